"""Events of a run: stages, restarts of the learner, rollbacks, alarms, failures. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from evolver_async.metrics.alarm_rows import PREFIX, alarm_spans
from evolver_async.metrics.newest_lineage import key_of
from evolver_async.runs.results.table import MetricTable

SHOWN = 200  # events of one kind, the newest ones
LOGGED = re.compile(r"^(\d\S+) WARNING [\w.]+: (.*restart \d+ of \d+.*)$")


@dataclass(frozen=True)
class RunEvent:
    """One event. `step` is None where only its time is known."""

    kind: str  # stage, restart, rollback, alarm, failure
    step: int | None
    text: str


def events(all_rows: Sequence[dict[str, Any]], steps: MetricTable) -> list[RunEvent]:
    """Return the newest events of each kind by step.

    `steps`: those of `all_rows` in the newest lineage's curve.
    """
    found = [*_restarts(all_rows), *_stages(steps), *_alarms(steps), *_rises(steps)]
    found.sort(key=lambda event: event.step or 0)
    counts, newest = Counter[str](), []
    for event in reversed(found):
        counts[event.kind] += 1
        if counts[event.kind] <= SHOWN:
            newest.append(event)
    return newest[::-1]


def restarts_logged(log: str) -> list[RunEvent]:
    """Return the restarts of processes that the launcher's log names."""
    matches = [LOGGED.match(line) for line in log.splitlines()]
    found = [RunEvent("restart", None, f"{one[1]}: {one[2]}") for one in matches if one]
    return found[-SHOWN:]


def _restarts(all_rows: Iterable[dict[str, Any]]) -> list[RunEvent]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for row in all_rows:
        if key_of(row).kind == "take":
            lineage, step = int(row["lineage"]), int(row["step"])
            first[lineage] = min(step, first.get(lineage, step))
            last[lineage] = max(step, last.get(lineage, step))
    lineages = sorted(first)
    found = []
    for before, lineage in pairwise(lineages):
        repeated = max(0, last[before] - first[lineage] + 1)
        text = f"lineage {lineage} starts with step {first[lineage]}; it repeats {repeated} steps"
        found.append(RunEvent("restart", first[lineage], text))
    return found


def _stages(takes: Iterable[dict[str, Any]]) -> list[RunEvent]:
    found, before = [], None
    for row in takes:
        stage = int(row.get("stage") or 0)
        if stage != before:
            text = f"stage {stage} ({row['stage_kind']}) starts"
            found.append(RunEvent("stage", int(row["step"]), text))
        before = stage
    return found


def _alarms(steps: MetricTable) -> list[RunEvent]:
    found = []
    names = ["step", *(name for name in steps.names if name.startswith(PREFIX))]
    takes = [{name: row.get(name) for name in names} for row in steps]
    for name, begun, ended in alarm_spans(takes):
        until = "" if ended is None else f" until step {ended}"
        found.append(RunEvent("alarm", begun, f"alarm {name} fires{until}"))
    return found


def _rises(steps: MetricTable) -> list[RunEvent]:
    """Return the steps at which a count of rollbacks, failures or stalls rose."""
    kinds = {"safety/rollbacks": "rollback", "supervision/stalled": "failure"}
    kinds |= {name: "failure" for name in steps.names if name.startswith("failures/")}
    counts: dict[str, float] = {}
    found = []
    for row in steps:
        for name, kind in kinds.items():
            if (value := row.get(name)) is None:
                if name.startswith("failures/"):  # a buffer that counts from 0 has none yet
                    counts.pop(name, None)
                continue
            before = 0.0 if name.startswith("supervision") else counts.get(name, 0.0)
            counts[name] = value
            rise = value - before if value >= before else value  # a resume counts from 0
            if rise > 0:
                found.append(RunEvent(kind, int(row["step"]), f"{name}: +{rise:g}"))
    return found
