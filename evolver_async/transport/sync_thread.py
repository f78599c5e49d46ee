"""Thread that syncs a commit while the server receives the next one."""

import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Self

from evolver_async.errors import Inconsistency

JOIN_S = 60.0  # a sync that lasts longer is left alone at the end


class SyncThread:
    """Runs one call at a time. `fileno` is readable once a call has returned, until `finish`."""

    def __init__(self) -> None:
        self.busy = False  # from `start` to `finish`
        self.returned = False
        self._error: BaseException | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            os.close(self._reading)
            os.close(self._writing)

    def fileno(self) -> int:
        return self._reading

    def start(self, call: Callable[[], None]) -> None:
        if self.busy:
            raise Inconsistency("one sync at a time")
        self.busy, self.returned = True, False
        self._calls.put(call)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the call has returned, or for so long."""
        select.select([self._reading], [], [], timeout_s)

    def finish(self) -> None:
        """End a call that has returned. Raises its error."""
        os.read(self._reading, 1)
        self.busy = False
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._error = error
            self.returned = True
            os.write(self._writing, b"\0")
