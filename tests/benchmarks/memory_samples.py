"""Peak memory of every process of a run, sampled from /proc while it trains."""

import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

ROLES = ("learner", "actor", "buffer", "experience", "prepare")
SAMPLE_S = 0.05


@dataclass
class Peak:
    """Largest sizes of one process, with the processes that it has started, in bytes.

    `private`: anonymous memory, which nothing can reclaim; `pss`: with its share of files.
    """

    role: str
    private: int = 0
    pss: int = 0


def owner_of(process: psutil.Process) -> tuple[int, str]:
    """Return the process of a run that a process belongs to, itself or one above it, and its
    role: launcher if none above has one of ROLES. vLLM's processes belong to their actor."""
    for one in (process, *process.parents()):
        command = one.cmdline()
        if found := [role for role in ROLES if role in command]:
            return one.pid, found[0]
        if "train" in command:
            return one.pid, "launcher"
    return process.pid, "launcher"


def measured(command: list[str], weights_dir: Path, env: dict[str, str]) -> tuple[list[Peak], int]:
    """Run a training command; return the peaks of its processes, and of the files of weights."""
    peaks: dict[int, Peak] = {}
    owners: dict[int, tuple[int, str]] = {}
    shared, looked = 0, 0.0
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as run:
        root = psutil.Process(run.pid)
        while run.poll() is None:
            thorough = time.monotonic() - looked > 1
            looked = time.monotonic() if thorough else looked
            _look([root, *_children(root)], owners, peaks, thorough)
            shared = max(shared, _bytes_of(weights_dir))
            time.sleep(SAMPLE_S)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {run.returncode}")
    return list(peaks.values()), shared


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _look(
    processes: list[psutil.Process],
    owners: dict[int, tuple[int, str]],
    peaks: dict[int, Peak],
    thorough: bool,
) -> None:
    private, pss = Counter[int](), Counter[int]()
    for process in processes:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            anonymous = re.search(r"RssAnon:\s+(\d+)", status)
            if anonymous is None:
                continue  # a zombie
            if process.pid not in owners:
                owners[process.pid] = owner_of(process)
            owner, role = owners[process.pid]
            peaks.setdefault(owner, Peak(role))
            private[owner] += int(anonymous[1]) << 10
            if thorough:
                pss[owner] += process.memory_full_info().pss
        except (psutil.Error, OSError):
            continue
    for owner, size in private.items():
        peaks[owner].private = max(peaks[owner].private, size)
        peaks[owner].pss = max(peaks[owner].pss, pss[owner])


def _bytes_of(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total
