"""Connections of actors, agents and others are open files, of which a process may have many."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import resource, sys
from pathlib import Path
from evolver_async.process import setup
from evolver_async.process.setup import RoleArgs, run_process

def limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)

_, most = limit()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
setup.MOST_FILES = min(int(sys.argv[2]), setup.MOST_FILES)
wanted = min(most, setup.MOST_FILES)
args = RoleArgs(address="", name="one", incarnation=0, run_dir=Path())
sys.exit(run_process(sys.argv[1], lambda: lambda _: 10 + (limit() == (wanted, most)), args, None))
"""


@pytest.mark.parametrize("bound", [100, 1 << 30])  # below and beyond what the machine allows
@pytest.mark.parametrize(("role", "code"), [("buffer", 11), ("actor", 11)])
def test_processes_may_open_many_files(role: str, code: int, bound: int) -> None:
    command = [sys.executable, "-c", SCRIPT, role, str(bound)]
    assert subprocess.run(command, capture_output=True).returncode == code
