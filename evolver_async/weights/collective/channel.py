"""Weights over the network: broadcast by gloo or NCCL to receivers that come and go.

The learner's end has a thread that sends the staged versions, each receiver has one that receives
them; `sender` describes their protocol. So a publish overlaps with the next step, and a silent or
dead actor holds up the thread for at most `deadline_s` and a roll call, the step never. Versions of
a receiver are whole and verified; a failed cast and a rebuilt group leave them unchanged. The bytes
are neither encrypted nor authenticated.
"""

import logging
import os
import socket
import threading
import time
from pathlib import Path

from torch import Tensor

from evolver_async.process.private_directories import claim
from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import Layout
from evolver_async.weights.channel.checksums import usual_threads
from evolver_async.weights.channel.publisher import StagedPublisher
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.collective.event_log import ServedStore, connect
from evolver_async.weights.collective.process_group import first_line, sweep
from evolver_async.weights.collective.receiver import BroadcastReceiver
from evolver_async.weights.collective.sender import BroadcastSender
from evolver_async.weights.collective.versions import ReceivedVersions

JOIN_POLL_S = 0.1  # until an idle learner notices a new receiver
RETRY_S = 0.2  # between attempts to reach the learner

log = logging.getLogger(__name__)


class CollectivePublisher(StagedPublisher[WeightSnapshot]):
    """Publisher to the receivers that have joined at `address`.

    `address`: tcp://host:port, or a private directory with the address of a store on this host.
    Keeps the newest `keep` versions and the retained ones for late joiners. `device`: a GPU for
    NCCL, which needs a GPU of its own for every member.
    """

    def __init__(
        self,
        address: str,
        keep: int = 2,
        *,
        deadline_s: float = 30.0,
        bucket_bytes: int = 64 << 20,
        device: str = "",
    ) -> None:
        assert keep >= 1
        self._claim = None if address.startswith("tcp://") else claim(Path(address))
        super().__init__(address, keep, usual_threads())
        self._pinned = bool(device)
        self._held: dict[WeightId, WeightSnapshot] = {}  # in the order of publishing
        self._sender = BroadcastSender(
            ServedStore(address, deadline_s),
            deadline_s=deadline_s,
            bucket_bytes=bucket_bytes,
            device=device,
            closing=lambda: self._closed,
            warn=lambda text: self._warn(text),
        )
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
        self._thread.start()

    @property
    def casts(self) -> int:
        """Number of casts so far, repetitions included."""
        return self._sender.casts

    def release(self, weights: WeightId) -> None:
        with self._changed:
            self._retained.discard(weights)

    def close(self) -> None:
        self._end()
        self._thread.join()
        self._sender.close()
        if self._claim is not None:
            self._claim.release()

    def _buffer(self, layout: Layout) -> WeightSnapshot:
        return WeightSnapshot(pinned=self._pinned, summed=False)

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed, JOIN_POLL_S)
                    if self._closed:
                        return
                    self._take()
                asked = self._sender.requested()
                late = self._sender.due() or self._sender.newcomers()
                head = next(reversed(self._held), None)
                due = [one for one in self._held if one in asked or (self._busy and one == head)]
                if head is not None and (due or late):
                    self._sender.send(dict(self._held), head, due)
                sweep()
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        except Exception as error:
            self._fail(error)

    def _take(self) -> None:
        """Hold the version that has waited longest; drop versions that no receiver needs."""
        if not self._waiting:
            return
        weights, snapshot = self._waiting.pop(0)
        self._busy = True
        dropped = [self._held.pop(weights)] if weights in self._held else []
        self._held[weights] = snapshot
        kept = {*list(self._held)[-self.keep :], *self._retained}
        dropped += [self._held.pop(other) for other in [*self._held] if other not in kept]
        for other in dropped:
            self._give_back(other)


class CollectiveReceiver:
    """Receiver of a CollectivePublisher at `address`, and of its successors, by a thread.

    `keep`: number of newest versions that the engine may fetch; those before them come on request.
    `name`: the name of this receiver in the learner's log. `device`: a GPU for NCCL.
    """

    def __init__(
        self,
        address: str,
        keep: int = 2,
        *,
        deadline_s: float = 30.0,
        device: str = "",
        name: str = "",
    ) -> None:
        self.address = address
        self._deadline_s = deadline_s
        self._device = device
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._versions = ReceivedVersions(keep, bool(device), deadline_s)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    def head(self) -> WeightId | None:
        return self._versions.head

    def available(self) -> list[WeightId]:
        return self._versions.available()

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        return self._versions.fetch(weights)

    def close(self) -> None:
        self._closed = True
        self._versions.close()
        self._thread.join(timeout=1.0)  # building a group may take longer

    def _work(self) -> None:
        problem = ""
        while not self._closed:
            try:
                self._follow()
                problem = ""
            except (OSError, RuntimeError) as error:  # the learner is gone, or has not started
                if problem != (problem := first_line(error)):
                    log.warning("weights at %s: %s; trying again", self.address, problem)
            except Exception:
                log.exception("the weights at %s cannot be followed", self.address)
            time.sleep(RETRY_S)

    def _follow(self) -> None:
        store, host = connect(self.address, self._deadline_s)
        receiver = BroadcastReceiver(
            self._versions,
            store,
            host=host,
            name=self._name,
            deadline_s=self._deadline_s,
            device=self._device,
            closing=lambda: self._closed,
        )
        log.info("joined the weights at %s", self.address)
        try:
            receiver.run()
        finally:
            receiver.leave()
