"""Groups whose values a critic can learn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episodes import episode
from updates import config, groups

from evolver_async.config import AdvantageConfig, Config, StageConfig
from evolver_async.config import CriticConfig as Settings
from evolver_async.model import policy
from evolver_async.schema import Group, Role, Sequence, VersionRun, WeightId
from learner.data.collate import Internalise

NEVER = Internalise(0.0, 0)


WEIGHTS = WeightId(lineage=1, step=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critic") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return path


def sequence(roles: str, turns: list[int], seed: int) -> Sequence:
    """`roles` by first letter: P(rompt), A(ction), O(bservation); turns of the ACTION tokens."""
    role_L = np.array([{"P": 0, "A": 2, "O": 3}[letter] for letter in roles], np.uint8)
    act_L = role_L == Role.ACTION
    turn_L = np.full(len(roles), -1, np.int16)
    turn_L[act_L] = turns
    rng = np.random.default_rng(seed)
    return Sequence(
        tokens=rng.integers(0, 50, len(roles)).astype(np.int32),
        roles=role_L,
        turns=turn_L,
        logprobs=np.where(act_L, -0.5, 0.0).astype(np.float32),
        versions=[VersionRun(weights=WEIGHTS, tokens=int(act_L.sum()))],
    )


def crossed() -> Group:
    """Two members. The first goes to and fro between two contexts and was cut off, in the second
    of them; the other ended by itself."""
    (group,) = groups(1)
    rewards = np.array([0.5, -1.0, 2.0, 4.0], np.float32)
    group.trajectories = [
        episode(
            sequence("PPAAOA", [0, 0, 2], 1),
            sequence("PAOAAOO", [1, 3, 3], 2),
            turns=4,
            reward=5.5,
            turn_rewards=rewards,
            terminated=False,
            truncated=True,
        ),
        episode(
            sequence("PPAOAA", [0, 1, 1], 3),
            member=1,
            turns=2,
            reward=-0.25,  # .5 less than its turns say: taken off at the end
            turn_rewards=np.array([0.5, -0.25], np.float32),
        ),
    ]
    return group


def ppo(tiny: Path, kind: str, minibatches: int = 2, **critic: Any) -> Config:
    settings = config(tiny, [StageConfig(kind="rl", steps=9)], minibatches)
    settings.advantage = AdvantageConfig(kind="gae")
    settings.critic = Settings(**{"kind": kind, "lr": 1e-2, **critic})
    return settings


def data(seed: int = 0) -> list[Group]:
    """Groups of crossed members whose rewards differ."""
    found = [crossed() for _ in range(4)]
    rng = np.random.default_rng(seed)
    for number, group in enumerate(found):
        group.group_id = number
        for one in group.trajectories:
            one.reward = float(rng.normal())
    return found


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_tensors(module).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())
