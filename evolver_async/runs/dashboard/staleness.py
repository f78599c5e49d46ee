"""View of staleness: a histogram by version lag, off-policy measures by lag, and curves. Pure."""

import re
from collections.abc import Sequence

import numpy as np
from rich.text import Text

from evolver_async.runs.chosen_curves import OFFPOLICY
from evolver_async.runs.dashboard.braille import bar, number
from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, beside, table, title
from evolver_async.runs.dashboard.overview import PlotOptions, charts
from evolver_async.runs.results.table import MetricTable

RECENT = 20  # steps
LAG = re.compile(r"lag_(\d+)\S*/trajectories")
MEASURES = {
    "trajectories": "trajectories",
    "tokens": "tokens",
    "ess": "ESS",
    "kl": "KL",
    "w_mean": "weight",
    "clip_low": "clip low",
    "clip_high": "clip high",
    "masked": "masked",
    "reward_mean": "reward",
    "length_mean": "length",
}
SUMMED = ("trajectories", "tokens")
OF_TRAJECTORIES = ("reward_mean", "length_mean")  # means over them, the others over tokens
NARROW = ("tokens", "reward_mean", "length_mean")  # left out below 100 cells
CURVES = OFFPOLICY[:3]  # staleness, effective sample size, KL


def staleness(snapshot: RunSnapshot, options: PlotOptions, width: int, height: int) -> list[Text]:
    """Return histograms and measures by lag, and curves in the remaining rows."""
    steps = snapshot.steps
    buckets = _buckets(steps)
    if not buckets:
        return [Text("no step has trained sampled tokens yet, so there is no staleness", DIM)]
    recent = MetricTable(steps.rows[-RECENT:])
    half = width // 2
    lines = beside(
        [
            _histogram(f"lag of trained data, {len(steps)} steps", steps, buckets, half - 1),
            _histogram(f"the last {len(recent)} steps", recent, buckets, half - 1),
        ],
        [half, half],
    )
    lines += [title(f"off-policy measures by lag, the last {len(recent)} steps", width)]
    names = [name for name in MEASURES if width >= 100 or name not in NARROW]
    rows = [[bucket, *(_cell(recent, bucket, name) for name in names)] for bucket in buckets]
    lines += table(["lag", *(MEASURES[name] for name in names)], rows, width)
    return lines + charts(snapshot, CURVES, options, width, height - len(lines))


def _buckets(steps: MetricTable) -> list[str]:
    """Return the buckets of lags that the rows have, by lag."""
    found = {int(one[1]): name for name in steps.names if (one := LAG.fullmatch(name))}
    return [found[lag].removeprefix("lag_").partition("/")[0] for lag in sorted(found)]


def _histogram(text: str, steps: MetricTable, buckets: Sequence[str], width: int) -> list[Text]:
    counts = {bucket: measure(steps, bucket, "trajectories") or 0.0 for bucket in buckets}
    total = sum(counts.values())
    lines = [title(text, width)]
    for bucket, count in counts.items():
        share = f"{count / total:5.0%}" if total else "    –"
        label = f"{bucket:>4} "
        room = width - len(label) - len(share) - 9
        drawn = bar(count, max(counts.values()), max(1, room))
        lines.append(Text.assemble(label, (drawn, "cyan"), f" {count:8,.0f}", share))
    return lines


def _cell(steps: MetricTable, bucket: str, name: str) -> str:
    value = measure(steps, bucket, name)
    if value is None:
        return "–"
    return f"{value:,.0f}" if name in SUMMED else number(value)


def measure(steps: MetricTable, bucket: str, name: str) -> float | None:
    """Return the sum of a count, or the mean over what it is of; None if no step has a value."""
    of = "trajectories" if name in OF_TRAJECTORIES else "tokens"
    column, weight = f"lag_{bucket}/{name}", f"lag_{bucket}/{of}"
    if column not in steps or weight not in steps:
        return None
    values_N, weights_N = steps[column], steps[weight]
    both_N = np.isfinite(values_N) & np.isfinite(weights_N)
    if name in SUMMED:
        return float(values_N[both_N].sum())
    if weights_N[both_N].sum() <= 0:
        return None
    return float(np.average(values_N[both_N], weights=weights_N[both_N]))
