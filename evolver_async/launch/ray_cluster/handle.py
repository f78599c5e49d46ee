"""Handle of a process that a Ray actor runs, as the supervisor polls it."""

import logging
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    ActorUnavailableError,
    RayActorError,
    RayError,
    RayTaskError,
)

from evolver_async.durations import utc
from evolver_async.launch.ray_cluster.head import HeadService
from evolver_async.launch.ray_cluster.ray_host import Order

POLL_S = 0.05
PATIENCE_S = 10.0  # for a place in the cluster, until it is asked what is waited for

log = logging.getLogger(__name__)


class RayHandle:
    """A process of a run and its Ray actor. Nothing here waits, except `wait`.

    `home` is the node that it must run on, "" for any; `node` the one it was placed on. `wants`
    describes the resources that it waits for while Ray has not placed it.
    """

    def __init__(
        self,
        name: str,
        host: Any,
        order: Order,
        wants: str,
        log_file: Path,
        head: HeadService,
        home: str = "",
    ) -> None:
        self.name = name
        self.host = host
        self.wants = wants
        self.log_file = log_file
        self.head = head
        self.home = home
        self.pid = 0
        self.node = ""
        self.warned = False
        self._asks_at = time.monotonic() + PATIENCE_S
        self._offset = 0
        self._code: int | None = None
        self._placed = False
        self._reply = host.start.remote(order)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs or waits for its place."""
        while self._code is None and ray.wait([self._reply], timeout=0)[0]:
            try:
                self._take(ray.get(self._reply))
            except ActorUnavailableError:
                if self._placed:
                    self._reply = self.host.watch.remote(self._offset)
                    break
                self._note("its Ray actor could not be reached at its start")
                self._end(-signal.SIGKILL)  # it may run, and a second order would start another
            except RayActorError as error:
                self._note(f"its Ray actor is lost: {' '.join(str(error).split())}")
                self._code = -signal.SIGKILL
            except RayError as error:  # of its host, of runtime_env, or no node may have it
                cause = error.cause if isinstance(error, RayTaskError) else error
                what = "watch" if self._placed else "start"
                self._note(f"its node cannot {what} it: {' '.join(str(cause).split())}")
                self._end(1)  # it may still run, and another will be started
        if self._code is None and not self._placed and time.monotonic() > self._asks_at:
            self._asks_at = time.monotonic() + PATIENCE_S
            self._ask_for_place()
        return self._code

    def _ask_for_place(self) -> None:
        """Log the resources that it waits for, or end if its node is gone: Ray would wait for
        ever."""
        if self.home and (view := self.head.now()) and self.home not in view.living:
            self._note(f"its node {self.home[:8]} is gone")
            self._end(-signal.SIGKILL)
        elif not self.warned:
            self.warned = True
            log.warning("%s waits for a node of the Ray cluster with %s", self.name, self.wants)

    def _take(self, reply: tuple[Any, Any]) -> None:
        """Take in what `start` or `watch` returned, and watch on."""
        if not self._placed:
            self._placed = True
            self.pid, self.node = reply
            log.info("%s runs on node %s as pid %d", self.name, self.node[:8], self.pid)
        else:
            code, lines = reply
            self._offset += len(lines)
            if lines:
                self._log(lines)
            if code is not None:
                self._end(code)
                return
        self._reply = self.host.watch.remote(self._offset)

    def terminate(self) -> None:
        """Send SIGTERM; a process without a place ends at once."""
        if self._placed:
            self.host.signal.remote(signal.SIGTERM)
        else:
            self._end(-signal.SIGTERM)

    def kill(self) -> None:
        """Kill the Ray actor; the kernel kills its process with it.

        The process is killed first, which needs no service of the head.
        """
        if self._code is None:
            if self._placed:
                self.host.signal.remote(signal.SIGKILL)
            self._end(-signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(POLL_S)
        return code

    def _end(self, code: int) -> None:
        self._code = code
        ray.kill(self.host)

    def _note(self, text: str) -> None:
        self._log(f"{utc()} ERROR {__name__}: {text}\n".encode())

    def _log(self, lines: bytes) -> None:
        with suppress(OSError), open(self.log_file, "ab") as file:  # a full disk ends no run
            file.write(lines)
