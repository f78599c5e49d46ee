"""The promises of the buffer towards actors and learner, each request of the wire, and restarts."""

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from buffer_world import HEAD, World, config, synthetic, trajectory

from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.state import records
from evolver_async.checkpoint.checkpoints import save
from evolver_async.config import QuestioningConfig
from evolver_async.process.package_versions import versions
from evolver_async.runs.watch.status_text import status_lines
from evolver_async.schema import Ticket, WeightId
from evolver_async.wire import messages
from evolver_async.wire.envelope import SCHEMA_HASH, Envelope, pack
from evolver_async.wire.failure_totals import FailureTotal

GIB = 1 << 30


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, config(max_staleness=1))
    made.resume()
    return made


def weights(step: int, lineage: int = 1) -> WeightId:
    return WeightId(lineage=lineage, step=step)


def learn(world: World, take: int, *, episodes: int = 0) -> messages.Ok:
    """One whole step: two groups are made, taken and trained."""
    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(take)]
    assert len(groups) == 2
    return world.done(take, groups, take + 1, episodes=episodes)


# ---- joining


def test_hello_refuses_another_schema_or_tokenizer_and_names_both(world):
    def hello(schema: str, tokenizer: str | None) -> messages.Reply:
        request = messages.Hello(role="eval", schema_hash=schema, tokenizer=tokenizer)
        return world.one("a", request)

    assert isinstance(hello(SCHEMA_HASH, None), messages.Welcome)
    assert isinstance(hello(SCHEMA_HASH, "one"), messages.Welcome)
    for reply, words in (
        (hello("theirs", None), ("theirs", SCHEMA_HASH)),
        (hello(SCHEMA_HASH, "two"), ("two", "one")),
    ):
        assert isinstance(reply, messages.Reject)
        assert all(word in reply.reason for word in words)


def test_an_actor_of_an_earlier_launch_is_told_to_start_again(tmp_path):
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    (ticket,) = world.lease()
    world.service.welcome.launch = 2
    lease = messages.Lease(credit=2, weights=HEAD, visible=HEAD, launch=1)
    renewal = messages.Renew(progress={ticket.group_id: 1}, launch=1)
    for request in (lease, renewal):
        reply = world.one("actor-0", request)
        assert isinstance(reply, messages.Fenced) and reply.groups == []
        assert reply.reason == (
            "actor-0 has joined launch 1, the run is in launch 2 now: start it again"
        )
    assert isinstance(world.one("actor-0", messages.Lease(credit=0, launch=1)), messages.Ok)
    lease.launch = 2
    assert isinstance(world.one("actor-1", lease), messages.Tickets)


@pytest.mark.parametrize("role", ["actor", "learner"])
def test_a_host_with_other_versions_is_named_on_the_console(world, role):
    hello = messages.Hello(role=role, schema_hash=SCHEMA_HASH, host="node-b")
    hello.versions = versions() | {"torch": "1.0", "unknown": "2"}
    assert isinstance(world.one("actor-0", hello), messages.Welcome), "it may work all the same"
    (failure,) = world.one("you", messages.StatusRequest()).status["failures"]
    assert (failure["kind"], failure["name"], failure["count"]) == ("host", "node-b", 1)
    assert failure["error"].startswith("other versions than the buffer, torch 1.0 (buffer: ")
    same = messages.Hello(role="actor", schema_hash=SCHEMA_HASH, versions=versions())
    world.one("actor-1", same)
    assert len(world.one("you", messages.StatusRequest()).status["failures"]) == 1


def test_a_new_process_of_the_same_name_loses_the_old_leases(world):
    (ticket,) = world.lease()
    world.one("actor-0", messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
    (again,) = world.lease()
    assert (again.group_id, again.attempt) == (ticket.group_id, 1)


# ---- leases


def test_a_conversation_of_people_is_taken_once_over_restarts(world):
    """An actor that was killed before the reply sends it again, by a ticket of its new process."""

    def push(ticket: Ticket, member: int, conversation: int) -> messages.Reply:
        sent = trajectory(ticket, member, conversation=conversation)
        return world.one("actor-0", messages.Push(trajectory=sent))

    (first,) = world.lease(credit=1)
    (lost,) = world.lease(credit=1, peer="actor-1")
    assert isinstance(push(first, 0, 11), messages.Ack)
    world.kill()
    assert isinstance(push(lost, 0, 11), messages.Dup), "in a group of its own, too"
    assert isinstance(push(first, 0, 12), messages.Stale), "to be delivered by another ticket"
    assert isinstance(push(lost, 0, 12), messages.Ack)
    (held,) = [one for one in world.replay.at.groups.values() if one.group_id == lost.group_id]
    assert [*held.arrived] == [0]
    world.store.journal.roll(records.encode(world.store.state.snapshot()))
    world.kill()
    assert isinstance(push(lost, 1, 12), messages.Dup), "a snapshot knows it"
    (sent,) = world.store.trajectories(held)
    assert sent.conversation == 12


def test_a_lease_waits_for_a_learner_then_for_room_and_says_why(tmp_path):
    world = World(tmp_path, config(max_staleness=0))
    reply = world.one("actor-0", messages.Lease(credit=1, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait) and "no learner" in reply.reason
    world.resume()
    assert len(world.lease(credit=9)) == 2
    world.pass_time(3.0)
    reply = world.one("actor-1", messages.Lease(credit=1, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait)
    assert "2 of 2 uses outstanding" in reply.reason
    assert "members [0, 1] from actor-0 for 3.0 s" in reply.reason


def test_a_ticket_demands_nothing_that_its_actor_has_not_held(tmp_path):
    """DONE is ahead of the publish: the head counts at once, and is demanded only when it came."""
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    world.finish(world.lease(credit=2))
    take = [group.group_id for group in world.sample(0)]
    world.done(0, take, version=1)
    (ticket,) = world.lease(credit=1, held=HEAD)
    assert ticket.weights == HEAD
    world.finish([ticket])
    assert len(world.lease(credit=9, peer="actor-1", held=HEAD)) == 1
    assert world.lease(credit=9, peer="actor-0", held=HEAD) == []  # would be trained too late
    reply = world.one("actor-0", messages.Lease(credit=2, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait) and "the actor has held 1.0" in reply.reason
    newer = WeightId(lineage=1, step=1)
    world.one("actor-0", messages.Renew(progress={}, weights=newer, visible=newer))
    tickets = world.lease(credit=9, peer="actor-0", held=HEAD)  # the LEASE that was parked
    assert len(tickets) == 2 and {ticket.weights for ticket in tickets} == {newer}


def test_without_staleness_a_group_is_granted_only_with_the_head(tmp_path):
    world = World(tmp_path, config(max_staleness=0))
    world.resume()
    world.finish(world.lease(credit=2))
    world.done(0, [group.group_id for group in world.sample(0)], version=1)
    assert world.lease(credit=2, held=HEAD) == []
    tickets = world.lease(credit=2, held=WeightId(lineage=1, step=1))
    assert {ticket.weights for ticket in tickets} == {WeightId(lineage=1, step=1)}


def test_an_evaluation_is_granted_once_its_weights_can_be_fetched(tmp_path):
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    world.finish(world.lease(credit=2))
    world.done(0, [group.group_id for group in world.sample(0)], version=1, episodes=1)
    assert all(ticket.kind == "rollout" for ticket in world.lease(credit=1, held=HEAD))
    seen = WeightId(lineage=1, step=1)
    reply = world.one("actor-1", messages.Lease(credit=1, weights=HEAD, visible=seen))
    assert isinstance(reply, messages.Tickets)
    assert [(one.kind, one.weights) for one in reply.tickets] == [("eval", seen)]


def test_a_new_process_of_an_actor_holds_nothing_yet(tmp_path):
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    assert world.lease(credit=1)
    hello = messages.Hello(role="actor", schema_hash=SCHEMA_HASH)
    world.one("actor-0", hello)
    assert isinstance(world.one("actor-0", messages.Lease(credit=2)), messages.Wait)


def test_no_more_members_are_granted_than_the_credit_also_in_a_stage_of_larger_groups(tmp_path):
    settings = config(group_size=2, max_staleness=9)
    settings.stages[0].override = {"rollout": {"group_size": 8}}
    world = World(tmp_path, settings)
    world.resume()
    reply = world.one("actor-0", messages.Lease(credit=7, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait)
    assert reply.reason == "a group has 8 members, the credit is 7"
    reply = world.one("actor-0", messages.Lease(credit=17, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Tickets)
    assert [len(ticket.members) for ticket in reply.tickets] == [8, 8]


def test_groups_of_a_run_that_resumes_with_smaller_ones_are_completed(tmp_path):
    world = World(tmp_path, config(group_size=8, groups_per_step=1, max_staleness=0))
    world.resume()
    (ticket,) = world.lease()
    world.settings = config(group_size=4, groups_per_step=1, max_staleness=0)
    world.kill()
    world.resume(lineage=1)
    world.one("actor-0", messages.Lease(credit=0))
    for actor, members in (("actor-0", [0, 1, 2, 3]), ("actor-1", [4, 5, 6, 7])):
        (part,) = world.lease(peer=actor)
        assert (part.group_id, part.members) == (ticket.group_id, members)
        assert world.lease(peer=actor) == []
        world.finish([part])
    assert list(world.replay.by_state["ready"]) == [ticket.group_id]


def test_a_group_is_split_only_if_no_whole_one_was_granted(tmp_path):
    world = World(tmp_path, config(group_size=2, groups_per_step=2, max_staleness=0))
    world.resume()
    assert len(world.lease(credit=2)) == 2
    world.one("actor-0", messages.Lease(credit=0))
    assert [ticket.members for ticket in world.lease(credit=1.5)] == [[0, 1]]
    assert [ticket.members for ticket in world.lease(credit=0.5)] == [[0]]


def test_who_asks_for_nothing_more_holds_nothing_more(tmp_path):
    world = World(tmp_path, config(max_staleness=0))
    world.resume()
    (ticket,) = world.lease()
    assert isinstance(world.one("actor-0", messages.Lease(credit=0)), messages.Ok)
    assert world.service.status(world.now)["actors"]["actor-0"]["leases"] == 0
    granted = world.lease(credit=9, peer="actor-1")
    assert [again.group_id for again in granted].count(ticket.group_id) == 1


def test_tickets_carry_the_oldest_weights_that_will_do(tmp_path):
    world = World(tmp_path, config(max_staleness=3, weight_lag=1))
    world.resume()
    for take in range(2):
        learn(world, take)
    (ticket,) = world.lease()
    assert ticket.weights == weights(1)
    assert ticket.kind == "rollout" and ticket.members == [0, 1]


def test_an_actor_with_a_lag_gets_the_weights_that_its_stage_began_with(tmp_path):
    """There are no newer ones before it plays, and without newer ones it holds these back."""
    world = World(tmp_path, config(stages=["rl", "rl"], max_staleness=2, weight_lag=1))
    world.resume()
    learn(world, 0)
    assert world.sample(1, stage=1) == []  # the switch
    unseen = messages.Lease(credit=2, weights=weights(0), visible=weights(0))
    assert isinstance(world.one("actor-0", unseen), messages.Wait)
    reply = world.one("actor-0", messages.Lease(credit=2, weights=weights(0), visible=weights(1)))
    assert isinstance(reply, messages.Tickets)
    assert [ticket.weights for ticket in reply.tickets] == [weights(1)]


def test_an_expired_lease_is_reissued_for_its_missing_members_only(world):
    (ticket,) = world.lease()
    world.push(ticket, 0)
    world.pass_time(10.0)
    (again,) = world.lease(peer="actor-1")
    assert (again.group_id, again.members, again.attempt) == (ticket.group_id, [1], 1)
    reply = world.one("actor-0", messages.Renew(progress={ticket.group_id: 1}))
    assert isinstance(reply, messages.Fenced) and reply.groups == [ticket.group_id]


def test_renewing_with_progress_keeps_a_lease_and_standing_still_loses_it(world):
    (ticket,) = world.lease()
    for progress in range(8):
        world.pass_time(8.0)
        reply = world.one("actor-0", messages.Renew(progress={ticket.group_id: progress}))
        assert isinstance(reply, messages.Ok)
    for _ in range(4):
        world.pass_time(8.0)
        assert isinstance(reply, messages.Ok)
        reply = world.one("actor-0", messages.Renew(progress={ticket.group_id: 7}))
    world.pass_time(8.0)
    reply = world.one("actor-0", messages.Renew(progress={ticket.group_id: 7}))
    assert isinstance(reply, messages.Fenced)
    assert world.lease(peer="actor-1")[0].group_id == ticket.group_id


def test_leases_that_are_over_leave_nothing_behind(tmp_path):
    """In a week an actor has millions: by their arrival, by an eviction, by their end in time."""
    world = World(tmp_path, config(max_staleness=9))
    world.resume()
    first, second, third = (world.lease()[0] for _ in range(3))
    world.finish([first])
    world.store.evict([second.group_id], "age")
    world.pass_time(11.0)
    leases = world.store.leases
    assert not list(leases) and leases.vacant.keys() == {third.group_id}
    assert not leases._by_peer


def test_released_members_are_granted_again_at_once(world):
    (ticket,) = world.lease()
    request = messages.Release(group_id=ticket.group_id, members=[1], reason="drain")
    assert isinstance(world.one("actor-0", request), messages.Ok)
    assert isinstance(world.one("actor-0", request), messages.Ok)
    (again,) = world.lease(peer="actor-1")
    assert (again.group_id, again.members) == (ticket.group_id, [1])


def test_a_task_that_keeps_failing_is_quarantined(world):
    (ticket,) = world.lease()
    for attempt in range(2):
        request = messages.Release(group_id=ticket.group_id, members=[1], reason="environment")
        world.one("actor-0", request)
        if attempt == 0:
            world.push(ticket, 0)
            assert world.lease()[0].group_id == ticket.group_id
    status = world.service.status(0.0)
    assert status["quarantined"] == {ticket.task.task_id: "environment"}
    said = f"not played again: {ticket.task.task_id} (environment)"
    assert any(line.endswith(said) for line in status_lines(status))
    assert world.service.actor_requests.status.counters(0.0)["buffer/quarantined"] == 1.0
    assert isinstance(world.push(ticket, 1), messages.Stale)
    assert world.lease()[0].task != ticket.task


def test_bytes_stop_grants_only_while_a_whole_take_is_ready(tmp_path):
    world = World(tmp_path, config(max_staleness=4))
    world.service.actor_requests.config.buffer.limit_bytes = 100
    world.resume()
    (first,) = world.lease()
    world.finish([first], length=20)
    (second,) = world.lease()
    world.finish([second], length=20)
    reply = world.one("actor-0", messages.Lease(credit=1, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait) and "buffer.limit_bytes=100" in reply.reason
    world.sample(0)
    assert world.lease()


def test_ready_groups_stop_grants_until_the_learner_takes_some(tmp_path):
    settings = config(max_staleness=4)
    settings.buffer.max_ready = 1.5
    world = World(tmp_path, settings)
    world.resume()
    for _ in range(3):  # a step takes two
        world.finish(world.lease())
    reply = world.one("actor-0", messages.Lease(credit=1, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait)
    assert reply.reason == "3 groups are ready: buffer.max_ready=1.5 steps of 2"
    world.sample(0)
    assert world.lease()


def test_an_actor_that_waits_is_not_compared_with_all_others(tmp_path, monkeypatch):
    """Every commit looks at every parked LEASE: with an obstacle it has nothing to share."""
    settings = config(max_staleness=9)
    settings.buffer.max_ready = 1.0
    world = World(tmp_path, settings)
    world.resume()
    for _ in range(2):
        world.finish(world.lease())
    monkeypatch.setattr(world.service.activity, "asking", None)
    assert world.lease() == []


def test_a_full_disk_stops_grants_and_pushes_are_retried(world):
    (ticket,) = world.lease()
    world.store.journal.free = 0
    reply = world.one("actor-0", messages.Lease(credit=1, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait) and "bytes of disk are free" in reply.reason
    assert isinstance(world.push(ticket, 0), messages.Retry)
    world.pass_time(0.1)
    assert isinstance(world.push(ticket, 0), messages.Ack)


def test_a_finished_member_keeps_its_lease_while_the_disk_is_full(world):
    (ticket,) = world.lease()
    for _ in range(12):  # of 5 s, longer than buffer.stall_s
        world.pass_time(5.0)
        world.store.journal.free = 0
        assert isinstance(world.push(ticket, 0), messages.Retry)
        renewed = world.one("actor-0", messages.Renew(progress={ticket.group_id: 7}))
        assert isinstance(renewed, messages.Ok)
    world.pass_time(0.1)
    assert isinstance(world.push(ticket, 0), messages.Ack)


def test_who_has_sent_all_of_a_group_and_waits_for_its_ack_is_not_fenced(world):
    """Fenced it would drop the trajectory, which the disk may not have yet."""
    (ticket,) = world.lease()
    for member in ticket.members:
        assert isinstance(world.push(ticket, member), messages.Ack)
    renewal = messages.Renew(progress={ticket.group_id: 7})
    assert isinstance(world.one("actor-0", renewal), messages.Ok)
    assert isinstance(world.one("actor-0", renewal), messages.Ok)
    assert isinstance(world.one("actor-1", renewal), messages.Fenced)
    news = messages.Renew(progress={}, weights=HEAD, visible=HEAD)
    assert isinstance(world.one("actor-0", news), messages.Ok), "of weights, beside a parked LEASE"
    assert isinstance(world.one("actor-0", renewal), messages.Ok)
    (other,) = world.lease()
    others = messages.Renew(progress={other.group_id: 1})
    assert isinstance(world.one("actor-0", others), messages.Ok)
    assert isinstance(world.one("actor-0", renewal), messages.Fenced), "it has forgotten the ticket"


@pytest.mark.parametrize("seconds", [10.0, 1000.0])
def test_a_standstill_of_the_buffer_ends_no_lease(world, seconds):
    """Its actors could not renew: neither the lease nor the progress is too old for that."""
    (ticket,) = world.lease()
    world.pass_time(5.0)
    world.stand_still(seconds)
    renewal = messages.Renew(progress={ticket.group_id: 1})
    assert isinstance(world.one("actor-0", renewal), messages.Ok)
    world.stand_still(seconds)
    assert isinstance(world.one("actor-0", renewal), messages.Ok), "it could not make progress"
    world.pass_time(10.0)
    assert isinstance(world.one("actor-0", renewal), messages.Fenced), "silent for a whole lease"


def test_a_standstill_of_the_buffer_is_no_stall_of_its_actors(world, caplog):
    (ticket,) = world.lease()
    world.pass_time(2.0)
    world.stand_still(100.0)
    renewal = messages.Renew(progress={ticket.group_id: 1})
    assert isinstance(world.one("actor-0", renewal), messages.Ok)
    world.pass_time(2.0)
    assert "stood still for 100.0 s" in caplog.text
    assert not re.search("actor-0 (has made no progress|was not heard)", caplog.text)


def test_short_standstills_crowd_no_lost_lease_out_of_the_log(world, caplog):
    """Of the lines of one place in the source only a few a minute are written."""
    world.lease()
    for _ in range(20):
        world.stand_still(2.0)
    assert "actor-0 was silent" in caplog.text
    assert "stood still" not in caplog.text


def test_a_stall_is_told_although_every_sync_takes_long(world, caplog):
    world.lease()
    for _ in range(12):
        world.stand_still(4.0)
    assert "actor-0 was not heard for" in caplog.text


def test_a_renewal_that_waited_for_the_buffer_is_read_before_the_standstill_is_counted(world):
    (ticket,) = world.lease()
    renewal = messages.Renew(progress={ticket.group_id: 1})
    assert isinstance(world.one("actor-0", renewal), messages.Ok)
    world.pass_time(5.0)
    world.now += 1000.0
    assert isinstance(world.one("actor-0", renewal), messages.Ok)


def test_the_lease_of_a_dead_actor_ends_although_every_sync_takes_long(world):
    (ticket,) = world.lease()
    for _ in range(10):
        assert not world.lease(peer="actor-1", credit=0.5)
        world.stand_still(3.0)
    assert world.lease(peer="actor-1")[0].group_id == ticket.group_id


def test_a_standstill_gives_no_lease_more_than_its_length(world):
    (ticket,) = world.lease()
    world.stand_still(100.0)
    world.pass_time(10.0)
    assert world.lease(peer="actor-1")[0].group_id == ticket.group_id


def test_vacant_members_are_not_granted_again_while_the_disk_is_full(world):
    (ticket,) = world.lease()
    world.one("actor-0", messages.Lease(credit=0))
    world.store.journal.free = 0
    assert world.lease(peer="actor-1") == []
    world.pass_time(0.1)
    assert [again.group_id for again in world.lease(peer="actor-1")] == [ticket.group_id]


def test_the_journals_limit_stops_grants_until_a_checkpoint_lets_it_go(tmp_path):
    world = World(tmp_path, config(max_staleness=1), segment_bytes=1 << 13)
    world.service.disk.limit_bytes = limit = 1 << 16
    world.resume()
    take = 0
    while not learn(world, take).checkpoint:
        assert world.store.journal.size < limit + (1 << 13)
        take += 1
    assert world.store.journal.size >= limit
    assert len(world.lease(credit=9)) == 2  # else the learner would starve
    reply = world.one("actor-0", messages.Lease(credit=1, weights=HEAD, visible=HEAD))
    assert isinstance(reply, messages.Wait) and "buffer.disk_limit_bytes" in reply.reason
    world.one("learner", messages.Kept(take=take + 1))
    assert len(world.store.journal.sizes) <= 2
    assert len(world.lease(credit=9)) == 2


def test_a_member_of_an_exploration_under_way_keeps_no_segment(tmp_path):
    """Its trajectory is in none: only what is trained has to be read again."""
    asking = QuestioningConfig(kind="goals", every=1, groups=1)
    world = World(tmp_path, config(max_staleness=9, questioning=asking), segment_bytes=2000)
    world.resume()
    tickets: list[Ticket] = []
    while not any(ticket.kind == "explore" for ticket in tickets):
        tickets += world.lease(credit=1)
    *others, exploring = tickets
    world.push(exploring, 0)
    first = world.store.journal.newest
    world.finish(others)
    take = 0
    while world.store.journal.newest < first + 3:
        world.finish(world.lease(credit=2))
        groups = [group.group_id for group in world.sample(take)]
        world.done(take, groups, take + 1)
        take += 1
    assert first in world.store.journal.sizes
    world.service.disk.limit_bytes = 1
    assert world.service.disk.wants_checkpoint()
    world.one("learner", messages.Kept(take=take))
    assert first not in world.store.journal.sizes
    world.kill()  # what is left says all that is held
    assert world.replay.at.groups[exploring.group_id].missing == [1]
    assert isinstance(world.push(exploring, 1), messages.Ack)


# ---- pushes


def test_the_first_copy_wins_whichever_attempt_it_is(world):
    (ticket,) = world.lease()
    world.pass_time(10.0)
    (again,) = world.lease(peer="actor-1")
    assert isinstance(world.push(ticket, 0, reward=1.0), messages.Ack)
    assert isinstance(world.push(again, 0, reward=2.0), messages.Dup)
    world.finish(
        [Ticket(**{f: getattr(again, f) for f in again.__struct_fields__} | {"members": [1]})]
    )
    world.finish(world.lease())
    taken = {group.group_id: group for group in world.sample(0)}
    assert [t.reward for t in taken[ticket.group_id].trajectories] == [1.0, 0.0]


def test_what_was_not_granted_is_refused_with_its_reason(world):
    (ticket,) = world.lease()
    for facts, member, field in (
        ({}, 5, "member"),
        ({"attempt": 3}, 0, "attempt"),
        ({"weights": weights(0, lineage=7)}, 0, "versions"),
    ):
        reply = world.push(ticket, member, **facts)
        assert isinstance(reply, messages.Reject) and reply.reason.startswith(field)
    scripted = trajectory(ticket, 0)
    scripted.policy = "scripted"
    reply = world.one("actor-0", messages.Push(trajectory=scripted))
    assert isinstance(reply, messages.Reject) and reply.reason.startswith("policy")
    assert world.store.state.ledger.refused["rejected"].trajectories == 4


def test_an_unknown_group_is_stale(world):
    (ticket,) = world.lease()
    elsewhere = trajectory(ticket, 0)
    elsewhere.group_id = 99
    assert isinstance(world.one("a", messages.Push(trajectory=elsewhere)), messages.Stale)


def test_a_group_too_old_is_evicted_and_its_task_queued_again(tmp_path):
    world = World(tmp_path, config(max_staleness=1, groups_per_step=1))
    world.resume()
    (slow,) = world.lease()
    world.push(slow, 0)
    for take in range(2):
        world.finish(world.lease())
        (group,) = world.sample(take)
        world.done(take, [group.group_id], take + 1)
    assert isinstance(world.push(slow, 1), messages.Stale)
    reply = world.one("actor-0", messages.Renew(progress={slow.group_id: 1}))
    assert isinstance(reply, messages.Fenced)
    (again,) = world.lease()
    assert again.task == slow.task and again.group_id != slow.group_id
    assert world.store.state.ledger.total("rollout", "evicted").trajectories == 1


# ---- takes


def test_the_same_take_gets_the_same_groups_before_and_after_its_report(world):
    world.finish(world.lease(credit=2), reward=0.5)
    first = world.sample(0)
    for _ in range(2):
        again = world.sample(0)
        assert [g.group_id for g in again] == [g.group_id for g in first]
        assert [t.tokens.tolist() for g in again for t in g.trajectories[0].sequences] == [
            t.tokens.tolist() for g in first for t in g.trajectories[0].sequences
        ]
        world.done(0, [g.group_id for g in first], 1)


def test_a_take_out_of_order_is_refused_and_an_old_lineage_is_fenced(world):
    def sample(lineage: int, take: int) -> messages.Reply:
        return world.one("learner", messages.Sample(lineage=lineage, take=take, stage=0))

    assert isinstance(sample(1, 3), messages.Reject)
    assert isinstance(sample(0, 0), messages.Fenced)
    request = messages.Done(lineage=0, take=0, version=1, trained=[], filtered={})
    assert isinstance(world.one("learner", request), messages.Fenced)


def test_sample_says_what_is_missing_from_whom_for_how_long(world):
    world.finish(world.lease(peer="actor-1"))
    (ticket,) = world.lease(peer="actor-1")
    world.push(ticket, 1)
    world.pass_time(7.0)
    reply = world.one("learner", messages.Sample(lineage=1, take=0, stage=0))
    assert isinstance(reply, messages.Wait)
    assert "1 open, 0 taken, 1 ready of 2 needed" in reply.reason
    assert f"group {ticket.group_id}: members [0] from actor-1 for 7.0 s" in reply.reason


def test_the_next_take_waits_for_the_report_of_the_last(world):
    world.finish(world.lease(credit=4))
    world.sample(0)
    reply = world.one("learner", messages.Sample(lineage=1, take=1, stage=0))
    assert isinstance(reply, messages.Wait) and "take 0 is not reported" in reply.reason


def test_done_must_account_for_every_group(world):
    world.finish(world.lease(credit=2))
    ids = [group.group_id for group in world.sample(0)]

    def done(trained, filtered=None, version=1) -> messages.Reply:
        request = messages.Done(
            lineage=1, take=0, version=version, trained=trained, filtered=filtered or {}
        )
        return world.one("learner", request)

    for reply, words in (
        (done(ids[:1]), "missing"),
        (done([*ids, 99]), "not of take 0"),
        (done(ids, {"spread": ids[:1]}), "twice"),
        (done(ids, version=-1), "version"),
    ):
        assert isinstance(reply, messages.Reject) and words in reply.reason
    assert isinstance(done(ids[:1], {"spread": ids[1:]}), messages.Ok)
    ledger = world.store.state.ledger
    assert ledger.total("rollout", "trained").groups == 1
    assert ledger.closed["rollout"]["filtered"]["spread"].groups == 1


def test_a_skipped_take_uses_its_groups_and_leaves_the_version(world):
    world.finish(world.lease(credit=2))
    world.sample(0)
    reply = world.done(0, [], 0, skipped=True)
    assert world.replay.at.head == weights(0)
    assert world.store.state.ledger.closed["rollout"]["filtered"]["skipped"].groups == 2
    assert reply.counters["ledger/filtered"] == 4.0
    learn(world, 1)


def test_counters_name_the_buffer_and_the_ledger(world):
    counters = learn(world, 0).counters
    assert counters["ledger/received"] == counters["ledger/trained"] == 4.0
    assert counters["buffer/ready"] == counters["buffer/bytes"] == 0.0
    assert counters["actors/alive"] == 1.0


def test_turns_of_all_episodes_but_those_of_evaluations_are_counted(world):
    """Each has one turn here; those that never train count too."""
    learn(world, 0, episodes=2)
    tickets = world.lease(credit=2)
    assert {ticket.kind for ticket in tickets} == {"eval", "rollout"}
    for ticket in tickets:
        world.finish([ticket], weights=weights(1))
    evicted = list(world.replay.by_state["ready"])
    world.store.evict(evicted, "age")
    counters, turns = learn(world, 1).counters, world.store.state.ledger.turns
    assert turns["eval"] > 0 and evicted
    assert counters["ledger/received_turns"] == turns["rollout"] == counters["ledger/received"]
    assert counters["ledger/received"] > counters["ledger/trained"]


def test_a_ready_group_that_becomes_stale_has_its_task_queued_again(tmp_path):
    world = World(tmp_path, config(max_staleness=1, groups_per_step=1, sampler="prioritized"))
    world.resume()
    even, take = world.lease()[0], 0

    def miss(ticket: Ticket) -> Ticket:
        """`ticket` is whole, but others are taken until it is too old; its task's next ticket."""
        nonlocal take
        world.finish([ticket])
        while world.replay.at.groups.get(ticket.group_id) is not None:
            (spread,) = [t for t in world.lease() if t.task != ticket.task]
            for member in spread.members:
                world.push(spread, member, reward=float(member))
            (group,) = world.sample(take)
            assert group.group_id == spread.group_id
            world.done(take, [spread.group_id], take + 1)
            take += 1
        world.kill()
        (again,) = world.lease()
        assert again.task == ticket.task and again.group_id > ticket.group_id
        return again

    second = miss(even)
    assert world.store.state.ledger.closed["rollout"]["evicted"]["stale"].groups == 1
    third = miss(second)
    assert world.replay.at.groups[third.group_id].wait, "the learner waits for the third"
    world.finish([third])
    (group,) = world.sample(take)
    assert group.group_id == third.group_id, "so it is taken before it is too old"
    assert world.store.state.tasks.cursor.missed == {}
    assert world.store.state.tasks.cursor.quarantined == {}


# ---- resume, stages, evaluation


def test_resume_makes_everything_since_ready_again_and_fences_the_old_learner(tmp_path):
    world = World(tmp_path, config(max_staleness=3))
    world.resume()
    for take in range(2):
        learn(world, take)
    world.finish(world.lease(credit=2))
    ids = {take: [g.group_id for g in world.sample(take)] for take in (0, 1, 2)}
    for _ in range(2):  # the second is the same request, sent again
        assert world.resume(lineage=1, take=1, version=1, process="second") == 2
    request = messages.Done(lineage=1, take=2, version=3, trained=ids[2], filtered={})
    assert isinstance(world.one("learner", request), messages.Fenced)
    again = [g.group_id for take in (1, 2) for g in world.sample(take, lineage=2)]
    assert again == ids[1]
    world.done(1, again, 2, lineage=2)
    assert [g.group_id for g in world.sample(2, lineage=2)] == ids[2]


def test_after_a_resume_groups_of_the_abandoned_branch_are_as_old_as_the_way_around(world):
    for take in range(2):
        learn(world, take)
    tickets = world.lease(credit=2)
    world.finish(tickets)  # sampled two versions after the fork
    world.resume(lineage=1, take=0, version=0)
    assert world.store.state.ledger.closed["rollout"]["evicted"]["fork"].groups == 2
    again = [queued.task.task_id for queued in world.store.state.tasks.cursor.queue]
    assert again == [ticket.task.task_id for ticket in tickets], "it is not their tasks' fault"
    assert world.store.state.tasks.cursor.ages == {}
    assert len(world.sample(0, lineage=2)) == 2


def test_resume_from_what_the_journal_does_not_have_is_refused(world):
    learn(world, 0)
    world.one("learner", messages.Kept(take=1))
    for lineage, take, field in ((1, 0, "take"), (1, 2, "take"), (3, 1, "lineage")):
        request = messages.Resume(lineage=lineage, take=take, version=0)
        reply = world.one("learner", request)
        assert isinstance(reply, messages.Reject) and reply.reason.startswith(field)


def test_demonstrations_need_no_weights_and_the_old_stage_is_evicted_at_a_switch(tmp_path):
    world = World(tmp_path, config(stages=["sft", "rl"], demo_groups=5))
    tickets = world.lease(credit=9)
    assert len(tickets) == 5
    assert {(t.kind, t.weights) for t in tickets} == {("demo", None)}
    world.resume()
    world.finish(tickets[:3])
    groups = world.sample(0)
    assert [group.kind for group in groups] == ["demo", "demo"]
    world.done(0, [group.group_id for group in groups], 1)
    assert world.sample(1, stage=1) == []
    assert world.store.state.ledger.closed["demo"]["evicted"]["stage"].groups == 3
    (ticket, *_) = world.lease()
    assert (ticket.kind, ticket.stage, ticket.weights) == ("rollout", 1, weights(1))


def test_evaluation_is_pinned_granted_first_and_reported_until_confirmed(world):
    assert learn(world, 0, episodes=3).evals == []
    tickets = world.lease(credit=2)
    assert [(t.kind, t.weights, t.task.split) for t in tickets[:3]] == [
        ("eval", weights(1), "validation")
    ] * 3
    assert [t.task.map_seed for t in tickets[:3]] == [0, 1, 2]
    assert tickets[0].sampling.temperature == 0.0
    wrong = world.push(tickets[0], 0, weights=weights(0))
    assert isinstance(wrong, messages.Reject) and wrong.reason.startswith("versions")
    for ticket, reward in zip(tickets[:3], (1.0, 0.0, 0.5), strict=True):
        assert isinstance(world.push(ticket, 0, reward=reward), messages.Ack)
    world.finish(tickets[3:])
    taken = [group.group_id for group in world.sample(0)]
    for _ in range(2):
        (result,) = world.done(0, taken, 1).evals
    assert (result.weights, result.episodes) == (weights(1), 3)
    assert result.success == pytest.approx(2 / 3) and result.reward_mean == pytest.approx(0.5)
    world.finish(world.lease(credit=4))
    assert world.done(1, [g.group_id for g in world.sample(1)], 2).evals == []


def test_the_learner_sees_the_progress_of_the_evaluation_that_it_waits_for(world):
    def evaluating() -> dict[int, int]:
        return world.one("learner", messages.Kept(take=0)).evaluating

    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(0)]
    (rollout,) = world.lease()
    assert evaluating() == {}
    world.done(0, groups, 1, episodes=2)
    world.one("actor-0", messages.Renew(weights=weights(1), progress={rollout.group_id: 5}))
    assert evaluating() == {rollout.group_id: 5}, "its actor must end it before it evaluates"
    first, second = (ticket for ticket in world.lease() if ticket.kind == "eval")
    world.one("actor-0", messages.Renew(weights=weights(1), progress={first.group_id: 3}))
    assert evaluating() == {first.group_id: 3, second.group_id: -1}
    world.push(first, 0, weights=weights(1))
    assert evaluating() == {second.group_id: -1}
    release = messages.Release(group_id=second.group_id, members=[0], reason="engine")
    world.one("actor-0", release)
    assert evaluating()[rollout.group_id] == 5


def test_a_resume_abandons_evaluations_and_asks_for_its_own(tmp_path):
    world = World(tmp_path, config(stages=["rl", "rl"], max_staleness=1))
    world.resume()
    learn(world, 0, episodes=1)
    world.finish(world.lease(credit=1)[:1])  # a result that the learner never saw
    request = messages.Resume(lineage=1, take=1, version=1, episodes=2, stage=0, process="second")
    for _ in range(2):  # the second is the same request, sent again
        reply = world.one("learner", request)
        assert isinstance(reply, messages.Resumed) and reply.lineage == 2
    for restart in (False, True):
        if restart:
            world.kill()
        (evaluation,) = world.store.state.evaluations.running
        assert (evaluation.weights, evaluation.episodes) == (weights(1, lineage=2), 2)
        assert world.store.state.evaluations.results == []
    tickets = [t for t in world.lease(credit=1) if t.kind == "eval"]
    assert [t.weights for t in tickets] == [weights(1, lineage=2)] * 2
    world.finish(tickets)
    for _ in range(2):  # no take needs to be done for it
        reply = world.one("learner", messages.Kept(take=1))
        assert isinstance(reply, messages.Ok)
        assert [(r.weights, r.step) for r in reply.evals] == [(weights(1, lineage=2), 0)]
    bad = messages.Resume(lineage=2, take=1, version=1, episodes=2, stage=2)
    assert isinstance(world.one("learner", bad), messages.Reject)


def test_a_fork_grants_nothing_before_its_learner_names_the_stage(tmp_path):
    def write(directory: Path) -> None:
        state = {"lineage": 0, "take": 0, "stage": 1, "discard": False}
        (directory / "state.json").write_text(json.dumps(state))

    save(tmp_path / "checkpoints", 0, write, run_id="run", keep=2)
    world = World(tmp_path / "journal", config(stages=["sft", "rl"], max_staleness=1))
    world.service.check_end(tmp_path / "checkpoints")
    request = messages.Lease(credit=2)
    reply = world.one("actor-0", request)
    assert isinstance(reply, messages.Wait) and "in which stage this fork begins" in reply.reason
    world.resume(stage=1)
    (ticket,) = world.lease()
    assert (ticket.kind, ticket.stage, ticket.task.map_seed) == ("rollout", 1, 0)


def test_a_resume_begins_its_stage_at_once(tmp_path):
    world = World(tmp_path, config(stages=["sft", "rl"], max_staleness=1))
    world.resume()
    (demo,) = world.lease()
    assert demo.kind == "demo"
    world.resume(lineage=1, process="second", stage=1)
    assert demo.group_id not in world.replay.at.groups
    assert [ticket.stage for ticket in world.lease()] == [1]
    world.kill()
    assert world.replay.at.stage == 1


def test_a_restart_knows_as_little_of_the_stage_before_as_the_buffer_did(tmp_path):
    settings = config(stages=["rl", "rl", "rl"], max_staleness=1, train=4, max_attempts=1)
    for stage in settings.stages[1:]:
        stage.override = {"env": {"params": {"size": 8}}}
    world = World(tmp_path, settings)
    world.resume()
    (ticket,) = world.lease()
    failed = messages.Release(
        group_id=ticket.group_id, members=ticket.members, reason="environment"
    )
    world.one("actor-0", failed)
    learn(world, 0)
    before = world.store.state.tasks.cursor
    assert list(before.quarantined) == [ticket.task.task_id] and before.success
    assert world.sample(1, stage=1) == []  # the switch
    assert not world.store.state.tasks.cursor.quarantined | world.store.state.tasks.cursor.success
    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(1, stage=1)]
    world.done(1, groups, 2)
    assert world.sample(2, stage=2) == []
    assert world.store.state.tasks.cursor.success, "of the same tasks"
    world.finish(world.lease())
    live = msgspec.to_builtins(world.store.state.tasks.cursor)
    world.kill()
    assert msgspec.to_builtins(world.store.state.tasks.cursor) == live


def test_a_stage_is_evaluated_with_its_own_tasks_after_the_switch(tmp_path):
    settings = config(stages=["rl", "rl"], max_staleness=1)
    settings.stages[0].override = {"env": {"name": "first"}, "rollout": {"max_tokens": 3}}
    settings.stages[1].override = {"env": {"name": "second"}, "rollout": {"max_tokens": 5}}
    world = World(tmp_path, settings)
    world.resume()
    learn(world, 0, episodes=1)
    assert world.sample(1, stage=1) == []  # the switch
    (evaluation, *others) = world.lease(credit=2)
    assert (evaluation.kind, evaluation.stage) == ("eval", 0)
    assert (evaluation.task.env, evaluation.sampling.max_tokens) == ("first", 3)
    assert [(t.task.env, t.sampling.max_tokens) for t in others] == [("second", 5)]


def test_a_second_request_for_the_same_weights_gives_one_result_over_more_episodes(world):
    learn(world, 0, episodes=1)
    tickets = world.lease(credit=3)
    world.finish(tickets)
    groups = [group.group_id for group in world.sample(1)]
    assert world.done(1, groups, 1, skipped=True, episodes=2).evals == []
    (evaluation,) = world.store.state.evaluations.running
    assert (evaluation.weights, evaluation.episodes) == (weights(1), 2)


def test_a_take_whose_done_was_lost_with_the_learner_blocks_nobody(world):
    world.finish(world.lease(credit=2))
    assert len(world.sample(0)) == 2
    # the checkpoint was written after the training, no DONE came
    assert world.resume(lineage=1, take=1, version=1) == 2
    closed = world.store.state.ledger.closed["rollout"]
    assert closed["filtered"]["unreported"].groups == 2
    assert world.replay.outstanding() == 0
    world.finish(world.lease(credit=2))
    assert len(world.sample(1, lineage=2)) == 2
    world.kill()
    world.store.state.check()


def test_an_evaluation_whose_weights_are_gone_ends_without_those_episodes(world):
    learn(world, 0, episodes=1)
    for _ in range(2):
        ticket = world.lease()[0]
        assert ticket.kind == "eval"
        request = messages.Release(group_id=ticket.group_id, members=[0], reason="weights")
        world.one("actor-0", request)
    assert world.lease()[0].kind == "rollout"
    taken = [group.group_id for group in world.sample(0)]
    assert world.done(0, taken, 1).evals[0].episodes == 0


def test_only_synthetic_tasks_of_the_train_split_can_be_offered(world):
    assert isinstance(world.one("a", messages.Offer(tasks=[synthetic(0)])), messages.Ok)
    assert world.store.state.tasks.pool_size() == 1
    numbered = {"task_id": "frozen_lake/train/1"}
    for change in ({"split": "test"}, {"origin": "original"}, numbered, {"query": "q" * 40_000}):
        foreign = msgspec.structs.replace(synthetic(1), **change)
        assert isinstance(world.one("a", messages.Offer(tasks=[foreign])), messages.Reject)
    assert world.store.state.tasks.pool_size() == 1


def test_status_in_short_says_what_fails(world):
    failed = FailureTotal(kind="agent", name="my:play", error="KeyError: 'map'", count=7)
    world.one("actor-0", messages.Counters(values={}, failures=[failed]))
    reply = world.one("you", messages.StatusRequest())
    assert isinstance(reply, messages.StatusReply)
    assert "agent my:play failed 7 times, last: KeyError: 'map'" in status_lines(reply.status)


def test_status_tells_the_state_and_the_last_error_of_every_actor(world):
    def actor(name: str) -> dict[str, Any]:
        reply = world.one("you", messages.StatusRequest())
        assert isinstance(reply, messages.StatusReply)
        return reply.status["actors"][name]

    while world.lease(peer="actor-0"):
        pass
    assert (actor("actor-0")["state"], actor("actor-0")["weights"]) == ("working", "1.0")
    assert not world.lease(peer="actor-1")
    assert actor("actor-1")["state"] == "waiting" and actor("actor-1")["error"] == ""
    for count, error in ((1, "first"), (1, "first"), (3, "a\x1b[31mthird")):
        failed = FailureTotal(kind="agent_call", name="my:play", error=error, count=count)
        world.one("actor-1", messages.Counters(values={}, failures=[failed]))
        world.pass_time(1.0)
    assert actor("actor-1")["error"] == "agent call my:play: a?[31mthird"
    assert actor("actor-1")["error_s_ago"] == 1.0
    world.one("actor-1", messages.Lease(credit=0))
    assert actor("actor-1")["state"] == "left"
    world.pass_time(11.0)
    assert actor("actor-0")["state"] == "silent"


def test_status_shows_rates_leases_and_who_waits_for_what(world):
    (ticket,) = world.lease()
    world.pass_time(2.0)
    world.push(ticket, 0)
    world.sample(0)
    world.pass_time(2.0)
    reply = world.one("you", messages.StatusRequest())
    assert isinstance(reply, messages.StatusReply)
    status = reply.status
    assert status["groups"] == {"open": 1, "ready": 0, "taken": 0, "closed": 0}
    said = "\n".join(status_lines(status))
    for part in (
        "groups: 1 open",
        "1 received",
        "actor-0: working, weights 1.0, 0.25 trajectories/s",
        "learner waits 2 s",
    ):
        assert part in said
    assert status["actors"]["actor-0"] == {
        "state": "working",
        "weights": "1.0",
        "trajectories_per_s": 0.25,
        "tokens_per_s": 0.75,
        "phase": "",
        "seen_s_ago": 2.0,
        "leases": 1,
        "doing": "",
        "error": "",
        "error_s_ago": 0.0,
    }
    assert status["waiting"]["learner"]["sample"]["for_s"] == 2.0
    assert status["open"] == ["group 0: members [1] from actor-0 for 4.0 s"]
    assert status["ledger"]["held"]["rollout"]["open"] == {
        "groups": 1,
        "trajectories": 1,
        "tokens": 3,
    }


# ---- restarts


def test_what_was_acknowledged_survives_a_kill(world):
    tickets = world.lease(credit=2)
    world.finish(tickets, reward=0.25)
    world.kill()
    assert isinstance(world.push(tickets[0], 0), messages.Dup)
    groups = world.sample(0)
    assert [group.group_id for group in groups] == [ticket.group_id for ticket in tickets]
    assert {t.reward for group in groups for t in group.trajectories} == {0.25}


def test_what_was_not_committed_was_never_answered_and_can_be_sent_again(world):
    (ticket,) = world.lease()
    push = messages.Push(trajectory=trajectory(ticket, 0))
    world.service.handle("actor-0", push, 0.0)
    world.kill()
    assert isinstance(world.one("actor-0", push), messages.Ack)


def test_takes_and_lineages_repeat_identically_after_a_kill(world):
    learn(world, 0)
    world.finish(world.lease(credit=2))
    taken = [group.group_id for group in world.sample(1)]
    world.kill()
    assert [group.group_id for group in world.sample(1)] == taken
    world.done(1, taken, 2)
    world.kill()
    assert world.replay.at.head == weights(2)
    assert world.resume(lineage=1, take=1, version=1) == 2
    assert [group.group_id for group in world.sample(1, lineage=2)] == taken


def test_leases_start_anew_after_a_kill(world):
    (ticket,) = world.lease()
    world.pass_time(9.0)
    world.kill()
    world.pass_time(9.0)
    reply = world.one("actor-0", messages.Renew(progress={ticket.group_id: 1}))
    assert isinstance(reply, messages.Ok)
    world.pass_time(10.0)
    assert world.lease(peer="actor-1")[0].group_id == ticket.group_id


def test_tickets_whose_grant_was_never_answered_are_granted_again_with_the_next_lease(world):
    (known,) = world.lease()
    request = messages.Lease(credit=2, groups=[known.group_id])
    request.weights = request.visible = world.replay.at.head
    (lost,) = world.one("actor-0", request).tickets
    world.kill()  # after its commit, before its answer
    (again,) = world.one("actor-0", request).tickets
    assert (again.group_id, again.attempt) == (lost.group_id, 1)
    (lease,) = world.store.leases.of_group(known.group_id)
    assert lease.peer == "actor-0" and lease.members == set(known.members)


def test_tickets_fill_a_reply_and_the_next_lease_gets_the_rest(tmp_path):
    path = tmp_path / "tasks.jsonl"
    queries = [{"query": f"{number} " + "x" * 20_000} for number in range(200)]
    path.write_text("\n".join(map(json.dumps, queries)))
    settings = config(group_size=1, max_staleness=99)
    settings.tasks.path = str(path)
    world = World(tmp_path / "journal", settings)
    world.resume()
    ask = messages.Resume(lineage=1, take=0, version=0, episodes=70, process="again")
    assert isinstance(world.one("learner", ask), messages.Resumed)

    def lease(peer: str, members: int) -> list[Ticket]:
        """Lease until so many members are there; every reply can be sent."""
        tickets: list[Ticket] = []
        while (room := members - len(tickets)) > 0:
            head = world.replay.at.head
            request = messages.Lease(credit=room, weights=head, visible=head)
            reply = world.one(peer, request)
            assert isinstance(reply, messages.Tickets), reply
            pack(Envelope("run", "buffer", 0, 0, reply))
            tickets += reply.tickets
        return tickets

    first = lease("actor-0", 140)
    assert {ticket.kind for ticket in first} == {"eval", "rollout"}
    world.one("actor-0", messages.Lease(credit=0))
    again = lease("actor-1", 140)
    assert {one.group_id for one in again} == {one.group_id for one in first}


def test_every_torn_tail_loses_only_the_last_commit(world):
    (ticket,) = world.lease()
    path = world.directory / "00000001.log"
    before = path.stat().st_size
    world.push(ticket, 0)
    data = path.read_bytes()
    for size in (*range(before, len(data), 29), len(data) - 1):
        path.write_bytes(data[:size])
        world.kill()
        assert world.replay.at.groups[ticket.group_id].missing == [0, 1]
    assert isinstance(world.push(ticket, 0), messages.Ack)


def test_a_flipped_bit_stops_the_start_and_names_file_and_offset(world):
    learn(world, 0)
    path = world.directory / "00000001.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"00000001\.log at \d+: damaged"):
        world.kill()


def test_a_ledger_that_does_not_close_after_a_replay_is_an_error_of_the_journal(tmp_path):
    world = World(tmp_path, config(reuse=2))
    world.resume()
    world.finish(world.lease(2))
    for take in range(2):
        taken = [group.group_id for group in world.sample(take)]
        world.done(take, taken, version=take + 1)
    world.settings = config(reuse=1)
    with pytest.raises(JournalError, match=r"00000001\.log .*: the ledger does not close"):
        world.kill()


def test_the_journal_of_another_run_is_refused(world):
    welcome = messages.Welcome(run_id="other", config={}, weights_address="")
    with pytest.raises(JournalError, match="belongs to run 'run'"):
        type(world.service)(world.settings, "other", world.directory, welcome, None, 0.0)


def test_segments_go_with_the_checkpoints_and_state_survives_them(tmp_path):
    world = World(tmp_path, config(max_staleness=1, archive="all"), segment_bytes=2000)
    world.resume()
    for take in range(12):
        learn(world, take)
        if take % 3 == 2:
            world.one("learner", messages.Kept(take=take - 1))
    kept = len(world.store.journal.sizes)
    assert world.store.journal.newest > kept
    assert len(os.listdir(tmp_path / "archive")) == world.store.journal.newest - kept
    world.kill()
    assert world.store.state.ledger.total("rollout", "trained").groups == 24
    assert world.resume(lineage=1, take=10, version=10) == 2
    assert len(world.sample(10, lineage=2)) == 2
