"""The runner of the GPU tests, which is the same for tests that need none."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "tests" / "gpu" / "suite.py"
HANGS = """
import pytest, time
pytestmark = pytest.mark.gpu
def test_before(): pass
def test_hangs(): time.sleep(600)
def test_after(): pass
@pytest.mark.skip(reason="for want of two GPUs")
def test_skipped(): pass
"""
DIES = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_dies(): os.kill(os.getpid(), 9)
def test_fails(): assert 1 == 2
"""


@pytest.mark.process
def test_a_hung_test_costs_itself_alone_and_every_file_has_an_exit_code(tmp_path: Path) -> None:
    for name, body in (("hangs", HANGS), ("dies", DIES), ("fine", "def test_other(): pass")):
        (tmp_path / f"test_{name}.py").write_text(body)
    files = [str(tmp_path / f"test_{name}.py") for name in ("hangs", "dies", "fine")]
    command = [sys.executable, str(SUITE), str(tmp_path / "out"), *files]
    environment = os.environ | {"TEST_S": "5", "LIMIT_S": "500"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 1, done.stdout + done.stderr
    codes = (tmp_path / "out" / "codes.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in codes] == ["1", "1", "5"]
    entries = map(json.loads, (tmp_path / "out" / "tests.jsonl").read_text().splitlines())
    outcomes = {one["test"].partition("::")[2]: one["outcome"] for one in entries}
    assert outcomes == {
        "test_before": "passed",
        "test_hangs": "took too long",
        "test_after": "passed",
        "test_skipped": "skipped",
        "test_dies": "took too long",
        "test_fails": "failed",
    }
    assert "test_hangs" in (tmp_path / "out" / "stacks.txt").read_text()
    assert "test_skipped: Skipped: for want of two GPUs" in done.stdout


@pytest.mark.process
def test_without_a_gpu_the_suite_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = [str(SUITE.with_name("run.sh")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 77
    assert "there is no GPU" in done.stdout


@pytest.mark.process
def test_the_kit_measures_without_an_installation_of_ours(tmp_path: Path) -> None:
    """The folder of `make gpu-kit` alone; what this Python has is not unpacked again."""
    kit, version = tmp_path / "kit", "{}.{}".format(*sys.version_info)
    environment = os.environ | {"PYTHON": sys.executable, "KIT_PYTHON": version}
    command = [str(SUITE.with_name("kit") / "make.sh"), str(kit)]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    wheels = {path.name.partition("-")[0] for path in (kit / "wheels").iterdir()}
    assert {"pyzmq", "msgspec", "omegaconf", "gymnasium", "uvicorn"} <= wheels
    assert sum(path.stat().st_size for path in kit.rglob("*") if path.is_file()) < 40 << 20
    environment = environment | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    done = subprocess.run(
        ["sh", str(kit / "c.sh"), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 77, done.stdout + done.stderr
    figures = map(json.loads, (tmp_path / "costs.jsonl").read_text().splitlines())
    found = {one["name"]: one["value"] for one in figures}
    assert {name for name in found if "MFU" in name} and min(found.values()) > 0


def test_what_most_is_built_on_is_tested_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SUITE.parent))
    names = [Path(file).name for file in import_module("suite").files()]
    assert names[:3] == ["test_packing_gpu.py", "test_step_gpu.py", "test_parity_gpu.py"]
    assert names[-1] == "test_fsdp.py" and len(names) == len(set(names))
