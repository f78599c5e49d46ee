"""Roles by name, and what every process of a run does before its role's own `main`.

The wings are named here and resolved where a process starts, so that no import runs up to them.
"""

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolver_async.buffer.log.journal import JournalError
from evolver_async.checkpoint.directory import CheckpointError
from evolver_async.config import Config
from evolver_async.config.check import ConfigError
from evolver_async.config.secrets import mask
from evolver_async.process.logs import Repeats
from evolver_async.process.private_directories import PREFIX

# Processes: main(RoleArgs) -> exit code.
PROCESSES = {
    "buffer": "evolver_async.buffer.service:main",
    "learner": "learner.train:main",
    "actor": "actors.main:main",
    "experience": "actors.experience.service:main",
    "prepare": "learner.tools.prepare:main",
}
# Everything else that a wing offers by name.
ROLES = PROCESSES | {
    "eval": "actors.evaluate:evaluate",  # (run_dir, episodes, step) -> one line
    "exact": "actors.envs.base:exact",  # (tasks, max_turns) -> random and optimal, or None
    "check_prompts": "actors.checks.prompts:check",  # (config) -> None
    "export": "learner.tools.export:export",  # (run_dir, out, step) -> one line
    "manual": "actors.export_manual:write_manual",  # (config of a stage, directory) -> None
    "purge": "actors.experience.service:purge_files",  # (config, run_dir, source) -> entries
    "serial_actor": "actors.main:build",
    "serial_experience": "actors.experience.service:build",
    "serial_learner": "learner.train:build",
}
# Each raises ValueError, naming the key, for what only its wing can tell about a configuration.
CHECKS = ("actors.checks.config:check",)

# Exit codes of ends that starting again would only repeat.
USER_ERROR = 2
TRAINING_ERROR = 3
EVALUATION_LOST = 4  # all was trained and written, but an evaluation stood still
SET_PDEATHSIG = 1  # of prctl
WEIGHTS = "weights"  # file of the run directory with the path of the weights directory

log = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """The run cannot usefully go on, however often it is started again; says why."""


@dataclass(frozen=True, kw_only=True)
class RoleArgs:
    """What a process is told on its command line; WELCOME and the run directory have the rest.

    `run_dir` of an actor that joined by hand is its working directory.
    """

    address: str
    name: str
    incarnation: int
    run_dir: Path
    parent_pid: int | None = None
    keys: Path | None = None
    rank: int = 0  # of a learner of several ranks, which find each other at the file `meeting`
    meeting: Path | None = None


def resolve(entry_point: str) -> Callable[..., Any]:
    """The function behind a role's name or behind `module:function`."""
    module, _, function = ROLES.get(entry_point, entry_point).partition(":")
    return getattr(importlib.import_module(module), function)


def check_wings(config: Config) -> None:
    """Raises ValueError, naming the key, for what one of the wings refuses."""
    for check in CHECKS:
        resolve(check)(config)


def run_process(role: str, args: RoleArgs, log_file: Path | None) -> int:
    """Run a role's `main` as this process; errors end up in the log and give exit code 1 to 3."""
    set_up_logging(log_file, logging.ERROR)
    if args.parent_pid is not None:
        die_with(args.parent_pid)
    log.info("%s %s, incarnation %d, pid %d", role, args.name, args.incarnation, os.getpid())
    try:
        return resolve(role)(args)
    except (ConfigError, CheckpointError, JournalError) as error:
        log.error("%s", error)
        return USER_ERROR
    except TrainingError as error:
        log.error("%s", error)
        return TRAINING_ERROR
    except Exception:
        log.exception("%s failed", args.name)
        return 1


def collect_rarely() -> None:
    """Make the cyclic garbage collector of this process run seldom, after its set-up.

    Live trajectories are many small objects and part of no cycle, models are many and stay; walking
    them all again and again takes a fifth of the buffer's time and a tenth of the learner's.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} is gone")


def set_up_logging(log_file: Path | None, stderr_level: int) -> None:
    """Log to `log_file` from INFO on, and to stderr from `stderr_level` on unless it is that file.

    Without a file everything goes to stderr.
    """
    handlers: list[logging.Handler] = []
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
    if log_file is None or not os.path.samestat(os.fstat(2), os.stat(log_file)):
        stderr = logging.StreamHandler()
        stderr.setLevel(stderr_level if log_file is not None else logging.INFO)
        handlers.append(stderr)
    repeats = Repeats()
    for handler in handlers:
        handler.setFormatter(_Masked("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(repeats)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)


class _Masked(logging.Formatter):
    """Lines and tracebacks without the environment's secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record))


def keys_of(config: Config) -> Path | None:
    """The directory of the run's keys, where it has some."""
    return Path(config.security.keys).expanduser() if config.security.keys else None


def experience_address(config: Config, buffer_address: str) -> str:
    """Where the experience service of a run is reached, which has its buffer there; "" for none."""
    if config.experience.kind == "none":
        return ""
    return config.experience.address or f"{buffer_address}.experience"


def make_weights_dir(config: Config, run_dir: Path) -> Path:
    """A new private directory for the weights of this launch; the run directory records its path.

    Its name is random, so that no other user can make it first.
    """
    parent = Path(config.weights.dir).resolve()
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{run_dir.name}-", dir=parent))
    part = run_dir / f".{WEIGHTS}"
    part.write_text(str(made), encoding="utf-8")
    part.replace(run_dir / WEIGHTS)
    return made


def weights_dir(config: Config, run_dir: Path) -> Path:
    """The directory through which the weights of this run travel on this host, as recorded.

    Made where there is no record, as in a run without a launcher.
    """
    try:
        return Path((run_dir / WEIGHTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return make_weights_dir(config, run_dir)


def weights_address(config: Config, run_dir: Path) -> str:
    """Where the weights of this run are published, as WELCOME says it: a directory of this host, or
    tcp://host:port."""
    return config.weights.address or str(weights_dir(config, run_dir))
