"""View of the actors: their state, weights, rates and last errors. Pure."""

from typing import Any

from rich.text import Text

from evolver_async.durations import duration
from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, GAP, table, title, wrapped
from evolver_async.terminal import plain

STYLES = {
    "working": "green",
    "waiting": "yellow",
    "idle": "yellow",
    "behind": "magenta",
    "silent": "red",
    "left": DIM,
}
WIDE = 120  # cells, from which every column has room


def actors(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return a table of the actors, or of the logs' last warnings once the run has ended."""
    status = snapshot.status
    if status is None:
        return _without_status(snapshot, width)
    found = status["actors"]
    counts = {state: sum(a["state"] == state for a in found.values()) for state in STYLES}
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    rate = f"{sum(actor['tokens_per_s'] for actor in found.values()):,.0f} tokens/s"
    if more := status["actors_not_shown"]:
        text, rate = f"{text}, {more} not shown", f"{rate} of those shown"
    head = f"actors: {text or 'none yet'}; {rate}; head {status['head'] or 'none'}"
    lines = wrapped(snapshot.silence, width, "yellow") if snapshot.silence else []
    lines.append(title(head, width))
    names = ["actor", "state", "weights", "tokens/s", "heard", "last error"]
    if width >= WIDE:
        names = ["actor", "state", "weights", "tokens/s", "traj/s", "leases", "heard", "last error"]
    rows = []
    for name, actor in found.items():
        values = {
            "actor": plain(name),
            "state": Text(actor["state"], STYLES[actor["state"]]),
            "weights": actor["weights"] or "none",
            "tokens/s": f"{actor['tokens_per_s']:,.0f}",
            "traj/s": f"{actor['trajectories_per_s']:.2f}",
            "leases": str(actor["leases"]),
            "heard": duration(actor["seen_s_ago"]),
            "last error": _error(actor),
        }
        rows.append([values[one] for one in names])
    lines += table(names, rows, width, left=("actor", "state", "last error"))
    lines.append(title("what they do, and their errors in full", width))
    for name, actor in found.items():
        if actor["doing"]:
            text = f"{plain(name)}, slowest ticket: {plain(actor['doing'])}"
            lines += wrapped(text, width, DIM, most=2)
        if actor["error"]:
            lines += wrapped(f"{plain(name)}, {_error(actor)}", width, "red", most=4)
    return lines


def _error(actor: dict[str, Any]) -> Text:
    if not actor["error"]:
        return Text("–", DIM)
    return Text(f"{duration(actor['error_s_ago'])} ago: {plain(actor['error'])}", "red")


def _without_status(snapshot: RunSnapshot, width: int) -> list[Text]:
    if snapshot.live:
        text = snapshot.silence or "the buffer has not answered STATUS yet"
        return [title("actors", width), *wrapped(text, width, "yellow")]
    text = f"The run has {_ended(snapshot)}, so the buffer tells nothing about its actors any more."
    lines = wrapped(text, width, DIM)
    lines.append(title("last warning or error in the log of each process", width))
    room = max([len(one.process) for one in snapshot.errors] + [0]) + GAP
    for one in snapshot.errors:
        text = f"{one.when}: {one.text}" if one.text else "–"
        found = wrapped(text, width - room, "red" if one.text else DIM)
        for index, line in enumerate(found):
            lines.append(Text(f"{'' if index else one.process:{room}}").append_text(line))
    return lines if snapshot.errors else [*lines, Text("no logs", DIM)]


def _ended(snapshot: RunSnapshot) -> str:
    return "ended" if snapshot.end.state != "killed" else "been killed"
