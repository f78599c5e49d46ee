"""Plots of characters: curves of braille dots, and bars of block characters. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from evolver_async.schema import Array

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits by column and row of a cell
DOTS_X, DOTS_Y = 2, 4  # dots of one cell
EIGHTHS = " ▏▎▍▌▋▊▉█"
MARGIN = 8  # cells left of the plot: a label and the axis
AXIS_STYLE = "grey62"
EMPTY = "no values yet"


@dataclass(frozen=True)
class PlotLine:
    """One curve over x_N with values y_N, which may be NaN; later lines are drawn over it."""

    x_N: Array
    y_N: Array
    style: str

    def finite(self) -> tuple[Array, Array]:
        """Return the points that have a place."""
        both_N = np.isfinite(self.x_N) & np.isfinite(self.y_N)
        return self.x_N[both_N], self.y_N[both_N]


def trailing_mean(y_N: Array, window: int) -> Array:
    """Return for each value the mean of the last `window` ones; NaNs are left out."""
    finite_N = np.isfinite(y_N)
    sums_N = np.cumsum(np.where(finite_N, y_N, 0.0))
    counts_N = np.cumsum(finite_N)
    sums_N[window:] -= sums_N[:-window].copy()
    counts_N[window:] -= counts_N[:-window].copy()
    return np.where(counts_N > 0, sums_N / np.maximum(counts_N, 1), np.nan)


def number(value: float) -> str:
    """Format a number in at most seven characters."""
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(0, 3 - max(0, int(math.log10(abs(value)))))}f}"
    text = f"{value:.1e}"
    return text if len(text) <= 7 else f"{value:.0e}"


def curve(
    lines: Sequence[PlotLine],
    width: int,
    height: int,
    x_label: Callable[[float], str] = number,
    within: tuple[float, float] | None = None,
) -> list[Text]:
    """Draw lines in `height` rows of `width` cells, the last row being the labels of the x axis.

    `within`: bounds of the y axis that are always shown. A column of dots shows the mean of the
    points that fall into it, and columns are joined.
    """
    columns, rows = width - MARGIN, height - 1
    points = [(*line.finite(), line.style) for line in lines]
    points = [one for one in points if len(one[0])]
    if not points or columns < 2 or rows < 1:
        blank = [Text(" " * width) for _ in range(height)]
        if height > 0:
            blank[height // 2] = Text(EMPTY.center(width)[:width], style=AXIS_STYLE)
        return blank
    x_all = np.concatenate([x for x, _, _ in points])
    low, high = _limits(np.concatenate([y for _, y, _ in points]), within)
    x_low, x_high = float(x_all.min()), float(x_all.max())
    cells = np.zeros((rows, columns), np.int64)
    styles: dict[tuple[int, int], str] = {}
    for x, y, style in points:
        across = np.zeros(len(x)) if x_high == x_low else (x - x_low) / (x_high - x_low)
        dot_x = np.rint(across * (columns * DOTS_X - 1)).astype(int)
        dot_y = (y - low) / (high - low) * (rows * DOTS_Y - 1)
        for column, row in _joined(dot_x, dot_y):
            place = (rows - 1 - row // DOTS_Y, column // DOTS_X)
            cells[place] |= DOTS[column % DOTS_X][DOTS_Y - 1 - row % DOTS_Y]
            styles[place] = style
    labels = {0: high, rows - 1: low}
    if rows >= 7:
        labels[rows // 2] = high - (rows // 2) / (rows - 1) * (high - low)
    drawn = [_row(cells[row], row, styles, labels.get(row)) for row in range(rows)]
    left, right = x_label(x_low), "" if x_high == x_low else x_label(x_high)
    axis = left + right.rjust(max(len(right) + 1, columns - len(left)))
    drawn.append(Text((" " * MARGIN + axis)[:width].ljust(width), style=AXIS_STYLE))
    return drawn


def _limits(y_N: Array, within: tuple[float, float] | None) -> tuple[float, float]:
    low, high = float(y_N.min()), float(y_N.max())
    if within is not None:
        low, high = min(low, within[0]), max(high, within[1])
    if low == high:
        room = abs(low) / 2 or 1.0
        low, high = low - room, high + room
    return low, high


def _joined(dot_x_N: Array, dot_y_N: Array) -> list[tuple[int, int]]:
    """Return the dots (column, row) of a line through the mean of each column."""
    columns_M, member_N = np.unique(dot_x_N, return_inverse=True)
    means_M = np.bincount(member_N, dot_y_N) / np.bincount(member_N)
    every = np.arange(columns_M[0], columns_M[-1] + 1)
    rows = np.rint(np.interp(every, columns_M, means_M)).astype(int).tolist()
    dots = []
    before = rows[0]
    for column, row in zip(every.tolist(), rows, strict=True):
        if row > before:
            span = range(before + 1, row + 1)
        elif row < before:
            span = range(row, before)
        else:
            span = range(row, row + 1)
        dots += [(column, each) for each in span]
        before = row
    return dots


def _row(bits: Array, row: int, styles: dict[tuple[int, int], str], label: float | None) -> Text:
    """Return one row: its label, the axis and the cells, in runs of one style."""
    text = "" if label is None else number(label)
    drawn = Text(f"{text:>{MARGIN - 1}}{'│' if label is None else '┤'}", style=AXIS_STYLE)
    run, style = "", ""
    for column, cell in enumerate(bits.tolist()):
        wanted = styles.get((row, column), "")
        if wanted != style:
            drawn.append(run, style)
            run, style = "", wanted
        run += chr(0x2800 + cell) if cell else " "
    drawn.append(run, style)
    return drawn


def bar(value: float, largest: float, width: int) -> str:
    """Return a horizontal bar of `width` cells that is full at `largest`; none if it is 0."""
    share = min(1.0, max(0.0, value / largest)) if largest > 0 else 0.0
    eighths = round(share * width * 8)
    if value > 0 and width > 0:
        eighths = max(1, eighths)  # what exists is seen
    full, part = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[part] if part else "")).ljust(width)
