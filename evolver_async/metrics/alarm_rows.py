"""Alarms in the rows of takes: those that fire, and the steps from which they did. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PREFIX = "alarm/"


class AlarmSpan(NamedTuple):
    """Steps of one alarm: it fires from `begun` on and not at `ended`, None if it still fires."""

    name: str
    begun: int
    ended: int | None


def firing(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the alarms that fire in a row."""
    return [name.removeprefix(PREFIX) for name in row if name.startswith(PREFIX) and row[name]]


def alarm_spans(takes: Sequence[Mapping[str, Any]]) -> list[AlarmSpan]:
    """Return the spans of all alarms by their first step, from the rows of takes."""
    begun: dict[str, int] = {}
    found = []
    for row in takes:
        step, now = int(row["step"]), firing(row)
        found += [AlarmSpan(name, begun.pop(name), step) for name in [*begun] if name not in now]
        begun = dict.fromkeys(now, step) | begun
    found += [AlarmSpan(name, first, None) for name, first in begun.items()]
    return sorted(found, key=lambda span: span.begun)


def alarms_line(takes: Sequence[Mapping[str, Any]]) -> str:
    """Name the alarms that fired, each with the steps at which it began; "" if none did."""
    times: dict[str, list[int]] = {}
    for span in alarm_spans(takes):
        times.setdefault(span.name, []).append(span.begun)
    parts = [f"{name} at {_steps(steps)}" for name, steps in times.items()]
    return f"alarms: {', '.join(parts)}; remedies: docs/alarms.md" if parts else ""


def _steps(steps: Sequence[int]) -> str:
    """Name the first steps of many."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    shown = " and ".join(map(str, steps[:2]))
    return f"steps {shown}" + (f" and {len(steps) - 2} more" if len(steps) > 2 else "")
