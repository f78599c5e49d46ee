"""The lines of the documents that start a Ray cluster and a run on it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray._private.utils import get_ray_address_file

ROOT = Path(__file__).parents[2]
TRAIN = "evolver-async train configs/frozen_lake.yaml"
COMMANDS = """
ray() { "$PYTHON" -m ray.scripts.scripts "$@"; }
evolver-async() { "$PYTHON" -m evolver_async.cli "$@"; }
"""  # of this environment, whose scripts need not be in the path
SHORT = "stages='[{kind: rl, steps: 1}]' eval.every=0 eval.episodes=4 metrics.panel=none"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home of its own, by which the processes of the cluster are found at the end.

    Ray notes a cluster's address outside of it, where later runs would look for the dead one.
    """
    noted = Path(get_ray_address_file(None))
    before = noted.read_bytes() if noted.exists() else None
    yield tmp_path
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(tmp_path):
                process.kill()
        except psutil.Error:
            continue
    if before is None:
        noted.unlink(missing_ok=True)
    else:
        noted.write_bytes(before)


def test_the_lines_of_the_documents_start_a_cluster_and_a_run(home: Path) -> None:
    """As they stand, in a home without a token; the run alone is made short."""
    text = (ROOT / "docs" / "scaling.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (lines,) = [block for block in blocks if "ray start --head" in block]
    assert TRAIN in lines
    script = lines.replace(TRAIN, f"{TRAIN} {SHORT} run.dir={home} run.name=run")
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
    environment |= {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHON"] = sys.executable
    with open(home / "output", "wb") as output:  # a pipe would stay open as long as the cluster
        command = ["bash", "-ec", COMMANDS + script]
        code = subprocess.call(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=300
        )
    said = (home / "output").read_text()
    assert code == 0 and "finished at step 1" in said, said
    assert (home / ".ray" / "auth_token").exists()
