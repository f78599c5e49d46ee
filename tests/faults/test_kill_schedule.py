"""Forty kills over four minutes, the launcher and the experience service among the victims.

    KILL_SEEDS=3 make faults ARGS=-kkill_schedule    three schedules, not one

Nothing acknowledged is lost, nothing is trained twice, every repeated take gives bitwise the same
losses, and no process or file is left.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from invariants import check_leaks, traces
from launches import Launch, launching
from under_fire import LAUNCHER, ROLES, RunUnderFire

SEEDS = range(int(os.environ.get("KILL_SEEDS", "1")))
EVERY_S = 6.0
VICTIMS = {"actor-0": 8, "actor-1": 8, "buffer": 9, "learner": 7, "experience": 4, LAUNCHER: 4}
EXPERIENCE = ("experience.kind=contrast", "loss.boost=0")
ANCHORS = (  # interpolation is undefined for guided tokens
    ("rollout.guided_fraction=0.25", "correction.anchor=recompute"),
    ("rollout.guided_fraction=0.0", "correction.anchor=interpolate"),
)


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Launch]]:
    with pytest.MonkeyPatch.context() as patch, launching() as start:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))  # where moody is
        yield start


@pytest.mark.time_limit(1200)  # 40 kills 6 s apart, and what a busy machine adds
@pytest.mark.parametrize("seed", SEEDS)
def test_forty_kills_lose_nothing_and_repeat_every_take_bitwise(
    seed: int, tmp_path: Path, start: Callable[..., Launch]
) -> None:
    before = traces()
    rng = random.Random(seed)
    victims = [name for name, count in VICTIMS.items() for _ in range(count)]
    assert len(victims) == 40 and set(victims) == {LAUNCHER, *ROLES}
    rng.shuffle(victims)
    run = RunUnderFire(start, tmp_path, f"killed-{seed}", *EXPERIENCE, *ANCHORS[seed % 2])
    run.recover()
    for index, victim in enumerate(victims):
        run.wait(time.monotonic() + EVERY_S)
        if index % 2:  # faults may overlap, but a slow machine still trains between them
            run.advance()
        run.strike("kill", victim, rng)
    run.recover()
    story = run.finish()
    assert story.whole and story.lineage >= VICTIMS["learner"] + VICTIMS[LAUNCHER]
    assert sum(run.faults.values()) == len(victims)
    check_leaks(before)
