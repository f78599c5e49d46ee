"""Ranks publish a model that they share: whole for receivers, and never twice in their memory."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from evolver_async.schema import WeightId
from evolver_async.weights.shm import ShmPublisher, ShmReceiver
from learner.ranks.gathered import GatheredWeights
from learner.ranks.meeting import FileMeeting
from learner.ranks.mesh import join

pytestmark = pytest.mark.process

RANKS = 4
WIDTH = 1 << 10
VERSION = WeightId(lineage=1, step=1)


class Wide(nn.Module):
    """128 MiB of weights: large, small, and with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(16)])
        self.embedding = nn.Embedding((16 << 10) - 3, WIDTH)
        self.odd, self.short = nn.Linear(3, 7), nn.Linear(5, 2)
        self.counted = nn.BatchNorm1d(3)  # buffers, one without dimensions


def memory(name: str) -> int:
    """Bytes of a line of this process's status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


def be_rank(rank: int, directory: Path, shared: Path) -> None:
    """Publish twice, in both types; note the peak of this process's memory over the first."""
    torch.set_num_threads(1)
    ranks = join(FileMeeting(directory / "meeting"), rank, RANKS, device="cpu", deadline_s=240.0)
    model = ranks.shard(Wide(), master=False, dtype="float32")
    publishers = [ShmPublisher(shared / f"w{n}") for n in range(2)] if rank == 0 else []
    gc.collect()
    ranks.gather(b"")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    for number, dtype in enumerate(("float32", "bfloat16")):
        source = GatheredWeights(model, ranks, dtype)
        if rank == 0:
            publishers[number].publish(VERSION, source)
            publishers[number].wait()
        else:
            assert [part for parts in source.parts() for part in parts] == []
        if number == 0:
            (directory / f"extra-{rank}").write_text(str(memory("VmHWM") - before))
    ranks.gather(b"")
    if rank == 0:
        whole = Wide().state_dict()
        for publisher, dtype in zip(publishers, (torch.float32, torch.bfloat16), strict=True):
            found = ShmReceiver(publisher.address).fetch(VERSION)
            assert list(found) == list(whole)
            for name, tensor in whole.items():
                expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
                assert found[name].dtype == expected.dtype and torch.equal(found[name], expected)
            publisher.close()
    ranks.leave()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in this host's shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-gathered-") as directory:
        yield Path(directory)


def test_four_ranks_publish_what_they_share_with_a_third_of_it_beside_the_file(
    tmp_path: Path, shared: Path
) -> None:
    mp.spawn(be_rank, args=(tmp_path, shared), nprocs=RANKS)  # pyright: ignore[reportPrivateImportUsage]
    extra = [int((tmp_path / f"extra-{rank}").read_text()) for rank in range(RANKS)]
    size = sum(one.numel() * one.itemsize for one in Wide().state_dict().values())
    assert min(extra) > 0, "the kernel counts"
    assert size < sum(extra) < 1.3 * size, [round(one / size, 3) for one in extra]
