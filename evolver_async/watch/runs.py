"""States of runs: the end of a launch with its summary, and the runs of a directory."""

import contextlib
import fcntl
import itertools
import json
import logging
import re
import shlex
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evolver_async.checkpoint.directory import resumable
from evolver_async.config.load import load
from evolver_async.files import write_whole
from evolver_async.launch.run_directory import last_lines
from evolver_async.metrics.alarms import alarms_line
from evolver_async.metrics.lineages import current_rows, key_of
from evolver_async.metrics.tail import Tail
from evolver_async.metrics.wandb_process import url_of
from evolver_async.process.stopping import CODES
from evolver_async.watch.cells import played
from evolver_async.watch.throughput import time_lines

log = logging.getLogger(__name__)

END = "end.json"  # end of the newest launch
SEARCHED_LINES = 100  # of the launcher's log, for the reason of a failure
RECORD = re.compile(r"[\d:,-]+( [\d:,]+)? [A-Z]+ [\w.]+: ")  # the head of a log line


@dataclass(frozen=True)
class Ending:
    """End of a launch; `state` is finished, stopped or failed, else that of `ending_of`."""

    state: str
    code: int
    reason: str
    time: float

    @property
    def text(self) -> str:
        """Describe the end."""
        return {
            "running": "running",
            "finished": "finished",
            "stopped": f"stopped by {self.reason}",
            "failed": f"failed with exit code {self.code}: {self.reason}",
            "killed": "killed: no launcher runs, and none has recorded an end",
        }[self.state]


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run, from its metrics: the newest step, its last and its best evaluation.

    `last`: row of the evaluation with the largest step, None before the first.
    """

    step: int
    last: dict[str, Any] | None
    best: float | None
    best_step: int | None


def begin(run_dir: Path) -> None:
    """Delete the record of an earlier launch's end."""
    (run_dir / END).unlink(missing_ok=True)


def end(run_dir: Path, code: int, reason: str = "") -> Ending:
    """Record the end of the launch: its exit code, and the reason if it failed."""
    if code == 0:
        state = "finished"
    elif code in CODES:
        state, reason = "stopped", signal.Signals(code - 128).name
    else:
        state, reason = "failed", reason or _logged_reason(run_dir)
    ending = Ending(state, code, reason, time.time())
    try:
        write_whole(run_dir / END, json.dumps(asdict(ending)))
    except OSError as error:  # a full disk must not hide how the run ended
        log.warning("%s is not written: %s", run_dir / END, error.strerror)
    return ending


def _logged_reason(run_dir: Path) -> str:
    """Return the last error of the launcher's log with all its lines, else the last line."""
    lines = last_lines(run_dir / "logs" / "launcher.log", SEARCHED_LINES).splitlines()
    errors = [index for index, line in enumerate(lines) if " ERROR " in line]
    if not errors:
        return lines[-1] if lines else "no error is in the logs"
    first, *rest = lines[errors[-1] :]
    record = [first, *itertools.takewhile(lambda line: not RECORD.match(line), rest)]
    return RECORD.sub("", "\n".join(record))


def summary(run_dir: Path, ending: Ending) -> list[str]:
    """Return lines for people at the end of a launch: its end, and the next commands."""
    run = shlex.quote(_short(run_dir))
    resume = f"continue: evolver-async train --resume {run}"
    rows = current_rows(Tail(run_dir / "metrics.jsonl").rows())
    alarms = alarms_line([row for row in rows if key_of(row).kind == "take"])
    if ending.state == "failed":
        lines = [ending.text, f"logs: {run}/logs"]
        return [*lines, *filter(None, [alarms]), resume]
    config = load(run_dir / "config.yaml")
    progress = progress_of(rows)
    success = "not evaluated"
    if progress.last is not None:
        best = f"best {progress.best:.3f} at step {progress.best_step}"
        last = progress.last
        success = f"eval success {last['eval/success']:.3f} over {played(last)} ({best})"
    lines = [f"{ending.state} at step {progress.step}, {success}", *time_lines(rows, config)]
    lines += filter(None, [alarms])
    if saved := resumable(run_dir / "checkpoints"):
        lines.append(f"checkpoint: {_short(saved[-1][0])}")
    if url := url_of(run_dir):
        lines.append(f"W&B: {url}")
    if ending.state == "stopped":
        return [*lines, resume]
    *others, last = config.stages
    limits = {key: getattr(last, key) for key in ("steps", "tokens", "hours", "until_success")}
    longer = [
        f"stages.{len(others)}.{key}={'…' if key == 'until_success' else 2 * limit}"
        for key, limit in limits.items()
        if limit
    ]
    lines.append(f"extend: {resume.partition(': ')[2]} {' '.join(longer)}")
    return [*lines, f"export: evolver-async export {run} OUT"]


def progress_of(rows: list[dict[str, Any]]) -> RunProgress:
    """Return the progress of a run by the rows of its newest lineage."""
    found = (row for row in rows if row.get("eval/success") is not None)
    evaluated = sorted(found, key=lambda row: row["step"])  # an earlier one can end later
    values = [(row["eval/success"], row["step"]) for row in evaluated]
    best, best_step = max(values, default=(None, None))
    return RunProgress(
        step=max((row["step"] for row in rows), default=0),
        last=evaluated[-1] if evaluated else None,
        best=best,
        best_step=best_step,
    )


def listed(directory: Path) -> list[dict[str, Any]]:
    """List the runs of a directory by the time of their last change.

    Each has a name, state, step, time, and the success of its last evaluation, with the number of
    `distinct` tasks. The state of a run whose files lack some of this is "unreadable".
    """
    runs = []
    for path in directory.glob("*/config.yaml"):
        try:
            runs.append(_summary(path.parent))
        except (OSError, ValueError, KeyError, TypeError):
            changed = path.stat().st_mtime
            nothing = {"state": "unreadable", "step": 0, "success": None, "distinct": None}
            runs.append({"name": path.parent.name, **nothing, "time": changed})
    return sorted(runs, key=lambda run: run["time"])


def _summary(run_dir: Path) -> dict[str, Any]:
    progress = progress_of(current_rows(Tail(run_dir / "metrics.jsonl").rows()))
    last = progress.last or {}
    ending = ending_of(run_dir)
    state = "running" if is_running(run_dir) else ending.state
    return {
        "name": run_dir.name,
        "state": state,
        "step": progress.step,
        "success": last.get("eval/success"),
        "distinct": last.get("eval/distinct"),
        "time": ending.time,
    }


def ending_of(run_dir: Path) -> Ending:
    """Return the end of the newest launch.

    Its state is "running" or "killed" if no end is recorded; its time is that of the last metric
    then. The lock of a run with a recorded end is not touched.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Ending(**json.loads((run_dir / END).read_text()))
    metrics = run_dir / "metrics.jsonl"
    changed = (metrics if metrics.exists() else run_dir / "config.yaml").stat().st_mtime
    return Ending("running" if is_running(run_dir) else "killed", -1, "", changed)


def is_running(run_dir: Path) -> bool:
    """True if a launcher holds the run directory."""
    try:
        with open(run_dir / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _short(path: Path) -> str:
    """Shorten a path below the working directory to a relative one."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
