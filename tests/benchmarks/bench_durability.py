"""Durable throughput of 20 KB trajectories, and how much of it is left while the buffer is killed.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_durability.py

The buffer is the role's own process, three producers and a learner stand-in are processes too. At
first nothing happens to it; then it is killed (-9) and started again at random moments spread over
a minute. Afterwards the journal is compared with the ACKs: none lost, none given twice, no group
trained twice.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from invariants import check_run  # noqa: E402 (its folder is no package)
from producers import BYTES_PER_TOKEN, BufferProcess, Crowd, config  # noqa: E402

PRODUCERS, TOKENS = 3, 1862  # 20 KiB
WARMUP_S = 5.0  # four interpreters start first
REQUIRED = 2500  # trajectories/s
REQUIRED_SHARE = 0.6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="without kills")
    parser.add_argument("--kill-seconds", type=float, default=60.0, help="with kills")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    (ROOT / "runs").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as sockets,
        tempfile.TemporaryDirectory(prefix="bench-durability-", dir=ROOT / "runs") as directory,
    ):
        run_dir = Path(directory) / "bench"
        buffer = BufferProcess(run_dir, f"ipc://{sockets}/buffer", config())
        crowd = Crowd(buffer.address, run_dir.name, PRODUCERS, TOKENS)
        crowd.start()
        time.sleep(WARMUP_S)
        quiet = time.perf_counter()
        time.sleep(args.seconds)
        noisy = time.perf_counter()
        restarts_s = kill(buffer, noisy, args.kill_seconds, args.kills, rng)
        end = time.perf_counter()
        delivered, takes = crowd.end()
        buffer.end()
        ends = np.concatenate([one.ends for one in delivered])
        acked = [place for one in delivered for place in one.acked]
        check_run(run_dir, acked)
    trained = [group_id for take in takes for group_id in take]
    assert len(trained) == len(set(trained)), "a group was given to the learner twice"
    rate = ((ends >= quiet) & (ends < noisy)).sum() / (noisy - quiet)
    left = ((ends >= noisy) & (ends < end)).sum() / (end - noisy)
    print(
        f"{rate:.0f} durable trajectories/s of {BYTES_PER_TOKEN * TOKENS / 1024:.0f} KiB "
        f"(required {REQUIRED}), {BYTES_PER_TOKEN * TOKENS * rate / 1e6:.0f} MB/s"
    )
    print(
        f"{left:.0f}/s with {buffer.kills} kills in {end - noisy:.0f} s: {left / rate:.0%} of it "
        f"(required {REQUIRED_SHARE:.0%}); back after {np.median(restarts_s):.2f} s (median), "
        f"{max(restarts_s):.2f} s (longest)"
    )
    print(
        f"{len(acked)} acknowledged, 0 lost, 0 twice; {len(trained)} groups trained, 0 twice; "
        f"{sum(one.others for one in delivered)} sends were answered DUP or STALE; seed {args.seed}"
    )
    return 0 if rate >= REQUIRED and left >= REQUIRED_SHARE * rate else 1


def kill(
    buffer: BufferProcess, start: float, seconds: float, kills: int, rng: random.Random
) -> list[float]:
    """Kill it once in each of `kills` equal stretches; how long every restart took, in seconds."""
    restarts_s = []
    for number in range(kills):
        due = start + seconds * (number + rng.random() * 0.8) / kills
        time.sleep(max(0.0, due - time.perf_counter()))
        buffer.kill()
        restarts_s.append(buffer.start())
    time.sleep(max(0.0, start + seconds - time.perf_counter()))
    return restarts_s


if __name__ == "__main__":
    sys.exit(main())
