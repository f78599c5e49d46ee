"""Process groups for broadcasts that may fail: built directly, abandoned without waiting.

For gloo and NCCL. There is no global process group. A broadcast with a peer that stopped cannot be
interrupted in gloo, so an abandoned group is kept, with the memory that it may still write to,
until its own timeout has ended it.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from evolver_async.schema import Array
from evolver_async.weights.channel import checksums
from evolver_async.weights.channel.checksums import BLOCK

BUILD_S = 3.0  # for all members to connect
LOOK_S = 0.05  # until an end notices that the other has given up
IN_FLIGHT = 2  # buckets; checksums are computed meanwhile
POLL_S = 0.0005
UNWATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}


class CastFailed(Exception):
    """A broadcast that did not reach every member; `members`: numbers of those to blame."""

    def __init__(self, message: str, members: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.members = sorted(members)


class BroadcastGroup:
    """Process group in which rank 0 sends. `device`: "" for gloo, else the GPU that NCCL uses.

    `connected`: gloo connects all members when the group is built, NCCL with the first broadcast,
    after which the sender sets it.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        rank: int,
        size: int,
        *,
        host: str,
        device: str,
        deadline_s: float,
    ) -> None:
        prefixed = PrefixStore(f"epoch/{epoch}/", store)
        self._device = device
        # Training and generation use the default stream: a copy on it would wait for theirs.
        self._stream = torch.cuda.Stream(device) if device else None
        self._pending: list[tuple[Any, Tensor]] = []
        build_s = timedelta(seconds=min(BUILD_S, deadline_s))
        self._group: Any
        if device:
            self._group = _nccl(prefixed, rank, size, deadline_s)
        else:
            gloo: Any = ProcessGroupGloo  # its options have no stub
            options = gloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = build_s
            self._group = ProcessGroupGloo(prefixed, rank, size, options)
            self._group.set_timeout(timedelta(seconds=deadline_s))
        self._sends = rank == 0
        self.connected = not device

    def broadcast(self, part_N: Tensor) -> "Broadcast":
        """Begin to send, or to receive into, `part_N`, bytes of host memory."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with _on(self._stream):
            travels_N = part_N
            if self._device:
                travels_N = torch.empty(len(part_N), dtype=torch.uint8, device=self._device)
                if self._sends:
                    travels_N.copy_(part_N)
            work = self._group.broadcast([travels_N], options)
        self._pending = [entry for entry in self._pending if not entry[0].is_completed()]
        self._pending.append((work, travels_N))
        return Broadcast(work, part_N, travels_N, self._sends, self._stream)

    def abandon(self) -> None:
        """Leave the group; unfinished broadcasts are lost."""
        if self._device:
            with contextlib.suppress(RuntimeError):
                self._group.abort()
        _abandoned.append((self._group, self._pending))
        sweep()


@dataclass
class Broadcast:
    """One broadcast under way."""

    _work: Any
    _part_N: Tensor
    _travels_N: Tensor
    _sends: bool
    _stream: Any

    def checksum(self) -> int:
        """Checksum of the bytes where they travel: on a GPU in a fraction of the host's time.

        The sender may compute it at once, a receiver when they are `done`.
        """
        with _on(self._stream):
            return checksum(self._travels_N)

    def done(self, seconds: float) -> bool:
        """Wait; return True if it is complete in time. Raises RuntimeError if a peer is gone."""
        until = time.monotonic() + seconds
        while not self._work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        with _on(self._stream):
            self._work.wait()
            if self._travels_N is not self._part_N and not self._sends:
                self._part_N.copy_(self._travels_N)
        return True


def _on(stream: Any) -> AbstractContextManager[Any]:
    """Select a stream. Without one CUDA is not touched: its context would take GPU memory."""
    return torch.cuda.stream(stream) if stream else contextlib.nullcontext()


# Abandoned groups, each with its unfinished broadcasts and the memory that these use.
_abandoned: list[tuple[Any, list[tuple[Any, Tensor]]]] = []


def sweep() -> None:
    """Free the abandoned groups whose broadcasts have ended: freeing others would wait for them."""
    for entry in _abandoned[:]:
        if all(work.is_completed() for work, _ in entry[1]):
            with contextlib.suppress(ValueError):  # several threads sweep
                _abandoned.remove(entry)


def _nccl(store: Store, rank: int, size: int, deadline_s: float) -> Any:
    """Build an NCCL group without its watchdog, which would end the process on a failure.

    With BLOCKING_WAIT there is none; `wait` of a failed broadcast raises instead. A group reads
    these variables when it is made; the groups of the learner's ranks keep theirs.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(deadline_s))))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline_s)
    # Only a non-blocking group heeds the timeout above if a member dies while it is built.
    options.config.blocking = 0
    with environment(UNWATCHED):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def gpu_id(device: str) -> str:
    """The unique identifier of a GPU among all hosts; "" for none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device else ""


def on_distinct_gpus(gpus: list[str]) -> bool:
    """True if no two processes share a GPU, as NCCL requires."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def buckets(bytes_N: Tensor, size: int) -> list[Tensor]:
    return [bytes_N[start : start + size] for start in range(0, len(bytes_N), size)]


def passing(size: int, bucket_bytes: int) -> list[Tensor]:
    """Buckets for bytes that are not kept: those under way at once have memory of their own."""
    places = [torch.empty(min(size, bucket_bytes), dtype=torch.uint8) for _ in range(IN_FLIGHT)]
    starts = range(0, size, bucket_bytes)
    return [places[i % IN_FLIGHT][: size - start] for i, start in enumerate(starts)]


def checksum(bytes_N: Tensor) -> int:
    """Checksum of bytes whose number is a multiple of 8, summed on their own device."""
    if not bytes_N.is_cuda:
        return checksums.checksum(bytes_N.numpy())
    return checksums.summed(*block_sums(bytes_N))


def block_sums(bytes_N: Tensor) -> tuple[Array, Array]:
    """Return the sums of whole blocks, mod 2^64, and the bytes after them, in host memory."""
    blocks = len(bytes_N) // BLOCK
    words_BN = bytes_N[: blocks * BLOCK].view(torch.int64).reshape(blocks, BLOCK // 8)
    return words_BN.sum(1).cpu().numpy(), bytes_N[blocks * BLOCK :].cpu().numpy()


def first_line(error: Exception) -> str:
    """Return the message of an error without its backtrace."""
    return str(error).partition("\n")[0][:300]
