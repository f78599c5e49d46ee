"""A run that meets a fault every ten seconds for hours, beside the same run without faults.

    make soak ARGS=--hours=2

Both are local runs with a buffer, an experience service, a learner and two actors. The faults: a
process is killed (-9), or is stopped for 1 to 4 seconds; actors and services are hit most often,
the learner every two minutes, the launcher every ten. In the end nothing acknowledged may be lost,
nothing trained twice, every repeated take must have been bitwise equal, and no process or file may
be left. The figures, and whether they reach their marks: progress beside the run without faults,
growth of memory and descriptors an hour. They are printed every five minutes as well. Exit code 1
with the reason where a promise does not hold, or a mark is missed.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from invariants import check_leaks, traces
from launches import Launch, launching
from under_fire import LAUNCHER, ROLES, Broken, RunUnderFire, slopes

LEARNER_EVERY_S, LAUNCHER_EVERY_S = 120.0, 600.0
FREQUENT = [
    *(f"kill {name}" for name in ("actor-0", "actor-1", "buffer", "experience")),
    *(f"stop {name}" for name in ROLES),
]
TOLD_S = 300.0
WARMUP = 0.2  # share of the time after which growth is measured
MOST_WALL, MOST_GROWTH = 1.15, 0.01
OVERRIDES = (
    "experience.kind=contrast",
    "rollout.guided_fraction=0.25",
    "loss.boost=0",  # no clip binds with one update a step
    "env.params.reset_s=2.0",  # bound by the environment, as rollouts of agents are
    "actors.groups=4",
    "stages.0.hours=1000",
    "buffer.archive=all",
)


class Soak:
    """The run that meets the faults, and the one that is left alone."""

    def __init__(self, start: Callable[..., Launch], directory: Path, rng: random.Random) -> None:
        self.rng = rng
        self.hit = RunUnderFire(start, directory / "hit", "hit", *OVERRIDES)
        self.spared = RunUnderFire(start, directory / "spared", "spared", *OVERRIDES)
        for run in (self.hit, self.spared):
            run.recover()
        self.began = self.told = time.monotonic()
        self.from_steps = self.hit.highest, self.spared.highest
        self.due = {
            "kill learner": self.began + LEARNER_EVERY_S / 2,
            f"kill {LAUNCHER}": self.began + LAUNCHER_EVERY_S / 2,
        }

    def run(self, seconds: float, every_s: float) -> None:
        """Strike every `every_s` until the time is over, then let the run recover."""
        due = self.began
        while time.monotonic() < self.began + seconds:
            due = max(due + every_s, time.monotonic())
            while time.monotonic() < due:
                self.hit.look()
                self.spared.look()
                time.sleep(0.5)
            self.hit.strike(*self.next_fault().split(), self.rng)
            if time.monotonic() > self.told + TOLD_S:
                self.told = time.monotonic()
                self.tell(seconds)
        for run in (self.hit, self.spared):
            run.recover()

    def next_fault(self) -> str:
        """The learner's or the launcher's turn where it has come, else one of the frequent ones."""
        now = time.monotonic()
        for fault, due in self.due.items():
            if now >= due:
                self.due[fault] += LAUNCHER_EVERY_S if LAUNCHER in fault else LEARNER_EVERY_S
                return fault
        return self.rng.choice(FREQUENT)

    def tell(self, seconds: float) -> list[str]:
        """Print the figures so far; returns the marks that they miss."""
        hours = (time.monotonic() - self.began) / 3600
        hit, spared = self.hit.highest, self.spared.highest
        wall = (spared - self.from_steps[1]) / max(1, hit - self.from_steps[0])
        faults = Counter(self.hit.faults)
        print(f"{hours:.2f} h, {faults.total()} faults: {dict(sorted(faults.items()))}")
        print(f"steps {hit} under fire, {spared} without: wall time {wall:.3f} a step")
        missed = [f"wall time {wall:.3f}"] if wall > MOST_WALL else []
        print(f"{'':8}{'role':12}{'looks':>6}{'RSS':>9}{'growth/h':>10}{'fds':>6}{'growth/h':>10}")
        for run in (self.hit, self.spared):
            for name, sizes in sorted(run.sizes.items()):
                if len(sizes) < 20:
                    continue
                rss, grows, fds, opens = slopes(sizes, WARMUP * hours * 3600)
                print(
                    f"{run.run_dir.name:8}{name:12}{len(sizes):6}{rss / 2**20:6.0f} MB"
                    f"{grows:10.2%}{fds:6.0f}{opens:10.2%}"
                )
                if max(grows, opens) >= MOST_GROWTH:
                    missed.append(f"{run.run_dir.name}: {name} grows by {max(grows, opens):.1%}/h")
        sys.stdout.flush()
        return missed

    def finish(self, seconds: float) -> list[str]:
        """End both runs in order, check all that must hold; returns the marks that are missed."""
        missed = self.tell(seconds)
        for run in (self.hit, self.spared):
            run.finish()
        return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=4 / 60)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short, for the socket
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "support")
    before = traces()
    try:
        with launching() as start:
            soak = Soak(start, directory, random.Random(args.seed))
            soak.run(3600 * args.hours, args.every)
            missed = soak.finish(3600 * args.hours)
        check_leaks(before)
    except (AssertionError, Broken) as broken:
        print(f"FAILED with seed {args.seed}, kept {directory}: {broken}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    if missed:
        print(f"missed with seed {args.seed}: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
