"""The weight channel's end in vLLM's workers, and what its actor is told of it. Both ends.

Every worker has a receiver of its own and a thread beside generation, which stages the versions
that the actor asks for. The thread keeps a small file of the worker's state in a directory of the
actor: versions, no weights. The actor reads all of them, and can adopt only what all workers hold.
Nothing here imports vLLM, nor transformers unless adapters are merged.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from evolver_async.model.tokenizer import ModelError
from evolver_async.schema import WeightId
from evolver_async.weights.channel.interface import Receiver, WeightsCorrupt, WeightsGone
from evolver_async.weights.ends import ReceiverSettings, receiver
from evolver_async.weights.probe import Probe, separate

POLL_S = 0.02  # interval at which a worker looks for a new head
REFRESH_S = 1.0  # interval at which it looks for versions besides the head
ERRORS = {error.__name__: error for error in (WeightsGone, WeightsCorrupt, ModelError)}

log = logging.getLogger(__name__)


class WorkerChannel(msgspec.Struct, frozen=True):
    """Values from which a worker makes its end; `states`: directory for the workers' states."""

    receiver: ReceiverSettings
    states: str
    name: str


class WorkerState(msgspec.Struct):
    """State of one worker. `request`: the last one that it has finished.

    `error`: name of the error that it ended with and its message; empty if the version is staged.
    """

    head: WeightId | None = None
    held: list[WeightId] = []
    request: int = 0
    error: tuple[str, str] = ("", "")
    probe: Probe | None = None


class StagingThread:
    """Thread of a worker that receives, verifies and stages versions while generation goes on.

    `prepare` makes the form that is adopted, of whole tensors; ModelError if they do not fit.
    """

    def __init__(
        self,
        channel: WorkerChannel,
        rank: int,
        device: str,
        prepare: Callable[[dict[str, Tensor]], Any],
    ) -> None:
        self._file = Path(channel.states) / f"{rank}"
        self._prepare = prepare
        self._receiver: Receiver = receiver(channel.receiver, device, f"{channel.name}/{rank}")
        self._requests: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._staged: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._work, name="staging", daemon=True)
        self._thread.start()

    def stage(self, request: int, weights: str) -> None:
        """Begin to stage a version; the state tells the end."""
        self._requests.put((request, weights))

    def take(self, request: int) -> Any:
        """Return what `prepare` made for a request, and forget it."""
        return self._staged.pop(request)

    def close(self) -> None:
        self._requests.put(None)
        self._thread.join(timeout=5.0)
        self._receiver.close()

    def _work(self) -> None:
        state, written, looked = WorkerState(), b"", -REFRESH_S
        while True:
            request = None
            with contextlib.suppress(queue.Empty):
                request = self._requests.get(timeout=POLL_S)
                if request is None:
                    return
            try:
                if request is not None:
                    self._stage(state, *request)
                head = self._receiver.head()
                if head != state.head or time.monotonic() > looked + REFRESH_S:
                    state.head, state.held = head, self._receiver.available()
                    looked = time.monotonic()
                if (shown := msgspec.json.encode(state)) != written:
                    part = self._file.with_name(f".{self._file.name}")
                    part.write_bytes(shown)
                    os.replace(part, self._file)
                    written = shown  # not before: what failed is to be written again
            except Exception:
                log.exception("a worker cannot tell its actor which weights it holds")
                time.sleep(REFRESH_S)

    def _stage(self, state: WorkerState, request: int, weights: str) -> None:
        self._staged.clear()  # an actor that asks again will not adopt it
        lineage, step = weights.split(".")
        state.error, state.probe = ("", ""), None
        try:
            found = self._receiver.fetch(WeightId(lineage=int(lineage), step=int(step)))
            tensors, state.probe = separate(found)
            self._staged[request] = self._prepare(tensors)
        except Exception as error:
            name = type(error).__name__
            state.error = (name if name in ERRORS else ModelError.__name__), f"{error}"
            if name not in ERRORS:
                log.exception("weights %s cannot be staged", weights)
        state.request = request


class WorkerStates:
    """The states of `workers` workers in `directory`, as their actor reads them."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory = directory
        self._workers = range(workers)

    def head(self) -> WeightId | None:
        """Return the newest version that all workers know of."""
        heads = [state.head for state in self._read()]
        known = [head for head in heads if head is not None]
        return min(known) if len(known) == len(self._workers) else None

    def available(self) -> list[WeightId]:
        """List the versions that all workers hold, oldest first."""
        held = [set(state.held) for state in self._read()]
        return sorted(set.intersection(*held)) if len(held) == len(self._workers) else []

    def staged(self, request: int) -> WorkerState | None:
        """Return the state after a request, None before all workers have finished it.

        Raise the error of a worker that could not stage its version.
        """
        states = [state for state in self._read() if state.request == request]
        for state in states:
            name, message = state.error
            if name:
                raise ERRORS[name](message)
        return states[0] if len(states) == len(self._workers) else None

    def _read(self) -> list[WorkerState]:
        states = []
        for rank in self._workers:
            with contextlib.suppress(FileNotFoundError):
                content = (self.directory / f"{rank}").read_bytes()
                states.append(msgspec.json.decode(content, type=WorkerState))
        return states
