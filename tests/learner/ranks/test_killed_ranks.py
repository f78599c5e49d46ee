"""Ranks of a learner that are killed while they write a checkpoint, each its own part of it."""

import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from parallel_world import DEADLINE_S, make_policies, settings_of
from updates import FORKS

from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint import shards
from evolver_async.config.load import stage_config
from evolver_async.metrics.writer import Timers
from learner.ranks.meeting import FileMeeting
from learner.ranks.mesh import join
from learner.run.rank_server import Leader, follow
from learner.state import LearnerState
from learner.step import Updater

pytestmark = pytest.mark.process

NAME, RUN = "rl", "run"


def die_while_writing(rank: int, directory: Path, victims: Collection[int]) -> None:
    """Take a step, save, and die in the middle of the next checkpoint."""
    torch.set_num_threads(1)
    settings, kind, data = settings_of(NAME, directory)
    stage = stage_config(settings, 0)
    out = directory / f"of-{rank}"
    out.mkdir()
    ranks = join(FileMeeting(directory / "meeting"), rank, 2, device="cpu", deadline_s=DEADLINE_S)
    updater = Updater(settings, out, Timers(), ranks)
    state = LearnerState(lineage=1)
    saved = 0

    def save_parts(directory: Path) -> None:
        nonlocal saved
        saved += 1
        whole(directory)
        if saved > 1 and rank in victims:
            torn = directory / f"optimizer.{rank}of2.safetensors"
            os.truncate(torn, torn.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    whole, updater.save_tensors = updater.save_tensors, save_parts
    if rank > 0:
        return follow(updater, lambda *_: stage, ranks)
    leader = Leader(updater, ranks)
    leader.enter(stage, state)
    leader.step(kind, stage, data, state, FORKS, 1)
    for take in (1, 2):
        state.take = take
        checkpoint.save(
            directory / "checkpoints",
            take,
            lambda path: leader.save(path, state),
            run_id=RUN,
            keep=2,
        )
    return None


@pytest.mark.parametrize("victims", [(0, 1)])
def test_the_last_whole_checkpoint_is_left_and_the_torn_one_goes(
    victims: tuple[int, ...], tmp_path: Path
) -> None:
    make_policies(tmp_path)
    context = mp.get_context("spawn")
    both: list[Any] = []
    for rank in range(2):
        both.append(context.Process(target=die_while_writing, args=(rank, tmp_path, victims)))
        both[-1].start()
    for process in both:
        process.join(DEADLINE_S)
    codes = [process.exitcode for process in both]
    assert all(codes[rank] == -signal.SIGKILL for rank in victims) and 0 not in codes
    found = tmp_path / "checkpoints"
    newest, manifest = checkpoint.load_newest(found, RUN)
    state = LearnerState.read(newest)
    assert manifest.step == state.take == 1 and len(checkpoint.valid(found)) == 1
    assert shards.read(newest, "model") and shards.read(newest, "optimizer")
    assert bool(list(found.glob(f"{checkpoint.TEMPORARY}*"))) == (0 in victims)
    step = checkpoint.save(found, 2, state.write, run_id=RUN, keep=2)
    assert not list(found.glob(f"{checkpoint.TEMPORARY}*")), "torn parts are gone with the next one"
    assert not shards.exists(step, "optimizer")
