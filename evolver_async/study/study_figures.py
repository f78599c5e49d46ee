"""Figures of a study: a line for each cell, with the interval over its seeds."""

from collections.abc import Sequence
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, Whisker
from bokeh.plotting import figure

from evolver_async.runs.report.plots.curve_plots import PALETTE, finish, place_legend
from evolver_async.study.curves import StudyCurve
from evolver_async.study.statistics import Interval

HEIGHT = 420
TOOLS = "pan,box_zoom,wheel_zoom,reset,save"


def bands(title: str, axis: str, curves: Sequence[StudyCurve], *, name: str = "") -> figure:
    """Return curves over numbers; a band shows each interval. `name`: the figure's, for scripts."""
    made = _empty(title, axis)
    made.name = name
    for index, curve in enumerate(curves):
        source, color = _source(curve), PALETTE[index % len(PALETTE)]
        if any(one.half for one in curve.values):
            made.varea(
                x="place", y1="low", y2="high", source=source, fill_color=color, fill_alpha=0.15,
                legend_label=curve.label,
            )  # fmt: skip
        if len(curve.places) == 1:  # a line of one point is invisible
            made.scatter(
                "place", "mean", source=source, color=color, size=8, legend_label=curve.label
            )
        dash = "solid" if index < len(PALETTE) else "dashed"
        line = made.line(
            "place", "mean", source=source, color=color, line_width=2, line_dash=dash,
            legend_label=curve.label,
        )  # fmt: skip
        tips = [(axis, "@place{0.[0]}"), (curve.label, "@shown")]
        made.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="mouse"))
    place_legend(made, len(curves))
    return made


def points(title: str, axis: str, values: Sequence[str], curves: Sequence[StudyCurve]) -> figure:
    """Return curves over named values, whose numbers are their places; whiskers show intervals."""
    made = _empty(title, axis)
    for index, curve in enumerate(curves):
        shift = 0.12 * (index - (len(curves) - 1) / 2) / max(1, len(curves) - 1)
        source, color = _source(curve, shift, values), PALETTE[index % len(PALETTE)]
        made.line("place", "mean", source=source, color=color, legend_label=curve.label)
        dots = made.scatter(
            "place", "mean", source=source, color=color, size=8, legend_label=curve.label
        )
        if any(one.half for one in curve.values):
            known = _source(_with_intervals(curve), shift)
            made.add_layout(
                Whisker(base="place", lower="low", upper="high", source=known, line_color=color)
            )
        tips = [(axis, "@name"), (curve.label, "@shown")]
        made.add_tools(HoverTool(renderers=[dots], tooltips=tips))
    made.xaxis.ticker = list(range(len(values)))
    made.xaxis.major_label_overrides = dict(enumerate(values))
    place_legend(made, len(curves))
    return made


def _empty(title: str, axis: str) -> figure:
    made = figure(
        title=title, height=HEIGHT, sizing_mode="stretch_width", x_axis_label=axis, tools=TOOLS
    )
    finish(made)
    return made


def _source(curve: StudyCurve, shift: float = 0.0, names: Sequence[str] = ()) -> ColumnDataSource:
    data: dict[str, Any] = {
        "place": [place + shift for place in curve.places],
        "mean": [one.mean for one in curve.values],
        "low": curve.low,
        "high": curve.high,
        "shown": [_shown(one) for one in curve.values],
    }
    if names:
        data["name"] = [names[int(place)] for place in curve.places]
    return ColumnDataSource(data, name=curve.label)


def _with_intervals(curve: StudyCurve) -> StudyCurve:
    """Return the part of a curve whose means are those of several seeds."""
    pairs = zip(curve.places, curve.values, strict=True)
    known = [(place, one) for place, one in pairs if one.half is not None]
    return StudyCurve(curve.label, [place for place, _ in known], [one for _, one in known])


def _shown(one: Interval) -> str:
    """Return a mean with its interval as text; a mean without one stands alone."""
    if one.half is None:
        return f"{one.mean:.3f}"
    return f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})"
