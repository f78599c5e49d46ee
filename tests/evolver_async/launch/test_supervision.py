"""Who makes no progress is named; whose fault a failure is; how actors share what is granted."""

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from buffer_world import HEAD, World, config
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.buffer.actor_requests import share
from evolver_async.buffer.monitor.peers import START_S
from evolver_async.buffer.monitor.stalls import LIFE
from evolver_async.launch.child import innermost
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.tail import Tail
from evolver_async.schema import WeightId
from evolver_async.wire import messages
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.envelope import SCHEMA_HASH
from evolver_async.wire.server import Server

WARN_S = 5.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, config(max_staleness=1, warn_s=WARN_S))
    made.resume()
    return made


def stalled(world: World) -> dict[str, tuple[str, float]]:
    """What STATUS says, by who; nobody is late with two things in these tests."""
    found = world.service.status(world.now)["stalled"]
    assert found == sorted(found, key=lambda stall: -stall["for_s"])
    named = {stall["who"]: (stall["what"], stall["for_s"]) for stall in found}
    assert len(named) == len(found), found
    return named


def renew(world: World, group_id: int, count: int, still_s: float, peer: str = "actor-0") -> None:
    request = messages.Renew(
        progress={group_id: count},
        doing={group_id: f"member 1: step for {still_s:.1f} s"},
        still_s={group_id: still_s},
        weights=world.replay.at.head,
    )
    assert isinstance(world.one(peer, request), messages.Ok)


def keep_up(world: World, seconds: float, *others: str) -> None:
    """Time passes in which these peers are heard; a learner asks for its take."""
    for _ in range(int(seconds)):
        world.pass_time(1.0)
        for peer in others:
            world.one(peer, messages.StatusRequest())


# ---- who is named


def test_a_slow_member_is_no_stall_while_its_actor_goes_on(world: World) -> None:
    slow, other = world.lease(credit=2)
    for second in range(9):
        renew(world, slow.group_id, 10, still_s=second)
        renew(world, other.group_id, second, still_s=0.0)
        keep_up(world, 1, "learner")
    assert stalled(world) == {}, "the other group goes on"
    assert world.service.status(world.now)["actors"]["actor-0"]["doing"]
    for second in range(9):
        renew(world, slow.group_id, 10, still_s=9.0 + second)
        renew(world, other.group_id, 8, still_s=0.0)
        beat(world, "actor-0", count=second, busy=False)
        keep_up(world, 1, "learner")
    assert stalled(world) == {}, "its own count moves"
    for _ in range(7):
        renew(world, slow.group_id, 10, still_s=18.0)
        renew(world, other.group_id, 8, still_s=0.0)
        beat(world, "actor-0", count=8, busy=False)
        keep_up(world, 1, "learner")
    what, for_s = stalled(world)["actor-0"]
    assert what.startswith("group 0 waits for members [0, 1]: member 1: step for 18.0 s")
    assert for_s == pytest.approx(8.0), "the process, not the member"


def test_members_that_compute_are_no_stall(world: World) -> None:
    (ticket,) = world.lease()
    for second in range(20):
        renew(world, ticket.group_id, 1, still_s=second)
        beat(world, "actor-0", count=1, busy=True)
        keep_up(world, 1, "learner")
    assert stalled(world) == {}
    assert [one["who"] for one in world.service.status(world.now)["busy"]] == ["actor-0"]


def test_a_ticket_without_any_progress_is_named_with_its_missing_members(world: World) -> None:
    (ticket,) = world.lease()
    world.push(ticket, 0)
    for _ in range(3):
        keep_up(world, 2, "learner")
        renew(world, ticket.group_id, 3, still_s=0.0)
    keep_up(world, 4, "learner", "actor-0")
    what, for_s = stalled(world)["actor-0"]
    assert what.startswith("group 0 waits for members [1]") and for_s == pytest.approx(8.0)


def test_a_silent_actor_is_named_with_what_it_holds_and_was_doing(world: World) -> None:
    (ticket,) = world.lease()
    world.pass_time(1.0)
    renew(world, ticket.group_id, 1, still_s=0.5)
    keep_up(world, 6, "learner")
    what, for_s = stalled(world)["actor-0"]
    assert what == "holds group 0; 6 s ago member 1: step for 0.5 s"
    assert for_s == pytest.approx(6.0)
    keep_up(world, 5, "learner")
    assert stalled(world)["actor-0"][0].startswith("holds no group any more")


def test_who_has_left_is_not_missed_and_who_comes_back_is(world: World) -> None:
    world.lease(credit=1)
    world.one("actor-0", messages.Lease(credit=0))
    keep_up(world, 8, "learner")
    assert stalled(world) == {}
    assert world.service.status(world.now)["actors"]["actor-0"]["leases"] == 0
    world.one("actor-0", messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
    keep_up(world, int(START_S), "learner")
    assert stalled(world) == {}
    keep_up(world, 8, "learner")
    assert stalled(world)["actor-0"][0].startswith("has joined and asked for no ticket yet")
    world.lease(credit=1)
    keep_up(world, 8, "learner")
    assert stalled(world)["actor-0"][0].startswith("holds group")


def test_an_actor_that_was_refused_is_not_missed(world: World) -> None:
    world.service.tokenizer_hash = "the run's"
    hello = messages.Hello(role="actor", schema_hash=SCHEMA_HASH)
    assert isinstance(world.one("actor-1", hello), messages.Welcome)
    hello.tokenizer = "another"
    assert isinstance(world.one("actor-1", hello), messages.Reject)
    keep_up(world, 8, "learner")
    assert stalled(world) == {}


def test_a_learner_that_waits_for_data_is_named_with_whom_it_waits_for(world: World) -> None:
    (ticket,) = world.lease()
    for second in range(8):
        world.sample(0)
        world.pass_time(1.0)
        renew(world, ticket.group_id, second, still_s=0.0)
    assert stalled(world) == {}, "the actor works, so both make progress"
    for _ in range(8):
        world.sample(0)
        world.pass_time(1.0)
        renew(world, ticket.group_id, 7, still_s=0.0)
    found = {s["what"]: s["for_s"] for s in world.service.status(world.now)["stalled"]}
    (what,) = (what for what in found if what.startswith("waits for fresh data"))
    assert "1 open, 0 taken, 0 ready of 2 needed" in what
    assert "members [0, 1] from actor-0" in what and found[what] == pytest.approx(8.0)
    world.finish([ticket, *world.lease()])
    assert world.sample(0)
    assert stalled(world) == {}


def test_a_silent_learner_is_named_with_its_take(world: World) -> None:
    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(0)]
    keep_up(world, 6, "actor-0")
    what, for_s = stalled(world)["learner"]
    assert what == "take 0 is out" and for_s == pytest.approx(6.0)
    world.done(0, groups, 1)
    assert stalled(world) == {}
    keep_up(world, 6, "actor-0")
    assert stalled(world)["learner"][0] == "it neither asks for a take nor reports one"


def test_a_learner_that_never_spoke_is_named(tmp_path: Path) -> None:
    world = World(tmp_path, config(warn_s=WARN_S), now=100.0)
    assert stalled(world) == {}
    world.pass_time(START_S)
    assert stalled(world) == {}, "however small buffer.warn_s is"
    world.pass_time(6.0)
    assert stalled(world) == {"learner": ("it has not started yet", pytest.approx(START_S + 6.0))}


def test_a_learner_that_starts_is_not_missed_between_its_beats(tmp_path: Path) -> None:
    """Its imports hold its heartbeat, and another one begins after them."""
    world = World(tmp_path, config(warn_s=WARN_S))
    for incarnation in range(2):
        for _ in range(4):
            beat(world, "learner", count=0, busy=True, phase="start", incarnation=incarnation)
            keep_up(world, int(START_S) - 1)
            assert stalled(world) == {}, incarnation
        world.resume()
        beat(world, "learner", count=1, busy=False, phase="start", incarnation=incarnation)
        keep_up(world, int(WARN_S) + 1)
        (stall,) = world.service.status(world.now)["stalled"]
        assert stall["who"] == "learner" and stall["silent"]


def beat(world: World, peer: str, count: int, busy: bool, **progress: Any) -> None:
    role = "learner" if peer == "learner" else "actor"
    phase = progress.pop("phase", "forward")
    sent = messages.Beat(role=role, phase=phase, count=count, busy=busy, **progress)
    assert isinstance(world.one(peer, sent), messages.Ok)


def in_step(world: World) -> None:
    """The learner gets its first take."""
    world.finish(world.lease(credit=2))
    assert world.sample(0)


@pytest.mark.parametrize(
    ("busy", "seconds", "held"), [(True, 36, True), (False, 36, False), (True, 60, False)]
)
def test_a_forward_longer_than_the_lease_keeps_it_within_the_time_of_a_stall(
    world: World, busy: bool, seconds: int, held: bool
) -> None:
    buffer = world.service.store.leases
    assert (buffer.lease_s, buffer.stall_s) == (10, 40)
    world.lease(credit=2)
    for _ in range(seconds):
        beat(world, "actor-0", 7, busy)
        world.pass_time(1.0)
    status = world.service.status(world.now)["actors"]["actor-0"]
    assert bool(status["leases"]) == held and status["seen_s_ago"] <= 1
    assert (status["state"] == "silent") == (not busy)


@pytest.mark.parametrize("peer", ["learner", "actor-0"])
def test_a_process_that_moves_or_computes_is_not_stuck(world: World, peer: str) -> None:
    in_step(world)
    if peer == "actor-0":
        world.lease()
    other = "actor-0" if peer == "learner" else "learner"
    for second in range(20):
        beat(world, peer, count=second, busy=False)
        keep_up(world, 1, other)
    status = world.service.status(world.now)
    assert status["stalled"] == status["busy"] == [], "its count moves"
    for _ in range(20):
        beat(world, peer, count=19, busy=True)
        keep_up(world, 1, other)
    status = world.service.status(world.now)
    assert status["stalled"] == []
    (busy,) = status["busy"]
    assert (busy["who"], busy["phase"]) == (peer, "forward") and busy["for_s"] >= 19
    for _ in range(20):
        beat(world, peer, count=19, busy=False)
        keep_up(world, 1, other)
    (stall,) = [one for one in world.service.status(world.now)["stalled"] if one["who"] == peer]
    assert stall["what"].startswith("stuck in forward") and not stall["silent"]
    assert 19 <= stall["for_s"] <= 22, "since it has last used a processor"
    keep_up(world, 20, other)
    (stall,) = [one for one in world.service.status(world.now)["stalled"] if one["who"] == peer]
    assert stall["silent"], "no beat comes from a stopped process"


def test_a_busy_process_is_logged_once_and_no_alert(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world.service.run_dir = tmp_path
    in_step(world)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            beat(world, "learner", count=1, busy=True, phase="checkpoint")
            keep_up(world, 1, "actor-0")
    said = [record.message for record in caplog.records if "learner" in record.message]
    assert said == ["learner is busy for 6 s in checkpoint"]
    assert not (tmp_path / ALERTS).exists()


def titles(run_dir: Path) -> list[str]:
    return [row["title"] for row in Tail(run_dir / ALERTS).rows()]


def test_a_stall_is_one_alert_for_all_and_none_for_an_hour(world: World, tmp_path: Path) -> None:
    world.service.run_dir = tmp_path
    for peer in ("actor-0", "actor-1"):
        world.lease(peer=peer)
    keep_up(world, 8, "learner")
    assert titles(tmp_path) == ["stall of actor-0"], "both are stopped by one cause"
    for _ in range(20):  # they come and go
        beat(world, "actor-0", 1, True)
        beat(world, "actor-1", 1, True)
        keep_up(world, 8, "learner")
    assert titles(tmp_path) == ["stall of actor-0"]
    world.pass_time(3600)
    keep_up(world, 8, "learner")
    assert len(titles(tmp_path)) == 2


def test_a_wait_is_an_alert_after_some_of_the_longest_steps(world: World, tmp_path: Path) -> None:
    world.service.run_dir = tmp_path
    in_step(world)
    beat(world, "learner", 1, True, step=1, step_s=8.0)
    (ticket,) = world.lease()
    for _ in range(20):
        renew(world, ticket.group_id, 1, still_s=0.0)
        beat(world, "learner", 2, True)
        keep_up(world, 1, "learner")
    assert "actor-0" in stalled(world) and titles(tmp_path) == []
    for _ in range(16):
        renew(world, ticket.group_id, 1, still_s=0.0)
        beat(world, "learner", 3, True)
        keep_up(world, 1, "learner")
    assert titles(tmp_path) == ["stall of actor-0"]


def test_a_status_tells_what_stands_still_from_what_waits(world: World) -> None:
    world.lease()
    keep_up(world, 8, "learner")
    (found,) = world.service.status(world.now)["stalled"]
    assert (found["who"], found["about"]) == ("actor-0", LIFE)


def test_beats_of_an_earlier_process_do_not_hide_a_stuck_one(world: World) -> None:
    in_step(world)
    for second in range(10):
        beat(world, "learner", count=7, busy=False, incarnation=2)
        beat(world, "learner", count=second, busy=True, incarnation=1)
        keep_up(world, 1, "actor-0")
    assert stalled(world)["learner"][0].startswith("stuck in forward")


def test_a_beat_whose_numbers_are_none_is_refused(world: World) -> None:
    for sent in (
        {"share": float("nan")},
        {"share": 2.0},
        {"step_s": float("inf")},
        {"left_s": -1.0},
    ):
        reply = world.one("learner", messages.Beat(role="learner", phase="forward", **sent))
        assert isinstance(reply, messages.Reject)


def test_status_tells_the_progress_of_data_and_of_a_step(world: World) -> None:
    assert world.service.status(world.now)["progress"]["phase"] == ""
    tickets = world.lease(credit=2)
    world.sample(0)
    world.pass_time(4.0)
    assert world.service.status(world.now)["progress"]["eta_s"] is None
    world.push(tickets[0], 0)
    found = world.service.status(world.now)["progress"]
    assert (found["step"], found["phase"], found["done"], found["needed"]) == (1, "data", 1, 4)
    assert found["eta_s"] == pytest.approx(12.0)
    world.push(tickets[0], 1)
    world.finish(tickets[1:])
    assert world.sample(0)
    sent = {"step_s": 10.0, "left_s": 30.0, "share": 0.25, "micro_batches": 3, "tokens": 99}
    beat(world, "learner", 1, True, step=1, **sent)
    world.pass_time(2.0)
    found = world.service.status(world.now)["progress"]
    assert (found["step"], found["phase"], found["share"]) == (1, "forward", 0.25)
    assert (found["micro_batches"], found["tokens"]) == (3, 99)
    assert found["for_s"] == pytest.approx(12.0) and found["eta_s"] == pytest.approx(28.0)
    assert found["data_s"] == pytest.approx(4.0), "the time of its data, for the estimate"


def old_weights(world: World) -> list[dict[str, Any]]:
    found = world.service.status(world.now)["stalled"]
    return [stall for stall in found if "which are too old" in stall["what"]]


def test_an_actor_whose_weights_do_not_come_is_named(world: World) -> None:
    world.finish(world.lease(credit=2))
    world.done(0, [group.group_id for group in world.sample(0)], 1)
    old, new = WeightId(lineage=1, step=0), WeightId(lineage=1, step=1)
    for second in range(7):
        renewed = messages.Renew(progress={}, weights=old)
        world.one("actor-0", renewed if second % 2 else messages.Lease(credit=1, weights=old))
        keep_up(world, 1, "learner")
    (stall,) = old_weights(world)
    assert stall["who"] == "actor-0" and stall["for_s"] == pytest.approx(7.0)
    assert f"weights {old}" in stall["what"]
    world.one("actor-0", messages.Lease(credit=1, weights=new))
    assert old_weights(world) == []


def test_an_actor_that_plays_an_evaluation_may_hold_older_weights(world: World) -> None:
    world.finish(world.lease(credit=2))
    world.done(0, [group.group_id for group in world.sample(0)], 1, episodes=1)
    (evaluation, *others) = world.lease(credit=3)
    assert evaluation.kind == "eval"
    world.finish(others)
    world.done(1, [group.group_id for group in world.sample(1)], 2)
    for second in range(8):
        progress = {evaluation.group_id: second}
        world.one("actor-0", messages.Renew(progress=progress, weights=evaluation.weights))
        keep_up(world, 1, "learner")
    assert old_weights(world) == []


def test_a_stall_is_logged_after_growing_pauses_and_once_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, config(max_staleness=1, warn_s=WARN_S, lease_s=500.0))
    world.resume()
    tickets = world.lease()
    with caplog.at_level(logging.WARNING):
        keep_up(world, 200, "learner")
        said = [record.message for record in caplog.records if "actor-0" in record.message]
        assert len(said) == 3, "after 5 s, 65 s and 185 s"
        assert said[1].startswith("actor-0 was not heard for 66 s (stopped?): holds group 0")
        caplog.clear()
        keep_up(world, 1, "learner", "actor-0")  # heard, but its group stands still
        assert not any("goes on" in record.message for record in caplog.records)
        world.finish(tickets)
        keep_up(world, 2, "learner")
    ends = [record.message for record in caplog.records if "goes on after" in record.message]
    assert [end.split(":")[0] for end in ends] == ["actor-0 goes on after 200 s"]


def test_stalls_reach_the_metrics_of_the_step_in_which_they_were(world: World) -> None:
    tickets = world.lease(credit=2)
    for _ in range(9):
        world.sample(0)
        keep_up(world, 1, "actor-0")
    world.finish(tickets)
    groups = [group.group_id for group in world.sample(0)]
    counters = world.done(0, groups, 1).counters
    assert counters["supervision/stalled"] == 2.0, "an actor, and the learner waiting for them"
    assert counters["supervision/longest_s"] == pytest.approx(9.0)
    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(1)]
    counters = world.done(1, groups, 2).counters
    assert counters["supervision/stalled"] == counters["supervision/longest_s"] == 0.0


def test_an_actor_whose_loop_hangs_loses_its_lease_though_its_sockets_answer(
    tmp_path: Path,
) -> None:
    """The peer's heartbeats go on in its I/O thread; only the work loop can renew a lease."""
    world = World(tmp_path / "journal", config(max_staleness=1, lease_s=1.0, warn_s=0.5))
    world.service.close()
    world.now = time.monotonic()
    world.open()
    world.resume()
    stop, hung, free = threading.Event(), threading.Event(), threading.Event()
    replies: list[Any] = []
    address = f"ipc://{tmp_path}/s"
    server = Server(world.service, address, "run")

    async def hang() -> None:
        client = DealerClient(address, "run", "actor-0")
        (ticket,) = (await client.request(messages.Lease(credit=2, weights=HEAD))).tickets
        hung.set()
        free.wait(30)  # nothing else runs in this loop
        progress = {ticket.group_id: 5}
        replies.append(await client.request(messages.Renew(progress=progress)))
        client.close()

    async def take_over() -> dict[str, Any]:
        client = DealerClient(address, "run", "actor-1")
        try:
            while True:
                reply = await client.request(messages.Lease(credit=2, weights=HEAD))
                for ticket in reply.tickets:
                    if ticket.attempt == 1:
                        return (await client.request(messages.StatusRequest())).status
        finally:
            client.close()

    threads = [
        threading.Thread(target=server.serve, args=(stop,)),
        threading.Thread(target=lambda: asyncio.run(hang())),
    ]
    for thread in threads:
        thread.start()
    try:
        assert hung.wait(30)
        status = asyncio.run(asyncio.wait_for(take_over(), 30))
        (stall,) = [stall for stall in status["stalled"] if stall["who"] == "actor-0"]
        assert stall["silent"] and stall["for_s"] >= 1.0
    finally:
        free.set()
        threads[1].join()
        stop.set()
        threads[0].join()
        server.close()
        world.service.close()
    (reply,) = replies
    assert isinstance(reply, messages.Fenced)


# ---- whose fault it is


def fail(world: World, ticket: Any, reason: str = "environment", member: int = 1) -> None:
    release = messages.Release(group_id=ticket.group_id, members=[member], reason=reason)
    world.one("actor-0", release)


def quarantined(world: World) -> dict[str, str]:
    return world.service.status(world.now)["quarantined"]


def test_failures_of_a_task_count_over_groups_and_members_and_restarts(tmp_path: Path) -> None:
    world = World(tmp_path, config(max_staleness=1, groups_per_step=1, train=1))
    world.resume()
    first, second = world.lease(credit=2)
    assert first.task == second.task and first.group_id != second.group_id
    fail(world, first, member=0)
    assert quarantined(world) == {}
    world.kill()
    fail(world, second, member=1)
    assert quarantined(world) == {first.task.task_id: "environment"}
    world.kill()
    assert quarantined(world) == {first.task.task_id: "environment"}
    world.pass_time(10.0)  # leases began anew
    (again,) = world.lease()
    assert again.group_id == first.group_id
    fail(world, again)
    reply = world.one("actor-0", messages.Lease(credit=1))
    assert isinstance(reply, messages.Wait) and "every task is quarantined" in reply.reason
    world.resume(lineage=1)
    assert quarantined(world) == {}
    world.kill()
    (again,) = world.lease()
    assert again.task == first.task
    fail(world, again)
    assert quarantined(world) == {}


def test_a_whole_group_shows_that_the_task_can_be_run(tmp_path: Path) -> None:
    world = World(tmp_path, config(max_staleness=1, groups_per_step=1, train=1))
    world.resume()
    for take in range(5):
        (ticket,) = world.lease()
        fail(world, ticket)
        world.push(ticket, 0)
        world.finish(world.lease())
        world.done(take, [group.group_id for group in world.sample(take)], take + 1)
    assert quarantined(world) == {}


@pytest.mark.parametrize("reason", ["drain", "weights", "engine", "error", "death", "silence"])
def test_what_is_not_the_environments_fault_never_counts(world: World, reason: str) -> None:
    (ticket,) = world.lease()
    for attempt in range(5):
        if reason == "death":
            world.one("actor-0", messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
        elif reason == "silence":
            world.pass_time(11.0)
        else:
            fail(world, ticket, reason)
            fail(world, ticket, reason, member=0)
        (again,) = world.lease()
        assert (again.group_id, again.attempt) == (ticket.group_id, attempt + 1)
    assert quarantined(world) == {}
    assert world.store.state.tasks.cursor.failures == {}


# ---- shares


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_fair_and_nothing_is_left(room: int, actors: int) -> None:
    got = []
    left = room
    for waiting in range(actors, 0, -1):  # who has been served waits no more
        got.append(share(left, waiting))
        left -= got[-1]
    assert left == 0 and max(got) - min(got) <= 1


def test_waiting_actors_share_what_may_be_granted(tmp_path: Path) -> None:
    world = World(tmp_path, config(max_staleness=0, groups_per_step=5))
    for name in ("a", "b", "c"):
        assert world.lease(credit=9, peer=name) == []  # there is no learner yet
    world.resume()
    counts = {name: len(world.lease(credit=9, peer=name)) for name in ("a", "b", "c")}
    assert counts == {"a": 2, "b": 2, "c": 1}


def test_nothing_is_kept_for_actors_that_do_not_ask(tmp_path: Path) -> None:
    world = World(tmp_path, config(max_staleness=0, groups_per_step=4, lease_s=10.0))
    assert world.lease(credit=9, peer="dead") == []
    world.resume()
    assert [len(world.lease(credit=9)) for _ in range(4)] == [2, 1, 1, 0]
    again = World(tmp_path / "again", config(max_staleness=0, groups_per_step=4, lease_s=10.0))
    assert again.lease(credit=9, peer="dead") == []
    again.resume()
    again.pass_time(11.0)
    assert len(again.lease(credit=9)) == 4


def test_the_cause_of_a_crash_is_no_frame_and_no_mere_message() -> None:
    group = ["  + Exception Group Traceback", "    | KeyError: 'x'", "    +-------------------"]
    assert innermost(group) == "KeyError: 'x'"
    assert innermost(["a", " "]) == "a" and innermost([]) == ""
    warned = ["tracker.py:254: UserWarning: tracker: 1 leaked", "  warnings.warn('tracker: %d '"]
    assert innermost(["KeyError: 'x'", *warned]) == "KeyError: 'x'"
