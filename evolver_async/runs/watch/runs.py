"""States of runs: the end of a launch with its summary, and the runs of a directory."""

import contextlib
import fcntl
import json
import logging
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evolver_async.buffer.stages import evaluation_digest
from evolver_async.checkpoint.checkpoints import resumable
from evolver_async.checkpoint.history import numbers
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load_written, stage_config
from evolver_async.files import parsed, write_whole
from evolver_async.launch.run_directory import last_error, last_lines
from evolver_async.metrics.alarm_rows import alarms_line
from evolver_async.metrics.newest_lineage import current_rows, key_of
from evolver_async.metrics.tail import Tail, last_rows
from evolver_async.metrics.wandb_process import sync_of, url_of
from evolver_async.process.stopping import CODES
from evolver_async.runs.watch.row_texts import bounds, eval_sets_of, gain, played, validation
from evolver_async.runs.watch.throughput import time_lines

log = logging.getLogger(__name__)

END = "end.json"  # end of the newest launch


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


def begin(run_dir: Path) -> None:
    """Delete the record of an earlier launch's end."""
    (run_dir / END).unlink(missing_ok=True)


def end(run_dir: Path, code: int, reason: str = "") -> Ending:
    """Record the end of the launch: its exit code, and the reason if it failed or was drained."""
    if code == 0:
        state = "finished"
    elif code in CODES:
        state, reason = "stopped", reason or signal.Signals(code - 128).name
    else:
        log_file = run_dir / "logs" / "launcher.log"
        logged = last_error(log_file) or last_lines(log_file, 1) or "no error is in the logs"
        state, reason = "failed", reason or logged
    ending = Ending(state, code, reason, time.time())
    try:
        write_whole(run_dir / END, json.dumps(asdict(ending)))
    except OSError as error:  # a full disk must not hide how the run ended
        log.warning("%s is not written: %s", run_dir / END, error.strerror)
    return ending


def summary(run_dir: Path, ending: Ending) -> list[str]:
    """Return lines for people at the end of a launch: its end, and the next commands."""
    run = shlex.quote(_short(run_dir))
    resume = f"continue: evolver-async train --resume {run}"
    rows = current_rows(Tail(run_dir / "metrics.jsonl").rows())
    alarms = alarms_line([row for row in rows if key_of(row).kind == "take"])
    if ending.state == "failed":
        lines = [ending.text, f"logs: {run}/logs"]
        return [*lines, *filter(None, [alarms, repeated(run_dir, last_step(rows))]), resume]
    config = load_written(run_dir)
    step, evaluated, success = last_step(rows), evaluations(rows), "not evaluated"
    if evaluated:
        last, best = evaluated[-1], best_of(evaluated, digests(config))
        success = f"eval success {last['eval/success']:.3f} ({bounds(last)}) over {played(last)}"
        success += f" (best {best['eval/success']:.3f} at step {best['step']})"
        if evaluated[0]["step"] == 0 and len(evaluated) > 1:
            success += f", {evaluated[0]['eval/success']:.3f} before the first step"
        if (untouched := untouched_of(evaluated, digests(config))) is not None:
            success += f", {gain(last, untouched)} since then"
        success += "".join(f"; {name} {value}" for name, value in eval_sets_of(last))
    validated = next(((row, text) for row in reversed(rows) if (text := validation(row))), None)
    if validated is not None:
        success += f"; validation {validated[1]} at step {validated[0]['step']}"
    lines = [f"{ending.state} at step {step}, {success}", *time_lines(rows, config)]
    lines += filter(None, [alarms])
    if saved := resumable(run_dir / "checkpoints"):
        lines.append(f"checkpoint: {_short(saved[-1][0])}")
    lines += filter(None, [repeated(run_dir, step)])
    if url := url_of(run_dir):
        lines.append(f"W&B: {url}")
    elif directory := sync_of(run_dir):
        lines.append(f"W&B: wandb sync {shlex.quote(_short(Path(directory)))}")
    if ending.state == "stopped":
        return [*lines, resume]
    *others, last = config.stages
    limits = {key: getattr(last, key) for key in ("steps", "tokens", "hours", "until_success")}
    longer = [
        f"stages.{len(others)}.{key}={'…' if key == 'until_success' else 2 * limit}"
        for key, limit in limits.items()
        if limit
    ]
    place, rate = f"stages.{len(others)}", newest_rate(rows)
    stage = stage_config(config, len(others))
    if last.steps and stage.learner.decay != "none" and rate:
        # A longer stage has another schedule, in which the rate would rise again. Rollbacks have
        # made it smaller, and would do so again.
        rollbacks = numbers(saved[-1][0]).get("rollbacks", 0) if saved else 0
        lr = rate / stage.safety.rollback_lr**rollbacks
        longer += [f"{place}.override.learner.{key}" for key in (f"lr={lr:g}", "decay=none")]
        lines.append(f"the schedule of the last stage has ended, at learner.lr {rate:g}")
    lines.append(f"extend: {resume.partition(': ')[2]} {' '.join(longer)}")
    return [*lines, f"export: evolver-async export {run} OUT"]


def newest_rate(rows: list[dict[str, Any]]) -> float:
    """Return the learning rate of the newest step that has one, 0 without any."""
    rates = [row["learner/lr"] for row in rows if row.get("learner/lr")]
    return rates[-1] if rates else 0.0


def repeated(run_dir: Path, step: int) -> str:
    """Name the steps up to `step` that the newest checkpoint lacks, "" if it has them all."""
    saved = resumable(run_dir / "checkpoints")
    behind = step - saved[-1][1].step if saved else step
    return f"not saved: the last {behind} steps, which a resume repeats" if behind > 0 else ""


def last_step(rows: list[dict[str, Any]]) -> int:
    """Return the newest step of the rows of a lineage, 0 before the first."""
    return max((row["step"] for row in rows), default=0)


def evaluations(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of evaluations by step: an earlier one can end later."""
    found = (row for row in rows if row.get("eval/success") is not None)
    return sorted(found, key=lambda row: row["step"])


def digests(config: Config) -> Callable[[float], str]:
    """Return a function from a stage to the digest of its evaluations, which it keeps.

    A stage that cannot be read, as one whose task file is gone, has a digest of its own.
    """

    @cache
    def digest_of(stage: float) -> str:
        try:
            return evaluation_digest(stage_config(config, int(stage)))
        except (ConfigError, IndexError):  # a resume can have added stages
            return f"stage {stage}"

    return digest_of


def best_of(
    evaluated: Sequence[dict[str, Any]], digest_of: Callable[[float], str]
) -> dict[str, Any]:
    """Return the best of some evaluations by step, of equal ones the newer.

    Only those like the last one count: success on other tasks cannot be compared.
    """
    last = evaluated[-1]["eval/stage"]
    stages = {row["eval/stage"] for row in evaluated} - {last}
    like = {last, *(one for one in stages if digest_of(one) == digest_of(last))}
    alike = [row for row in evaluated if row["eval/stage"] in like]
    return max(alike, key=lambda row: (row["eval/success"], row["step"]))


def untouched_of(
    evaluated: Sequence[dict[str, Any]], digest_of: Callable[[float], str]
) -> dict[str, Any] | None:
    """Return the evaluation before the first step, whose tasks are those of the last one.

    None if there is none, or if the last evaluation is not later.
    """
    first, last = evaluated[0], evaluated[-1]
    if first["step"] > 0 or last["step"] == 0:
        return None
    like = digest_of(first["eval/stage"]) == digest_of(last["eval/stage"])
    return first if like else None


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
    rows = current_rows(last_rows(run_dir / "metrics.jsonl", _has_last_evaluation))
    last, ending = next(reversed(evaluations(rows)), {}), ending_of(run_dir)
    state = "running" if is_running(run_dir) else ending.state
    return {
        "name": run_dir.name,
        "state": state,
        "step": last_step(rows),
        "success": last.get("eval/success"),
        "distinct": last.get("eval/distinct"),
        "time": ending.time,
    }


def _has_last_evaluation(rows: list[dict[str, Any]]) -> bool:
    """True if the last rows of a run hold its evaluation with the largest step.

    The row of an evaluation comes after that of its step, so those before an earlier step are of
    earlier ones.
    """
    known = current_rows(rows)
    evaluated = evaluations(known)
    steps = (row["step"] for row in known if key_of(row).kind == "take")
    return bool(evaluated) and any(step <= evaluated[-1]["step"] for step in steps)


def ending_of(run_dir: Path) -> Ending:
    """Return the end of the newest launch.

    Its state is "running" or "killed" if no end is recorded; its time is that of the last metric
    then. The lock of a run with a recorded end is not touched.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Ending(**parsed((run_dir / END).read_text()))
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
