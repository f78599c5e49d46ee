"""A run that is given no peace: every few seconds a process is killed or stopped (fault 32).

    python tests/faults/soak.py --minutes 4 --seed 0

A real local run of a bandit with two actors. Every `--every` seconds one of these: an actor or the
buffer is killed (-9), the learner is killed (at most every 30 s), one of all is stopped and goes on
a few seconds later. In the end the steps must have risen throughout, the journal must tell of
nothing lost and nothing trained twice, and no role may have grown. Exit code 1 with the reason
where it is otherwise.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the launches are

from invariants import Traces, check_leaks, check_run, traces
from launches import Launch, launching
from live import check_ledger, check_updates, status, stopped, write_recipe

ROLES = ("buffer", "learner", "actor-0", "actor-1")
LEARNER_EVERY_S = 30.0
STOP_S = 4.0  # twice a lease
QUIET_S = 120.0  # without a step; a learner takes a while to start on a busy machine
GROWTH = 1.3  # of the resident memory of a role, from its first quarter to its last
SETTLED_S = 5.0  # after its start a process is measured


class Broken(Exception):
    """What the run did not bear."""


@dataclass
class Size:
    """A process at one moment."""

    at: float
    rss: int
    descriptors: int


class Punisher:
    """What is done to one run, and what is seen of it."""

    def __init__(self, run: Launch, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self.began = time.monotonic()
        self.done: dict[str, int] = defaultdict(int)
        self.sizes: dict[str, list[Size]] = defaultdict(list)
        self.rows: list[dict[str, float]] = []
        self.moved = self.began
        self.learner_due = self.began + LEARNER_EVERY_S / 2

    def look(self) -> None:
        """New steps, and the size of every process that has settled; Broken where nothing moves."""
        now = time.monotonic()
        if self.run.process.poll() is not None:
            raise Broken(f"the run ended: {self.run.end()}; {self.run.logs()}")
        rows = [row for row in self.run.rows() if "stage_kind" in row]
        if rows:
            self.rows += rows
            self.moved = now
        elif now - self.moved > QUIET_S:
            raise Broken(f"no step for {now - self.moved:.0f} s: {self.run.logs()}")
        for name, process in self.run.children().items():
            with contextlib.suppress(psutil.Error):
                if time.time() - process.create_time() > SETTLED_S:
                    size = Size(now, process.memory_info().rss, process.num_fds())
                    self.sizes[name].append(size)

    def strike(self) -> None:
        """One fault."""
        now = time.monotonic()
        acts = ["kill actor-0", "kill actor-1", "kill buffer", *(f"stop {name}" for name in ROLES)]
        if now >= self.learner_due:
            self.learner_due = now + LEARNER_EVERY_S
            acts = ["kill learner"]
        act = self.rng.choice(acts)
        verb, name = act.split()
        process = self.run.children().get(name)
        if process is None:
            return  # it is being started
        self.done[act] += 1
        print(f"{now - self.began:6.1f} s  {act}", flush=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if verb == "kill":
                process.kill()
            else:
                with stopped(process):
                    time.sleep(min(STOP_S, self.rng.uniform(1.0, STOP_S)))

    def check_rise(self) -> None:
        """The last step of every quarter is later than that of the quarter before."""
        times = [row["time_s"] for row in self.rows]
        steps = [int(row["step"]) for row in self.rows]
        if not steps:
            raise Broken("not one step")
        quarters = [steps[max(0, len(steps) * part // 4 - 1)] for part in range(1, 5)]
        if quarters != sorted(set(quarters)):
            raise Broken(f"steps do not rise: {quarters}")
        print(f"steps {steps[0]} to {steps[-1]} in {times[-1] - times[0]:.0f} s of training")

    def check_sizes(self) -> None:
        """Memory and descriptors of every role: the median of its last quarter against the first's.

        A role's processes are many, so a leak from one to the next counts as well.
        """
        print(f"{'role':10}{'looks':>7}{'RSS then':>12}{'RSS now':>12}{'fds then':>10}{'now':>6}")
        grown = []
        for name, sizes in sorted(self.sizes.items()):
            quarter = max(1, len(sizes) // 4)
            (rss, fds), (rss_now, fds_now) = (
                (_median([s.rss for s in part]), _median([s.descriptors for s in part]))
                for part in (sizes[:quarter], sizes[-quarter:])
            )
            print(
                f"{name:10}{len(sizes):7}{rss / 2**20:9.0f} MB{rss_now / 2**20:9.0f} MB"
                f"{fds:10}{fds_now:6}"
            )
            if rss_now > GROWTH * rss + (8 << 20) or fds_now > fds + 16:
                grown.append(name)
        if grown:
            raise Broken(f"grown: {', '.join(grown)}")


def _median(numbers: list[int]) -> int:
    return sorted(numbers)[len(numbers) // 2]


def soak(run: Launch, rng: random.Random, seconds: float, every_s: float) -> Punisher:
    """Strike until the time is over, then let the run recover and show its ledger."""
    while not run.rows():
        if run.process.poll() is not None:
            raise Broken(f"the run did not start: {run.end()}; {run.logs()}")
        time.sleep(0.5)
    punisher = Punisher(run, rng)
    due = punisher.began
    while time.monotonic() < punisher.began + seconds:
        due += every_s
        while time.monotonic() < due:
            punisher.look()
            time.sleep(0.5)
        punisher.strike()
    steps = len(punisher.rows)
    while len(punisher.rows) < steps + 3:
        punisher.look()
        time.sleep(0.5)
    check_ledger(status(run)["ledger"])
    return punisher


def finish(run: Launch, punisher: Punisher, before: Traces) -> None:
    """End the run in order and check all that must hold."""
    run.process.send_signal(signal.SIGTERM)
    code, _ = run.end()
    if code != 128 + signal.SIGTERM:
        raise Broken(f"exit code {code}: {run.logs()}")
    told = check_run(run.run_dir)
    check_updates(run.run_dir, told)
    check_leaks(before)
    uses = sum(map(len, told.trained.values()))
    print(f"{told.lineage} lineages, {told.next_take} takes, {uses} uses of groups trained")
    punisher.check_rise()
    punisher.check_sizes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short, for the socket
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the environment is
    try:
        with launching() as start:
            before = traces()
            run = start(directory / "soak", write_recipe(directory), "run.name=soak")
            seconds = 60 * args.minutes
            punisher = soak(run, random.Random(args.seed), seconds, args.every)
            finish(run, punisher, before)
    except (AssertionError, Broken) as broken:
        print(f"FAILED after seed {args.seed}, kept {directory}: {broken}", file=sys.stderr)
        return 1
    done = ", ".join(f"{act} × {count}" for act, count in sorted(punisher.done.items()))
    print(f"borne: {done}")
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
