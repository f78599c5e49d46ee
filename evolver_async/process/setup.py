"""Set-up of a process: arguments, logging, open files, proxies, death with the parent."""

import ctypes
import logging
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import getproxies_environment

from evolver_async.config.secrets import mask
from evolver_async.durations import utc
from evolver_async.errors import (
    DISK_FAILED,
    DISK_FULL,
    TRAINING_ERROR,
    USER_ERROR,
    TrainingError,
    Unrecoverable,
)
from evolver_async.process.logs import RepeatFilter
from evolver_async.room import fails_to_sync, lacks_room
from evolver_async.terminal import harmless, say

SET_PDEATHSIG = 1  # of prctl
LOOPBACK = ("localhost", "127.0.0.1")
MOST_FILES = 1 << 16  # enough for all names; a program may try all numbers up to its limit
LOG_BYTES = 64 << 20  # of a log, and of the copy of what it held before
INCARNATIONS = 1000  # of one process in one launch; those of the next launch are higher

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoleArgs:
    """Arguments of a process on its command line; WELCOME and the run directory hold the rest.

    The `run_dir` of an actor that was started by hand is its working directory.
    """

    address: str
    name: str
    incarnation: int
    run_dir: Path
    parent_pid: int | None = None
    keys: Path | None = None
    rank: int = 0  # of a learner of several ranks, which find each other by the file `meeting`
    meeting: Path | None = None


Main = Callable[[RoleArgs], int]  # returns the exit code


def run_process(
    role: str, load_main: Callable[[], Main], args: RoleArgs, log_file: Path | None
) -> int:
    """Run a role's main function, which `load_main` imports, as this process.

    Errors are logged and give an exit code from 1 to 3. So does a `sys.exit` in a user's code: its
    code 0 would mean that the work is done.
    """
    set_up_logging(log_file, logging.ERROR)
    if args.parent_pid is not None:
        die_with(args.parent_pid)
    prepare_process()
    log.info("%s %s, incarnation %d, pid %d", role, args.name, args.incarnation, os.getpid())
    try:
        return load_main()(args)
    except (Unrecoverable, TrainingError) as error:
        log.error("%s", error)
        return USER_ERROR if isinstance(error, Unrecoverable) else TRAINING_ERROR
    except Exception as error:
        if lacks_room(error):
            log.error("%s cannot write: %s", args.name, error)
            return DISK_FULL
        log.exception("%s failed", args.name)
        return DISK_FAILED if fails_to_sync(error) else 1
    except SystemExit as stop:
        log.exception("%s was ended by sys.exit(%r)", args.name, stop.code)
        return 1


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"the parent process {parent_pid} has ended")


def prepare_process() -> None:
    """Prepare a process that serves others or plays episodes: its open files and its proxies."""
    raise_file_limit()
    except_loopback()


def except_loopback() -> None:
    """Exclude this host from the proxies of the environment.

    Agents call the endpoint of their actor by HTTP, which no proxy can reach.
    """
    proxies = getproxies_environment()
    listed = proxies.pop("no", "")
    if not proxies or listed.strip() == "*":
        return
    names = [name for name in map(str.strip, listed.split(",")) if name]
    text = ",".join(dict.fromkeys([*names, *LOOPBACK]))
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = text


def raise_file_limit() -> None:
    """Raise this process's limit of open files, as far as is allowed and up to `MOST_FILES`.

    Beyond the limit libzmq accepts no connection, tries again without a pause, and says nothing. An
    actor needs files for the agents that it plays, a launcher for those that scrape it.
    """
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The hard limit can be 2**30 in a container. Programs that close every possible descriptor
    # before they start would stand still.
    wanted = max(least, min(most, MOST_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def set_up_logging(log_file: Path | None, stderr_level: int) -> None:
    """Log to `log_file` from INFO on, and to stderr from `stderr_level` on unless that is the file.

    Without a file all records go to stderr.
    """
    handlers: list[logging.Handler] = []
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(LogFile(log_file))
    if log_file is None or not os.path.samestat(os.fstat(2), os.stat(log_file)):
        stderr = logging.StreamHandler()
        stderr.setLevel(stderr_level if log_file is not None else logging.INFO)
        handlers.append(stderr)
    repeats = RepeatFilter()
    for handler in handlers:
        handler.setFormatter(_Masked("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(repeats)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)


class LogFile(logging.FileHandler):
    """Log file that can lie on a full disk: its lines wait, and stderr has one line about it.

    From `limit_bytes` on it begins anew, and a copy with `.1` behind its name has what it held. It
    is emptied and not renamed: the stderr of its process appends to it as well.
    """

    _failed = _warned = False

    def __init__(self, path: Path, *, limit_bytes: int = LOG_BYTES) -> None:
        super().__init__(path, encoding="utf-8")
        self._step = self._limit = limit_bytes

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)
        self._warned = self._failed
        with suppress(OSError):  # a full disk, or the file is gone
            if (size := os.stat(self.baseFilename).st_size) > self._limit:
                self._begin_anew(size)

    def _begin_anew(self, size: int) -> None:
        self._limit = size + self._step  # unless there is room for the copy
        shutil.copyfile(self.baseFilename, f"{self.baseFilename}.1")
        os.truncate(self.baseFilename, 0)
        self._limit = self._step

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._failed = True
        if not self._warned:
            with suppress(OSError):
                say(f"{self.baseFilename}: cannot be written: {error.strerror}", file=sys.stderr)


class _Masked(logging.Formatter):
    """Formatter that masks the environment's secrets and makes control characters harmless, in
    lines and tracebacks; times are in UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return utc(record.created)

    def format(self, record: logging.LogRecord) -> str:
        return harmless(mask(super().format(record)))
