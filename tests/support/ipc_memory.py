"""What every end of `weights.cuda_ipc` must do, whatever memory its slots are in."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evolver_async.schema import WeightId
from evolver_async.weights.channel.interface import WeightsCorrupt, WeightsGone
from evolver_async.weights.cuda_ipc import IpcPublisher, IpcReceiver, Memory

READER = """
import sys
from ipc_memory import memory_named
from evolver_async.weights.channel.interface import WeightsGone
from evolver_async.weights.cuda_ipc import IpcReceiver
receiver = IpcReceiver(sys.argv[1], memory_named(sys.argv[2]))
print("ready", flush=True)
while True:
    head = receiver.head()
    try:
        if head is not None:
            tensors = receiver.fetch(head)
            whole = all(bool((tensor == head.step).all()) for tensor in tensors.values())
            print(head.step if whole else "mixed", flush=True)
    except WeightsGone:
        pass
"""


@dataclass(frozen=True)
class Files:
    """Host memory in files, shared by name: stands in for a GPU's where there is none."""

    device: str = "cpu"

    def share(self, bytes_N: Tensor) -> list[int | bytes | bool]:
        return list(bytes_N.untyped_storage()._share_filename_cpu_())

    def open(self, name: list[Any]) -> Tensor:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*name)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def synchronize(self) -> None:
        """Nothing is asynchronous here."""


def memory_named(name: str) -> Memory:
    from evolver_async.weights.cuda_ipc import CudaMemory

    return Files() if name == "cpu" else CudaMemory(name)


def version(step: int, lineage: int = 1) -> WeightId:
    return WeightId(lineage=lineage, step=step)


def check_versions(tmp_path: Path, memory: Memory) -> None:
    """Kept versions, lineages, retained ones, what is gone and what is damaged."""
    device = memory.device
    publisher = IpcPublisher(tmp_path / "w", memory)
    receiver = IpcReceiver(publisher.address, Loopback(publisher))
    assert receiver.head() is None and receiver.available() == []
    tensors = {
        "matrix": torch.randn(7, 5, device=device),
        "bf16": torch.randn(3, 3, device=device).bfloat16(),
        "empty": torch.empty(0, 4, device=device),
        "scalar": torch.tensor(3, device=device),
    }
    publisher.publish(version(1), tensors, retain=True)
    fetched = receiver.fetch(version(1))
    assert list(fetched) == list(tensors)
    assert all(torch.equal(fetched[name], tensors[name]) for name in tensors)
    assert all(tensor.device.type == torch.device(device).type for tensor in fetched.values())
    for step in range(2, 6):
        publisher.publish(version(step), {"a": torch.full((1000,), float(step), device=device)})
    publisher.publish(version(3, lineage=2), {"a": torch.zeros(1000, device=device)})
    assert receiver.head() == version(3, lineage=2)
    assert receiver.available() == [version(1), version(5), version(3, lineage=2)]
    assert all(torch.equal(receiver.fetch(version(1))[name], tensors[name]) for name in tensors)
    with pytest.raises(WeightsGone, match=r"1\.4"):
        receiver.fetch(version(4))
    publisher.release(version(1))
    assert receiver.available() == [version(5), version(3, lineage=2)]
    damaged = receiver._mapped(
        "slot-x", next(s for _, s in receiver._slots() if s.weights.step == 5)
    )
    damaged[100] += 1
    with pytest.raises(WeightsCorrupt, match="tensor a"):
        receiver.fetch(version(5))
    receiver.close()
    publisher.close()
    assert not (tmp_path / "w").exists()


@dataclass(frozen=True)
class Loopback:
    """Opens a publisher's memory in its own process, where no handle is needed or allowed."""

    publisher: IpcPublisher

    @property
    def device(self) -> str:
        return self.publisher._memory.device

    def share(self, bytes_N: Tensor) -> list[int | bytes | bool]:
        raise AssertionError("a receiver shares nothing")

    def open(self, name: list[Any]) -> Tensor:
        slot = next(slot for slot, other in self.publisher._names.items() if other == name)
        return self.publisher._slots[slot].bytes_N

    def synchronize(self) -> None:
        self.publisher._memory.synchronize()


def check_race(tmp_path: Path, memory: Memory, name: str, numbers: int, versions: int) -> None:
    """Another process, reading as fast as it can, sees whole versions or none."""
    publisher = IpcPublisher(tmp_path / "w", memory)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, publisher.address, name],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    seen: list[str] = []
    try:
        assert reader.stdout is not None and reader.stdout.readline().strip() == "ready"
        for step in range(versions):
            tensor = torch.full((numbers,), float(step), device=memory.device)
            publisher.publish(version(step), {"a": tensor, "b": tensor[: numbers // 2]})
        while not seen or seen[-1] != str(versions - 1):
            line = reader.stdout.readline()
            assert line, "the reader died"
            seen.append(line.strip())
    finally:
        reader.kill()
        reader.wait()
        publisher.close()
    assert "mixed" not in seen


PUBLISHER = """
import itertools, sys, torch
from ipc_memory import memory_named, version
from evolver_async.weights.cuda_ipc import IpcPublisher
memory = memory_named(sys.argv[2])
publisher = IpcPublisher(sys.argv[1], memory)
for step in itertools.count():
    tensor = torch.full((int(sys.argv[3]),), float(step), device=memory.device)
    publisher.publish(version(step), {"a": tensor})
    if step == 2:
        print("publishes", flush=True)
"""


def check_killed(tmp_path: Path, memory: Memory, name: str, numbers: int, times: int) -> None:
    """A publisher that is killed while this process reads leaves whole versions or none."""
    for round_ in range(times):
        directory = tmp_path / f"w{round_}"
        command = [sys.executable, "-c", PUBLISHER, str(directory), name, str(numbers)]
        here = Path(__file__).parent
        publisher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here)
        reader = IpcReceiver(directory, memory)
        try:
            assert publisher.stdout is not None and publisher.stdout.readline() == "publishes\n"
            for read in range(20):
                if read == 5 + round_:
                    publisher.kill()
                try:
                    head = reader.head()
                    assert head is not None
                    tensors = reader.fetch(head)
                except WeightsGone:
                    continue
                assert bool((tensors["a"] == head.step).all())
        finally:
            publisher.kill()
            publisher.wait()
            reader.close()
        assert torch.ones(4, device=memory.device).sum() == 4, "the reader's device still works"
