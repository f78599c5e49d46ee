"""View of what is wrong and what happened: waits, failures, events, newest first. Pure."""

from rich.text import Text

from evolver_async.durations import duration
from evolver_async.metrics.alarm_rows import firing
from evolver_async.runs.dashboard.feed import RunSnapshot
from evolver_async.runs.dashboard.lines import DIM, title, wrapped
from evolver_async.runs.results.events import SHOWN
from evolver_async.runs.watch.status_text import longest_stall, waits_of
from evolver_async.terminal import plain

STYLES = {"alarm": "yellow", "failure": "red", "rollback": "magenta", "restart": "magenta"}


def happenings(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the end of the run, waiting processes, failures, alarms and events."""
    lines = _end(snapshot, width)
    alarms = firing(snapshot.steps.rows[-1]) if len(snapshot.steps) else []
    if alarms:
        lines += wrapped(f"alarms that fire now: {', '.join(alarms)}", width, "bold yellow")
    if snapshot.live:
        lines += _waits(snapshot, width) + _failures(snapshot, width)
    kept = f"at most {SHOWN} of a kind"
    lines.append(title(f"events, newest first, {kept}: {len(snapshot.events)}", width))
    for event in sorted(snapshot.events, key=lambda one: -(one.step or 0)):
        place = "" if event.step is None else f"step {event.step}"
        label = f"{place:>12} {event.kind:9} "
        texts = wrapped(plain(event.text), width - len(label), most=2)
        for index, text in enumerate(texts):
            head = label if not index else " " * len(label)
            lines.append(Text.assemble((head, STYLES.get(event.kind, "")), text))
    if not snapshot.events:
        lines.append(Text("none yet", DIM))
    return lines


def _end(snapshot: RunSnapshot, width: int) -> list[Text]:
    end = snapshot.end
    lines = []
    if snapshot.problem:
        lines += wrapped(plain(snapshot.problem), width, "red")
    if snapshot.paused and snapshot.live:
        lines += wrapped(f"paused: {snapshot.paused}", width, "bold yellow")
    if snapshot.live:
        return lines
    style = {"finished": "green", "stopped": "yellow"}.get(end.state, "red")
    return lines + wrapped(plain(end.text), width, f"bold {style}", most=8)


def _waits(snapshot: RunSnapshot, width: int) -> list[Text]:
    lines = [title("waits", width)]
    if snapshot.silence:
        lines += wrapped(snapshot.silence, width, "yellow")
    if snapshot.status is None:
        return lines
    stall = longest_stall(snapshot.status)
    if stall:
        lines += wrapped(plain(stall), width, "red")
    waits = waits_of(snapshot.status)
    for text in waits:
        lines += wrapped(plain(text), width, most=2)
    return lines if waits or stall else [*lines, Text("no process waits", DIM)]


def _failures(snapshot: RunSnapshot, width: int) -> list[Text]:
    if snapshot.status is None or not snapshot.status["failures"]:
        return []
    lines = [title("failures", width)]
    for one in snapshot.status["failures"]:
        name = f"{one['kind'].replace('_', ' ')} {one['name']}"
        text = f"{name}, {one['count']:,} times, {duration(one['seconds_ago'])} ago: {one['error']}"
        lines += wrapped(plain(text), width, "red", most=2)
    return lines
