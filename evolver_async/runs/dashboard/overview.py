"""View of the learning: numbers of the newest step, and curves. Pure."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from evolver_async.durations import clock
from evolver_async.runs.chosen_curves import OVERVIEW, Curve
from evolver_async.runs.dashboard.braille import PlotLine, curve, number, trailing_mean
from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, beside, title
from evolver_async.runs.results.table import MetricTable
from evolver_async.runs.watch import row_texts as texts
from evolver_async.schema import Array

LEAST_WIDTH, LEAST_HEIGHT = 38, 8  # of one curve, its title included
RAW, SMOOTH, EVALUATED, BESIDE = "cyan", "bright_cyan", "bright_green", "yellow"
AXES = {"step": "step", "time_s": "time"}


@dataclass(frozen=True)
class PlotOptions:
    """Choices by keys: steps in a mean (1: none), and the column of the x axis."""

    window: int = 1
    axis: str = "step"

    def x_label(self, value: float) -> str:
        return clock(value) if self.axis == "time_s" else number(value)


def overview(snapshot: RunSnapshot, options: PlotOptions, width: int, height: int) -> list[Text]:
    """Return the newest step's numbers, and as many curves as fit."""
    lines = headline(snapshot, width)
    room = max(LEAST_HEIGHT, height - len(lines))
    return lines + charts(snapshot, OVERVIEW, options, width, room)


def charts(
    snapshot: RunSnapshot,
    choices: Sequence[Curve],
    options: PlotOptions,
    width: int,
    height: int,
) -> list[Text]:
    """Return the first curves in rows of up to three, as many as fit; none if no row fits."""
    across = _across(width)
    down = min(least_height(choices, width), height) // LEAST_HEIGHT
    part = width // across
    lines: list[Text] = []
    for row in range(down):
        chosen = choices[row * across : (row + 1) * across]
        blocks = [chart(snapshot, one, options, part - 1, height // down) for one in chosen]
        lines += beside(blocks, [part] * len(chosen))
    return lines


def least_height(choices: Sequence[Curve], width: int) -> int:
    """Return the rows that `charts` needs for all curves."""
    return LEAST_HEIGHT * -(-len(choices) // _across(width))


def _across(width: int) -> int:
    return max(1, min(3, width // LEAST_WIDTH))


def headline(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the numbers of the newest step and of the last evaluation."""
    left_out = {"groups/s"} if width < 100 else set()
    if not snapshot.live:
        left_out.add("eta")
    cells = [one for one in snapshot.cells if one[0] not in left_out]
    if not cells:
        cells = [("waiting", "for the first step") if snapshot.live else ("steps", "none")]
    if snapshot.best is not None:
        evaluations = snapshot.evaluations
        success = _finite(evaluations["eval/success"])
        distinct = texts.number(evaluations.rows[-1].get("eval/distinct"))
        best = f"best {snapshot.best:.3f}, {distinct} distinct"
        cells.insert(1, ("eval success", f"{success[-1]:.3f} ({best})"))
    if snapshot.live:
        cells += [one for one in snapshot.present if one[0] != "eta" or "eta" not in dict(cells)]
    lines = [Text()]
    for name, value in cells:
        part = Text.assemble((f"{name} ", DIM), (value, "bold"), "   ")
        if len(lines[-1]) and len(lines[-1]) + len(part) - 3 > width:
            lines.append(Text())
        lines[-1].append_text(part)
    for name, text in snapshot.times:
        first, *rest = textwrap.wrap(f"{name} {text}", width)
        lines.append(Text.assemble((name, DIM), (first.removeprefix(name), "bold")))
        lines += [Text(one, "bold") for one in rest]
    return lines


def chart(
    snapshot: RunSnapshot, choice: Curve, options: PlotOptions, width: int, height: int
) -> list[Text]:
    """Return a title with the newest values, and the curve below it."""
    (first, _), *more = choice.metrics.items()
    drawn, newest = [], []
    found = _line(snapshot.steps, first, options, RAW)
    if found is not None:
        newest.append(f"{number(float(_finite(found.y_N)[-1]))}")
        if options.window > 1:
            drawn.append(PlotLine(found.x_N, found.y_N, DIM))
            mean_N = trailing_mean(found.y_N, options.window)
            newest = [f"{number(float(mean_N[-1]))} over {options.window}"]
            found = PlotLine(found.x_N, mean_N, SMOOTH)
        drawn.append(found)
    head = title(" ".join([choice.short, *newest]), width)
    raw = PlotOptions(axis=options.axis)
    evaluated = [*choice.evaluations][:1]
    others = [("eval", snapshot.evaluations, column, EVALUATED, raw) for column in evaluated]
    others += [(label, snapshot.steps, column, BESIDE, options) for column, label in more[:1]]
    for label, rows, column, style, smoothing in others:
        line = _smoothed(_line(rows, column, options, style), smoothing)
        if line is not None:
            drawn.append(line)
            text = f" {label} {number(float(_finite(line.y_N)[-1]))} "
            head.truncate(width - len(text))
            head.append(text, line.style)
    x_label: Callable[[float], str] = options.x_label
    return [head, *curve(drawn, width, height - 1, x_label, choice.within)]


def _line(rows: MetricTable, column: str, options: PlotOptions, style: str) -> PlotLine | None:
    """Return a column as a line, None if no row has a number there."""
    if column not in rows or options.axis not in rows:
        return None
    line = PlotLine(rows[options.axis], rows[column], style)
    return line if len(line.finite()[1]) else None


def _smoothed(line: PlotLine | None, options: PlotOptions) -> PlotLine | None:
    if line is None or options.window == 1:
        return line
    return PlotLine(line.x_N, trailing_mean(line.y_N, options.window), line.style)


def _finite(values_N: Array) -> Array:
    return values_N[np.isfinite(values_N)]
