"""Data that must not be trained: impossible numbers (22), empty groups (23), data too old (24)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_world import World, config, trajectory
from invariants import check_journal, check_named
from killed_runs import Run, episode
from updates import FORKS, groups, updater
from updates import config as settings_of

from evolver_async.config import SelectionConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.errors import TrainingError
from evolver_async.metrics import alerts
from evolver_async.metrics.alarm_rows import firing
from evolver_async.model import policy
from evolver_async.schema import Sequence, Ticket, Trajectory, WeightId
from evolver_async.wire import messages
from evolver_async.wire.envelope import Envelope, WireError, pack, unpack
from learner.state import LearnerState
from learner.step import Updater

HUGE = 1e30


def poison_array(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Trajectory], None]:
    def poison(made: Trajectory) -> None:
        holder: Any = made.sequences[0] if name in Sequence.__struct_fields__ else made
        array = getattr(holder, name).copy()
        changed = change(array)
        setattr(holder, name, array if changed is None else changed)

    return poison


def put(value: float) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[-1] = value

    return change


def set_reward(value: float) -> Callable[[Trajectory], None]:
    return lambda made: setattr(made, "reward", value)


def set_timing(value: float) -> Callable[[Trajectory], None]:
    return lambda made: made.timing.update(total_s=value)


def set_named(field: str, value: float) -> Callable[[Trajectory], None]:
    return lambda made: getattr(made, field).update(one=value)


# by what is wrong: how it comes to be, and the field that the refusal must name
POISONS: dict[str, tuple[Callable[[Trajectory], None], str]] = {
    **{f"reward {x}": (set_reward(x), "reward") for x in (math.nan, math.inf, -math.inf, HUGE)},
    **{f"timing {x}": (set_timing(x), "timing") for x in (math.nan, math.inf, -1.0)},
    **{
        f"{name} {x}": (set_named(name, x), name)
        for name in ("terms", "metrics")
        for x in (math.nan, math.inf, -math.inf)
    },
    **{
        f"{name} {x}": (poison_array(name, put(x)), name)
        for name in ("logprobs", "turn_rewards")
        for x in (math.nan, math.inf, -math.inf, HUGE, -HUGE)
    },
    "logprobs above 0": (poison_array("logprobs", put(0.01)), "logprobs"),
    **{
        f"{name} too {word}": (poison_array(name, cut), name)
        for name in ("logprobs", "turns", "roles")
        for word, cut in (("short", lambda a: a[:-1]), ("long", lambda a: np.append(a, a[-1:])))
    },
    "turn_rewards too long": (
        poison_array("turn_rewards", lambda a: np.append(a, a)),
        "turn_flags",
    ),
    "turn_rewards missing": (poison_array("turn_rewards", lambda a: a[:0]), "turn_flags"),
    **{f"labels {x}": (poison_array("labels", put(x)), "labels") for x in (2, 127, -128)},
    "logprobs as int32": (poison_array("logprobs", lambda a: a.astype(np.int32)), "logprobs"),
}


@pytest.mark.parametrize("what", POISONS)
def test_22_impossible_numbers_are_refused_at_the_edge(what: str, tmp_path: Path) -> None:
    """As bytes, since no honest process can even make them; the place stays free for a good one."""
    poison, field = POISONS[what]
    world = World(tmp_path, config())
    world.resume()
    (ticket,) = world.lease()
    made = trajectory(ticket, 0, reward=0.5)
    poison(made)
    frames = pack(Envelope("run", "actor-0", 0, 7, messages.Push(trajectory=made)))
    try:
        request = unpack(frames).message
    except WireError as error:
        check_named(str(error), field)
    else:
        assert isinstance(request, messages.Push)
        reply = world.one("actor-0", request)
        assert isinstance(reply, messages.Reject), reply
        check_named(reply.reason, field, "safety.max_reward")
    assert isinstance(world.push(ticket, 0), messages.Ack)
    world.service.close()
    story = check_journal(tmp_path, world.settings, "run", [(ticket.group_id, 0)])
    assert story.arrived[ticket.group_id] == {0}


def test_22_every_number_of_a_trajectory_is_poisoned_above() -> None:
    """A float field added later must be added here."""
    floats = {"reward", "terms", "metrics", "timing", "turn_rewards", "logprobs"}
    kinds = {**Trajectory.__annotations__, **Sequence.__annotations__}
    integers = {"turn_flags", "labels", "tokens", "roles", "turns"}  # arrays without NaN
    held = {n for n, kind in kinds.items() if "float" in str(kind) or "Array" in str(kind)}
    held |= {n for n, kind in kinds.items() if "ndarray" in str(kind)}
    poisoned = {name.split()[0] for name in POISONS}
    assert held - integers == floats == poisoned - {"turns", "roles", "labels"}


def test_22_the_bound_on_rewards_is_that_of_the_stage(tmp_path: Path) -> None:
    settings = config()
    settings.stages = [StageConfig(kind="rl", steps=1, override={"safety": {"max_reward": 2.0}})]
    world = World(tmp_path, settings)
    world.resume()
    (ticket,) = world.lease()
    reply = world.push(ticket, 0, reward=2.5)
    assert isinstance(reply, messages.Reject)
    check_named(reply.reason, "reward", "2.5", "safety.max_reward")
    assert isinstance(world.push(ticket, 0, reward=-2.0), messages.Ack)
    world.service.close()


def test_22_a_reward_at_the_bound_passes_as_it_was_rounded(tmp_path: Path) -> None:
    settings = config()
    settings.stages = [StageConfig(kind="rl", steps=1, override={"safety": {"max_reward": 1.1}})]
    world = World(tmp_path, settings)
    world.resume()
    (ticket,) = world.lease()
    made = trajectory(ticket, 0, reward=1.1)
    made.turn_rewards = np.full(1, 1.1, np.float32)
    assert isinstance(world.one("actor-0", messages.Push(trajectory=made)), messages.Ack)
    world.service.close()


# ---- in the learner, should anything come through


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("poisoned") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return path


def weights_of(made: Updater) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in policy.state_tensors(made.model).values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_22_a_group_without_a_finite_advantage_is_left_out_and_moves_nothing(
    value: float, tiny: Path, tmp_path: Path
) -> None:
    """The weights become those of a step without it, bit for bit; so does the baseline."""
    settings = settings_of(tiny, [StageConfig(kind="rl", steps=1)])
    stage = stage_config(settings, 0)
    alone, poisoned = updater(settings, tmp_path), updater(settings, tmp_path)
    state_alone, state = LearnerState(lineage=1), LearnerState(lineage=1)
    expected = alone.rl(stage, groups(3), state_alone, FORKS, 1)
    data = groups(4)
    data[3].trajectories[0].reward = value
    outcome = poisoned.rl(stage, data, state, FORKS, 1)
    assert (outcome.trained, outcome.filtered) == ([10, 11, 12], {"non_finite": [13]})
    assert outcome.metrics["loss/policy"] == expected.metrics["loss/policy"]
    assert same(weights_of(poisoned), weights_of(alone)) and state.baseline == state_alone.baseline


def test_22_nothing_finite_at_all_leaves_the_weights_and_ends_the_run_in_time(
    tiny: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny, [StageConfig(kind="rl", steps=1)])
    made, state = updater(settings, tmp_path), LearnerState(lineage=1)
    before = weights_of(made)

    def step() -> Any:
        data = groups(2)
        for group in data:
            group.trajectories[0].reward = math.nan
        return made.rl(stage_config(settings, 0), data, state, FORKS, 1)

    for bad in range(1, settings.learner.max_bad_steps):
        outcome = step()
        assert (outcome.trained, outcome.filtered) == ([], {"non_finite": [10, 11]})
        assert state.bad_steps == bad and outcome.updates == 0
        assert firing(outcome.metrics) == ["non_finite"]
        assert alerts.last_title(tmp_path) == "step skipped"
    with pytest.raises(TrainingError, match="non-finite steps in a row"):
        step()
    assert same(weights_of(made), before) and math.isfinite(state.baseline)


# ---- groups that cannot be trained


def equal_rewards(ticket: Ticket, member: int) -> Trajectory:
    made = episode(ticket, member)
    made.reward, made.success = 0.25, False
    return made


def test_23_groups_without_spread_are_skipped_counted_and_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, selection=SelectionConfig(kind="spread", keep=1.0, max_empty=3))
    run.episode = equal_rewards
    try:
        with pytest.raises(TrainingError, match=r"3 steps in a row .*zero_spread"):
            run.train()
        assert run.trained == {0: [], 1: [], 2: []}
        ledger = run.world.store.state.ledger
        assert ledger.total("rollout", "filtered").trajectories == 3 * 3 * 4
    finally:
        run.close()


def test_23_a_partial_group_is_never_taken_and_the_learner_is_told_who_is_missing(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config())
    world.resume()
    tickets = world.lease(credit=2)
    world.finish(tickets[:1])
    world.push(tickets[1], 0)
    reply = world.one("learner", messages.Sample(lineage=1, take=0, stage=0))
    assert isinstance(reply, messages.Wait)
    check_named(reply.reason, f"group {tickets[1].group_id}", "members [1]", "actor-0")
    world.push(tickets[1], 1)
    assert len(world.sample(0)) == 2
    world.service.close()


def test_23_when_all_that_was_ready_is_stale_new_groups_are_made(tmp_path: Path) -> None:
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    tickets = world.lease(credit=4)
    world.finish(tickets)
    first = [group.group_id for group in world.sample(0)]
    world.done(0, first, version=5)  # far ahead: what is left is too old
    assert world.sample(1) == []
    assert world.replay.by_state["ready"] == {}
    world.finish(world.lease(credit=4))
    again = {group.group_id for group in world.sample(1)}
    assert len(again) == 2 and not again & {ticket.group_id for ticket in tickets}
    world.done(1, sorted(again), version=6)
    assert world.store.state.ledger.total("rollout", "evicted").trajectories == 4
    world.service.close()
    check_journal(tmp_path, world.settings, "run")


# ---- data too old


def test_24_what_is_over_the_bound_at_sampling_is_never_trained(tmp_path: Path) -> None:
    world = World(tmp_path, config(max_staleness=1))
    lineage, taken = world.resume(), set[int]()
    for take in range(6):
        world.finish(
            world.lease(credit=9), weights=WeightId(lineage=lineage, step=max(0, take - 1))
        )
        found = world.sample(take)
        for group in found:
            for one in group.trajectories:
                assert one.oldest is not None and take - one.oldest.step <= 1
        taken |= {group.group_id for group in found}
        world.done(take, [group.group_id for group in found], version=take + 1)
    assert len(taken) == 12
    world.service.close()
    check_journal(tmp_path, world.settings, "run")


def test_24_a_fork_makes_what_the_dead_lineage_sampled_older(tmp_path: Path) -> None:
    """Sampled at 1.2; the new lineage begins at version 0: two versions up and one down again.

    Its takes are not repeated: what is trained once more has the age that it had the first time.
    """
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    for take in range(2):
        world.finish(world.lease(credit=2))
        world.done(take, [group.group_id for group in world.sample(take)], version=take + 1)
    old = [ticket.group_id for ticket in world.lease(credit=2)]
    tickets = [world.replay.at.groups[group_id] for group_id in old]
    assert len(tickets) == 2
    assert world.resume(lineage=1, take=0, version=0, discard=True) == 2
    reply = world.one(
        "learner", messages.Done(lineage=1, take=2, version=3, trained=[], filtered={})
    )
    assert isinstance(reply, messages.Fenced)
    taken: set[int] = set()
    for take in range(2):
        world.finish(world.lease(credit=4))
        found = world.sample(take, lineage=2)
        for group in found:
            for one in group.trajectories:
                assert one.oldest is not None
                fork = 0 if one.oldest.lineage == 1 else one.oldest.step
                assert (take - fork) + (one.oldest.step - fork) <= 1
        taken |= {group.group_id for group in found}
        world.done(take, [group.group_id for group in found], version=take + 1, lineage=2)
    assert len(taken) == 4
    world.service.close()
    check_journal(tmp_path, world.settings, "run")
