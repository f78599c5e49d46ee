"""What fails is counted by kind and name, told to people, and ends a run that cannot go on."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from buffer_world import World, config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from actors.failure_counts import MOST_NAMES, FailureCounts
from evolver_async.buffer.monitor import failures as module
from evolver_async.buffer.monitor.failures import MOST_KEPT, PATIENCE_S, Failures
from evolver_async.config import Config
from evolver_async.errors import TrainingError
from evolver_async.metrics.alerts import Level
from evolver_async.metrics.writer import Metrics
from evolver_async.process.logs import FIRST, WINDOW_S, RepeatFilter
from evolver_async.runs.watch.view import REPEAT_S, View
from evolver_async.wire import messages
from evolver_async.wire.envelope import SCHEMA_HASH
from evolver_async.wire.failure_totals import ERROR_CHARS, FailureKind, FailureTotal
from learner.diagnostics.measure import StepResult
from learner.diagnostics.stop_rules import Guard
from learner.state import LearnerState

MOST = 3  # lost episodes beyond those being played


def total(
    count: int, *, kind: FailureKind = "agent", name: str = "my:play", error: str = "KeyError: 'x'"
) -> FailureTotal:
    return FailureTotal(kind=kind, name=name, error=error, count=count)


@pytest.fixture
def world(tmp_path: Path) -> World:
    settings = config(max_staleness=3, lease_s=1000.0, stall_s=1000.0)
    settings.launch.max_failures = MOST
    made = World(tmp_path, settings)
    made.resume()
    return made


def tell(world: World, *failures: FailureTotal, peer: str = "actor-0") -> None:
    world.one(peer, messages.Counters(values={}, failures=list(failures)))


def sample(world: World) -> messages.Reply:
    return world.ask("learner", messages.Sample(lineage=1, take=0, stage=0))[0]


def lose(world: World, reason: str = "environment") -> None:
    """A ticket comes back without any of its two members."""
    (ticket,) = world.lease()
    members = ticket.members
    world.one("actor-0", messages.Release(group_id=ticket.group_id, members=members, reason=reason))


# ---- what an actor counts


def test_an_actor_counts_by_kind_and_name_with_the_last_error() -> None:
    counts = FailureCounts()
    counts.note("agent", "my:play", "KeyError: 'a'")
    counts.note("environment", "my:Env", "step: KeyError: 'b'")
    assert counts.noted.is_set()
    counts.note("agent", "my:play", "KeyError: 'c'", count=2)
    assert counts.totals() == [
        total(1, kind="environment", name="my:Env", error="step: KeyError: 'b'"),
        total(3, error="KeyError: 'c'"),
    ]


def test_what_an_actor_tells_is_bounded_and_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-123456789")
    counts = FailureCounts()
    counts.note("agent", "a" * 999, "sk-123456789 \ud800" + "b" * 999)
    (only,) = counts.totals()
    assert only.error.startswith("*** ?b") and len(only.error) == ERROR_CHARS
    for number in range(2 * MOST_NAMES):
        counts.note("agent", str(number), "e")
    assert len(counts.totals()) == MOST_NAMES


# ---- what the buffer makes of it


def test_totals_of_processes_are_added_and_a_repeated_report_changes_nothing(world: World) -> None:
    for _ in range(2):
        tell(world, total(2))
        tell(world, total(5, error="IndexError"), peer="actor-1")
    (shown,) = world.service.status(world.now)["failures"]
    assert shown == {
        "kind": "agent",
        "name": "my:play",
        "count": 7,
        "error": "IndexError",
        "actor": "actor-1",
        "seconds_ago": 0.0,
    }
    world.one("actor-0", messages.Hello(role="actor", schema_hash=SCHEMA_HASH))
    tell(world, total(1))  # a new process counts anew
    assert world.service.status(world.now)["failures"][0]["count"] == 8


def test_the_learner_hears_of_failures_while_it_waits_and_with_its_steps(world: World) -> None:
    tell(world, total(2), total(1, kind="judge", name="http://here/v1"))
    waiting = sample(world)
    assert isinstance(waiting, messages.Wait)
    assert [(one.kind, one.name, one.count) for one in waiting.failures] == [
        ("judge", "http://here/v1", 1),
        ("agent", "my:play", 2),
    ]
    world.finish(world.lease(2))
    groups = world.sample(0)
    reply = world.done(0, [group.group_id for group in groups], version=1)
    assert reply.failures == waiting.failures
    assert reply.counters["failures/agent"] == 2 and reply.counters["failures/judge"] == 1


def test_text_of_unknown_origin_is_one_printable_line(world: World) -> None:
    tell(world, total(1, name="a\x1b[31m\nb", error="x\r\n\ty\x07"))
    (shown,) = world.service.status(world.now)["failures"]
    assert (shown["name"], shown["error"]) == ("a?[31m b", "x y?")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["agent", "judge"]),
            st.integers(0, 99),
            st.integers(1, 9),
        )
    )
)
def test_what_is_kept_is_bounded_and_no_failure_is_counted_twice(
    told: list[tuple[str, FailureKind, int, int]],
) -> None:
    failures, most = Failures(0), dict[tuple[str, str, int], int]()
    for actor, kind, name, count in told:
        failures.take_in(actor, [total(count, kind=kind, name=str(name))], 0.0)
        place = (actor, kind, name)
        most[place] = max(count, most.get(place, 0))
    assert len(failures.totals()) <= MOST_KEPT
    counted = failures.counters()
    for kind in ("agent", "judge"):
        expected = sum(count for (_, of, _), count in most.items() if of == kind)
        assert counted.get(f"failures/{kind}", 0) == expected


def test_totals_of_very_many_processes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REPORTED", 10)
    failures = Failures(0)
    for number in range(100):
        failures.take_in(f"actor-{number}", [total(1)], 0.0)
    assert len(failures._reported) == 10 and failures.totals() == [total(100)]


def test_totals_of_a_thousand_actors_count_once_however_often_they_are_reported() -> None:
    failures = Failures(0)
    kinds: list[FailureKind] = ["agent", "environment", "late", "policy", "judge"]
    for _ in range(3):
        for number in range(1000):
            failures.take_in(f"actor-{number}", [total(2, kind=kind) for kind in kinds], 0.0)
    assert failures.counters() == {f"failures/{kind}": 2000.0 for kind in kinds}


def test_a_total_that_is_still_reported_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REPORTED", 10)
    failures = Failures(0)
    for number in range(100):
        failures.take_in("actor", [total(1, kind="judge")], 0.0)
        failures.take_in(f"actor-{number}", [total(1)], 0.0)
    assert failures.counters() == {"failures/judge": 1.0, "failures/agent": 100.0}


# ---- the end of a run that cannot go on


def test_a_run_ends_after_so_many_failures_without_one_whole_group(world: World) -> None:
    tell(world, total(4))
    lose(world)
    lose(world)
    assert isinstance(sample(world), messages.Wait)  # an outage may be over soon
    world.now += PATIENCE_S
    reply = sample(world)
    assert isinstance(reply, messages.Reject)
    assert reply.reason.startswith("launch.max_failures: 4 ")
    assert reply.reason.endswith(f": {total(4)}")


def test_a_failure_that_loses_episodes_is_named_before_an_unreadable_policy() -> None:
    failures = Failures(MOST)
    failures.take_in("actor-0", [total(1, kind="judge"), total(9, kind="policy")], 0.0)
    assert failures.last.startswith("judge ")
    alone = Failures(MOST)
    alone.take_in("actor-0", [total(9, kind="policy")], 0.0)
    assert alone.last.startswith("policy ")


@pytest.mark.parametrize("reason", ["drain", "weights", "error"])
def test_what_is_no_failure_ends_no_run(world: World, reason: str) -> None:
    for _ in range(4):
        lose(world, reason)
    world.now += PATIENCE_S
    assert isinstance(sample(world), messages.Wait)


def test_a_whole_group_begins_the_count_anew(world: World) -> None:
    lose(world)
    lose(world)
    world.finish(world.lease())
    world.now += PATIENCE_S
    assert isinstance(sample(world), messages.Wait)
    lose(world)
    lose(world)
    world.now += PATIENCE_S / 2
    assert isinstance(sample(world), messages.Wait)
    world.now += PATIENCE_S / 2
    assert isinstance(sample(world), messages.Reject)


def test_every_episode_that_is_being_played_may_fail_once(world: World) -> None:
    (ticket,) = world.lease()  # two members
    lose(world)
    lose(world)
    world.now += PATIENCE_S
    assert isinstance(sample(world), messages.Wait)
    release = messages.Release(group_id=ticket.group_id, members=[0], reason="environment")
    world.one("actor-0", release)
    assert isinstance(sample(world), messages.Reject)


def test_no_number_of_failures_ends_a_run_that_wants_none(tmp_path: Path) -> None:
    settings = config()
    settings.launch.max_failures = 0
    world = World(tmp_path, settings)
    world.resume()
    for _ in range(10):
        lose(world)
    world.now += PATIENCE_S
    assert isinstance(sample(world), messages.Wait)


def test_a_run_whose_tasks_are_all_quarantined_ends(tmp_path: Path) -> None:
    world = World(tmp_path, config(train=2, max_attempts=1))
    world.resume()
    tell(world, total(4, kind="environment", name="my:Env"))
    lose(world)
    assert isinstance(sample(world), messages.Wait)
    lose(world)
    reply = sample(world)
    assert isinstance(reply, messages.Reject)
    assert "quarantined (environment; see buffer.max_attempts)" in reply.reason
    assert reply.reason.endswith(f": {total(4, kind='environment', name='my:Env')}")


# ---- what people see


class Told(Metrics):
    """Metrics of a learner that remember what people are told."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.alerts: list[tuple[str, str]] = []

    def alert(self, title: str, text: str, level: Level = "WARN", console: bool = False) -> None:
        self.alerts.append((title, text))


def test_people_and_metrics_are_told_once_of_each_thing_that_fails(tmp_path: Path) -> None:
    told = Told(tmp_path)
    guard = Guard(tmp_path, told)
    judge = total(2, kind="judge", name="http://here/v1")
    for failures in ([total(1)], [total(500)], [total(501), judge], [total(502), judge]):
        guard.report_failures(failures, 7, 2.5)
    assert told.alerts == [
        ("agent fails", str(total(1))),
        ("judge fails", str(judge)),
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row.pop("time") for row in rows)
    assert rows == [
        {"step": 7, "lineage": 0, "time_s": 2.5, "failures/agent": 1.0},
        {"step": 7, "lineage": 0, "time_s": 2.5, "failures/agent": 501.0, "failures/judge": 2.0},
    ]


def test_people_are_told_of_a_target_kl_that_leaves_most_data_out(tmp_path: Path) -> None:
    told, stage, state = Told(tmp_path), Config(), LearnerState(lineage=1)
    guard = Guard(tmp_path, told)
    stage.loss.target_kl = 0.1
    cut = StepResult([1], {"target_kl": [2]}, 1, 9, {"offpolicy/kl_beyond": 0.25})
    later = replace(cut, updates=2)
    for outcome in (*[cut] * 4, later, *[cut] * 4):
        guard.check(stage, state, outcome)
    assert told.alerts == []
    for outcome in (cut, replace(cut, updates=0), cut):
        guard.check(stage, state, outcome)
    ((title, text),) = told.alerts
    assert title == "target_kl" and text.startswith("take 0: 5 steps ")
    assert " 0.25 " in text and "loss.target_kl is 0.1" in text


def test_steps_that_select_nothing_end_a_run_and_updates_that_were_left_out_do_not(
    tmp_path: Path,
) -> None:
    stage, state, guard = Config(), LearnerState(lineage=1), Guard(tmp_path, Told(tmp_path))
    stage.selection.max_empty = 2

    def step(reason: str, updates: int = 0) -> None:
        outcome = StepResult([], {reason: [1]}, updates, 0)
        guard.count(stage, state, outcome)
        guard.check(stage, state, outcome)

    for reason in ("non_finite", "target_kl"):
        for _ in range(3):
            step(reason)
    step("zero_spread")
    step("zero_spread", updates=1)
    step("zero_spread")
    with pytest.raises(TrainingError, match=r"^2 .*zero_spread"):
        step("zero_spread")


def status(*failures: FailureTotal) -> dict[str, object]:
    kept = Failures(0)
    kept.take_in("actor-0", list(failures), 0.0)
    return {"failures": kept.report(0.0)}


def test_a_new_failure_is_printed_at_once_and_one_that_goes_on_now_and_then() -> None:
    view = View("run", 20)
    first = view.feed_failures(status(total(1)), 0.0)
    assert first == [str(total(1))]
    assert view.feed_failures(status(total(90)), 2.0) == []
    judge = total(1, kind="judge", name="http://here/v1", error="[/red] garbage")
    again = view.feed_failures(status(total(12345), judge), REPEAT_S)
    assert again == [str(total(12345)), str(judge)] and "12,345" in again[0]
    assert view.feed_failures(status(total(12345), judge), 9 * REPEAT_S) == []
    console = Console(width=120)
    with console.capture() as captured:
        console.print(view.panel())
    assert "[/red] garbage" in captured.get() and "12,345 times" in captured.get()


@pytest.fixture
def lines() -> tuple[Callable[[float, str], None], list[str]]:
    """Logs a line at a time of its own; what has been written so far."""
    now, written = [0.0], list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    logger, handler = logging.Logger("repeats"), Handler()
    repeats, other = RepeatFilter(lambda: now[0]), logging.NullHandler()
    for each in (handler, other):
        each.addFilter(repeats)
        logger.addHandler(each)

    def log(at: float, text: str) -> None:
        now[0] = at
        logger.warning("%s", text)

    return log, written


def test_a_line_that_comes_again_and_again_is_counted(
    lines: tuple[Callable[[float, str], None], list[str]],
) -> None:
    log, written = lines
    for number in range(1000):
        log(number / 100, f"line {number}")
    assert len(written) == FIRST and written[0] == "line 0"
    assert written[-1].count("only counted for 60 s") == 1
    log(WINDOW_S, "line 1000")
    assert written[-1] == "line 1000 (980 more of these were omitted in 60 s)"
    log(WINDOW_S + 1, "line 1001")
    assert written[-1] == "line 1001"
