"""Pool of processes that call the functions of reward terms, each killed at its deadline.

Calls block, so the caller makes them in threads.
"""

import queue
from typing import Any

from actors.child_process import ChildProcess
from actors.rewards.facts import Unscorable

START_S = 110.0  # for a process to start and to import a function: less than buffer.stall_s
LARGEST_REPLY = 1 << 20  # bytes


class WorkerPool:
    """Pool of `size` processes, each started when it is first needed, or again after its death."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: queue.LifoQueue[_ScoringProcess | None] = queue.LifoQueue()
        self._living: set[_ScoringProcess] = set()
        for _ in range(size):
            self._free.put(None)

    def call(
        self, path: str, arguments: dict[str, Any], made: dict[str, int], timeout_s: float
    ) -> tuple[Any, dict[str, float]]:
        """Return a function's result and the metrics that it logged.

        `path`: module:function; `made`: see `term_process.py`. Raises Unscorable if the function
        raised, ended its process or has not returned after `timeout_s`.
        """
        worker = self._free.get()
        try:
            if worker is None:
                worker = _ScoringProcess()
                self._living.add(worker)
            worker.load(path)
            request = {"path": path, "arguments": arguments, "made": made}
            reply = worker.ask(request, timeout_s)
        except BaseException:
            if worker is not None:
                self._living.discard(worker)
                worker.kill()
            worker = None
            raise
        finally:
            self._free.put(worker)
        if "error" in reply:
            raise Unscorable(f"failed: {reply['error']}")
        return reply["value"], reply["metrics"]

    def close(self) -> None:
        """End all processes, running calls included."""
        for worker in list(self._living):
            worker.end()


class _ScoringProcess(ChildProcess):
    """One process, seen from the actor."""

    def __init__(self) -> None:
        super().__init__("actors.rewards.term_process", LARGEST_REPLY)
        self._loaded: set[str] = set()

    def load(self, path: str) -> None:
        """Import a function, which is not part of a call's time. Raises Unscorable."""
        if path not in self._loaded:
            self.ask({"path": path, "arguments": None, "made": {}}, START_S)
            self._loaded.add(path)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request; return the reply. Raises Unscorable without one in time."""
        try:
            return super().ask(request, timeout_s)
        except TimeoutError:
            raise Unscorable(f"did not return within {timeout_s:g} s") from None
        except EOFError:
            raise Unscorable("ended its process") from None
        except ValueError as error:
            raise Unscorable(str(error)) from None
