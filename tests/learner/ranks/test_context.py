"""Ranks that compute rows together, a range of the tokens each, train as one rank does.

Ranks are spawned processes that meet at a file and talk by gloo.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from alike import TOLERANCE, assert_alike
from parallel_world import LONGEST, SAVED, STEPS, Trained, be_rank, make_policies, read, train
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.model import policy, row_checks
from evolver_async.model.projection import TargetReadout, read_out
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.context import ContextGroup
from evolver_async.model.rows.prefix_trees import merge
from evolver_async.model.tokenizer import ModelError
from learner.ranks.meeting import FileMeeting
from learner.ranks.mesh import join

pytestmark = pytest.mark.process

# "sft" has packed rows, the others trees; with "distill" there are two passes over a row.
KINDS = (
    "rl",
    "sft",
    "long",
    "distill",
    "teacher",
    "dpo",
    "reward_model",
    "ppo",
    "apart",
    "apart_lora",
    "moe",
)
SHORT = "bf16"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    """A directory with policies, and what one rank makes of them."""
    directory = tmp_path_factory.mktemp("context")
    make_policies(directory)
    kinds = (*KINDS, SHORT)
    return directory, {name: train(name, directory, directory / f"{name}-single") for name in kinds}


@pytest.mark.parametrize(("count", "kinds"), [(2, (*KINDS, SHORT)), (4, ("rl", "ppo"))])
def test_ranks_of_a_row_have_the_losses_and_weights_of_one(count, kinds, single, tmp_path):
    """Two ranks that have every row together, and two pairs of them."""
    before, alone = single
    make_policies(tmp_path)
    plan: list[tuple[str, str | None]] = [(name, None) for name in kinds]
    plan.append(("rl", str(before / "rl-single" / "checkpoint")))
    given = count, tmp_path, plan, "cpu", (), 1, 2
    mp.spawn(be_rank, args=given, nprocs=count)  # pyright: ignore[reportPrivateImportUsage]
    for name in kinds:
        found, wanted = read(tmp_path / f"{name}-whole-0"), alone[name]
        assert len(found.rows) == STEPS
        if name == SHORT:
            losses, expected = ([row["loss/policy"] for row in one.rows] for one in (found, wanted))
            assert losses == pytest.approx(expected, abs=2e-2)
            continue
        if name == "long":
            assert {row.pop("learner/token_budget") for row in found.rows} == {-(-LONGEST // 2)}
            assert found.longest == -(-LONGEST // 2)
            for row in wanted.rows:
                del row["learner/token_budget"]
        assert_alike(found.rows, wanted.rows, TOLERANCE)
        for key, tensor in wanted.weights.items():
            torch.testing.assert_close(found.weights[key], tensor, atol=1e-3, rtol=1e-3)
    assert_alike(read(tmp_path / "rl-resumed-0").rows, alone["rl"].rows[SAVED:], TOLERANCE)


SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
MODELS = {"grouped": Qwen3Config(**SHAPE, head_dim=8), "windowed": Qwen2Config(**SHAPE, **WINDOWED)}


def borders_of(name: str) -> dict[str, Borders]:
    """Packed rows; rows with fewer tokens than there are ranks; a tree."""
    device = torch.device("cpu")
    rows = [np.append(np.arange(30), [30 + member] * 3) for member in range(3)]
    trees = {} if name == "windowed" else {"tree": merge(rows, device).borders}
    return trees | {
        "packed": Borders.of([9, 1, 17], device),
        "short": Borders.of([1, 2], device),
    }


def passed(model: Any, borders: Borders, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a pass, and the gradients of `share` of their loss."""
    tokens_1T = torch.arange(borders.starts[-1])[None] * 7 % 50
    read_K = torch.arange(0, tokens_1T.shape[1], 2)
    hidden_KD = policy.hidden_states(model, tokens_1T, borders, read_K)
    given = hidden_KD, read_K % 50, 1.0, 2
    found = policy.target_logprobs(model, *given, with_entropy=True, context=borders.context)
    whole = torch.stack(found)
    (share * (whole.square() * (read_K + 1)).sum()).backward()
    gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return whole.detach(), torch.cat(gradients)


def be_part(rank: int, directory: Path, count: int) -> None:
    torch.set_num_threads(1)
    meeting = FileMeeting(directory / "meeting")
    ranks = join(meeting, rank, count, device="cpu", deadline_s=240.0, together=count)
    for name, shape in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()
        for kind, borders in borders_of(name).items():
            wanted, gradient = passed(model, borders, 1.0)
            shared = replace(borders, context=ranks.context)
            found, part = passed(model, shared, 1 / count)
            dist.all_reduce(part)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, msg=f"{name}, {kind}")
            assert (part - gradient).norm() <= 1e-5 * gradient.norm(), f"{name}, {kind}"
        assert ranks.context is not None
        own = ranks.context.own(9)
        assert projected(model, ranks.context, 9) == [*range(own.start, own.stop)]
    ranks.leave()


def projected(model: Any, context: ContextGroup, count: int) -> list[int]:
    """The positions that this rank projects, of so many that all ranks of a row read."""
    seen = list[int]()

    @dataclass(frozen=True)
    class Seen(TargetReadout):
        def prepare(self, logits_NV: torch.Tensor, rows: slice) -> torch.Tensor:
            seen.extend(range(rows.start, rows.stop))
            return super().prepare(logits_NV, rows)

    hidden_ND = torch.zeros(count, SHAPE["hidden_size"])
    readout = Seen(torch.zeros(count, dtype=torch.int64), 1.0, False, 0, None)
    found_N, _ = read_out(policy.split_model(model)[1], hidden_ND, readout, 2, context=context)
    assert len(found_N) == count
    return seen


def test_four_ranks_share_two_heads_of_keys_and_rows_shorter_than_they_are_many(tmp_path):
    mp.spawn(be_part, args=(tmp_path, 4), nprocs=4)  # pyright: ignore[reportPrivateImportUsage]


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS["grouped"])
    row_checks.check_context(model, 4)
    with pytest.raises(ModelError, match=r"learner\.context_parallel"):
        row_checks.check_context(model, 3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_the_length_of_a_row_are_refused(kind):
    factors: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        factors |= {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
        factors["original_max_position_embeddings"] = 64
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, rope_parameters=factors))
    row_checks.check_context(model, 1)
    with pytest.raises(ModelError, match=r"learner\.context_parallel"):
        row_checks.check_context(model, 2)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("learner.context_parallel", ["learner.ranks=3"]),
        ("learner.context_parallel", ["learner.ranks=2", "learner.packing=false"]),
        ("learner.token_budget", ["learner.ranks=2", "learner.token_budget=0"]),
        ("learner.token_budget", ["learner.ranks=2", "learner.token_budget=400"]),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_its_key(key, changes):
    longest = ["policy.max_length=801", "learner.token_budget=401"]
    given = ["stages.0.steps=1", "learner.context_parallel=2", *longest]
    load(None, [*given, "learner.ranks=4"])
    with pytest.raises(ConfigError, match=key):
        load(None, [*given, *changes])
