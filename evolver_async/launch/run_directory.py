"""The run directory: its files, its lock, its address and its pause.

`config.yaml` is the resolved configuration, `policy/` the model that training began with,
`exact.json` the success of the optimal and of the random policy by stage and number of episodes,
`pace.json` the times of its model (see `pace.py`), `run.json` the format of the directory and the
address of a running job; `lock` is held while a launcher runs. `PAUSED` exists while the learner
must take no groups, `ACTORS` holds the number of actors that `scale` asked for, `.creating` exists
until the directory is complete (see `creation.py`). `reward_models/<stage>` is the model that this
stage trained. `origin.json` names the run that a fork or a
rerun began from.
"""

import fcntl
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load_written
from evolver_async.config.paths import with_paths
from evolver_async.config.values.rules import FilePath
from evolver_async.file_formats import RUN, numbered
from evolver_async.files import parsed, write_whole
from evolver_async.metrics.launches import LAUNCHES
from evolver_async.metrics.tail import Tail

EXACT = "exact.json"
PAUSED = "PAUSED"
ACTORS = "ACTORS"
REWARD_MODELS = "reward_models"
CREATING = ".creating"
CONVERTED = "converted"  # content of `.creating` as soon as `policy` is a whole, converted model
ORIGIN = "origin.json"
LOCK = "lock"
SEARCHED_LINES = 100  # of a log, for its last error
RECORD = re.compile(r"\d[\dTZ:.-]+ [A-Z]+ [\w.]+: ")  # the head of a log line
NOTICE_CHARS = 300  # of a reason in the notice of a pause: STATUS cuts longer texts at their end


R = TypeVar("R")


class Origin(msgspec.Struct, frozen=True):
    """Run that another began from; a fork at `step`, counted from the run's own first step."""

    kind: Literal["fork", "rerun"]
    run: str
    step: int = 0


class Locked(ConfigError):
    """Another process holds the run directory."""


def config_of(run_dir: Path, changes: Sequence[str] = (), *, checked: bool = True) -> Config:
    """Load the configuration of a run, with its own policy and tasks where they are now.

    `config.yaml` has absolute paths, which are gone after the run was moved or renamed.
    """
    config = load_written(run_dir, changes, checked=checked)

    def now(path: str, kind: FilePath) -> str:
        own = run_dir / Path(path).name
        gone = kind.hub and path and not Path(path).expanduser().exists()
        return str(own) if gone and own.exists() else path

    return with_paths(config, now)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process. Raises Locked if another one does."""
    with open(run_dir / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(f"{run_dir}: is already running; end that launch first") from None
        except OSError as error:  # a file system without locks
            raise OSError(error.errno, error.strerror, file.name) from None
        yield


def reward_model_of(run_dir: Path, stage: int) -> Path:
    """Return the directory of the reward model that a stage trained, which its end writes."""
    return run_dir / REWARD_MODELS / str(stage)


def announce(run_dir: Path, address: str) -> int:
    """Record the address of the buffer; return the number of this launch, from 1."""
    path = run_dir / RUN
    try:
        launches = parsed(path.read_text())["launches"] + 1 if path.exists() else 1
    except (OSError, ValueError, KeyError, TypeError):  # numbers of launches must not come twice
        launches = 1 + len(Tail(run_dir / LAUNCHES).rows())
    facts = {"address": address, "pid": os.getpid(), "launches": launches}
    write_whole(path, json.dumps(numbered() | facts))
    return launches


def record_format(run_dir: Path) -> None:
    """Record the format of a new run directory."""
    write_whole(run_dir / RUN, json.dumps(numbered() | {"launches": 0}))


def facts_of(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None if there is no file or if it is torn."""
    try:
        facts = parsed(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def record_of(path: Path, kind: type[R]) -> R | None:
    """Return the record of this kind in a file of JSON, None if there is none, or a torn one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def address_of(run_dir: Path) -> str:
    """Return the recorded address of the buffer. Raises ConfigError if there is none."""
    try:
        return str(parsed((run_dir / RUN).read_text())["address"])
    except (FileNotFoundError, KeyError):
        origin = origin_of(run_dir)
        if origin is not None and origin.kind == "rerun":
            raise ConfigError(
                f"{run_dir}: was trained by rerun, without a buffer that could answer;"
                f" its steps: evolver-async watch --once {run_dir}"
            ) from None
        raise ConfigError(
            f"{run_dir}: its run.json has no address: it was never launched"
        ) from None
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{run_dir}: run.json cannot be read; a launch writes it anew") from None


def record_origin(run_dir: Path, **facts: object) -> None:
    """Record the run that this one began from: `kind` fork or rerun, its path, and more."""
    write_whole(run_dir / ORIGIN, json.dumps(facts, indent=1))


def origin_of(run_dir: Path) -> Origin | None:
    """Return the run that this one began from, None if it began by itself or its record is torn."""
    return record_of(run_dir / ORIGIN, Origin)


def pause(run_dir: Path, reason: str) -> None:
    """Stop the learner before its next take until `unpause`, also across restarts."""
    write_whole(run_dir / PAUSED, reason)


def scale(run_dir: Path, actors: str) -> None:
    """Ask the running launcher for a number of actors; `auto` undoes it: see ActorScaling."""
    write_whole(run_dir / ACTORS, actors)


def pause_reason(run_dir: Path) -> str | None:
    """Return the reason of the pause, None if the run is not paused."""
    try:
        return (run_dir / PAUSED).read_text(encoding="utf-8").strip() or "no reason was given"
    except FileNotFoundError:
        return None


def pause_notice(run_dir: Path) -> str | None:
    """Return the reason of the pause and the command that ends it, None if there is no pause."""
    reason = pause_reason(run_dir)
    if reason is None:
        return None
    command = f"evolver-async unpause {shlex.quote(str(run_dir))}"
    return f"{textwrap.shorten(reason, NOTICE_CHARS, placeholder=' …')}; to go on: {command}"


def unpause(run_dir: Path) -> str:
    """Let the learner continue and return the reason of its pause. ConfigError without a pause."""
    reason = pause_reason(run_dir)
    if reason is None:
        raise ConfigError(f"{run_dir}: is not paused")
    (run_dir / PAUSED).unlink(missing_ok=True)
    return reason


def last_lines(path: Path, count: int = 5) -> str:
    """Return the last `count` lines of a log that are not blank."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-count:])


def last_error(path: Path, since: str = "") -> str:
    """Return the last error of a log with all its lines, "" if there is none behind the last line
    that has `since` in it.

    What a process prints as it ends, a library's farewell for instance, stands behind its error.
    """
    lines = last_lines(path, SEARCHED_LINES).splitlines()
    begun = max((index for index, line in enumerate(lines) if since and since in line), default=0)
    first = max((index for index, line in enumerate(lines) if " ERROR " in line), default=-1)
    if first < begun:
        return ""
    rest = takewhile(lambda line: not RECORD.match(line), lines[first + 1 :])
    return RECORD.sub("", "\n".join([lines[first], *rest]))
