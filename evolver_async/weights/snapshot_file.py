"""File of one version in the shared-memory channel: filled by its publisher, mapped by receivers.

A snapshot: u64 length of the manifest, the manifest (JSON, ended by spaces), padding to 64, the
tensors' bytes. The manifest gives dtype, shape, offset and checksum of every tensor. `shm` has the
protocol by which a file is filled again.
"""

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from evolver_async.process.private_directories import UNSUPPORTED
from evolver_async.schema import Array, WeightId
from evolver_async.weights.channel.byte_layout import DTYPES, Layout, aligned, views
from evolver_async.weights.channel.checksums import checksums, region
from evolver_async.weights.channel.interface import WeightsCorrupt, WeightsGone
from evolver_async.weights.channel.mapping import in_memory, map_file, on_network, read_file
from evolver_async.weights.channel.snapshot import WeightSnapshot

LENGTH = struct.Struct("<Q")
STAGED = ".staged-"  # hidden names of files without a version
PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of the process
REMOVED = (errno.ENOENT, errno.ESTALE)  # by this host, or by another one


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a snapshot."""

    dtype: str
    shape: list[int]
    offset: int
    checksum: int


class SnapshotManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description at the beginning of a snapshot."""

    lineage: int
    step: int
    tensors: dict[str, StoredTensor]


class SnapshotFile(WeightSnapshot):
    """Staging buffer that is a file in `directory`, under a hidden name until it is published.

    `gpu`: the one that weights come from, "" for none.
    """

    def __init__(self, directory: Path, number: int, layout: Layout, gpu: str) -> None:
        super().__init__()
        self._layout = layout
        self._gpu = gpu
        self._hidden = self._path = directory / f"{STAGED}{number}"
        self.reusable = in_memory(directory)
        self._head_N = np.empty(0, np.uint8)  # nothing is mapped yet
        longest = dict.fromkeys(layout.entries, 2**32 - 1)
        self._room = len(_manifest(WeightId(lineage=2**63, step=2**63), layout.entries, longest))
        base = aligned(LENGTH.size + self._room)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        try:
            os.posix_fallocate(self._file, 0, base + layout.size)  # a later lack would kill: SIGBUS
            whole_N = map_file(os.dup(self._file), base + layout.size, shared=True)
        except OSError:
            self.discard()
            raise
        self._head_N = whole_N[:base]
        self.bytes_N = torch.from_numpy(whole_N)[base:]
        if gpu:
            _pin(whole_N)

    def claim(self, layout: Layout) -> bool:
        """Lock the file. False if it has another layout, was changed, or a receiver has it."""
        if not self.reusable or layout != self._layout:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(self._file)
            if not os.path.samestat(found, self._path.stat()):
                return False
        except OSError:
            return False
        return found.st_size == len(self._head_N) + layout.size

    def commit(self, path: Path, totals: dict[str, int]) -> None:
        """Write the manifest and give the file its final name."""
        manifest = _manifest(self.weights, self.tensors, totals).ljust(self._room)
        head = LENGTH.pack(len(manifest)) + manifest
        self._head_N[: len(head)] = np.frombuffer(head, np.uint8)
        if self.reusable:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        else:  # once it is closed, other hosts see the whole file
            self.close()
        os.replace(self._path, path)
        self._path = path

    def withdraw(self) -> bool:
        """Take the name away from receivers; return True if the file can be filled again."""
        try:
            if self.reusable:
                os.replace(self._path, self._hidden)
                self._path = self._hidden
                return True
        except OSError:  # the directory was removed
            self.reusable = False
        self.discard()
        return False

    def discard(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Drop the mapping, and not the file."""
        if self._file < 0:
            return
        if self._gpu and len(self.bytes_N):
            _unpin(self._head_N)
        self._head_N = self._head_N[:0].copy()
        self.bytes_N = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)
        self._file = -1


def read(path: Path, weights: WeightId, threads: int) -> dict[str, Tensor]:
    """Map a version's file, or copy it from the network, and verify it.

    Raises WeightsGone or WeightsCorrupt.
    """
    file = _open(path)
    if file < 0:
        raise WeightsGone(f"weights {weights} are not in {path.parent}")
    try:
        return _verified(_content(file), weights, threads)
    except WeightsCorrupt as error:
        raise WeightsCorrupt(f"{path}: {error}") from None
    except OSError as error:
        if error.errno not in REMOVED:
            raise
        raise WeightsGone(f"weights {weights} were removed from {path.parent}") from None


def _open(path: Path) -> int:
    """Open a version's file and lock it against being filled again; -1 if the version is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in REMOVED:
            raise
        return -1
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # the publisher is filling it again
            os.close(file)
            return -1
    try:
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except OSError as error:
        if error.errno not in REMOVED:
            os.close(file)
            raise
    os.close(file)
    return -1


def _content(file: int) -> Array:
    """Map an open file, or copy it from the network. OSError or WeightsCorrupt, with it closed."""
    try:
        size, copies = os.fstat(file).st_size, on_network(file)
        if size < LENGTH.size:
            raise WeightsCorrupt(f"has {size} bytes")
    except BaseException:
        os.close(file)
        raise
    return read_file(file, size) if copies else map_file(file, size, shared=False)


def _manifest(
    weights: WeightId, entries: dict[str, dict[str, Any]], totals: dict[str, int]
) -> bytes:
    tensors = {
        name: StoredTensor(**entry, checksum=totals[name]) for name, entry in entries.items()
    }
    return msgspec.json.encode(SnapshotManifest(weights.lineage, weights.step, tensors))


def _verified(whole_N: Array, weights: WeightId, threads: int) -> dict[str, Tensor]:
    """The tensors of a snapshot, as views on its bytes, after their checksums were compared."""
    (length,) = LENGTH.unpack_from(whole_N.data)
    try:
        manifest = msgspec.json.decode(whole_N[LENGTH.size :][:length].data, type=SnapshotManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightsCorrupt(f"unreadable manifest ({error})") from None
    found = WeightId(lineage=manifest.lineage, step=manifest.step)
    if found != weights:
        raise WeightsCorrupt(f"holds weights {found}")
    bytes_N = whole_N[aligned(LENGTH.size + length) :]
    entries = {}
    for name, stored in manifest.tensors.items():
        entries[name] = {"dtype": stored.dtype, "shape": stored.shape, "offset": stored.offset}
        if stored.dtype not in DTYPES or region(entries[name]).stop > len(bytes_N):
            raise WeightsCorrupt(f"tensor {name} is cut off")
    for name, total in checksums(bytes_N, entries, threads).items():
        if total != manifest.tensors[name].checksum:
            raise WeightsCorrupt(f"tensor {name} does not match its checksum")
    return views(torch.from_numpy(bytes_N), entries)


def _pin(whole_N: Array) -> None:
    """Let a GPU copy into this memory while the host goes on."""
    runtime: Any = torch.cuda.cudart()
    found = runtime.cudaHostRegister(whole_N.ctypes.data, whole_N.nbytes, PORTABLE)
    torch.cuda.check_error(found)


def _unpin(whole_N: Array) -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostUnregister(whole_N.ctypes.data))
