"""Publishing beside the training step: a version is copied by one thread and sent by another.

end       produces            consumes           waits for                 unblocked by
step      new weights         staged versions    the copy                  the copier
copier    staged versions     weights            a publish                 `publish`
thread    visible versions    staged versions    a version that is due     `publish`, the copier
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from torch import Tensor

from evolver_async.room import await_room, lacks_room
from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import Layout
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.channel.weight_source import WeightSource, source_of

S = TypeVar("S", bound=WeightSnapshot)


class StagedPublisher(Generic[S]):
    """Base of publishers with a thread; subclasses define its work and make its buffers.

    A version that is overtaken before its turn, and is neither among the newest `keep` nor
    retained, is never sent. Errors of the thread are raised by the next call.
    """

    def __init__(self, address: str, keep: int, threads: int) -> None:
        self.address = address
        self.keep = keep
        self._threads = threads
        self._retained: set[WeightId] = set()
        self._waiting: list[tuple[WeightId, S]] = []
        self._spare: list[S] = []  # one at most
        self._busy = False  # True while a version has left `_waiting` and is not visible yet
        self._copier = ThreadPoolExecutor(1, "copy") if threads > 1 else None
        self._newest: S | None = None  # the version that is perhaps still copied
        self._error: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self.heed(lambda: False, lambda _: None)

    def heed(
        self,
        stops: Callable[[], bool],
        tell: Callable[[str], object],
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._stops, self._tell, self._warn = stops, tell, warn

    def publish(
        self, weights: WeightId, tensors: dict[str, Tensor] | WeightSource, retain: bool = False
    ) -> None:
        source = source_of(tensors)
        self.copied()
        with self._changed:
            self._raise_error()
            spare = self._spare.pop() if self._spare else None
        if spare is not None and not spare.claim(source.layout):
            spare.discard()
            spare = None
        try:
            snapshot = spare
            if snapshot is None:
                snapshot = await_room(
                    lambda: self._buffer(source.layout),
                    f"{self.address}: a version of the weights",
                    stops=self._stops,
                    tell=self._tell,
                )
        except OSError as error:
            if lacks_room(error):
                raise
            self._fail(error)
            self._raise_error()
            raise
        # The copy overlaps with the next step. The learner waits for the rest of it in `copied`,
        # before its first update changes the tensors.
        snapshot.stage(weights, source, self._threads, self._copier)
        self._newest = snapshot
        with self._changed:
            if retain:
                self._retained.add(weights)
            self._waiting.append((weights, snapshot))
            newest = {name for name, _ in self._waiting[-self.keep :]}
            for entry in self._waiting[:]:
                if entry[0] not in newest | self._retained:
                    self._waiting.remove(entry)
                    self._give_back(entry[1])
            self._changed.notify_all()

    def copied(self) -> None:
        """Return once the published tensors are copied: they may change then."""
        if self._newest is not None:
            self._newest.finish_copies()
            self._newest = None

    def wait(self) -> None:
        """Return once every published version is visible to receivers."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._waiting or self._busy))
            self._raise_error()

    def _buffer(self, layout: Layout) -> S:
        """Make a buffer for such a version."""
        raise NotImplementedError

    def _give_back(self, snapshot: S) -> None:
        """Keep a buffer for the next version, and no other one."""
        for other in self._spare:
            other.discard()
        self._spare = [snapshot]

    def _end(self) -> None:
        """Drop the waiting versions and end the threads."""
        if self._copier is not None:
            self._copier.shutdown()
        with self._changed:
            self._closed = True
            for _, snapshot in self._waiting:
                snapshot.discard()
            self._waiting.clear()
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise OSError(
                f"cannot publish weights to {self.address}: {self._error}"
            ) from self._error
