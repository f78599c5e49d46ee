"""Weights on one GPU: the learner's copies of them, which engines map and read in place.

Both ends. The learner keeps each version that is available in a slot, a run of GPU memory of its
own; with two versions kept there are two alternating slots. A slot is described by a file in a
private directory, with the handle by which other processes map it. Before a slot is filled anew its
file is removed, and a receiver looks at the file again after it has read: so it reads a version
whole or finds it gone, and neither end waits for the other. A word-wise sum of every tensor, which
a GPU computes in passing, is compared as well.

A slot file is msgpack: plain numbers and bytes, nothing that is executed.
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from evolver_async.process.private_directories import claim, owned
from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import aligned, nbytes, views
from evolver_async.weights.channel.interface import HEAD, WeightsCorrupt, WeightsGone, read_head
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.channel.weight_source import WeightSource, source_of

SLOT = "slot-"
ALIVE = "publisher"  # the directory that a publisher holds: the launcher can own the one above


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version; `total` is the sum of its 64-bit words, mod 2^64."""

    dtype: str
    shape: list[int]
    offset: int
    total: int


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a slot. `memory` names it for `Memory.open`, the same for all its versions."""

    weights: WeightId
    memory: list[int | bytes | bool]
    serial: int
    tensors: dict[str, TensorEntry]


class Memory(Protocol):
    """Memory of one process that other processes can map."""

    @property
    def device(self) -> str: ...

    def share(self, bytes_N: Tensor) -> list[int | bytes | bool]:
        """Plain values by which another process opens it; it lives as long as `bytes_N` does."""
        ...

    def open(self, name: list[Any]) -> Tensor:
        """The bytes that `share` named."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        ...


@dataclass(frozen=True)
class CudaMemory:
    """CUDA's interprocess memory handles, by the calls that torch.multiprocessing makes itself."""

    device: str

    def share(self, bytes_N: Tensor) -> list[int | bytes | bool]:
        return list(bytes_N.untyped_storage()._share_cuda_())

    def open(self, name: list[Any]) -> Tensor:
        _, *rest = name  # the number of the GPU is that of the other process
        number = torch.device(self.device).index
        with torch.cuda.device(number):
            storage = torch.UntypedStorage._new_shared_cuda(number, *rest)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class IpcPublisher:
    """Publisher into `directory`, which is created as private if missing.

    Keeps the newest `keep` versions and the retained ones, all of them on the GPU.
    """

    def __init__(self, directory: Path | str, memory: Memory, keep: int = 2) -> None:
        assert keep >= 2
        self.directory = Path(directory)
        self.address = str(directory)
        self.keep = keep
        # Two locks: the launcher may hold the outer directory, and would hide that a learner died.
        # Its actors must notice, as the handles of its memory die with it.
        self._claims = [claim(self.directory), claim(self.directory / ALIVE)]
        for path in self.directory.glob(f"{SLOT}*"):
            path.unlink()  # of a publisher that died, and its memory with it
        self._memory = memory
        self._slots: list[WeightSnapshot] = []
        self._names: dict[int, list[int | bytes | bool]] = {}
        self._held: dict[WeightId, int] = {}  # slots by version, in the order of publishing
        self._retained: set[WeightId] = set()
        self._serial = itertools.count()

    def heed(
        self,
        stops: Callable[[], bool],
        tell: Callable[[str], object],
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Do nothing: versions stay on the GPU."""

    def publish(
        self, weights: WeightId, tensors: dict[str, Tensor] | WeightSource, retain: bool = False
    ) -> None:
        if retain:
            self._retained.add(weights)
        slot = self._free(weights)
        self._withdraw(slot)
        snapshot = self._slots[slot]
        before = snapshot.bytes_N.data_ptr()
        snapshot.stage(weights, source_of(tensors), 1)
        if slot not in self._names or snapshot.bytes_N.data_ptr() != before:
            self._names[slot] = self._memory.share(snapshot.bytes_N)
        totals = _totals(snapshot.bytes_N, snapshot.tensors)
        self._memory.synchronize()
        entries = {
            name: TensorEntry(**entry, total=total)
            for (name, entry), total in zip(snapshot.tensors.items(), totals, strict=True)
        }
        described = Slot(weights, self._names[slot], next(self._serial), entries)
        self._write(f"{SLOT}{slot}", msgspec.msgpack.encode(described))
        self._write(HEAD, str(weights).encode())
        self._held[weights] = slot

    def copied(self) -> None:
        """Do nothing: copies are in the GPU's own order, or done."""

    def wait(self) -> None:
        """Do nothing: published versions are visible at once."""

    def release(self, weights: WeightId) -> None:
        self._retained.discard(weights)
        if weights in self._held and weights not in list(self._held)[-self.keep :]:
            self._withdraw(self._held[weights])

    def close(self) -> None:
        """Remove the directory; the memory ends with this process, and readers have copies."""
        for one in reversed(self._claims):
            one.remove()

    def _free(self, weights: WeightId) -> int:
        """Return a slot whose version is replaced by `weights` or no longer kept."""
        if weights in self._held:
            return self._held[weights]
        kept = {*list(self._held)[1 - self.keep :], *self._retained}
        for other, slot in list(self._held.items()):
            if other not in kept:
                self._withdraw(slot)
        free = set(range(len(self._slots))) - {*self._held.values()}
        if not free:
            self._slots.append(WeightSnapshot(self._memory.device))
            free = {len(self._slots) - 1}
        return min(free)

    def _withdraw(self, slot: int) -> None:
        (self.directory / f"{SLOT}{slot}").unlink(missing_ok=True)
        self._held = {weights: other for weights, other in self._held.items() if other != slot}

    def _write(self, name: str, content: bytes) -> None:
        part = self.directory / f".{name}"
        part.touch(mode=0o600)
        part.write_bytes(content)
        os.replace(part, self.directory / name)


class IpcReceiver:
    """Receiver of an IpcPublisher; tensors stay in the GPU's memory."""

    def __init__(self, directory: Path | str, memory: Memory) -> None:
        self.directory = Path(directory)
        self._memory = memory
        self._open: dict[str, tuple[list[Any], Tensor]] = {}  # mapped slots, by file name

    def head(self) -> WeightId | None:
        return read_head(self.directory)

    def available(self) -> list[WeightId]:
        return sorted(slot.weights for _, slot in self._slots())

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        for path, slot in self._slots():
            if slot.weights != weights:
                continue
            entries = {name: msgspec.structs.asdict(entry) for name, entry in slot.tensors.items()}
            # Copied first, then looked up again: the slot can be filled anew in between.
            bytes_N = self._mapped(path.name, slot).clone()
            totals = _totals(bytes_N, entries)
            self._memory.synchronize()
            now = self._read(path)
            if now is None or now.serial != slot.serial or now.memory != slot.memory:
                break
            for (name, entry), total in zip(slot.tensors.items(), totals, strict=True):
                if entry.total != total:
                    raise WeightsCorrupt(f"{path}: tensor {name} does not match its sum")
            return views(bytes_N, entries)
        raise WeightsGone(f"weights {weights} are not in {self.directory}")

    def close(self) -> None:
        self._open.clear()

    def _slots(self) -> list[tuple[Path, Slot]]:
        found = [(path, self._read(path)) for path in sorted(self.directory.glob(f"{SLOT}*"))]
        return [(path, slot) for path, slot in found if slot is not None]

    def _read(self, path: Path) -> Slot | None:
        with contextlib.suppress(FileNotFoundError):
            try:
                return msgspec.msgpack.decode(path.read_bytes(), type=Slot)
            except msgspec.DecodeError as error:
                raise WeightsCorrupt(f"{path}: {error}") from None
        return None

    def _mapped(self, name: str, slot: Slot) -> Tensor:
        """The slot's memory; mapped once, for mapping it is slow."""
        if name not in self._open or self._open[name][0] != slot.memory:
            self._open.pop(name, None)
            try:
                self._open[name] = (slot.memory, self._memory.open(slot.memory))
            except RuntimeError as error:
                if owned(self.directory / ALIVE):
                    raise
                raise WeightsGone(f"{name}, of a learner that has died: {error}") from error
        return self._open[name][1]


def _totals(bytes_N: Tensor, entries: dict[str, dict[str, Any]]) -> list[int]:
    """The sum of every tensor's 64-bit words with the padding after it."""
    words_N = bytes_N.view(torch.int64)
    sums = []
    for entry in entries.values():
        start = entry["offset"]
        sums.append(words_N[start // 8 : aligned(start + nbytes(entry)) // 8].sum())
    return torch.stack(sums).tolist() if sums else []
