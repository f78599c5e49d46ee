"""The protocol of the channel on one GPU, with host memory in the GPU's place."""

from pathlib import Path

from ipc_memory import Files, check_race, check_versions


def test_versions_are_kept_replaced_and_verified(tmp_path: Path) -> None:
    check_versions(tmp_path, Files())


def test_a_reader_racing_with_a_fast_publisher_sees_whole_versions(tmp_path: Path) -> None:
    check_race(tmp_path, Files(), "cpu", numbers=200_000, versions=300)
