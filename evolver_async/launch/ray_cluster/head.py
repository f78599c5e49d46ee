"""View of a Ray cluster's nodes, and with it of the head's service (GCS), that blocks no launcher.

Calls that ask this service return when it answers. After `GIVES_UP_S` without an answer Ray ends
the process that asked, and all nodes. Therefore a thread asks, and the launcher reads the answers.
Orders to processes that run pass from their node to the launcher without it.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass

import ray  # pyright: ignore[reportMissingImports]
from ray._private.state import state  # pyright: ignore[reportMissingImports]

LOOK_S = 1.0  # between two questions
ANSWER_S = 5.0  # for an answer that the launcher needs
LATE_S = 5.0  # from which on the service is silent
STANDSTILL_S = 10.0  # between two looks at the answers, past which the launcher stood still
RECONNECT = "gcs_rpc_server_reconnect_timeout_s"  # Ray's setting, and its default
GIVES_UP_S = float(os.environ.get(f"RAY_{RECONNECT}", "60"))
PATIENCE_S = GIVES_UP_S / 3  # until a run is ended: it saves in the rest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeView:
    """Ids of the nodes of a cluster: those that live, and those of them that are drained."""

    living: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    asked: float = 0.0  # time of the question


def _ask() -> NodeView:
    asked = time.monotonic()
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    # Ray's own libraries ask here for nodes that their cloud takes back
    return NodeView(frozenset(living), frozenset(state.get_draining_nodes()), asked)


class HeadService:
    """The service of the head at `address`, asked by a thread of this object until `close`."""

    def __init__(self, address: str = "") -> None:
        self.address = address
        self.view = NodeView()
        self._since = self._looked = time.monotonic()  # when silence can have begun; last look
        self._answers = threading.Condition()
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ray-head")
        self._thread.start()

    def _run(self) -> None:
        problem = ""
        while not self._closed.is_set():
            self._wanted.clear()
            try:
                view = _ask()
            except Exception as error:  # Ray raises no class of its own; it can be the next time
                if problem != (problem := str(error)):
                    log.warning("the nodes of the Ray cluster are unknown: %s", error)
            else:
                with self._answers:
                    self.view = view
                    self._answers.notify_all()
            self._wanted.wait(LOOK_S)

    def now(self, within_s: float = ANSWER_S) -> NodeView | None:
        """Return a view of the nodes from now on, None if the service does not answer in time."""
        called = time.monotonic()
        self._wanted.set()
        with self._answers:
            answered = self._answers.wait_for(lambda: self.view.asked >= called, within_s)
        return self.view if answered else None

    def silent_s(self) -> float:
        """Return the seconds since the service answered last, 0 while it is not late."""
        now = time.monotonic()
        if now - self._looked > STANDSTILL_S:  # this process stood still, and its thread, too
            self._since = now
        self._looked = now
        silent_s = now - max(self._since, self.view.asked)
        return silent_s if silent_s > LATE_S else 0.0

    def close(self, wait_s: float = LATE_S) -> None:
        """End the thread; one that waits for an answer is left alone after `wait_s`."""
        self._closed.set()
        self._wanted.set()
        self._thread.join(wait_s)
