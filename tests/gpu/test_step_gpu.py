"""Whole learner steps of a half-billion model: time and memory, rows padded and packed.

Lengths vary as agents' episodes do (coefficient of variation about 1). The same steps in small run
on the CPU, where packed and padded rows must give the same loss and gradient in float32.
"""

import gc
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from episodes import episode
from gpu_models import HALF_BILLION, SMALL, TOKENIZER
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
MOST_HELD = 18.5  # bytes a parameter: 18 in bfloat16 with float32 masters, and what is small
RATE = 1e-6  # too small to matter: every step measures the same
PACKED_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # relative, of loss and gradient norm


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


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for each kind of device that is here."""
    found = {}
    for kind, shape in (("cpu", SMALL), ("cuda", HALF_BILLION)):
        if kind == "cuda" and not torch.cuda.is_available():
            continue
        found[kind] = tmp_path_factory.mktemp("policy") / kind
        torch.manual_seed(0)
        dtype = getattr(torch, SIZES[kind].dtype)
        with torch.device(kind):
            model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
        model.save_pretrained(found[kind])
        TOKENIZER.save_pretrained(found[kind])
    return found


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
    loss and gradient norm."""

    seconds: float
    peak: int
    held: float
    loss: float
    grad_norm: float


def measure(device: torch.device, policy: Path, run_dir: Path, **learner: bool) -> Measured:
    size = SIZES[device.type]
    config = Config(
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
    gc.collect()  # what an earlier step left in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    updater, groups = Updater(config, run_dir, Timers()), groups_of(size)
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
    return Measured(
        seconds, peak, held, done.metrics["loss/policy"], done.metrics["loss/grad_norm"]
    )


def test_steps_padded_packed_and_with_recomputed_layers(device, policies, tmp_path, figure):
    size = SIZES[device.type]
    tokens = sum(lengths_of(size))
    variation = np.std(lengths_of(size)) / np.mean(lengths_of(size))
    assert 0.6 < variation < 1.4
    found = {}
    for name, learner in (
        ("padded", {}),
        ("packed", {"packing": True}),
        ("packed, layers recomputed", {"packing": True, "gradient_checkpointing": True}),
    ):
        one = found[name] = measure(device, policies[device.type], tmp_path, **learner)
        figure(f"step, {name}", one.seconds, "s")
        figure(f"step, {name}", tokens / one.seconds, "tokens/s")
        if one.peak:
            figure(f"peak memory, {name}", one.peak / 2**30, "GiB")
            figure(f"held between steps, {name}", one.held, "bytes a parameter")
    tolerance = PACKED_TOLERANCE[size.dtype]
    for one in found.values():
        assert math.isfinite(one.loss) and one.grad_norm > 0
        assert one.loss == pytest.approx(found["padded"].loss, rel=tolerance, abs=tolerance)
        assert one.grad_norm == pytest.approx(found["padded"].grad_norm, rel=10 * tolerance)
    if device.type == "cuda":
        assert max(one.held for one in found.values()) <= MOST_HELD
        recomputed = found["packed, layers recomputed"]
        assert recomputed.peak < found["packed"].peak


@pytest.mark.gpu
def test_a_budget_of_what_the_memory_holds_runs_a_step(policies, tmp_path, figure):
    """`learner.token_budget: 0` on a GPU that others use, too."""
    device, size = torch.device("cuda"), SIZES["cuda"]
    SIZES["cuda"] = replace(size, budget=0)
    try:
        one = measure(device, policies["cuda"], tmp_path, packing=True)
    finally:
        SIZES["cuda"] = size
    total = torch.cuda.get_device_properties(0).total_memory
    figure("peak memory, measured budget", one.peak / 2**30, "GiB")
    assert one.peak < total
