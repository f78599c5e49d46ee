"""Kills every six seconds, the launcher and the experience service among the victims.

    KILL_SEEDS=3 KILL_RECIPES=plain,experience,agentevolver make faults ARGS=-kkill_schedule

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
NAMES = os.environ.get("KILL_RECIPES", "agentevolver").split(",")
EVERY_S = 6.0
VICTIMS = {"actor-0": 4, "actor-1": 4, "buffer": 5, "learner": 4, "experience": 2, LAUNCHER: 2}
ANCHORS = (  # interpolation is undefined for guided tokens
    ("rollout.guided_fraction=0.25", "correction.anchor=recompute"),
    ("rollout.guided_fraction=0.0", "correction.anchor=interpolate"),
)
NO_BOOST = "loss.boost=0"  # no clip binds with one update a step
# It learns to write answers first: without them nothing succeeds, and no experience is made.
STAGES = (
    "[{kind: sft, steps: 60, expert_fraction: 0.0, override: {rollout: {group_size: 1,"
    " guided_fraction: 1.0}, learner: {groups_per_step: 16, lr: 3e-3}, experience: {internalise:"
    " none}}}, {kind: rl, hours: 1}]"
)
AGENTEVOLVER = (
    f"stages={STAGES}",
    "env.name=moody:Lake",
    "tasks.synthetic=0.3",
    "policy.max_length=512",
    "policy.hidden_size=64",
    "policy.intermediate_size=192",
    "rollout.max_turns=3",
    "rollout.guided_fraction=0.5",
    "experience.kind=contrast",
    "experience.similarity=0.99",
    "judge.kind=rule",
    "questioning.kind=goals",
    "advantage.kind=adca",
    "advantage.alpha=0.1",
    "correction.kind=decoupled",
    "correction.guided=stale",
    "loss.kl_coef=0.001",
    "learner.token_budget=2560",
    NO_BOOST,
)


def overrides(name: str, seed: int, directory: Path) -> tuple[str, ...]:
    """What the recipe of this name has beside the one of all runs under fire."""
    match name:
        case "plain":
            return ()
        case "experience":
            return "experience.kind=contrast", NO_BOOST, *ANCHORS[seed % 2]
        case "agentevolver":
            return *AGENTEVOLVER, f"env.params.directory={directory}"
        case _:
            raise ValueError(f"KILL_RECIPES: {name}")


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Launch]]:
    with pytest.MonkeyPatch.context() as patch, launching() as start:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))  # where moody is
        yield start


@pytest.mark.time_limit(1800)  # 21 kills 6 s apart, and what a busy machine adds
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_kills_lose_nothing_and_repeat_every_take_bitwise(
    name: str, seed: int, tmp_path: Path, start: Callable[..., Launch]
) -> None:
    before = traces()
    rng = random.Random(seed)
    there = {LAUNCHER, *ROLES} - ({"experience"} if name == "plain" else set())
    victims = [role for role, count in VICTIMS.items() if role in there for _ in range(count)]
    assert set(victims) == there
    rng.shuffle(victims)
    run = RunUnderFire(start, tmp_path, f"{name}-{seed}", *overrides(name, seed, tmp_path))
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
