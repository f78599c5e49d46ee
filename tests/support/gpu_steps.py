"""Learner steps whose time and memory are measured, on rows whose lengths vary as those of agents'
episodes do: a coefficient of variation of about 1, and at least one row as long as may be."""

import gc
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from episodes import episode
from gpu_models import TOKENIZER
from transformers import PretrainedConfig
from transformers.models.auto import AutoModelForCausalLM

from evolver_async.config import (
    AdvantageConfig,
    Config,
    LearnerConfig,
    MetricsConfig,
    PolicyConfig,
    StageConfig,
)
from evolver_async.config.load import stage_config
from evolver_async.lineages import Fork
from evolver_async.metrics.writer import Timers
from evolver_async.schema import Group, Role, Sequence, Task, VersionRun, WeightId
from learner.state import LearnerState
from learner.step import Updater

FORKS = {1: Fork(lineage=1, parent=0, step=0)}
TASK = Task(task_id="t", env="t", split="train", map_seed=0)
MEMBERS = 8
SPREAD = math.sqrt(math.log(2))  # sigma of a lognormal whose coefficient of variation is 1
RATE = 1e-6  # too small to matter: every step measures the same


@dataclass(frozen=True)
class Size:
    """Of the steps on one kind of device."""

    dtype: str
    rows: int
    mean_tokens: int
    most_tokens: int
    budget: int


SIZES = {
    "cpu": Size("float32", 16, 40, 120, 256),
    "cuda": Size("bfloat16", 64, 1024, 4096, 8192),
}


def write_policy(shape: PretrainedConfig, directory: Path, kind: str, dtype: str) -> Path:
    """Write a random model of a shape, made on a kind of device; return its directory."""
    torch.manual_seed(0)
    with torch.device(kind):
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def lengths_of(size: Size) -> list[int]:
    """Tokens of every row; at least one row is as long as may be."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(math.log(size.mean_tokens) - SPREAD**2 / 2, SPREAD, size.rows)
    drawn[0] = size.most_tokens
    return [int(one) for one in np.clip(drawn, 16, size.most_tokens)]


def groups_of(size: Size) -> list[Group]:
    """Half of every row is ACTION, sampled by a policy that found all tokens equally likely."""
    rng, weights = np.random.default_rng(1), WeightId(lineage=1, step=0)
    vocabulary, lengths, groups = len(TOKENIZER), lengths_of(size), []
    for number in range(size.rows // MEMBERS):
        members = []
        for member in range(MEMBERS):
            count = lengths[number * MEMBERS + member]
            actions = count // 2
            roles = np.full(count, Role.PROMPT, np.uint8)
            roles[-actions:] = Role.ACTION
            sampled = roles == Role.ACTION
            sequence = Sequence(
                tokens=rng.integers(0, vocabulary, count, np.int32),
                roles=roles,
                turns=np.where(sampled, 0, -1).astype(np.int16),
                logprobs=np.where(sampled, -math.log(vocabulary), 0).astype(np.float32),
                versions=[VersionRun(weights=weights, tokens=actions)],
            )
            facts = {"group_id": number, "member": member}
            members.append(episode(sequence, reward=float(member % 2), **facts))
        about = {"group_id": number, "task": TASK, "kind": "rollout", "stage": 0, "use": 0}
        groups.append(Group(trajectories=members, **about))
    return groups


@dataclass
class Measured:
    """Of one step: seconds, bytes at the peak and after it for each parameter (both 0 on the CPU),
    loss and gradient norm; parameters of the model."""

    seconds: float
    peak: int
    held: float
    loss: float
    grad_norm: float
    parameters: int


def config_of(device: torch.device, policy: Path, **learner: bool) -> Config:
    size = SIZES[device.type]
    return Config(
        policy=PolicyConfig(path=str(policy), max_length=size.most_tokens, dtype=size.dtype),
        advantage=AdvantageConfig(kind="grpo"),
        learner=LearnerConfig(
            minibatches=1,
            warmup_steps=0,
            decay="none",
            lr=RATE,
            token_budget=size.budget,
            device=device.type,
            **learner,
        ),
        metrics=MetricsConfig(samples=0),
        stages=[StageConfig(steps=9)],
    )


def measure(device: torch.device, policy: Path, run_dir: Path, **learner: bool) -> Measured:
    config = config_of(device, policy, **learner)
    gc.collect()  # what an earlier step left in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    updater, groups = Updater(config, run_dir, Timers()), groups_of(SIZES[device.type])
    state = LearnerState(lineage=1, take=0, stage_take=0)
    updater.step(
        "rl", stage_config(config, 0), groups, state, FORKS, 9
    )  # warms up, allocates moments
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    done = updater.step("rl", stage_config(config, 0), groups, state, FORKS, 9)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    assert done.metrics["learner/updates"] == 1
    parameters = sum(one.numel() for one in updater.model.parameters())
    held = torch.cuda.memory_allocated() / parameters if device.type == "cuda" else 0.0
    loss = done.metrics["loss/policy"], done.metrics["loss/grad_norm"]
    return Measured(seconds, peak, held, *loss, parameters)
