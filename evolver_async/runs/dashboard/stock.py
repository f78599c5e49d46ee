"""View of the buffer: groups by state, the ledger and whether it closes, reasons. Pure."""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from evolver_async.runs.chosen_curves import EVICTED, GROUPS
from evolver_async.runs.dashboard.braille import bar
from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, beside, natural_width, table, title, wrapped
from evolver_async.runs.dashboard.overview import PlotOptions, charts

HELD = ("open", "ready", "taken")
CLOSED = ("trained", "filtered", "evicted")
STYLES = {"open": "yellow", "ready": "green", "taken": "cyan"}
UNITS = ("trajectories", "groups", "tokens")
CURVES = (GROUPS, EVICTED)
MOST_ROWS = 20  # of the curves
WIDE = 150  # cells, from which groups and tokens stand beside the trajectories

Amounts = dict[str, Any]


def stock(snapshot: RunSnapshot, options: PlotOptions, width: int, height: int) -> list[Text]:
    """Return occupancy, ledger and reasons, of STATUS or of the journal of an ended run."""
    status = snapshot.status
    if status is not None:
        groups, ledger = status["groups"], status["ledger"]
        text = f"groups: {status['outstanding']} of {status['limit']} uses outstanding"
    elif snapshot.ended is not None:
        groups, ledger = snapshot.ended
        text = "groups at the end, from the journal"
    else:
        return _unknown(snapshot, width)
    lines = wrapped(snapshot.silence, width, "yellow") if snapshot.live and snapshot.silence else []
    lines += [title(text, width), *_occupancy(groups, width)]
    for unit in UNITS if width >= WIDE else UNITS[:1]:
        lines += [title(f"ledger, in {unit}", width), *_ledger(ledger, unit, width)]
    half = width // 2
    reasons = [_reasons(ledger, fate, half - 1) for fate in ("evicted", "filtered")]
    lines += beside(reasons, [half, half])
    refused = ", ".join(f"{one['trajectories']:,} {f}" for f, one in ledger["refused"].items())
    lines.append(Text.assemble(("refused on arrival: ", DIM), refused))
    if status is not None:
        lines += _journal(status, width)
    return lines + charts(snapshot, CURVES, options, width, min(MOST_ROWS, height - len(lines)))


def _occupancy(groups: dict[str, int], width: int) -> list[Text]:
    largest = max([groups[state] for state in HELD] + [1])
    return [
        Text.assemble(
            f"{state:>6} {groups[state]:7,} ",
            (bar(groups[state], largest, max(1, width - 16)), STYLES[state]),
        )
        for state in HELD
    ]


def _ledger(ledger: Amounts, unit: str, width: int) -> list[Text]:
    """Return one row per kind: what was received, where all of it is, and whether it closes.

    What is held has one column where there is no room for its states.
    """
    rows, short = [], []
    for kind, received in ledger["received"].items():
        held = [ledger["held"].get(kind, {}).get(state, {}).get(unit, 0) for state in HELD]
        closed = [_total(ledger[fate].get(kind, {}), unit) for fate in CLOSED]
        missing = received[unit] - sum(held) - sum(closed)
        closes = Text("closes", "green") if not missing else Text(f"{missing:+,} off", "bold red")
        for found, parts in ((rows, held), (short, [sum(held)])):
            counts = (f"{count:,}" for count in (received[unit], *parts, *closed))
            found.append([kind, *counts, closes])
    if not rows:
        return [Text("nothing has been received yet", DIM)]
    names = ["kind", "received", *HELD, *CLOSED, ""]
    if natural_width(names, rows) > width:
        names, rows = ["kind", "received", "held", *CLOSED, ""], short
    return table(names, rows, width, left=("kind", ""))


def _total(reasons: Amounts, unit: str) -> int:
    return sum(amount[unit] for amount in reasons.values())


def _reasons(ledger: Amounts, fate: str, width: int) -> list[Text]:
    found = sorted(_by_reason(ledger, fate), key=lambda one: -one[2])
    total = sum(count for _, _, count in found)
    room = min(24, max([len(f"{kind}: {reason}") for kind, reason, _ in found] + [0]))
    lines = [title(f"{fate} by reason: {total:,}", width)]
    for kind, reason, count in found:
        label = f"{f'{kind}: {reason}':{room}.{room}} {count:9,} "
        drawn = bar(count, found[0][2], max(1, width - len(label)))
        lines.append(Text.assemble(label, (drawn, "magenta")))
    return lines if found else [*lines, Text("none", DIM)]


def _by_reason(ledger: Amounts, fate: str) -> Iterator[tuple[str, str, int]]:
    for kind, reasons in ledger[fate].items():
        for reason, amount in reasons.items():
            if amount["trajectories"]:
                yield kind, reason or "no reason", amount["trajectories"]


def _journal(status: Amounts, width: int) -> list[Text]:
    journal, ledger = status["journal"], status["ledger"]
    sampled = f"{ledger['generated_tokens']:,} tokens, {ledger['unacknowledged_tokens']:,} of them"
    lines = [
        Text.assemble(("sampled since the buffer began: ", DIM), f"{sampled} not received"),
        Text.assemble(
            ("journal: ", DIM),
            f"{journal['bytes'] / 2**20:.1f} MiB in {journal['segments']} segments,"
            f" {journal['disk_free_bytes'] / 2**30:.1f} GiB free",
        ),
    ]
    if journal["problem"]:
        lines += wrapped(f"journal: {journal['problem']}", width, "red")
    return lines


def _unknown(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the newest step's counters, since neither STATUS nor the journal tells more."""
    reason = snapshot.silence if snapshot.live else snapshot.unknown
    lines = wrapped(reason or "waiting for the buffer", width, "yellow")
    row = snapshot.steps.rows[-1] if len(snapshot.steps) else {}
    names = [name for name in row if name.startswith(("buffer/", "ledger/"))]
    if names:
        lines.append(title(f"counters of step {row['step']}", width))
        values = [[name, f"{row[name]:,.0f}"] for name in names if row[name] is not None]
        lines += table(["name", "value"], values, width, left=("name",))
    return lines
