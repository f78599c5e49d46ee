"""Parts that all queue benchmarks share: the sample, processor time, the result of one round.

It runs in the environment of a peer, so it imports numpy and psutil only.
"""

import json
import sys
from contextlib import suppress

import numpy as np
import psutil

PRODUCERS = 3
TOKENS = 744  # of 11 bytes: 8 KiB
IN_FLIGHT = 64  # puts that one producer has under way, if its client can
FULL = 1000  # items that a queue holds
WARMUP_S = 2.0


def sample() -> dict[str, np.ndarray]:
    """Return one trajectory: tokens, roles, turns and log-probs of `TOKENS` tokens."""
    return {
        "tokens": np.random.default_rng(0).integers(0, 512, TOKENS, np.int32),
        "roles": np.ones(TOKENS, np.uint8),
        "turns": np.zeros(TOKENS, np.int16),
        "logprobs": np.full(TOKENS, -0.5, np.float32),
    }


def processor_s() -> float:
    """Processor seconds of this process and all that descend from it."""
    own, used = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def window_s() -> float:
    """Return the seconds that count, the only argument of a script."""
    return float(sys.argv[1])


def report(*, put: int, got: int, dropped: int, seconds: float, used_s: float) -> None:
    """Print the result of one round as JSON on a line of its own."""
    result = {"put": put, "got": got, "dropped": dropped, "seconds": seconds, "used_s": used_s}
    print(json.dumps(result), flush=True)
