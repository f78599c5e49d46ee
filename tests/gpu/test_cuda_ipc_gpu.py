"""The channel on one GPU: handles that another process maps, versions that it reads whole."""

from pathlib import Path

import pytest
import torch
from ipc_memory import check_killed, check_race, check_versions

from evolver_async.weights.cuda_ipc import CudaMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_versions_are_kept_replaced_and_verified(tmp_path: Path) -> None:
    check_versions(tmp_path, CudaMemory("cuda:0"))


def test_another_process_reads_whole_versions(tmp_path: Path) -> None:
    check_race(tmp_path, CudaMemory("cuda:0"), "cuda:0", numbers=1 << 24, versions=100)


def test_a_publisher_killed_while_it_is_read_leaves_whole_versions_or_none(tmp_path: Path) -> None:
    check_killed(tmp_path, CudaMemory("cuda:0"), "cuda:0", numbers=1 << 26, times=3)
