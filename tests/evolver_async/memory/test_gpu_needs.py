"""GPU memory before a start: what the driver says, and the run that does not fit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.config.load import dump, load
from evolver_async.launch.run_directory import locked
from evolver_async.launch.start_checks import problems_of
from evolver_async.memory import gpu_needs, host_memory
from evolver_async.memory.gpu_needs import check_gpu_memory, visible
from evolver_async.memory.units import MIB

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "configs" / "bandit.yaml"
TWO = [("GPU-aa", 80.0), ("GPU-bb", 24.0)]
ON_GPU = ("learner.device=cuda", "engine.device=cuda", "actors.count=1", "weights.kind=shm")
BIG = ("policy.hidden_size=512", "policy.layers=6", "policy.intermediate_size=1536")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put an `nvidia-smi` that knows one GPU of 256 MiB first in the PATH."""
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\necho '0, GPU-aa, 256'\n")
    stand_in.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu_needs._found.cache_clear()
    yield stand_in
    gpu_needs._found.cache_clear()


@pytest.mark.parametrize(
    ("own", "by_bus", "expected"),
    [
        (None, True, [80.0, 24.0]),
        (None, False, [80.0, 80.0]),  # CUDA puts the fastest first, which need not be the first
        ("1", True, [24.0]),
        ("1, 0", True, [24.0, 80.0]),
        ("GPU-b", True, [24.0]),
        ("", True, []),
        ("MIG-cc", True, []),
        ("7", True, []),
    ],
)
def test_gpus_are_those_that_the_process_may_use(
    own: str | None, by_bus: bool, expected: list[float]
) -> None:
    assert visible(TWO, own, by_bus) == expected


def test_a_run_that_its_gpu_cannot_hold_is_refused_before_anything_starts(
    driver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, big = load(RECIPE, ON_GPU), load(RECIPE, [*ON_GPU, *BIG])
    check_gpu_memory(small)
    with pytest.raises(ConfigError, match=r"^engine\.slots: GPU 0: .* of 256 MiB$"):
        check_gpu_memory(big)
    assert [one for one in problems_of(big) if "GPU 0" in one]
    assert main(["train", str(RECIPE), *ON_GPU, *BIG, f"run.dir={tmp_path / 'runs'}"]) == 2
    assert "of 256 MiB" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_actors_that_their_gpu_cannot_hold_are_not_added(
    driver: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 50)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    dump(load(RECIPE, ON_GPU), run_dir / "config.yaml")
    with locked(run_dir):
        assert main(["scale", str(run_dir), "2"]) == 0
        assert main(["scale", str(run_dir), "5000"]) == 2
    assert "of 256 MiB" in capsys.readouterr().err


def test_a_machine_whose_driver_cannot_be_asked_is_not_checked(driver: Path) -> None:
    big = load(RECIPE, [*ON_GPU, *BIG])
    for answer in ("exit 9", "echo '0, GPU-aa, [N/A]'"):
        driver.write_text(f"#!/bin/sh\n{answer}\n")
        gpu_needs._found.cache_clear()
        assert gpu_needs._found() == []
        check_gpu_memory(big)


def test_the_driver_is_not_asked_by_a_run_on_the_cpu(driver: Path, tmp_path: Path) -> None:
    driver.write_text(f"#!/bin/sh\ntouch {tmp_path / 'asked'}\n")
    check_gpu_memory(load(RECIPE, ["learner.device=cpu", "engine.device=cpu"]))
    assert not (tmp_path / "asked").exists()
    check_gpu_memory(load(RECIPE, ON_GPU))
    assert (tmp_path / "asked").exists()


def test_the_driver_counts_in_mebibytes(driver: Path) -> None:
    assert gpu_needs._found() == [("GPU-aa", 256 * MIB)]
