"""Shared memory that a killed vLLM has left goes with the private directory of its owner."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from evolver_async.process import segments
from evolver_async.process.private_directories import PREFIX, claim, sweep

MAPS_ONE = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.truncate(file, 4096)
memory = mmap.mmap(file, 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_segments_of_a_killed_vllm_are_swept_with_its_owners_directory(tmp_path: Path) -> None:
    name = f"vllm_dist_{uuid.uuid4().hex}-tp:0-[0-1]-cpushm"
    other, place = segments.SHARED / f"psm_{uuid.uuid4().hex}", segments.SHARED / name
    other.touch()
    held = claim(tmp_path / f"{PREFIX}engine-of-a-killed-actor")
    command = [sys.executable, "-c", MAPS_ONE, str(place), "VLLM::Worker"]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"mapped\n"
            found = segments.mapped_below(os.getpid())
            child.kill()
        assert name in found and other.name not in found
        segments.note(held.directory, {name, "../outside"})
        held.release()
        assert place.exists()
        sweep(tmp_path)
        assert not place.exists() and not held.directory.exists() and other.exists()
    finally:
        place.unlink(missing_ok=True)
        other.unlink()
