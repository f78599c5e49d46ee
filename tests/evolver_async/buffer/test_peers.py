"""Who is remembered, and for how long."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from buffer_world import HEAD, World, config, trajectory

from evolver_async.buffer.monitor import peers
from evolver_async.buffer.monitor.peers import GONE_S, METRICS, NAME_CHARS, WINDOW_S
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.gauges import ACTORS_PER_S, PERIOD_S, SYSTEM
from evolver_async.metrics.tail import Tail
from evolver_async.runs.watch.status_text import status_lines, waits_of
from evolver_async.wire.envelope import SCHEMA_HASH, Envelope, pack, unpack
from evolver_async.wire.failure_totals import FailureTotal
from evolver_async.wire.messages import (
    Ack,
    Beat,
    Counters,
    Done,
    Hello,
    Kept,
    Lease,
    Ok,
    Push,
    Reject,
    Renew,
    Request,
    StatusReply,
    StatusRequest,
)
from evolver_async.wire.router import RequestRouter


def test_who_has_no_part_in_the_run_is_forgotten_after_a_minute(tmp_path):
    world = World(tmp_path, config())
    world.resume()
    for number in range(100):
        world.one(f"watch-{number}", StatusRequest())
    world.lease(peer="actor-0")
    for generated in (5, 9):
        world.one("gone", Lease(credit=0, generated=generated))
    world.one("experience", Counters(values={"experience/entries": 3.0}))
    peers = world.service.activity.peers
    assert len(peers) == 104
    world.pass_time(WINDOW_S)
    assert len(peers) == 104
    world.one("watch-7", StatusRequest())
    world.pass_time(1.0)
    assert set(peers) == {"learner", "actor-0", "experience", "watch-7"}, "gone has left"
    world.one("watch-0", StatusRequest())
    status = world.service.status(world.now)
    assert status["learner"].startswith("learner, last heard") and "actor-0" in status["actors"]
    assert status["ledger"]["generated_tokens"] == 4
    assert world.service.activity.counters() == {"experience/entries": 3.0}


KEPT, CROWD = 512, 600


def served(world: World) -> RequestRouter:
    return RequestRouter(world.service, "run", 5.0)


def answer(router: RequestRouter, request: Request, sender: str, number: int, now: float) -> Any:
    """The reply, as it arrives: it fits on the wire and can be read there."""
    router.receive(sender, pack(Envelope("run", sender, 0, number, request)), now)
    (frames,) = [frames for to, frames in router.settle(now) if to == sender]
    return unpack(frames).message


def test_more_names_than_it_keeps_leave_every_reply_and_all_memory_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", KEPT)
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    world.finish(world.lease(credit=2))
    groups = [group.group_id for group in world.sample(0)]
    for number in range(CROWD):
        name = f"{number}-{'x' * 240}"
        for request in (
            Hello(role="actor", schema_hash=SCHEMA_HASH),
            Counters(values={f"{number}/{'y' * 90}": 1.0, "judge/labelled": 1.0}),
            Kept(take=0, paused="z" * 10_000),
            Lease(credit=1, weights=HEAD, generated=1),
        ):
            world.service.handle(name, request, world.now)
    router = served(world)
    status = answer(router, StatusRequest(), "you", 1, world.now)
    assert isinstance(status, StatusReply)
    assert status.status["actors_not_shown"] > 0 and status.status["ledger"]["generated_tokens"] > 0
    more = status.status["actors_not_shown"]
    lines = status_lines(status.status)
    assert f"{more} more actors, which were not heard as lately, are not shown" in lines
    done = answer(
        router,
        Done(lineage=1, take=0, version=1, trained=groups, filtered={}),
        "learner",
        2,
        world.now,
    )
    assert isinstance(done, Ok)
    assert done.counters["judge/labelled"] == CROWD, "also of those that are forgotten"
    assert done.counters["ledger/generated_tokens"] == CROWD
    activity = world.service.activity
    assert len(activity.peers) == KEPT and len(activity.counters()) <= METRICS
    world.pass_time(GONE_S + 1)
    assert set(activity.peers) == {"learner"} and not activity.actors
    assert activity.counters()["judge/labelled"] == CROWD
    assert activity.generated() == CROWD


def test_status_is_answered_in_whatever_language_processes_report(tmp_path):
    actors, text = 300, "错误" * 200  # three bytes a character
    world = World(tmp_path, config(max_staleness=actors, warn_s=1.0))
    world.resume()
    for number in range(actors):
        name = f"actor-{number}"
        failed = FailureTotal(kind="environment", name=f"{number}{text}"[:200], error=text, count=1)
        world.service.handle(name, Lease(credit=2, weights=HEAD, visible=HEAD), world.now)
        world.service.handle(name, Counters(values={}, failures=[failed]), world.now)
        renewal = Renew(progress={number: 1}, doing={number: text * 2}, still_s={number: 9.0})
        world.service.handle(name, renewal, world.now)
    world.pass_time(2.0)
    reply = answer(served(world), StatusRequest(), "you", 1, world.now)
    assert isinstance(reply, StatusReply)
    shown = reply.status["actors"]
    assert shown and len(shown) + reply.status["actors_not_shown"] == actors
    assert reply.status["stalled"]


def test_counters_that_add_up_to_more_than_a_number_can_hold_are_clamped(tmp_path):
    world = World(tmp_path, config(max_staleness=1))
    world.resume()
    for name in ("actor-0", "actor-1"):
        world.one(name, Counters(values={"a": 1e308, "b": -1e308}))
        world.one(name, Lease(credit=1, weights=HEAD, generated=0))
        world.one(name, Lease(credit=1, weights=HEAD, generated=2**64 - 1))
    (ticket, *others) = world.lease(credit=2)
    for member in ticket.members:
        made = trajectory(ticket, member)
        made.timing = {"total_s": 1e308}
        assert isinstance(world.one("actor-0", Push(trajectory=made)), Ack)
    world.finish(others)
    groups = [group.group_id for group in world.sample(0)]
    router = served(world)
    request = Done(lineage=1, take=0, version=1, trained=groups, filtered={})
    reply = answer(router, request, "learner", 1, world.now)
    assert isinstance(reply, Ok)
    assert reply.counters["a"] == sys.float_info.max == -reply.counters["b"]
    assert isinstance(answer(router, StatusRequest(), "you", 1, world.now), StatusReply)


def test_a_negative_number_of_tokens_is_refused_and_not_counted(tmp_path):
    world = World(tmp_path, config())
    for name in ("actor-0", "actor-1"):
        world.one(name, Hello(role="actor", schema_hash=SCHEMA_HASH))
        assert isinstance(world.one(name, Lease(credit=1, generated=-(2**63))), Reject)
    reply = answer(served(world), StatusRequest(), "you", 1, world.now)
    assert isinstance(reply, StatusReply) and reply.status["ledger"]["generated_tokens"] == 0


def test_what_an_actor_counted_stays_counted_when_it_is_restarted_or_has_left(tmp_path):
    world = World(tmp_path, config())
    counters = world.service.activity.counters
    hello = Hello(role="actor", schema_hash=SCHEMA_HASH)
    world.one("a", hello)
    world.one("a", Counters(values={"judge/labelled": 3.0}))
    world.one("a", hello)  # a new process
    assert counters() == {"judge/labelled": 3.0}
    world.one("a", Counters(values={"judge/labelled": 2.0}))
    assert counters() == {"judge/labelled": 5.0}
    world.one("a", Lease(credit=0))
    world.pass_time(WINDOW_S + 1)
    assert world.service.activity.peers == {} and counters() == {"judge/labelled": 5.0}


@pytest.mark.parametrize("again", [False, True])
def test_an_actor_that_comes_back_after_an_hour_is_not_counted_twice(
    tmp_path: Path, again: bool
) -> None:
    """It reports totals. `again`: a new process of its name comes instead, which begins at 0."""
    world = World(tmp_path, config())
    world.resume()
    activity = world.service.activity

    def report(generated: int, labelled: float, seconds: float) -> None:
        spent = {"engine": seconds}
        world.one("actor-0", Lease(credit=2, weights=HEAD, generated=generated, seconds=spent))
        world.one("actor-0", Counters(values={"judge/labelled": labelled}))

    world.one("actor-0", Hello(role="actor", schema_hash=SCHEMA_HASH))
    report(5, 3.0, 10.0)
    world.pass_time(GONE_S + 1)
    assert not activity.actors, "it is not missed any more"
    if again:
        world.one("actor-0", Hello(role="actor", schema_hash=SCHEMA_HASH))
        report(4, 1.0, 2.0)
    else:
        report(9, 4.0, 12.0)
    assert activity.generated() == 9
    assert activity.counters() == {"judge/labelled": 4.0, "throughput/actor_s/engine": 12.0}


def test_counters_without_end_are_refused_by_name(tmp_path):
    world = World(tmp_path, config())
    for values, words in (
        ({"x" * (NAME_CHARS + 1): 1.0}, f"more than {NAME_CHARS} characters"),
        ({str(number): 1.0 for number in range(METRICS + 1)}, f"{METRICS + 1} metrics"),
    ):
        reply = world.one("a", Counters(values=values))
        assert isinstance(reply, Reject) and words in reply.reason


def test_gauges_of_actors_are_recorded_by_host_and_not_too_often(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config())
    world.service.run_dir = tmp_path
    world.one("actor-0", Hello(role="actor", schema_hash=SCHEMA_HASH, host="far", pid=1))
    gauges = {"rss_bytes": 5.0, "cpu_share": float("inf"), "nonsense": 1.0}
    for _ in range(3):
        world.one("actor-0", Counters(values={}, gauges=gauges))
    world.pass_time(PERIOD_S)
    world.one("actor-0", Counters(values={"judge/labelled": 1.0}, gauges={"rss_bytes": 6.0}))
    rows = Tail(tmp_path / SYSTEM).rows()
    assert [row["rss_bytes"] for row in rows] == [5.0, 6.0]
    assert {(row["process"], row["host"], len(row)) for row in rows} == {("actor-0", "far", 4)}
    assert world.service.activity.counters() == {"judge/labelled": 1.0}


def test_gauges_of_many_actors_are_recorded_at_a_bounded_rate(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config())
    world.service.run_dir = tmp_path
    names = [f"actor-{number}" for number in range(40 * ACTORS_PER_S)]
    hello = Hello(role="actor", schema_hash=SCHEMA_HASH, host="far", pid=1)
    for name in names:
        world.service.handle(name, hello, world.now)
    for _ in range(9):
        for name in names:
            world.service.handle(name, Counters(values={}, gauges={"rss_bytes": 1.0}), world.now)
        world.now += PERIOD_S
    rows = Tail(tmp_path / SYSTEM).rows()
    assert {row["process"] for row in rows} == set(names)
    assert len(rows) / world.now <= ACTORS_PER_S


def test_the_least_busy_host_of_the_actors_is_a_metric(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config())

    def share() -> float | None:
        counters = world.service.learner_requests.status.counters(world.now)
        return counters.get("throughput/actor/host_cpu_share")

    def report(actor: str, value: float) -> None:
        world.one(actor, Counters(values={}, gauges={"host_cpu_share": value}))

    for actor in ("actor-0", "actor-1", "actor-2"):
        world.one(actor, Hello(role="actor", schema_hash=SCHEMA_HASH, host=actor, pid=1))
    assert share() is None
    report("actor-2", float("nan"))
    assert share() is None
    report("actor-0", 0.9)
    report("actor-1", 0.4)
    assert share() == 0.4
    world.one("actor-1", Lease(credit=0))
    assert share() == 0.9, "one that has left is idle for another reason"


def test_the_processors_of_the_run_are_those_of_its_actors_and_learner_on_their_host(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "journal", config())

    def share() -> float | None:
        counters = world.service.learner_requests.status.counters(world.now)
        return counters.get("throughput/actor/run_cpu_share")

    hosts = {"actor-0": "one", "actor-1": "one", "actor-2": "two", "learner": "two"}
    for name, host in hosts.items():
        role = name.partition("-")[0]
        world.one(name, Hello(role=role, schema_hash=SCHEMA_HASH, host=host, pid=1))
    assert share() is None
    shares = {"actor-0": 0.125, "actor-1": 0.25, "actor-2": 0.125, "learner": 0.5}
    for name, used in shares.items():
        world.one(name, Beat(role=name.partition("-")[0], phase="", cpu_share=used))
    assert share() == 0.375
    world.one("actor-0", Beat(role="actor", phase="", count=1, cpu_share=0.5))
    assert share() == 0.625
    assert isinstance(world.one("actor-0", Beat(role="actor", phase="", cpu_share=2.0)), Reject)


def test_the_seconds_of_a_sync_are_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda fd: time.sleep(0.02))
    world = World(tmp_path / "journal", config())
    world.resume()
    counters = world.service.learner_requests.status.counters(world.now)
    assert counters["throughput/buffer/sync_s"] >= 0.02


def test_a_host_with_other_versions_has_not_failed() -> None:
    found = FailureTotal(kind="host", name="gpu-1", error="other versions, torch", count=1)
    assert "gpu-1" in str(found) and "torch" in str(found) and "failed" not in str(found)


def test_engines_are_told_of_by_their_levels_their_deaths_and_their_starts(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config())
    world.service.run_dir = tmp_path
    status = world.service.learner_requests.status
    world.resume()
    for number in range(2):
        hello = Hello(role="actor", schema_hash=SCHEMA_HASH, host="here", pid=number)
        world.one(f"actor-{number}", hello)
    world.one("actor-0", Beat(role="actor", phase="start of vLLM"))
    world.now += 7.0
    assert status.take(world.now).endswith("actor-0 and 1 more: start of vLLM, 7 s")
    reports = {"actor-0": (1.0, 0.5), "actor-1": (3.0, 1.0)}
    for actor, (waiting, used) in reports.items():
        world.lease(peer=actor)
        levels = {"engine/waiting": waiting, "engine/kv_use": used}
        totals = {"engine/reused": 30.0, "engine/prefilled": 10.0, "engine/restarts": 1.0}
        world.one(actor, Counters(values=levels | totals))
    counters = status.counters(world.now)
    assert counters["engine/waiting"] == 2.0 and counters["engine/kv_use"] == 0.75
    assert counters["engine/restarts"] == 2.0 and counters["engine/reused_share"] == 0.75
    assert "; 2 actors alive" in status.take(world.now) or "waits for group" in status.take(
        world.now
    )
    world.one("actor-1", Lease(credit=0))
    counters = status.counters(world.now)
    assert counters["engine/waiting"] == 1.0, "one that has left has no engine"
    assert counters["engine/restarts"] == 2.0
    died = FailureTotal(kind="engine", name="vllm", error="no kernel", count=1)
    for _ in range(2):
        world.one("actor-0", Counters(values={}, failures=[died]))
    rows = Tail(tmp_path / ALERTS).rows()
    assert [row["level"] for row in rows] == ["ERROR"] and "no kernel" in rows[0]["text"]


def test_a_stall_is_told_once_when_it_begins(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config(warn_s=5.0, lease_s=1000.0, stall_s=1000.0))
    world.service.run_dir = tmp_path
    world.resume()
    world.lease()
    for _ in range(20):
        world.pass_time(10.0)
    titles = [row["title"] for row in Tail(tmp_path / ALERTS).rows()]
    assert titles and len(titles) == len({*titles})


def test_a_paused_learner_waits_and_is_no_stall(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config(warn_s=5.0, lease_s=1000.0, stall_s=1000.0))
    world.service.run_dir = tmp_path
    world.resume()
    for _ in range(20):
        world.one("learner", Kept(take=0, paused="an alarm; to go on: evolver-async unpause RUN"))
        world.pass_time(4.0)
    status = world.service.status(world.now)
    assert status["stalled"] == [] and not (tmp_path / ALERTS).exists()
    assert waits_of(status) == [
        "learner waits 80 s: paused: an alarm; to go on: evolver-async unpause RUN"
    ]
    world.pass_time(40.0)
    assert [stall["who"] for stall in world.service.status(world.now)["stalled"]] == ["learner"]


def test_an_actor_is_counted_by_the_seconds_of_the_last_minute_alone(tmp_path):
    world = World(tmp_path, config())
    world.resume()
    world.lease(peer="actor-0")
    peer = world.service.activity.peers["actor-0"]
    for second in range(1000):
        peer.count(3, peer.first + second)
    assert len(peer.bins) <= WINDOW_S
    assert peer.rates(peer.first + 999) == (1.0, 3.0)
