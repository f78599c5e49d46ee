"""An updater and groups for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_world import trajectory

from evolver_async.config import (
    AdvantageConfig,
    Config,
    CorrectionConfig,
    ExperienceConfig,
    LearnerConfig,
    LossConfig,
    MetricsConfig,
    PolicyConfig,
    StageConfig,
)
from evolver_async.config.load import stage_config
from evolver_async.lineages import Fork
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.schema import (
    Group,
    Role,
    Sampling,
    Sequence,
    Task,
    Ticket,
    Trajectory,
    VersionRun,
    WeightId,
)
from learner.diagnostics.measure import StepResult
from learner.state import LearnerState
from learner.step import Updater

FORKS = {1: Fork(lineage=1, parent=0, step=0)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("update") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return path


def config(tiny: Path, stages: list[StageConfig], minibatches: int = 1, **loss: Any) -> Config:
    return Config(
        policy=PolicyConfig(path=str(tiny), max_length=64),
        advantage=AdvantageConfig(kind="reinforce"),
        learner=LearnerConfig(minibatches=minibatches, warmup_steps=0, decay="none", lr=1e-2),
        loss=LossConfig(**loss),
        metrics=MetricsConfig(samples=0),
        stages=stages,
    )


def updater(settings: Config, run_dir: Path) -> Updater:
    return Updater(settings, run_dir, Timers())


def groups(count: int, length: int = 4) -> list[Group]:
    """`count` groups of one member each, numbered from 10, rewards 0, 1, 0, …"""
    found = []
    for index in range(count):
        ticket = Ticket(
            group_id=10 + index,
            task=Task(task_id="t", env="t", split="train", map_seed=0),
            kind="rollout",
            stage=0,
            members=[0],
            guided=[],
            dynamics_seed=0,
            attempt=0,
            weights=WeightId(lineage=1, step=0),
            lease_s=1.0,
            sampling=Sampling(temperature=1.0, max_tokens=4),
        )
        made = trajectory(ticket, 0, length=length, reward=float(index % 2))
        found.append(
            Group(
                group_id=10 + index,
                task=ticket.task,
                kind="rollout",
                stage=0,
                use=0,
                trajectories=[made],
            )
        )
    return found


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    ours, theirs = policy.state_tensors(left), policy.state_tensors(right)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def guided_groups(count: int, *, policy_kind: str = "learned") -> list[Group]:
    """Groups of four members with two turns each; the even ones were sampled with experience."""
    found = groups(count)
    rng = np.random.default_rng(0)
    for group in found:
        group.trajectories = [
            guided_member(group.trajectories[0], member, rng, policy_kind) for member in range(4)
        ]
    return found


def guided_member(
    like: Trajectory, member: int, rng: np.random.Generator, policy_kind: str
) -> Trajectory:
    experience = [Role.EXPERIENCE] * (3 if member % 2 == 0 else 0)
    turn = [Role.ACTION, Role.ACTION, Role.OBSERVATION]
    roles = np.array([Role.PROMPT, *experience, Role.PROMPT, *turn, *turn], np.uint8)
    numbers = np.full(len(roles), -1, np.int16)
    numbers[-6:] = [0, 0, 0, 1, 1, 1]
    acts = roles == Role.ACTION
    versions = [VersionRun(weights=WeightId(lineage=1, step=0), tokens=4)]
    sequence = Sequence(
        tokens=rng.integers(0, 20, len(roles)).astype(np.int32),
        roles=roles,
        turns=numbers,
        logprobs=np.where(acts, -1 - rng.random(len(roles)), 0).astype(np.float32),
        versions=versions if policy_kind == "learned" else [],
    )
    return Trajectory(
        group_id=like.group_id,
        member=member,
        attempt=0,
        actor="a",
        incarnation=0,
        content=0,
        sequences=[sequence],
        reward=float(member > 1),
        success=member > 1,
        terminated=True,
        truncated=False,
        turn_rewards=np.array([0.25 * member, 0.5], np.float32),
        turn_flags=np.zeros(2, np.uint8),
        labels=np.array([1, -1 if member else 1], np.int8),
        label_source="rule",
        experience_ids=[],
        policy=policy_kind,  # pyright: ignore[reportArgumentType]
        timing={},
    )


def guided_config(tiny: Path, internalise: str, minibatches: int = 2, **correction: Any) -> Config:
    settings = config(tiny, [StageConfig(kind="rl", steps=3)], minibatches)
    settings.advantage = AdvantageConfig()
    settings.experience = ExperienceConfig(kind="contrast", internalise=internalise)
    settings.correction = CorrectionConfig(**correction)
    return settings


def step(made: Updater, data: list[Group], take: int = 0) -> StepResult:
    """Step `take` of a stage of 3."""
    state = LearnerState(lineage=1, take=7 + take, stage_take=7)
    return made.step("rl", stage_config(made.config, 0), data, state, FORKS, 3)
