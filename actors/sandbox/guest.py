"""Confined interpreter: it stays warm, forks for every program and cleans up after it.

Runs as process 1 of its namespace, by path and with the standard library alone; reads frames (four
bytes of length, then JSON) from its standard input, writes marked ones to its standard output, and
ends when these do. The first frame says how to harden itself; it checks what holds before it says
that it is ready. As process 1 no signal from within reaches it, and no program sees its pipes.

Every program runs in a copy of its memory, so nothing of a program ever enters it: the fork reads
the request, the kernel passes on the output, and another fork cleans up.
"""

import atexit
import gc
import importlib
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import time
import traceback
import types
from typing import Any, Literal

sys.path.insert(0, os.path.dirname(__file__))  # the option -P leaves it out
from hardening import HOME, ConfinementError, end_all, harden

del sys.path[0]

FILE = "program.py"
Status = Literal["ok", "error", "timeout", "output", "killed"]
END, STDOUT, STDERR = 0, 1, 2  # the marks of frames


def read_frame(fd: int) -> dict[str, Any]:
    """Read the next message; end the process if its input is closed."""
    (length,) = struct.unpack(">I", read_exactly(fd, 4))
    return json.loads(read_exactly(fd, length))


def read_exactly(fd: int, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = os.read(fd, count - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return parts


def write_message(fd: int, message: dict[str, Any]) -> None:
    content = json.dumps(message).encode()
    write(fd, struct.pack(">BI", END, len(content)) + content)


def write(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def free_inodes() -> int:
    """Return the inodes left of the empty HOME, 0 if its file system does not count them."""
    path, free = os.path.join(HOME, "counted"), os.statvfs(HOME).f_ffree
    with open(path, "w"):
        counted = os.statvfs(HOME).f_ffree == free - 1
    os.unlink(path)
    return free if counted else 0


class Relay:
    """Relay of a program's output, at most `most` + 1 bytes of each stream.

    The bytes go from pipe to pipe within the kernel. `between` is an empty pipe that lets a frame's
    length be known before the frame is written.
    """

    def __init__(self, marks: dict[int, int], most: int, between: tuple[int, int], answers: int):
        self.marks = marks
        self.most = most
        self.passed = dict.fromkeys(marks, 0)
        self._taken, self._given = between
        self._answers = answers

    def pass_on(self, fd: int) -> int:
        """Pass on available output, at least one byte; return the number of bytes, 0 at the end."""
        room = self.most + 1 - self.passed[fd]
        count = left = os.splice(fd, self._given, room) if room else 0
        if count:
            write(self._answers, struct.pack(">BI", self.marks[fd], count))
        while left:
            left -= os.splice(self._taken, self._answers, left)
        self.passed[fd] += count
        return count

    def overflows(self) -> bool:
        return max(self.passed.values()) > self.most


def run(setup: dict[str, Any], control: int, answers: int, between: tuple[int, int]) -> None:
    """Fork for the waiting request, let the program run until it ends or breaks a limit, end all of
    its processes."""
    began = time.monotonic()
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    begun, begun_end = os.pipe()
    child = os.fork()
    if child == 0:
        play(setup, control, (out_end, err_end), begun_end, max(control, answers, *between))
    for fd in (out_end, err_end, begun_end):
        os.close(fd)
    relay = Relay({out: STDOUT, err: STDERR}, setup["output_bytes"], between, answers)
    status = watch(child, relay, began + setup["wall_s"], control)
    exits = end_all()
    for fd in (out, err):  # no writer is left, so this ends
        while relay.pass_on(fd):
            pass
        os.close(fd)
    if not os.read(begun, 1):
        os._exit(0)  # what is left of its request would pass for the next one
    os.close(begun)
    if status is None and relay.overflows():
        status = "output"
    if status is None:
        code = os.waitstatus_to_exitcode(exits[child])
        status = "killed" if code < 0 else "error" if code else "ok"
    seconds = time.monotonic() - began
    clean = cleared(setup["free"])
    write_message(answers, {"status": status, "seconds": seconds, "clean": clean})


def watch(child: int, relay: Relay, deadline: float, control: int) -> Status | None:
    """Relay output until the program has ended (None) or has broken the returned limit."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    for fd in (ended, *relay.marks):
        poll.register(fd, select.POLLIN)
    poll.register(control, 0)  # its end alone: the child is still reading from it
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for fd, _ in poll.poll(1000 * left + 1):
                if fd == control:
                    os._exit(0)
                if fd == ended:
                    return None
                if not relay.pass_on(fd):
                    poll.unregister(fd)
                if relay.overflows():
                    return "output"
    finally:
        os.close(ended)


def cleared(free: int) -> bool:
    """Clean up in a fork, which alone reads the names of a program's files; False on failure.

    `free`: the inodes left where there are no files, 0 if the file system does not count them.
    """
    if free and os.statvfs(HOME).f_ffree == free:
        restore_home()
        return True
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if clear() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def restore_home() -> None:
    """Reset the mode and the times of HOME, which can be empty but changed."""
    os.chmod(HOME, 0o700)
    os.utime(HOME, (0, 0))


def clear() -> bool:
    """Empty HOME, the only writable place; False on failure."""
    try:
        os.chmod(HOME, 0o700)
        with os.scandir(HOME) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        restore_home()
    except (OSError, RecursionError):
        return False
    return True


def play(
    setup: dict[str, Any], control: int, outputs: tuple[int, int], begun: int, highest: int
) -> None:
    """Read the request in the fork, note in `begun` that it is read, and become its program. Never
    returns."""
    code = 1
    try:
        os.setsid()
        source = read_frame(control)["source"]
        os.write(begun, b"1")
        for number, fd in enumerate(outputs, start=1):
            os.dup2(fd, number)
        os.closerange(3, max(highest, begun, *outputs, 64) + 1)
        cpu = setup["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"],) * 2)
        random.seed(0)  # the same program says the same
        code = max(execute(source), conclude())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def execute(source: str) -> int:
    """Run the text as `__main__`; return its exit code. An exception is printed as Python does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(source, FILE, "exec"), module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        return 1
    return 0


def conclude() -> int:
    """Wait for the program's threads and call its exit handlers, as Python does at its end."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        return 1
    return 0


def main() -> None:
    """Harden, report readiness, then run program after program."""
    control, answers = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not get from within
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    setup = read_frame(control)
    sys.path += setup["path"]
    try:
        for name in setup["imports"]:
            importlib.import_module(name)
        harden(setup)
    except (ConfinementError, ImportError, OSError) as error:
        write_message(answers, {"refused": f"{type(error).__name__}: {error}"})
        return
    between = os.pipe()
    setup["free"] = free_inodes()
    restore_home()
    # Programs run in forks that share this memory. A collection in one would write to it, and so
    # copy it.
    gc.freeze()
    write_message(answers, {"refused": ""})
    requests = select.poll()
    requests.register(control, select.POLLIN)
    while any(event & select.POLLIN for _, event in requests.poll()):
        run(setup, control, answers, between)


if __name__ == "__main__":
    main()
