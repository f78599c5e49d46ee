"""View of experience, judge and questioning: benefit and cost of each, as curves. Pure."""

from rich.text import Text

from evolver_async.runs.chosen_curves import MECHANISMS, Curve
from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, wrapped
from evolver_async.runs.dashboard.overview import PlotOptions, charts, least_height
from evolver_async.runs.watch.row_texts import mechanisms

NONE = "no step has metrics of experience, of a judge or of questioning"
CURVES = [curve for one in MECHANISMS[:4] for curve in one.curves if curve.short]


def evolving(snapshot: RunSnapshot, options: PlotOptions, width: int, height: int) -> list[Text]:
    """Return the newest numbers, and all curves that the run has."""
    found = [one for one in CURVES if _recorded(snapshot, one)]
    if not found:
        return [Text(NONE, DIM)]
    lines = []
    for name, text in mechanisms(snapshot.steps.rows[-1]):
        lines += wrapped(f"{name}: {text}", width)
    room = max(height - len(lines), least_height(found, width))
    return lines + charts(snapshot, found, options, width, room)


def _recorded(snapshot: RunSnapshot, choice: Curve) -> bool:
    return any(column in snapshot.steps for column in choice.metrics)
