"""Guided groups: which members, which groups, when it stops, and the same after a restart."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from budget import examples
from buffer_world import World, config
from hypothesis import given, settings
from hypothesis import strategies as st

from evolver_async.buffer.state.groups import FORK, ArrivedMember, HeldGroup
from evolver_async.buffer.state.guidance import (
    LEAST,
    PROBE_EVERY,
    WINDOW,
    GuidanceRecord,
    GuidanceRule,
)
from evolver_async.buffer.tickets import guided_members
from evolver_async.schema import Task, Ticket
from evolver_async.wire import messages

SIZE = 4


def world_of(
    directory: Path, rule: GuidanceRule, stages: list[str] | None = None, **buffer: object
) -> World:
    made = config(group_size=SIZE, max_staleness=1, stages=stages, **buffer)
    made.experience.kind = "contrast"
    made.experience.internalise = "none" if stages == ["sft"] else "strip"
    made.loss.boost = 0.0  # needs several minibatches
    made.rollout.guided = rule
    world = World(directory, made)
    world.resume()
    return world


def play(world: World, tickets: list[Ticket], *, guided: int = 0, unguided: int = 0) -> None:
    """Finish the groups, with so many successes among their guided and their unguided members."""
    for ticket in tickets:
        others = [member for member in ticket.members if member not in ticket.guided]
        won = {*ticket.guided[:guided], *others[:unguided]}
        for member in ticket.members:
            reward = float(member in won)
            world.push(ticket, member, reward=reward, guided=member in ticket.guided)


def train(world: World, take: int, **successes: int) -> list[Ticket]:
    """Grant, finish, train and release the groups of one take; return their tickets."""
    tickets = world.lease(credit=2)
    play(world, tickets, **successes)
    groups = world.sample(take)
    world.done(take, [group.group_id for group in groups], version=take + 1)
    world.one("learner", messages.Kept(take=take + 1))
    return tickets


def state(world: World) -> dict[str, object]:
    snapshot = msgspec.to_builtins(world.store.state.snapshot())
    del snapshot["ledger"]["refused"]  # counted without a record
    return snapshot


# ---- members


@given(st.integers(0, 999), st.integers(0, 10**6), st.integers(1, 64), st.floats(0, 1))
def test_members_are_drawn_for_the_group_and_are_of_the_asked_number(
    seed: int, group_id: int, size: int, fraction: float
) -> None:
    members = guided_members(seed, group_id, size, fraction)
    assert len(members) == round(fraction * size) == len(set(members))
    assert members == sorted(members) and set(members) <= set(range(size))
    assert members == guided_members(seed, group_id, size, fraction)


def test_the_members_of_a_grant_stay_guided_when_it_is_granted_again(tmp_path: Path) -> None:
    world = world_of(tmp_path, "fixed")
    (ticket,) = world.lease()
    assert len(ticket.guided) == SIZE // 2
    world.settings.rollout.guided_fraction = 0.0  # as a resume may: the grant has been made
    world.kill()
    world.resume(lineage=1)
    world.pass_time(60.0)
    (again,) = (one for one in world.lease(credit=2, peer="actor-1") if one.attempt)
    assert (again.group_id, again.guided) == (ticket.group_id, ticket.guided)


def test_evaluations_and_runs_without_experience_are_not_guided(tmp_path: Path) -> None:
    world = world_of(tmp_path, "fixed")
    world.settings.experience.kind = "none"
    world.kill()
    assert [ticket.guided for ticket in world.lease(credit=2)] == [[], []]


@pytest.mark.parametrize("rule", ["failed", "adaptive"])
def test_demonstrations_are_guided_under_every_rule(tmp_path: Path, rule: GuidanceRule) -> None:
    world = world_of(tmp_path, rule, stages=["sft"])
    assert [len(ticket.guided) for ticket in world.lease(credit=2)] == [2, 2]
    assert world.store.state.guidance == GuidanceRecord()


# ---- failed


def test_a_group_that_failed_throughout_is_met_again_and_guided_once(tmp_path: Path) -> None:
    world = world_of(tmp_path, "failed")
    first, second = world.lease(credit=2)
    assert first.guided == second.guided == []
    play(world, [first], unguided=1)
    play(world, [second])
    world.kill()
    (repeat,) = world.lease()
    assert (repeat.task, len(repeat.guided)) == (second.task, SIZE // 2)
    assert repeat.guided == guided_members(world.settings.run.seed, repeat.group_id, SIZE, 0.5)
    play(world, [repeat])  # fails again
    (other,) = world.lease()
    assert other.task.task_id not in (first.task.task_id, second.task.task_id)
    assert other.guided == []


def test_guided_repeats_are_at_most_every_second_group(tmp_path: Path) -> None:
    world = world_of(tmp_path, "failed")
    tickets = [ticket for take in range(20) for ticket in train(world, take)]
    guided = [ticket for ticket in tickets if ticket.guided]
    plain = [ticket for ticket in tickets if not ticket.guided]
    assert len(guided) == len(plain) == 20
    assert len({ticket.task.task_id for ticket in plain}) == 20
    assert sorted(t.task.task_id for t in guided) == sorted(t.task.task_id for t in plain)
    assert world.store.state.tasks.cursor.queue == []
    assert world.store.state.guidance.counters()["guidance/groups"] == 0.5


def test_a_solvable_task_is_not_repeated(tmp_path: Path) -> None:
    world = world_of(tmp_path, "failed")
    tickets = [ticket for take in range(5) for ticket in train(world, take, unguided=1)]
    assert not any(ticket.guided for ticket in tickets)
    assert len({ticket.task.task_id for ticket in tickets}) == 10


@pytest.mark.parametrize("reason", ["age", FORK])
def test_a_repeat_that_became_too_old_is_guided_when_it_is_met_again(
    tmp_path: Path, reason: str
) -> None:
    world = world_of(tmp_path, "failed")
    (ticket,) = world.lease()
    play(world, [ticket])
    (repeat,) = world.lease()
    world.store.evict([repeat.group_id], reason)
    world.service.commit()
    (again,) = world.lease()
    assert again.task == repeat.task and len(again.guided) == SIZE // 2


def test_a_quarantined_task_is_not_repeated(tmp_path: Path) -> None:
    world = world_of(tmp_path, "failed")
    (ticket,) = world.lease()
    world.store.state.tasks.quarantine(ticket.task.task_id, "environment")
    play(world, [ticket])
    assert world.store.state.tasks.cursor.queue == []


# ---- adaptive


def test_guidance_stops_where_it_gains_nothing_and_comes_back_when_it_does(tmp_path: Path) -> None:
    world = world_of(tmp_path, "adaptive")
    takes = iter(range(1000))

    def solved(take: int) -> list[Ticket]:
        return train(world, take, guided=2, unguided=2)

    for _ in range(LEAST // 2):
        assert all(ticket.guided for ticket in solved(next(takes)))
    assert not world.store.state.guidance.pays()
    later = [ticket for _ in range(20) for ticket in solved(next(takes))]
    probes = [index for index, ticket in enumerate(later) if ticket.guided]
    assert probes == [PROBE_EVERY * number - 1 for number in range(1, 5)]
    counters = world.store.state.guidance.counters()
    assert counters["guidance/wasted"] == pytest.approx((LEAST - 2 + 4) / (LEAST + 4))
    assert counters["guidance/groups"] == pytest.approx((LEAST + 4) / (LEAST + 40))
    assert counters["guidance/gain"] == counters["guidance/upper"] == 0
    world.kill()
    probed = [train(world, next(takes), guided=2) for _ in range(PROBE_EVERY // 2)]
    assert sum(bool(ticket.guided) for tickets in probed for ticket in tickets) == 1
    assert all(ticket.guided for ticket in solved(next(takes))), "one gain is worth another look"


def test_only_members_with_experience_count_as_guided(tmp_path: Path) -> None:
    """A guided member for which the pool had nothing is an unguided one."""
    world = world_of(tmp_path, "adaptive")
    (ticket,) = world.lease()
    for member in ticket.members:
        world.push(ticket, member, reward=float(member in ticket.guided), guided=False)
    assert world.store.state.guidance.gains == []
    assert world.store.state.guidance.guided == 1


def test_a_stage_begins_with_a_record_of_its_own(tmp_path: Path) -> None:
    world = world_of(tmp_path, "adaptive", stages=["rl", "rl"])
    train(world, 0, guided=1)
    assert world.store.state.guidance.gains
    world.sample(1, stage=1)
    assert world.store.state.guidance == GuidanceRecord()


# ---- the same from the journal


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from(["fixed", "failed", "adaptive"]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=25),
)
def test_a_restart_has_the_state_and_the_decisions_of_the_process_before(
    tmp_path_factory: pytest.TempPathFactory,
    rule: GuidanceRule,
    successes: list[tuple[int, int]],
) -> None:
    """Small segments, of which old ones are deleted: the state comes from snapshots."""
    whole, killed = (world_of(tmp_path_factory.mktemp("run"), rule) for _ in range(2))
    killed.segment_bytes = 3_000
    for take, (guided, unguided) in enumerate(successes):
        before = state(killed)
        killed.kill()
        assert state(killed) == before
        tickets = [
            train(world, take, guided=guided, unguided=unguided) for world in (whole, killed)
        ]
        assert [t.guided for t in tickets[0]] == [t.guided for t in tickets[1]]
        assert [t.task for t in tickets[0]] == [t.task for t in tickets[1]]
    assert whole.store.state.guidance == killed.store.state.guidance
    if len(successes) > 4:
        assert min(killed.store.journal.sizes) > min(whole.store.journal.sizes)
    for world in (whole, killed):
        world.service.close()


# ---- the estimate


def completed(guided: list[bool], unguided: list[bool]) -> HeldGroup:
    members = [(True, won) for won in guided] + [(False, won) for won in unguided]
    arrived = {
        index: ArrivedMember(0, 1, 1, 0.0, won, with_experience, None, (0, 0, 0, 0))
        for index, (with_experience, won) in enumerate(members)
    }
    return HeldGroup(
        group_id=0,
        task=Task(task_id="t", env="e", split="train", map_seed=0),
        kind="rollout",
        stage=0,
        members=list(arrived),
        owners={},
        uses_left=1,
        arrived=arrived,
    )


outcomes = st.lists(st.booleans(), max_size=4)
won = st.lists(st.booleans(), min_size=1, max_size=2)


@given(
    st.lists(st.tuples(outcomes, outcomes), max_size=20)
    | st.lists(st.tuples(won, won), min_size=LEAST, max_size=60)  # both in every group
)
def test_the_gain_is_the_mean_difference_within_groups_that_have_both(
    groups: list[tuple[list[bool], list[bool]]],
) -> None:
    record = GuidanceRecord()
    for guided, unguided in groups:
        record.completed(completed(guided, unguided))
    both = [np.mean(one) - np.mean(other) for one, other in groups if one and other]
    assert record.gains == pytest.approx(both)
    assert record.gain() == pytest.approx(np.mean(both) if both else 0.0)
    if len(both) < LEAST:
        assert record.upper() == math.inf and record.pays()
    else:
        error = np.std(both, ddof=1) / math.sqrt(len(both))
        assert record.upper() == pytest.approx(np.mean(both) + 1.645 * error)


def test_the_bound_is_as_wide_as_the_gains_differ() -> None:
    """Guidance that cost more successes than it brought goes on while that may be chance."""
    record, even = GuidanceRecord(), [([True], [False]), ([False], [True])] * (LEAST // 2 - 1)
    for guided, unguided in [*even, ([False], [True]), ([False], [True])]:
        record.completed(completed(guided, unguided))
    gains = [1.0, -1.0] * (LEAST // 2 - 1) + [-1.0, -1.0]
    error = np.std(gains, ddof=1) / math.sqrt(LEAST)
    assert record.gain() == pytest.approx(-2 / LEAST)
    assert record.upper() == pytest.approx(-2 / LEAST + 1.645 * error)
    assert record.pays()
    for _ in range(LEAST):  # as often again, and always the same
        record.completed(completed([False], [True]))
    assert not record.pays()


def test_only_the_newest_groups_decide() -> None:
    record = GuidanceRecord()
    for won in [True] * 50 + [False] * WINDOW:
        record.completed(completed([won], [False]))
    assert len(record.gains) == WINDOW and not record.pays()
    record.completed(completed([True], [False]))
    assert record.pays(), "one success tells that it can help again"


def test_groups_that_were_guided_in_vain_are_wasted_before_the_rule_can_tell() -> None:
    record = GuidanceRecord()
    record.granted(True)
    assert record.wasted == 0, "nothing was known"
    record.completed(completed([False], [True]))
    assert record.pays(), "one group does not stop it"
    record.granted(True)
    record.granted(False)
    assert (record.guided, record.wasted) == (2, 1)


@given(st.lists(st.booleans(), max_size=80), st.booleans())
def test_counts_of_grants_agree_with_a_slow_count(grants: list[bool], pays: bool) -> None:
    record = GuidanceRecord(gains=[0.0] * LEAST if not pays else [1.0])
    for guided in grants:
        record.granted(guided)
    assert (record.groups, record.guided) == (len(grants), sum(grants))
    assert record.wasted == (0 if pays else sum(grants))
    assert record.withheld == len(grants) - max(
        (index + 1 for index, guided in enumerate(grants) if guided), default=0
    )
