"""Peak memory of every process of a run, sampled from /proc while it trains."""

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROLES = ("learner", "actor", "buffer", "experience", "prepare")
SAMPLE_S = 0.05


@dataclass
class Peak:
    """Largest sizes of one process in bytes.

    `private`: anonymous memory, which nothing can reclaim; `pss`: with its share of files.
    """

    role: str
    private: int = 0
    pss: int = 0


def role_of(command: list[str]) -> str:
    """Name the role of a process of a run; launcher if it is none of ROLES."""
    return next((one for one in ROLES if one in command), "launcher")


def measured(command: list[str], weights_dir: Path, env: dict[str, str]) -> tuple[list[Peak], int]:
    """Run a training command; return the peaks of its processes, and of the files of weights."""
    peaks: dict[int, Peak] = {}
    shared, looked = 0, 0.0
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as run:
        root = psutil.Process(run.pid)
        while run.poll() is None:
            thorough = time.monotonic() - looked > 1
            looked = time.monotonic() if thorough else looked
            for process in [root, *_children(root)]:
                _look(process, peaks, thorough)
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


def _look(process: psutil.Process, peaks: dict[int, Peak], thorough: bool) -> None:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = re.search(r"RssAnon:\s+(\d+)", status)
        if anonymous is None:
            return  # a zombie
        if process.pid not in peaks:
            peaks[process.pid] = Peak(role_of(process.cmdline()))
        peak = peaks[process.pid]
        peak.private = max(peak.private, int(anonymous[1]) << 10)
        if thorough:
            peak.pss = max(peak.pss, process.memory_full_info().pss)
    except (psutil.Error, OSError):
        return


def _bytes_of(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total
