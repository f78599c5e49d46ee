"""Queues of peers beside the durable buffer: trajectories a second, in alternating rounds.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_peers.py [--rounds 5] [--bound 4] [PEER ...]

Three producers put trajectories of 8 KiB as fast as the queue accepts them, a consumer takes them.
Each peer runs as its documents say, in an environment of its own, `.venv-peer-NAME`, which the
first call makes. Ours acknowledges a trajectory after its sync to the disk; no peer writes
anything. A round of a peer follows one of ours; ratios are taken within the pair. A peer whose
consumer falls behind drops the oldest (`dropped`), grows, or blocks its producers: then fewer are
taken than put. Ours gives no credit beyond `--bound`, its max_staleness in steps of 256, and grows
with a large one. A peer that cannot be installed is named.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from producers import BufferProcess, Crowd, config

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "peers"
PRODUCERS, TOKENS = 3, 744  # 8 KiB
WARMUP_S, TIMEOUT_S = 2.0, 600.0


@dataclass(frozen=True)
class Peer:
    """A project to compare with: its script and the packages that it needs.

    `bare`: packages that are installed without the others that they ask for, which the script does
    not use.
    """

    script: str
    packages: list[str]
    bare: list[str] = field(default_factory=list)


RAY = ["torch==2.13.0", "ray==2.60.0", "numpy", "psutil", "omegaconf"]
PEERS = {
    "verl": Peer(
        "verl_queue.py",
        [
            *RAY,
            "packaging",
            "pyvers",
            "cloudpickle",
            "importlib_metadata",
            "orjson",
            "transformers",
        ],
        ["verl==0.9.1", "tensordict==0.10.0"],
    ),
    "transferqueue": Peer("tq_queue.py", [*RAY, "transferqueue==0.1.11"]),
    "reverb": Peer(
        "reverb_queue.py", ["dm-reverb==0.14.0", "tensorflow-cpu==2.15.1", "numpy<2", "psutil"]
    ),
}


@dataclass(frozen=True)
class Round:
    """Trajectories put, taken and dropped a second, and processor microseconds of each."""

    put: float
    got: float
    dropped: float
    used_us: float


def install(name: str, peer: Peer) -> str:
    """Make a peer's environment if there is none; return why not, "" if it is there."""
    directory = ROOT / f".venv-peer-{name}"
    done = directory / ".installed"
    if done.exists():
        return ""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    calls = [[*pip, *peer.packages], *([[*pip, "--no-deps", *peer.bare]] if peer.bare else [])]
    for call in calls:
        result = subprocess.run(call, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return result.stderr.strip().splitlines()[-1]
    done.touch()
    return ""


def theirs(name: str, peer: Peer, seconds: float) -> Round:
    """Run one round of a peer."""
    python = ROOT / f".venv-peer-{name}" / "bin" / "python"
    result = subprocess.run(
        [str(python), str(SCRIPTS / peer.script), str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{name} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    found = json.loads(lines[-1])
    put, got, dropped = (found[key] / found["seconds"] for key in ("put", "got", "dropped"))
    return Round(put, got, dropped, 1e6 * found["used_s"] / found["put"])


def ours(seconds: float, bound: int) -> Round:
    """Run one round of the buffer, its journal on the disk where `runs/` is."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as sockets,
        tempfile.TemporaryDirectory(prefix="bench-peers-", dir=ROOT / "runs") as directory,
    ):
        buffer = BufferProcess(
            Path(directory) / "bench", f"ipc://{sockets}/buffer", config(max_staleness=bound)
        )
        crowd = Crowd(buffer.address, "bench", PRODUCERS, TOKENS)
        crowd.start()
        processes = [psutil.Process(process.pid) for process in crowd.processes.values()]
        processes.append(psutil.Process(buffer.process.pid))
        while min(_used(process) for process in processes[:-1]) < 1.0:
            time.sleep(0.1)  # interpreters that start
        time.sleep(WARMUP_S)
        start, before, taken = time.perf_counter(), sum(map(_used, processes)), _taken(buffer)
        time.sleep(seconds)
        end, used = time.perf_counter(), sum(map(_used, processes)) - before
        taken = _taken(buffer) - taken
        delivered, _ = crowd.end()
        buffer.end()
    ends = np.concatenate([one.ends for one in delivered])
    put = int(((ends >= start) & (ends < end)).sum())
    assert taken, "the learner took nothing"
    return Round(put / (end - start), taken / (end - start), 0.0, 1e6 * used / put)


def _taken(buffer: BufferProcess) -> int:
    """Trajectories that the learner has taken and reported."""
    trained = asyncio.run(buffer.status())["ledger"]["trained"]
    return sum(one["trajectories"] for reasons in trained.values() for one in reasons.values())


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def spread(values: list[float], digits: int) -> str:
    """Return the median and the extremes."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--bound", type=int, default=4)
    parser.add_argument("peers", nargs="*", help=", ".join(PEERS))
    args = parser.parse_args()
    for name in args.peers or PEERS:
        if reason := install(name, PEERS[name]):
            print(f"{name}: not installed: {reason}")
            continue
        pairs = []
        for _ in range(args.rounds):
            pairs.append((ours(args.seconds, args.bound), theirs(name, PEERS[name], args.seconds)))
        mine, other = zip(*pairs, strict=True)
        print(
            f"{name}, {len(pairs)} rounds: put {spread([one.put for one in other], 0)}/s, "
            f"taken {spread([one.got for one in other], 0)}/s, "
            f"dropped {spread([one.dropped for one in other], 0)}/s, "
            f"{spread([one.used_us for one in other], 0)} us of processor each; "
            f"ours, durable {spread([one.put for one in mine], 0)}/s, "
            f"taken {spread([one.got for one in mine], 0)}/s, "
            f"{spread([one.used_us for one in mine], 0)} us; "
            f"ratio of put {spread([a.put / b.put for a, b in pairs], 2)}, "
            f"of taken {spread([a.got / b.got for a, b in pairs], 2)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
