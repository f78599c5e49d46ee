"""What the sandbox does in a second, and what a hostile program costs.

    python tests/benchmarks/bench_sandbox.py [SECONDS]

Prints executions a second of a warm pool (two interpreters, four threads that ask), of one
interpreter, and of an interpreter started for every program; and for hostile programs how long
they held an interpreter beyond their deadline.
"""

import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import hostile

from actors.sandbox.interpreters import SandboxPool
from actors.sandbox.process import SandboxLimits

PROGRAM = "print(34*57%1000)"
REQUIRED = 50


def rate(pool: SandboxPool, threads: int, seconds: float) -> float:
    """Programs a second."""
    end = time.perf_counter() + seconds

    def ask(_: int) -> int:
        done = 0
        while time.perf_counter() < end:
            assert pool.run(PROGRAM).stdout == "938\n"
            done += 1
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as executor:
        total = sum(executor.map(ask, range(threads)))
    return total / (time.perf_counter() - began)


def starts(count: int) -> list[float]:
    """Seconds from nothing to the first program's output."""
    took = []
    for _ in range(count):
        pool, began = SandboxPool(size=1), time.perf_counter()
        assert pool.run(PROGRAM).status == "ok"
        took.append(time.perf_counter() - began)
        pool.close()
    return took


def measure(seconds: float) -> None:
    pool = SandboxPool(size=2)
    route = pool.start()
    print(f"confined by {route}; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    both = rate(pool, 4, seconds)
    print(f"two warm interpreters: {both:.0f} programs/s (required {REQUIRED})")
    pool.close()
    pool = SandboxPool(size=1)
    print(f"one: {rate(pool, 1, seconds):.0f} programs/s")
    pool.close()
    print(f"cold: {1e3 * statistics.median(starts(10)):.0f} ms to the first program's output")
    pool = SandboxPool(SandboxLimits(wall_s=hostile.WALL_S), size=1)
    over = {}
    for name, program in hostile.BATTERY.items():
        began = time.perf_counter()
        pool.run(program.source)
        over[name] = time.perf_counter() - began - hostile.WALL_S
    pool.close()
    worst = max(over, key=lambda name: over[name])
    print(
        f"{len(over)} hostile programs: at most {1e3 * over[worst]:+.0f} ms beyond their deadline"
        f" of {hostile.WALL_S:g} s ({worst})"
    )


if __name__ == "__main__":
    measure(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
