"""Histograms and bars: figures without steps."""

from collections.abc import Mapping, Sequence

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from evolver_async.runs.report.plots.curve_plots import HEIGHT, PALETTE, finish, place_legend

BINS = 24


def bars(title: str, axis: str, columns: Mapping[str, Mapping[str, float]]) -> figure:
    """Return a figure with a group of bars for each label; `columns` are bars by series, label."""
    labels = list(dict.fromkeys(label for one in columns.values() for label in one))
    made = figure(
        title=title,
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_range=labels,  # pyright: ignore[reportArgumentType]
        x_axis_label=axis,
        tools="save",
    )
    finish(made)
    width = 0.8 / max(len(columns), 1)
    for index, (name, values) in enumerate(columns.items()):
        shift = (index - (len(columns) - 1) / 2) * width
        data = {
            "x": [(label, shift) for label in values],
            "label": list(values),
            "value": list(values.values()),
        }
        drawn = made.vbar(
            x="x", top="value", width=width * 0.92, color=PALETTE[index % len(PALETTE)],
            source=ColumnDataSource(data), legend_label=name,
        )  # fmt: skip
        tips = [(axis, "@label"), (name, "@value{0.[0000]}")]
        made.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    made.y_range.start = 0  # pyright: ignore[reportAttributeAccessIssue]
    place_legend(made, len(columns))
    return made


def amounts(title: str, axis: str, values: Mapping[str, float]) -> figure:
    """Return horizontal bars, for labels that are long."""
    labels = [*values][::-1]
    made = figure(
        title=title,
        height=HEIGHT,
        sizing_mode="stretch_width",
        y_range=labels,  # pyright: ignore[reportArgumentType]
        x_axis_label=axis,
        tools="save",
    )
    finish(made)
    data = {"label": labels, "value": [values[label] for label in labels]}
    drawn = made.hbar(
        y="label", right="value", height=0.7, color=PALETTE[0], source=ColumnDataSource(data)
    )
    made.x_range.start = 0  # pyright: ignore[reportAttributeAccessIssue]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=[("", "@label"), (axis, "@value{0,0}")]))
    return made


def histogram(title: str, axis: str, samples: Mapping[str, Sequence[float]]) -> figure:
    """Return the distributions of several samples, each as shares, over common bins."""
    made = figure(
        title=title,
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_axis_label=axis,
        y_axis_label="share",
        tools="save",
    )
    finish(made)
    whole = np.concatenate([np.asarray(one, float) for one in samples.values()])
    edges = np.histogram_bin_edges(whole, BINS)
    for color, (name, values) in zip(PALETTE * 2, samples.items(), strict=False):
        shares = np.histogram(values, edges)[0] / max(len(values), 1)
        data = {"top": shares, "left": edges[:-1], "right": edges[1:]}
        drawn = made.quad(
            top="top", bottom=0, left="left", right="right", source=ColumnDataSource(data),
            fill_color=color, fill_alpha=0.4, line_color=color, legend_label=name,
        )  # fmt: skip
        tips = [(axis, "@left{0.[0]}-@right{0.[0]}"), (name, "@top{0.0%}")]
        made.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    made.y_range.start = 0  # pyright: ignore[reportAttributeAccessIssue]
    place_legend(made, len(samples))
    return made
