"""Process groups for broadcasts that may fail: built directly, given up without waiting for them.

gloo and NCCL alike. There is no global process group. A broadcast that a peer has stopped serving
cannot be interrupted in gloo, so a group that is given up is set aside, with the memory that it may
still write to, until its own timeout has ended it.
"""

import contextlib
import os
import time
import zlib
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

BUILD_S = 3.0  # for everybody to connect
LOOK_S = 0.05  # how soon an end sees that the other has given up what it waits for
WORDS = 512  # of 64 bits, summed before CRC32: 4 KiB
IN_FLIGHT = 2  # buckets; checksums are computed meanwhile
POLL_S = 0.0005
UNWATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}


class CastFailed(Exception):
    """A broadcast did not reach everybody."""


class BroadcastGroup:
    """Rank 0 sends, the others receive. `device`: "" for gloo, else the GPU that NCCL uses."""

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
        # Training and generation have the default stream: a copy on it would wait for theirs.
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
        """Give the group up, finished or not; whatever it was doing comes to nothing."""
        if self._device:
            with contextlib.suppress(RuntimeError):
                self._group.abort()
        _abandoned.append((self._group, self._pending))
        sweep()


class Broadcast:
    """One broadcast under way."""

    def __init__(
        self, work: Any, part_N: Tensor, travels_N: Tensor, sends: bool, stream: Any
    ) -> None:
        self._work = work
        self._part_N = part_N
        self._travels_N = travels_N
        self._sends = sends
        self._stream = stream

    def done(self, seconds: float) -> bool:
        """Whether it is complete within so many seconds. RuntimeError where a peer is gone."""
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
    """Without a stream nothing is asked of CUDA, which would take memory of a GPU to be ready."""
    return torch.cuda.stream(stream) if stream else contextlib.nullcontext()


# Groups that were given up, each with its unfinished broadcasts and the memory that these use.
_abandoned: list[tuple[Any, list[tuple[Any, Tensor]]]] = []


def sweep() -> None:
    """Free the groups whose broadcasts have ended by now: ending one before would wait for them."""
    for entry in _abandoned[:]:
        if all(work.is_completed() for work, _ in entry[1]):
            with contextlib.suppress(ValueError):  # several threads sweep
                _abandoned.remove(entry)


def _nccl(store: Store, rank: int, size: int, deadline_s: float) -> Any:
    """Failures are ours to notice: NCCL's watchdog would end the process, its monitor even others.

    With BLOCKING_WAIT there is no watchdog; a broadcast that has failed then says so when `wait` is
    called. Every group reads these when it is made; those of the learner's ranks keep theirs.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(deadline_s))))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline_s)
    options.config.blocking = 0
    before = {name: os.environ.get(name) for name in UNWATCHED}
    os.environ.update(UNWATCHED)
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def gpu_id(device: str) -> str:
    """What tells this GPU from all others of every host; "" for none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device else ""


def on_distinct_gpus(gpus: list[str]) -> bool:
    """Whether every end, the learner's included, has a GPU of its own: NCCL insists on it."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def buckets(bytes_N: Tensor, size: int) -> list[Tensor]:
    return [bytes_N[start : start + size] for start in range(0, len(bytes_N), size)]


def checksum(bytes_N: Tensor) -> int:
    """CRC32 of the sums of 512 64-bit words each; a length that is a multiple of 8.

    Notices every change within a word and, but for one in 2^32, everything that was mixed, cut or
    moved by a block or more; five times as fast as CRC32 of all bytes, which would take as long as
    sending them.
    """
    words_N = bytes_N.view(torch.int64)
    whole = len(words_N) // WORDS * WORDS
    sums = words_N[:whole].view(-1, WORDS).sum(dim=1)
    return zlib.crc32(words_N[whole:].numpy().data, zlib.crc32(sums.numpy().data))


def first_line(error: Exception) -> str:
    """What a broken connection says, without its backtrace."""
    return str(error).partition("\n")[0][:300]
