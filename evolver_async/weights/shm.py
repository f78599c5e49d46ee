"""Weights on one host: versioned snapshots as files in shared memory, pulled by version.

Both ends. The publisher writes each version into a file of its own and renames it into place, then
renames a new HEAD over the old one; it never changes a file that has its final name. So a receiver
reads a version whole or not at all, and neither end ever waits for the other.

A snapshot: u64 length of the manifest, the manifest (JSON), padding to 64, the tensors' bytes, each
at a multiple of 64. The manifest gives dtype, shape, offset and CRC32 of every tensor.
"""

import json
import os
import re
import struct
import threading
import zlib
from pathlib import Path

import torch
from torch import Tensor

from evolver_async.process.private_directories import claim
from evolver_async.schema import WeightId
from evolver_async.weights.channel.base import HEAD, WeightsCorrupt, WeightsGone, read_head
from evolver_async.weights.channel.publisher import StagedPublisher
from evolver_async.weights.channel.snapshot import WeightSnapshot, aligned, nbytes, views

LENGTH = struct.Struct("<Q")


class ShmPublisher(StagedPublisher):
    """Publisher into `directory`, which is created as private if missing.

    Keeps the newest `keep` versions and the retained ones. With `background` a thread writes.
    """

    def __init__(self, directory: Path | str, keep: int = 2, background: bool = True) -> None:
        assert keep >= 1
        super().__init__(str(directory), keep)
        self.directory = Path(directory)
        self._claim = claim(self.directory)
        self._written = _available(self.directory)  # those of a publisher that died
        self._thread = None
        if background:
            self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
            self._thread.start()

    def publish(self, weights: WeightId, tensors: dict[str, Tensor], retain: bool = False) -> None:
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
        self._claim.remove()

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
        _replace(self.directory / _name(weights), _pieces(snapshot))
        _replace(self.directory / HEAD, [str(weights).encode()])
        with self._changed:
            self._written = [other for other in self._written if other != weights] + [weights]
            self._prune()
            self._spare = [snapshot]
            self._busy = False
            self._changed.notify_all()

    def _prune(self) -> None:
        keep = set(self._written[-self.keep :]) | self._retained
        for weights in [weights for weights in self._written if weights not in keep]:
            self._written.remove(weights)
            (self.directory / _name(weights)).unlink(missing_ok=True)


class ShmReceiver:
    """Receiver of a ShmPublisher at `directory`."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    def head(self) -> WeightId | None:
        return read_head(self.directory)

    def available(self) -> list[WeightId]:
        return sorted(_available(self.directory))

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        path = self.directory / _name(weights)
        try:
            with open(path, "rb", buffering=0) as file:
                # A bytearray would be filled with zeros first, and other threads held up.
                whole_N = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
                view = whole_N.numpy().data
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except FileNotFoundError:
            raise WeightsGone(f"weights {weights} are not in {self.directory}") from None
        try:
            return _verified(whole_N, weights)
        except WeightsCorrupt as error:
            raise WeightsCorrupt(f"{path}: {error}") from None

    def close(self) -> None:
        """Do nothing: no resource is held between calls."""


def _pieces(snapshot: WeightSnapshot) -> list[bytes | memoryview]:
    """The file's content; checksums are computed here, outside the training step."""
    data = snapshot.bytes_N.numpy().data
    for entry in snapshot.tensors.values():
        start = entry["offset"]
        entry["crc32"] = zlib.crc32(data[start : start + nbytes(entry)])
    content = {
        "lineage": snapshot.weights.lineage,
        "step": snapshot.weights.step,
        "tensors": snapshot.tensors,
    }
    manifest = json.dumps(content).encode()
    head = LENGTH.pack(len(manifest)) + manifest
    return [head.ljust(aligned(len(head)), b"\0"), data]


def _verified(whole_N: Tensor, weights: WeightId) -> dict[str, Tensor]:
    """The tensors of a snapshot, as views on its bytes, after their checksums were compared."""
    buffer = whole_N.numpy().data
    try:
        (length,) = LENGTH.unpack_from(buffer)
        manifest = json.loads(bytes(buffer[LENGTH.size : LENGTH.size + length]))
        found = WeightId(lineage=manifest["lineage"], step=manifest["step"])
        entries = manifest["tensors"].items()
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise WeightsCorrupt(f"unreadable manifest ({error})") from None
    if found != weights:
        raise WeightsCorrupt(f"holds weights {found}")
    base = aligned(LENGTH.size + length)
    for name, entry in entries:
        start = base + entry["offset"]
        end = start + nbytes(entry)
        if zlib.crc32(buffer[start:end]) != entry["crc32"] or end > len(buffer):
            raise WeightsCorrupt(f"tensor {name} does not match its checksum")
    return views(whole_N[base:], manifest["tensors"])


def _name(weights: WeightId) -> str:
    return f"weights-{weights}"


def _available(directory: Path) -> list[WeightId]:
    """Snapshots by name, in order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    matches = [re.fullmatch(r"weights-(\d+)\.(\d+)", name) for name in names]
    return sorted(WeightId(lineage=int(m[1]), step=int(m[2])) for m in matches if m)


def _replace(path: Path, pieces: list[bytes | memoryview]) -> None:
    """Write a file that readers see whole or not at all. A crash may leave only a hidden part."""
    part = path.with_name(f".{path.name}")
    with open(part, "wb", buffering=0) as file:
        os.fchmod(file.fileno(), 0o600)
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
    os.replace(part, path)
