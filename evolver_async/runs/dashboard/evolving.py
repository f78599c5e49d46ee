"""View of experience, judge and questioning: benefit and cost of each, as curves. Pure."""

from rich.text import Text

from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, wrapped
from evolver_async.runs.dashboard.overview import CurveChoice, PlotOptions, charts, least_height
from evolver_async.runs.watch.row_texts import mechanisms

NONE = "no step has metrics of experience, of a judge or of questioning"
CURVES = (
    CurveChoice(
        "guided",
        "experience/guided_success",
        within=(0.0, 1.0),
        beside=("unguided", "experience/unguided_success"),
    ),
    CurveChoice("gain", "guidance/gain", within=(0.0, 0.0), beside=("upper", "guidance/upper")),
    CurveChoice("wasted share", "guidance/wasted", within=(0.0, 0.01)),
    CurveChoice("reliance, nats", "experience/reliance", within=(0.0, 0.01)),
    CurveChoice("freed share", "boost/freed_fraction", within=(0.0, 0.01)),
    CurveChoice("judge agreement", "judge/agreement", within=(0.0, 1.0)),
    CurveChoice(
        "praise bias",
        "judge/praise_bias",
        within=(0.0, 0.0),
        beside=("length", "judge/length_bias"),
    ),
    CurveChoice("turns judged GOOD", "judge/good_share", within=(0.0, 1.0)),
    CurveChoice(
        "synthetic tasks",
        "questioning/pool_size",
        within=(0.0, 1.0),
        beside=("useful", "questioning/useful"),
    ),
    CurveChoice("explored turns", "questioning/explored_turns", within=(0.0, 1.0)),
)


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


def _recorded(snapshot: RunSnapshot, choice: CurveChoice) -> bool:
    steps = snapshot.steps
    return choice.column in steps or choice.beside[1] in steps
