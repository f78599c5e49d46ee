"""Dynamic sampling: groups without any reward spread never reach the learner, others are granted
in their place, the ledger closes, and too many of them end the wait."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from buffer_world import World, config
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.buffer.state import records
from evolver_async.buffer.state.groups import ArrivedMember, HeldGroup
from evolver_async.config import Config, SelectionConfig
from evolver_async.schema import Player, Task, Ticket
from evolver_async.wire import messages

B, REFILLS = 2, 3


def dynamic(**changes: object) -> Config:
    chosen = SelectionConfig(kind="dynamic", max_refills=REFILLS)
    settings = config(groups_per_step=B, max_staleness=3, **changes)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(settings, selection=chosen)


def finish(world: World, ticket: Ticket, *rewards: float) -> None:
    for member, reward in zip(ticket.members, rewards, strict=True):
        world.push(ticket, member, reward=reward)


@pytest.fixture
def world(tmp_path: Path) -> World:
    opened = World(tmp_path, dynamic())
    opened.resume()
    return opened


def test_a_take_holds_only_groups_with_spread_and_refills_come_by_themselves(world):
    first = world.lease(credit=4)
    for ticket, rewards in zip(first, ((1, 1), (0, 1), (0, 0), (0.5, 0.5)), strict=True):
        finish(world, ticket, *rewards)
    assert world.sample(0) == []
    (more,) = world.lease(credit=1)
    finish(world, more, 1, 0)
    assert [group.group_id for group in world.sample(0)] == [first[1].group_id, more.group_id]
    ledger = world.store.state.ledger
    left_out = ledger.closed["rollout"]["filtered"]["zero_spread"]
    assert (left_out.groups, left_out.trajectories) == (3, 6)
    assert ledger.total("rollout", "evicted").groups == 0


def test_what_is_left_out_is_no_censoring(world):
    for _ in range(40):
        world.resume(lineage=world.replay.at.lineage)
        for ticket in world.lease(credit=4):
            finish(world, ticket, 0, 0)
    compared = world.service.censoring.compare()
    assert compared.evicted_share == 0.0
    assert world.service.censoring.total("filtered").trajectories > 64


def test_left_out_groups_count_as_the_newest_of_their_task(world):
    (ticket,) = world.lease(credit=1)
    world.store.state.tasks.source = dataclasses.replace(world.store.state.tasks.source, train=5)
    finish(world, ticket, 1, 1)
    assert world.store.state.tasks.cursor.success == {ticket.task.task_id: 1.0}


def test_too_many_left_out_end_the_wait_with_a_reason(world):
    for _ in range(REFILLS * B):
        assert world.sample(0) == []
        (ticket,) = world.lease(credit=1)
        finish(world, ticket, 1, 1)
    request = messages.Sample(lineage=1, take=0, stage=0)
    (reply,) = world.ask("learner", request)
    assert isinstance(reply, messages.Reject)
    assert reply.reason.startswith("selection.max_refills: 6 groups since the last take had equal")


def test_a_full_batch_is_handed_out_however_many_were_left_out_and_the_count_begins_anew(world):
    for _ in range(REFILLS * B):
        (ticket,) = world.lease(credit=1)
        finish(world, ticket, 1, 1)
    for ticket in world.lease(credit=B):
        finish(world, ticket, 1, 0)
    groups = world.sample(0)
    assert len(groups) == B
    world.done(0, [group.group_id for group in groups], version=1)
    (ticket,) = world.lease(credit=1)
    finish(world, ticket, 1, 1)
    assert world.sample(1) == [] and world.replay.at.zero_spread == 1


def test_the_count_survives_a_restart_and_a_new_lineage_begins_it_anew(world):
    for _ in range(REFILLS * B):
        (ticket,) = world.lease(credit=1)
        finish(world, ticket, 1, 1)
    world.kill()
    assert world.replay.refills_exhausted()
    world.resume(lineage=1)
    assert not world.replay.refills_exhausted()


def test_a_group_whose_eviction_was_lost_with_the_process_is_not_trained_either(world):
    (ticket,) = world.lease(credit=1)
    world.push(ticket, 0, reward=1.0)
    held = world.replay.at.groups[ticket.group_id]
    last = records.Arrived(
        group_id=ticket.group_id,
        member=1,
        attempt=0,
        content=0,
        tokens=3,
        bytes=1,
        reward=1.0,
        success=True,
        guided=False,
        turns=1,
        sampled=[world.replay.at.head],
    )
    world.store.record(last)
    world.service.commit()
    assert held.state == "ready"
    for ticket in world.lease(credit=B):
        finish(world, ticket, 1, 0)
    groups = world.sample(0)
    assert held.group_id not in [group.group_id for group in groups] and len(groups) == B
    world.done(0, [group.group_id for group in groups], version=1)
    assert held.group_id not in world.replay.at.groups
    world.store.state.check()


def test_without_dynamic_sampling_equal_rewards_are_handed_out(tmp_path):
    world = World(tmp_path, config(groups_per_step=B))
    world.resume()
    for ticket in world.lease(credit=B):
        finish(world, ticket, 1, 1)
    assert len(world.sample(0)) == B


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.integers(1, 6))
def test_the_spread_of_equal_rewards_is_exactly_zero_and_of_others_is_not(rewards, copies):
    def held(values: list[float]) -> HeldGroup:
        arrived = {
            index: ArrivedMember(0, 1, 1, value, False, False, None, (0, 0, 0, 0))
            for index, value in enumerate(values)
        }
        task = Task(task_id="t", env="e", split="train", map_seed=0)
        return HeldGroup(
            group_id=0,
            task=task,
            kind="rollout",
            stage=0,
            members=list(arrived),
            owners={},
            uses_left=1,
            arrived=arrived,
        )

    assert held(rewards[:1] * copies).spread == 0.0
    wide = max(rewards) - min(rewards)
    assert (held(rewards).spread > 0) == (wide > 0)
    assert held(rewards).spread <= wide


@pytest.mark.parametrize(
    ("outcomes", "left_out"),
    [
        # the mean of a game for two is always 0, yet each player has something to learn
        ([(1.0, -1.0), (-1.0, 1.0)], False),
        ([(1.0, 0.0), (1.0, -1.0)], False),
        ([(1.0, -1.0), (1.0, -1.0)], True),
    ],
)
def test_a_group_of_players_is_left_out_if_none_has_spread(world, outcomes, left_out):
    (ticket,) = world.lease(credit=1)
    for member, (even, odd) in enumerate(outcomes):
        players = [
            Player(name="even", reward=even, success=even > 0, turns=[0]),
            Player(name="odd", reward=odd, success=odd > 0, turns=[1]),
        ]
        arrays = {
            "turn_rewards": np.array([even, odd], np.float32),
            "turn_flags": np.zeros(2, np.uint8),
            "labels": np.zeros(2, np.int8),
        }
        world.push(ticket, member, reward=0.0, players=players, **arrays)
    assert (ticket.group_id not in world.replay.at.groups) == left_out


def test_by_success_groups_that_all_failed_or_all_succeeded_are_left_out(tmp_path):
    settings = dynamic()
    chosen = dataclasses.replace(settings.selection, by="success")
    world = World(tmp_path, dataclasses.replace(settings, selection=chosen))
    world.resume()
    outcomes = (((0.1, False), (0.9, False)), ((0.1, True), (0.9, True)), ((1, False), (1, True)))
    tickets = world.lease(credit=3)
    for ticket, members in zip(tickets, outcomes, strict=True):
        for member, (reward, success) in enumerate(members):
            world.push(ticket, member, reward=reward, success=success)
    left_out = world.store.state.ledger.closed["rollout"]["filtered"]["zero_spread"]
    assert left_out.groups == 2
    (held,) = world.replay.by_state["ready"]
    assert held == tickets[2].group_id
