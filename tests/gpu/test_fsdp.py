"""A learner of two ranks on two GPUs by NCCL, and of one in bfloat16 with float32 masters."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from alike import assert_alike
from parallel_world import STEPS, be_rank, make_policies, read, train

from evolver_async.checkpoint import shards
from learner.ranks.mesh import alone

pytestmark = pytest.mark.gpu

# On a GPU sums run in another order, and Adam's first steps are of size lr whatever the gradient.
FLOAT32, BFLOAT16 = 1e-3, 0.05


@pytest.mark.parametrize("name", ["rl", "sft", "ppo", "apart"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_losses_of_one(name: str, tmp_path: Path) -> None:
    make_policies(tmp_path)
    single = train(name, tmp_path, tmp_path / "single", device="cuda:0")
    mp.spawn(be_rank, args=(2, tmp_path, [(name, None)], "cuda"), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    both = read(tmp_path / f"{name}-whole-0")
    assert_alike(both.rows[:1], single.rows[:1], tolerance=FLOAT32)
    assert len(both.rows) == STEPS


@pytest.mark.parametrize("name", ["rl", "apart", "apart_lora"])
def test_one_gpu_sharded_by_itself_has_the_losses_of_a_plain_one(name: str, tmp_path: Path) -> None:
    """FSDP2 over a mesh of one rank, by NCCL: all of its code on a single GPU."""
    make_policies(tmp_path)
    plain = train(name, tmp_path, tmp_path / "single", device="cuda:0")
    mp.spawn(be_rank, args=(1, tmp_path, [(name, None)], "cuda"), nprocs=1)  # pyright: ignore[reportPrivateImportUsage]
    sharded = read(tmp_path / f"{name}-whole-0")
    assert_alike(sharded.rows[:1], plain.rows[:1], tolerance=FLOAT32)


def test_a_sharded_learner_measures_what_a_plain_one_does(tmp_path: Path) -> None:
    make_policies(tmp_path)
    mp.spawn(be_rank, args=(1, tmp_path, [("measured", None)], "cuda"), nprocs=1)  # pyright: ignore[reportPrivateImportUsage]
    sharded = read(tmp_path / "measured-whole-0").rows
    plain = train("measured", tmp_path, tmp_path / "single", device="cuda:0").rows
    torch.cuda.empty_cache()
    for one, other in zip(sharded, plain, strict=True):
        assert one["learner/token_budget"] == pytest.approx(other["learner/token_budget"], rel=0.2)


def test_bfloat16_on_the_gpu_is_bfloat16_on_the_cpu_with_masters_in_float32(
    tmp_path: Path,
) -> None:
    make_policies(tmp_path)
    there = train("bf16", tmp_path, tmp_path / "there", device="cuda")
    here = train("bf16", tmp_path, tmp_path / "here")
    assert_alike(there.rows[:1], here.rows[:1], tolerance=BFLOAT16)
    kept = shards.read(tmp_path / "there" / "checkpoint", "model")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert alone("cuda").device.type == "cuda"
