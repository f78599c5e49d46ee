"""Pool of confined interpreters: every program runs in the next free one.

Threads may call it at once; each waits at most WAIT_S for an interpreter. One that died, or that a
program left unclean, is replaced when it is next needed.
"""

import atexit
import functools
import os
import queue
import shutil
import threading
from typing import get_args

from actors.sandbox import process
from actors.sandbox.process import (
    InterpreterConfig,
    Result,
    Route,
    SandboxLimits,
    SandboxUnavailable,
)

USUAL, PLAIN = SandboxLimits(), InterpreterConfig()
KILLED = "the confined interpreter was ended"
WAIT_S = 10.0  # of a program for an interpreter; its sum with wall_s is to fit a step timeout


class SandboxPool:
    """Pool of `size` interpreters, started when first needed.

    `route`: how programs are confined; empty for the first that works: with root's rights,
    bubblewrap where it is installed, namespaces for ordinary users.
    """

    def __init__(
        self,
        limits: SandboxLimits = USUAL,
        *,
        size: int = 2,
        route: Route | None = None,
        interior: InterpreterConfig = PLAIN,
    ) -> None:
        if size < 1:
            raise ValueError(f"size: {size} is less than 1")
        self.limits = limits
        self._interior = interior
        self._routes: list[Route] = [route] if route else routes()
        self._free: queue.LifoQueue[process.ConfinedInterpreter | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)
        self._size = size
        self._whole = threading.Lock()  # held by a call that takes all interpreters

    def run(self, source: str) -> Result:
        """Run a program; SandboxUnavailable if programs cannot be confined here."""
        if len(source.encode(errors="replace")) > self.limits.source_bytes:
            return Result("", f"longer than {self.limits.source_bytes} bytes", "error", 0.0)
        try:
            cell = self._free.get(timeout=WAIT_S)
        except queue.Empty:
            return Result("", f"no interpreter was free within {WAIT_S:g} s", "busy", WAIT_S)
        clean = False
        try:
            if cell is not None and not cell.alive():
                cell.kill()
                cell = None
            if cell is None:
                cell = self._start()
            result, clean = cell.run(source)
        except process.InterpreterDied as death:
            status = "timeout" if isinstance(death, process.InterpreterTimeout) else "killed"
            result = Result("", KILLED, status, self.limits.wall_s)
        finally:
            if cell is not None and not clean:
                cell.kill()
            self._free.put(cell if clean else None)
        return result

    def start(self) -> Route:
        """Start every interpreter; return the route that works. SandboxUnavailable: none does."""
        with self._whole:
            cells = [self._free.get() for _ in range(self._size)]
            try:
                for place, cell in enumerate(cells):
                    cells[place] = cell or self._start()
            finally:
                for cell in cells:
                    self._free.put(cell)
        return self._routes[0]

    def close(self) -> None:
        """End all interpreters, each when its program has ended."""
        with self._whole:
            cells = [self._free.get() for _ in range(self._size)]
            for cell in cells:
                if cell is not None:
                    cell.kill()
                self._free.put(None)

    def _start(self) -> process.ConfinedInterpreter:
        refusals = []
        for route in self._routes:
            try:
                cell = process.ConfinedInterpreter(route, self.limits, self._interior)
            except SandboxUnavailable as refusal:
                refusals.append(f"{WAYS[route]}: {refusal}")
            else:
                self._routes = [route]
                return cell
        raise SandboxUnavailable(
            f"programs cannot be confined here; {'; '.join(refusals)}; needed is root with"
            " CAP_SYS_ADMIN, bubblewrap, or user namespaces (sysctl user.max_user_namespaces,"
            " kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
        )


WAYS: dict[Route, str] = {
    "root": "namespaces made by root",
    "bwrap": "bubblewrap",
    "user": "namespaces of an ordinary user",
}
assert set(WAYS) == set(get_args(Route))


def routes() -> list[Route]:
    """Return the routes worth trying here, best first."""
    found: list[Route] = ["root"] if os.geteuid() == 0 else []
    if shutil.which("bwrap"):
        found.append("bwrap")
    return [*found, "user"]


_sharing = threading.Lock()


def check_confined(who: str, interior: InterpreterConfig, limits: SandboxLimits = USUAL) -> None:
    """Raise ValueError, beginning with `who`, if programs cannot be confined on this machine."""
    pool = SandboxPool(limits, size=1, interior=interior)
    try:
        pool.start()
    except SandboxUnavailable as refusal:
        raise ValueError(f"{who} needs a sandbox: {refusal}") from None
    finally:
        pool.close()


def shared(limits: SandboxLimits, size: int, interior: InterpreterConfig) -> SandboxPool:
    """Return the process's own pool of these limits, closed when it ends."""
    with _sharing:
        return _pool(limits, size, interior)


@functools.cache
def _pool(limits: SandboxLimits, size: int, interior: InterpreterConfig) -> SandboxPool:
    pool = SandboxPool(limits, size=size, interior=interior)
    atexit.register(pool.close)
    return pool
