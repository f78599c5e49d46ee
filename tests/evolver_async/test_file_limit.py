"""Every actor is a connection, and a connection is an open file of the server."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import resource, sys
from pathlib import Path
from evolver_async.process.setup import RoleArgs, run_process

def limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)

_, most = limit()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
args = RoleArgs(address="", name="one", incarnation=0, run_dir=Path())
sys.exit(run_process(sys.argv[1], lambda: lambda _: 10 + (limit()[0] == most), args, None))
"""


@pytest.mark.parametrize(("role", "code"), [("buffer", 11), ("learner", 11), ("actor", 10)])
def test_servers_may_open_as_many_files_as_the_machine_allows(role: str, code: int) -> None:
    command = [sys.executable, "-c", SCRIPT, role]
    assert subprocess.run(command, capture_output=True).returncode == code
