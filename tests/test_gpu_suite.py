"""The runner of the GPU tests, which is the same for tests that need none."""

import json
import os
import subprocess
import sys
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
