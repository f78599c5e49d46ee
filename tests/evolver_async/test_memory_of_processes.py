"""Freed memory goes back to the kernel, and oneDNN prepares for few shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evolver_async.config import Config
from evolver_async.launch.child import FEW_SHAPES, KEEP_MEMORY, LocalSpawner

PROCESS = """
import sys, time, psutil
from evolver_async.process import garbage

garbage.TRIM_S = 0.05
rss = psutil.Process().memory_info
blocks = [bytes(1000) for _ in range(100_000)]
last = bytes(1000)  # behind them: glibc itself gives back only what is free at the end
full = rss().rss
del blocks
kept = rss().rss
garbage.give_back_memory()
deadline = time.monotonic() + 60
while rss().rss > full - 50e6 and time.monotonic() < deadline:
    time.sleep(0.05)
print(kept > full - 50e6, rss().rss < full - 50e6)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_goes_back_though_glibc_is_to_keep_it() -> None:
    environment = os.environ | KEEP_MEMORY
    command = [sys.executable, "-c", PROCESS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["True", "True"], ended.stderr


@pytest.mark.parametrize("role", ["learner", "actor", "experience"])
def test_every_process_prepares_for_few_shapes(role: str, tmp_path: Path) -> None:
    variables = LocalSpawner(Config(), tmp_path, "ipc:///none", None).variables(role)
    assert FEW_SHAPES.items() <= variables.items()
