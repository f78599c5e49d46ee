"""Processes of this project that begin as forks of this one, which has imported torch already.

A process that begins with an exec takes 6 seconds of a core to import torch and transformers, more
than most tests take otherwise. A fork has a pid, a session, signals, sockets and an end like it.
What it has not are the interpreter's options and its environment and command line in /proc:
Tests that are about these take `subprocess.Popen`, and so do all with `TEST_EXEC=1`.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

import pytest

from evolver_async.launch.registry import CHECKS, LAUNCHERS, PROCESSES

COMMAND = [sys.executable, "-m", "evolver_async"]
ROLE = "@"  # before the name of a role, which is that of its process
SET_NAME = 15  # of prctl
PROGRAMS = ("evolver_async", "evolver_async.cli")  # one and the same
NAMES = list(inspect.signature(subprocess.Popen._execute_child).parameters)[2:]  # type: ignore[attr-defined]


class Forked(subprocess.Popen):
    """Popen whose process is a fork, if its command is this project's; so are its own children."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        ours = isinstance(args, list) and args[0] == sys.executable and args[1] == "-m"
        if not ours or args[2] not in PROGRAMS or os.environ.get("TEST_EXEC"):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        given = dict(zip(NAMES, rest, strict=True))
        sys.audit("subprocess.Popen", args[0], args, given["cwd"], given["env"])
        for entry_point in (*PROCESSES.values(), *CHECKS, LAUNCHERS["local"]):
            importlib.import_module(entry_point.partition(":")[0])
        self.pid = os.fork()
        if self.pid == 0:
            _become([str(one) for one in args[3:]], given)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the product's own commands start their processes as forks of this one."""
    monkeypatch.setattr(subprocess, "Popen", Forked)


def _become(arguments: list[str], given: dict[str, Any]) -> None:
    """Be the process of this command from here on, and end with it."""
    code = 1
    try:
        _leave_parent(arguments, given)
        from evolver_async.cli import main

        sys.argv = ["evolver-async", *arguments]
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        os.write(2, traceback.format_exc().encode())  # sys.stderr can be another one
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _leave_parent(arguments: list[str], given: dict[str, Any]) -> None:
    """Give up what a new program would not have of its parent."""
    gc.freeze()  # a finalizer of the parent's objects is not this process's
    gc.enable()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if given["start_new_session"]:
        os.setsid()
    for number, end in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if given[end] >= 0:
            os.dup2(given[end], number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(
        int, os.listdir("/proc/self/fd")
    ):  # closed ones would be taken for new files of the same number
        if number > 2 and number != nothing:
            os.dup2(nothing, number, inheritable=False)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["env"] is not None:
        os.environ.clear()
        os.environ.update(given["env"])
    sys.modules["__main__"] = ModuleType("__main__")
    if "--connect" in arguments:  # as nothing of the command line is to be seen
        title = ROLE + arguments[arguments.index("--name") + 1]
        ctypes.CDLL(None).prctl(SET_NAME, title.encode(), 0, 0, 0)
    subprocess.Popen = Forked  # type: ignore[misc]
