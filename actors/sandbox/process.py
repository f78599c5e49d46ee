"""One confined interpreter, seen from outside: started, asked to run programs, ended.

A program costs at most its deadline: where the interpreter itself does not answer shortly after, it
is ended with everything in it.
"""

import json
import os
import select
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from actors.sandbox.seccomp import program

Route = Literal["root", "user", "bwrap"]
Status = Literal["ok", "error", "timeout", "output", "killed", "busy"]

START_S = 20.0
GRACE_S = 1.0  # beyond a program's deadline, for the interpreter to say so
CONFINE = Path(__file__).with_name("namespaces.py")
GUEST_FILES = ("guest.py", "hardening.py")  # of this directory, shown in the root directory inside
END, STDOUT, STDERR = 0, 1, 2  # the marks of frames, as in guest.py
GUEST, PYTHON, PACKAGES = "/guest.py", "/python", "/packages"
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
VARIABLES = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
VARIABLES |= {"HOME": "/tmp", "LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": f"{PYTHON}/lib"}


class SandboxUnavailable(RuntimeError):
    """Programs cannot be confined here; the message names what is missing."""


class InterpreterDied(RuntimeError):
    """The confined interpreter ended or did not answer in time."""


class InterpreterTimeout(InterpreterDied):
    """The confined interpreter did not answer in time."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one program. All its processes together may hold `processes` times `memory_bytes`,
    and the files of `temporary_bytes`. ValueError names the value out of range."""

    wall_s: float = 2.0
    cpu_s: int = 2  # of each process
    memory_bytes: int = 256 << 20  # address space of each process
    processes: int = 4  # and threads
    temporary_bytes: int = 16 << 20  # all files, in memory
    open_files: int = 64
    output_bytes: int = 64 << 10  # of each stream
    source_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, least in (
            *(("wall_s", 0.01), ("cpu_s", 1), ("memory_bytes", 64 << 20), ("processes", 1)),
            *(("temporary_bytes", 1 << 16), ("open_files", 16), ("output_bytes", 1)),
            ("source_bytes", 1),
        ):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: {getattr(self, name)} is less than {least}")


class Result(NamedTuple):
    """Output of a program, at most `output_bytes` of each stream, its status and duration.

    `error`: it raised or exited with a code; `timeout` and `output` name the limit that it broke;
    `killed`: by a signal, that of the limit on processor time among them; `busy`: it was not run,
    as no interpreter was free.
    """

    stdout: str
    stderr: str
    status: Status
    seconds: float


@dataclass(frozen=True, kw_only=True)
class InterpreterConfig:
    """Configuration of the interpreter: modules imported before the first program, and access to
    installed packages. `python`: the interpreter, this one's by default."""

    imports: tuple[str, ...] = ()
    packages: bool = False
    python: str = ""
    bwrap: str = ""  # where bubblewrap lies, where it is not on the path

    def executable(self) -> Path:
        return Path(os.path.realpath(self.python or getattr(sys, "_base_executable", "")))

    def paths(self) -> list[list[str]]:
        """Return pairs of source and target of everything visible inside.

        Sources are free of symbolic links, which would lead elsewhere once the root is another one.
        """
        executable = self.executable()
        prefix = executable.parent.parent
        pairs = [(path, path) for path in LIBRARIES]
        pairs += [(str(executable), f"{PYTHON}/bin/python")]
        pairs += [(str(prefix / lib), f"{PYTHON}/{lib}") for lib in ("lib", "lib64")]
        if self.packages:
            pairs.append((sysconfig.get_path("purelib"), PACKAGES))
        pairs += [(str(Path(__file__).with_name(name)), f"/{name}") for name in GUEST_FILES]
        return [
            [os.path.realpath(source), target] for source, target in pairs if os.path.exists(source)
        ]


class ConfinedInterpreter:
    """Confined interpreter. SandboxUnavailable if this route does not work."""

    def __init__(self, route: Route, limits: SandboxLimits, interior: InterpreterConfig) -> None:
        self.limits = limits
        python = str(interior.executable())
        spec = {
            "route": route,
            "bwrap": interior.bwrap or shutil.which("bwrap") or "bwrap",
            "paths": interior.paths(),
            "command": [f"{PYTHON}/bin/python", "-s", "-S", "-P", "-B", "-X", "utf8", GUEST],
            "variables": VARIABLES,
            "temporary_bytes": limits.temporary_bytes,
        }
        self._process = subprocess.Popen(
            [python, "-I", "-S", str(CONFINE), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The variables of the actor can hold secrets.
            env={},
            start_new_session=True,
        )
        try:
            setup = {
                "filter": program().hex(),
                "imports": interior.imports,
                "path": [PACKAGES] * interior.packages,
            } | vars(limits)
            refused = self._ask(setup, START_S)[0]["refused"]
        except InterpreterDied as death:
            raise SandboxUnavailable(self._last_words() or str(death)) from None
        except ValueError as error:
            self.kill()
            raise SandboxUnavailable(str(error)) from None
        if refused:
            self.kill()
            raise SandboxUnavailable(refused)

    def run(self, source: str) -> tuple[Result, bool]:
        """Run a program; return also whether the interpreter is as clean as before.
        InterpreterDied: it is gone."""
        limits = self.limits
        answer, texts = self._ask({"source": source}, limits.wall_s + GRACE_S)
        stdout, stderr = (
            bytes(texts[mark][: limits.output_bytes]).decode(errors="replace")
            for mark in (STDOUT, STDERR)
        )
        result = Result(stdout, stderr, answer["status"], answer["seconds"])
        return result, answer["clean"]

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the interpreter and all its programs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _ask(
        self, message: dict[str, Any], within_s: float
    ) -> tuple[dict[str, Any], dict[int, bytearray]]:
        """Return the answer and the output before it; without an answer in time the interpreter is
        killed and InterpreterDied raised."""
        content = json.dumps(message).encode()
        deadline = time.monotonic() + within_s
        texts = {STDOUT: bytearray(), STDERR: bytearray()}
        try:
            self._send(struct.pack(">I", len(content)) + content, deadline)
            while True:
                mark, length = struct.unpack(">BI", self._receive(5, deadline))
                held = len(texts[mark]) if mark in texts else 0
                if held + length > self.limits.output_bytes + 4096:
                    raise InterpreterDied(f"the interpreter answered with {held + length} bytes")
                part = self._receive(length, deadline)
                if mark == END:
                    return json.loads(part), texts
                texts[mark] += part
        except (OSError, ValueError, KeyError, InterpreterDied) as error:
            self._process.kill()
            died = InterpreterTimeout if isinstance(error, TimeoutError) else InterpreterDied
            raise died(f"the confined interpreter: {error}") from error

    def _send(self, content: bytes, deadline: float) -> None:
        assert self._process.stdin is not None
        fd, view = self._process.stdin.fileno(), memoryview(content)
        os.set_blocking(fd, False)
        while view:
            self._wait(fd, select.POLLOUT, deadline)
            view = view[os.write(fd, view) :]

    def _receive(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd, parts = self._process.stdout.fileno(), b""
        while len(parts) < count:
            self._wait(fd, select.POLLIN, deadline)
            part = os.read(fd, count - len(parts))
            if not part:
                raise InterpreterDied("ended")
            parts += part
        return parts

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise TimeoutError("did not answer in time")

    def _last_words(self) -> str:
        """Return the last line of error output of an interpreter that died at its start."""
        _, stderr = self._process.communicate(timeout=START_S)
        return stderr.decode(errors="replace").strip().rpartition("\n")[2]
