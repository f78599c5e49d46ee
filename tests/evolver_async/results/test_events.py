"""Events are found in the metrics: stages, restarts, rollbacks, alarms, failures."""

from evolver_async.metrics.lineages import current_rows
from evolver_async.results.events import events, restarts_logged


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
    found = [(one.kind, one.step, one.text) for one in events(rows, current_rows(rows))]
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
    assert "alarm grad_norm fires" in [one.text for one in events(rows, rows)]


def test_no_rows_have_no_events() -> None:
    assert events([], []) == []


def test_the_restarts_in_a_log_are_found() -> None:
    log = (
        "2026-11-23 09:10:15,162 INFO evolver_async.launch: begins\n"
        "2026-11-23 09:11:15,162 WARNING evolver_async.launch.supervisor: actor-0 ended with"
        " SIGKILL, restart 1 of 3 in 1.0 s: no error is in its log\n"
    )
    (found,) = restarts_logged(log)
    assert found.step is None and found.text.startswith("2026-11-23 09:11:15,162: actor-0 ended")
