"""Weights on one host: versioned snapshots as files in shared memory, pulled by version.

Both ends. The publisher fills a hidden file and renames it into place, then renames a new HEAD over
the old one; it never changes a file while it has its final name. A receiver maps a file and adopts
its tensors by reference. So it has a version whole or not at all, and neither end waits for the
other.

A new file's memory costs up to ten times as much as copying into it, so a file whose version is
withdrawn is filled again, by the following protocol. The memory of a receiver never changes:

    receiver    opens the file by its version's name, takes a shared `flock`, and looks whether the
                name still leads to this file; else the version is gone. It maps the file and keeps
                the lock until the last tensor on the mapping is dropped, or its process ends.
    publisher   withdraws a version by giving its file a hidden name, and fills the file again only
                under the exclusive lock, which it tries to get and never waits for. It unlocks the
                file before it gives it the next version's name.

A receiver that opened the file before it was hidden finds it locked, or its name gone. Locks are
seen by processes of one host, in all its containers; so files are filled again only in a file
system in memory, which no other host shares. Files of a publisher that died are not filled again.
On a network file system a receiver copies a file: another host can delete it under a mapping.
"""

import itertools
import os
import re
import threading
from pathlib import Path

from torch import Tensor

from evolver_async.process.private_directories import claim
from evolver_async.room import await_room
from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import Layout
from evolver_async.weights.channel.checksums import usual_threads
from evolver_async.weights.channel.interface import HEAD, read_head
from evolver_async.weights.channel.publisher import StagedPublisher
from evolver_async.weights.channel.weight_source import WeightSource
from evolver_async.weights.snapshot_file import REMOVED, STAGED, SnapshotFile, read


class ShmPublisher(StagedPublisher[SnapshotFile]):
    """Publisher into `directory`, which is created as private if missing.

    Keeps the newest `keep` versions and the retained ones. With `background` a thread writes, and
    others copy. `gpu`: the one that weights come from, "" for none.
    """

    def __init__(
        self, directory: Path | str, keep: int = 2, background: bool = True, gpu: str = ""
    ) -> None:
        assert keep >= 1
        super().__init__(str(directory), keep, usual_threads() if background else 1)
        self.directory = Path(directory)
        self._gpu = gpu
        self._claim = claim(self.directory)
        self._written = _available(self.directory)  # those of a publisher that died
        for path in self.directory.glob(f"{STAGED}*"):
            path.unlink(missing_ok=True)  # also its
        self._numbers = itertools.count()
        self._files: dict[WeightId, SnapshotFile] = {}
        self._thread = None
        if background:
            self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
            self._thread.start()

    def publish(
        self, weights: WeightId, tensors: dict[str, Tensor] | WeightSource, retain: bool = False
    ) -> None:
        super().publish(weights, tensors, retain)
        if self._thread is None:
            self._write_next()

    def release(self, weights: WeightId) -> None:
        with self._changed:
            self._retained.discard(weights)
            self._prune()

    def close(self) -> None:
        self._end()
        if self._thread is not None:
            self._thread.join()
        for file in (*self._files.values(), *self._spare):
            file.close()
        self._claim.remove()

    def _buffer(self, layout: Layout) -> SnapshotFile:
        return SnapshotFile(self.directory, next(self._numbers), layout, self._gpu)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            try:
                self._write_next()
            except Exception as error:
                self._fail(error)
                return

    def _write_next(self) -> None:
        with self._changed:
            if not self._waiting:
                return  # cleared by close
            weights, snapshot = self._waiting.pop(0)
            self._busy = True
        # The file gets its name before HEAD names it: a receiver that reads HEAD finds the version.
        snapshot.commit(self.directory / _name(weights), snapshot.checksums(self._threads))
        await_room(
            lambda: _replace(self.directory / HEAD, str(weights).encode()),
            f"{self.directory}: the name of the newest weights",
            stops=lambda: self._closed,
        )
        with self._changed:
            if weights in self._files:
                self._files.pop(weights).close()  # its name is the new one's
            self._files[weights] = snapshot
            self._written = [other for other in self._written if other != weights] + [weights]
            self._prune()
            self._busy = False
            self._changed.notify_all()

    def _prune(self) -> None:
        keep = set(self._written[-self.keep :]) | self._retained
        for weights in [weights for weights in self._written if weights not in keep]:
            self._written.remove(weights)
            if weights not in self._files:
                (self.directory / _name(weights)).unlink(missing_ok=True)
                continue
            file = self._files.pop(weights)
            if file.withdraw():
                self._give_back(file)


class ShmReceiver:
    """Receiver of a ShmPublisher at `directory`. `threads` verify what it fetches; 0: as many as
    the machine has, but for the one of the event loop."""

    def __init__(self, directory: Path | str, threads: int = 0) -> None:
        self.directory = Path(directory)
        self._threads = threads or max(1, usual_threads() - 1)

    def head(self) -> WeightId | None:
        return read_head(self.directory)

    def available(self) -> list[WeightId]:
        return sorted(_available(self.directory))

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        return read(self.directory / _name(weights), weights, self._threads)

    def close(self) -> None:
        """Do nothing: no resource is held between calls."""


def _name(weights: WeightId) -> str:
    return f"weights-{weights}"


def _available(directory: Path) -> list[WeightId]:
    """Snapshots by name, in order."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        if error.errno not in REMOVED:
            raise
        return []
    matches = [re.fullmatch(r"weights-(\d+)\.(\d+)", name) for name in names]
    return sorted(WeightId(lineage=int(m[1]), step=int(m[2])) for m in matches if m)


def _replace(path: Path, content: bytes) -> None:
    """Write a file that readers see whole or not at all. A crash may leave only a hidden part."""
    part = path.with_name(f".{path.name}")
    part.touch(mode=0o600)
    part.write_bytes(content)
    os.replace(part, path)
