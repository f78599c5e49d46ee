"""Curves over the learner's steps, on two shared sources: steps and evaluations.

A metric of few steps of a long run has a source of its own.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, Range1d, Scatter
from bokeh.plotting import figure

from evolver_async.runs.chosen_curves import Curve
from evolver_async.runs.results.events import RunEvent
from evolver_async.runs.results.table import MetricTable

Figure = figure
PALETTE = ("#1f6fb4", "#d1600f", "#2a8a4a", "#8a3fa0", "#b3282d", "#7a5c3a", "#c2559a", "#5f6b76")
EVENT_COLORS = {
    "stage": "#6b7280",
    "restart": "#d97706",
    "rollback": "#7c3aed",
    "alarm": "#dc2626",
    "failure": "#0f766e",
}
POINTS = 1500  # drawn per curve; of longer runs every n-th step is drawn
HEIGHT = 250


class CurveBoard:
    """Maker of figures that share their steps, their selection and the marks of events."""

    def __init__(
        self, steps: MetricTable, evaluations: MetricTable, marks: Sequence[RunEvent]
    ) -> None:
        self.all_steps = steps
        self.every = -(-max(len(steps), 1) // POINTS)
        self.steps = MetricTable(steps.rows[:: self.every])
        self.evaluations = evaluations
        self.sources = {
            "steps": _source("steps", self.steps),
            "evaluations": _source("evaluations", evaluations),
        }
        last = float(max((row["step"] for row in (*steps, *evaluations)), default=1))
        bounds = (-0.1 * last, 1.1 * last)
        self.x_range = Range1d(start=-0.02 * last, end=1.02 * last, bounds=bounds)
        placed = [mark for mark in marks if mark.step is not None]
        columns = {
            "step": [mark.step for mark in placed],
            "text": [mark.text for mark in placed],
            "color": [EVENT_COLORS[mark.kind] for mark in placed],
        }
        self.marks = ColumnDataSource(columns)

    def draw(self, curve: Curve) -> Figure | None:
        """Return the figure of a curve, None if its metrics are not recorded or always 0."""
        parts = [("steps", self.all_steps, name, label) for name, label in curve.metrics.items()]
        parts += [
            ("evaluations", self.evaluations, name, label)
            for name, label in curve.evaluations.items()
        ]
        parts = [part for part in parts if _recorded(part[1], part[2])]
        if not any(np.nan_to_num(table[name]).any() for _, table, name, _ in parts):
            return None
        log = curve.log and all(np.nanmin(table[name]) > 0 for _, table, name, _ in parts)
        made = self.empty(curve.title, log=log)
        for color, (source, _, name, label) in zip(PALETTE * 4, parts, strict=False):
            self._draw(made, source, name, label, color)
        place_legend(made, len(parts))
        return made

    def empty(self, title: str, *, log: bool = False) -> Figure:
        """Return a figure over the steps with the marks of events alone."""
        made = figure(
            name="curve",
            title=title,
            height=HEIGHT,
            sizing_mode="stretch_width",
            x_range=self.x_range,
            x_axis_label="step",
            y_axis_type="log" if log else "linear",
            tools="xpan,box_zoom,xwheel_zoom,reset,save",
            active_drag="box_zoom",
        )
        finish(made)
        if columns_of(self.marks)["step"]:
            lines = made.vspan(
                x="step", line_color="color", line_width=1.5, line_dash="dashed",
                line_alpha=0.75, source=self.marks,
            )  # fmt: skip
            made.add_tools(HoverTool(renderers=[lines], tooltips=[("event", "@text")]))
        return made

    def stacked(self, title: str, parts: dict[str, np.ndarray]) -> Figure:
        """Return a figure of `parts`, one value for each step, on top of each other."""
        made = self.empty(title)
        made.height = HEIGHT + 40  # for the legend
        labels = list(parts)
        columns = {f"p{index}": np.nan_to_num(parts[one]) for index, one in enumerate(labels)}
        source = ColumnDataSource({"step": columns_of(self.sources["steps"])["step"], **columns})
        made.varea_stack(
            list(columns), x="step", source=source, fill_alpha=0.8,
            color=[PALETTE[index % len(PALETTE)] for index in range(len(labels))],
            legend_label=labels,
        )  # fmt: skip
        made.y_range.start = 0  # pyright: ignore[reportAttributeAccessIssue]
        place_legend(made, len(labels) + 1)
        return made

    def _data(self, source: str, name: str) -> tuple[ColumnDataSource, str]:
        """Return the data of a metric and its column there.

        A metric with few values, which the steps that are drawn can miss, has all of them alone.
        """
        data, table = self.sources[source], self.evaluations
        if source == "steps":
            table = self.steps if name in self.steps else self.all_steps
            values_N = self.all_steps[name]
            known = np.flatnonzero(np.isfinite(values_N))
            if self.every > 1 and (len(known) <= POINTS or not _recorded(self.steps, name)):
                known = known[:: -(-len(known) // POINTS)]
                steps_N = self.all_steps["step"].astype(np.int32)
                values = {"step": steps_N[known], "value": values_N[known].astype(np.float32)}
                return ColumnDataSource(values), "value"
        column = f"c{table.names.index(name)}"
        if column not in (columns := columns_of(data)):
            columns[column] = table[name].astype(np.float32)
        return data, column

    def _draw(self, made: Figure, source: str, name: str, label: str, color: str) -> None:
        """Draw one metric: a line, and a point for each step, which answers the mouse."""
        data, column = self._data(source, name)
        line = made.line(
            "step", column, source=data, color=color, line_width=1.8, legend_label=label
        )
        line.selection_glyph = line.nonselection_glyph = None
        size = 7 if source == "evaluations" else 4 if len(data.data["step"]) <= 300 else 2
        points = made.scatter(
            "step", column, source=data, color=color, size=size, legend_label=label,
            marker="diamond" if source == "evaluations" else "circle",
            nonselection_alpha=1.0, nonselection_color=color,
            selection_color="#111827", selection_alpha=1.0,
        )  # fmt: skip
        assert isinstance(points.selection_glyph, Scatter)
        points.selection_glyph.line_width = 5
        tips = [("step", "@step"), (label, f"@{column}{{0.[0000]}}")]
        made.add_tools(HoverTool(renderers=[points], tooltips=tips, mode="mouse"))


def finish(made: Figure) -> None:
    """Apply the appearance that all figures share."""
    made.toolbar_location = "right"
    made.toolbar.autohide = True
    made.toolbar.logo = None
    assert made.title is not None
    made.title.text_font_size = "13px"  # pyright: ignore[reportAttributeAccessIssue]
    made.background_fill_color = "#fcfcfd"
    made.outline_line_color = "#d1d5db"
    made.grid.grid_line_color = "#e5e7eb"
    made.axis.axis_label_text_font_style = "normal"
    made.axis.minor_tick_line_color = None


def _source(name: str, table: MetricTable) -> ColumnDataSource:
    steps = table["step"] if "step" in table else np.zeros(0)
    return ColumnDataSource({"step": steps.astype(np.int32)}, name=name)


def columns_of(source: ColumnDataSource) -> dict[str, Any]:
    """Return the columns of a source, which bokeh types as whatever it can convert to one."""
    return cast("dict[str, Any]", source.data)


def _recorded(table: MetricTable, name: str) -> bool:
    return name in table and not bool(np.isnan(table[name]).all())


def place_legend(made: Figure, labels: int) -> None:
    """Put the legend above the plot, where it covers no curve; hide it for a single label."""
    legend = made.legend[0]
    if labels < 2:
        legend.visible = False
        return
    made.add_layout(legend, "above")
    legend.update(
        orientation="horizontal",
        ncols=4,
        label_text_font_size="11px",
        padding=0,
        margin=0,
        spacing=8,
        glyph_width=14,
        border_line_color=None,
        background_fill_alpha=0.0,
        click_policy="hide",
    )
