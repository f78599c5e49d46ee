"""Events are found in the metrics: stages, restarts, rollbacks, alarms, failures."""

from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.runs.results.events import SHOWN, events, restarts_logged
from evolver_async.runs.results.table import MetricTable


def row(step: int, lineage: int = 1, **values: float) -> dict:
    return {"step": step, "lineage": lineage, "stage": 0.0, "stage_kind": "rl", **values}


def test_every_kind_of_event_has_its_step() -> None:
    rows = [
        row(1),
        row(2),
        row(3),
        row(3, 2, **{"alarm/entropy_low": 1.0}),
        row(4, 2, **{"alarm/entropy_low": 1.0, "failures/agent": 2.0}),
        row(5, 2, **{"alarm/entropy_low": 0.0, "failures/agent": 2.0, "safety/rollbacks": 1.0}),
        row(6, 2, stage=1.0, **{"failures/agent": 3.0, "safety/rollbacks": 1.0}),
    ]
    found = [
        (one.kind, one.step, one.text) for one in events(rows, MetricTable(current_rows(rows)))
    ]
    assert sorted(found) == sorted(
        [
            ("stage", 1, "stage 0 (rl) starts"),
            ("restart", 3, "lineage 2 starts with step 3; it repeats 1 steps"),
            ("alarm", 3, "alarm entropy_low fires until step 5"),
            ("failure", 4, "failures/agent: +2"),
            ("rollback", 5, "safety/rollbacks: +1"),
            ("stage", 6, "stage 1 (rl) starts"),
            ("failure", 6, "failures/agent: +1"),
        ]
    )


def test_an_alarm_that_fires_to_the_end_has_no_end() -> None:
    rows = [row(1), row(2, **{"alarm/grad_norm": 1.0})]
    assert "alarm grad_norm fires" in [one.text for one in events(rows, MetricTable(rows))]


def test_no_rows_have_no_events() -> None:
    assert events([], MetricTable([])) == []


def test_the_restarts_in_a_log_are_found() -> None:
    log = (
        "2026-11-23T09:10:15.162Z INFO evolver_async.launch: begins\n"
        "2026-11-23T09:11:15.162Z WARNING evolver_async.launch.supervisor: actor-0 ended with"
        " SIGKILL, restart 1 of 3 in 1.0 s: no error is in its log\n"
    )
    (found,) = restarts_logged(log)
    assert found.step is None and found.text.startswith("2026-11-23T09:11:15.162Z: actor-0 ended")


def test_the_newest_events_of_each_kind_are_kept() -> None:
    """A run of weeks with an endpoint that fails now and then."""
    last = 2 * SHOWN
    rows = [row(1), row(2, **{"safety/rollbacks": 1.0})]
    rows += [row(step, **{"failures/judge": float(step)}) for step in range(3, last + 1)]
    found = events(rows, MetricTable(rows))
    assert [one.step for one in found if one.kind == "rollback"] == [2]
    failed = [one.step for one in found if one.kind == "failure"]
    assert failed == [*range(last - SHOWN + 1, last + 1)]
    assert [one.step for one in found] == sorted(one.step or 0 for one in found)


def test_the_newest_restarts_in_a_log_are_kept() -> None:
    line = "2026-11-23T09:11:15.162Z WARNING evolver_async.launch: actor-{} ended, restart 1 of 3"
    found = restarts_logged("\n".join(line.format(number) for number in range(SHOWN + 5)))
    assert len(found) == SHOWN and f"actor-{SHOWN + 4} ended" in found[-1].text


def test_failures_of_a_resumed_run_are_counted_from_0() -> None:
    rows = [row(1, **{"failures/agent": 5.0}), row(2, 2, **{"failures/agent": 2.0})]
    texts = [one.text for one in events(rows, MetricTable(rows)) if one.kind == "failure"]
    assert texts == ["failures/agent: +5", "failures/agent: +2"]


def test_as_many_failures_after_a_resume_as_before_are_listed() -> None:
    rows = [row(1, **{"failures/agent": 1.0}), row(2, 2), row(3, 2, **{"failures/agent": 1.0})]
    found = events(rows, MetricTable(rows))
    assert [one.step for one in found if one.text == "failures/agent: +1"] == [1, 3]
