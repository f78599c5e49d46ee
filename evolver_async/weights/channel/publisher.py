"""Publishing beside the training step: a version is copied at once and sent by a thread.

end       produces            consumes           waits for                 unblocked by
step      staged versions     named tensors      the copy                  itself
thread    visible versions    staged versions    a version that is due     `publish`
"""

import threading

from torch import Tensor

from evolver_async.schema import WeightId
from evolver_async.weights.channel.snapshot import WeightSnapshot


class StagedPublisher:
    """Base of publishers with a thread; subclasses define its work.

    A version that is overtaken before its turn, and is neither among the newest `keep` nor
    retained, is never sent. Errors of the thread are raised by the next call.
    """

    def __init__(self, address: str, keep: int) -> None:
        self.address = address
        self.keep = keep
        self._retained: set[WeightId] = set()
        self._waiting: list[tuple[WeightId, WeightSnapshot]] = []
        self._spare: list[WeightSnapshot] = []
        self._busy = False  # True while a version has left `_waiting` and is not visible yet
        self._error: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()

    def publish(self, weights: WeightId, tensors: dict[str, Tensor], retain: bool = False) -> None:
        with self._changed:
            self._raise_error()
            snapshot = self._spare.pop() if self._spare else WeightSnapshot()
        snapshot.stage(weights, tensors)
        with self._changed:
            if retain:
                self._retained.add(weights)
            self._waiting.append((weights, snapshot))
            newest = {name for name, _ in self._waiting[-self.keep :]}
            for entry in self._waiting[:]:
                if entry[0] not in newest | self._retained:
                    self._waiting.remove(entry)
                    self._spare = [entry[1]]
            self._changed.notify_all()

    def wait(self) -> None:
        """Return once every published version is visible to receivers."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._waiting or self._busy))
            self._raise_error()

    def _end(self) -> None:
        """Drop the waiting versions and end the thread."""
        with self._changed:
            self._closed = True
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
