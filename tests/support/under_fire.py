"""A local run whose processes are killed and stopped: victims, pace, and what must hold at the end.

Shared by the kill schedule of the test suite and by the soak. A run consists of a launcher, a
buffer, an experience service, a learner and two actors; a killed launcher takes all of them along
and is followed by `train --resume`.
"""

import contextlib
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from invariants import Place, Story, check_run
from launches import Launch
from live import check_ledger, check_repeats, check_updates, status, stopped, write_recipe

LAUNCHER = "launcher"
ROLES = ("buffer", "experience", "learner", "actor-0", "actor-1")
STOP_S = 4.0  # twice a lease
QUIET_S = 300.0  # without a step; a run takes a while to start on a busy machine
SETTLED_S = 30.0  # age at which a process is measured
LOOK_S = 0.5
SIZES_S = 5.0  # between two measurements of the processes
RECOVERED = 3  # steps after the last fault


class Broken(Exception):
    """A promise that the run did not keep."""


@dataclass(frozen=True)
class Size:
    """Resident memory in bytes and open descriptors of one process at a time in seconds."""

    at: float
    rss: int
    descriptors: int


class RunUnderFire:
    """One run, the faults it met, and what was seen of it."""

    def __init__(
        self, start: Callable[..., Launch], directory: Path, name: str, *overrides: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.start = start
        self.run_dir = directory / name
        self.acks = directory / "acked"
        recipe = write_recipe(directory)
        self.launch = start(self.run_dir, recipe, f"run.name={name}", *overrides)
        self.began = self.moved = time.monotonic()
        self.faults: dict[str, int] = defaultdict(int)
        self.sizes: dict[str, list[Size]] = defaultdict(list)
        self.highest = 0  # the latest step
        self.measure_due = 0.0

    def look(self) -> None:
        """Count new steps, measure settled processes. Raises Broken where nothing moves."""
        now = time.monotonic()
        if self.launch.process.poll() is not None:
            raise Broken(f"the run ended: {self.launch.end()}; {self.launch.logs()}")
        rows = [row for row in self.launch.rows() if "stage_kind" in row]
        if rows:
            self.moved = now
            self.highest = max(self.highest, *(int(row["step"]) for row in rows))
        elif now - self.moved > QUIET_S:
            raise Broken(f"no step for {now - self.moved:.0f} s: {self.launch.logs()}")
        if now < self.measure_due:
            return
        self.measure_due = now + SIZES_S
        for name, process in self.processes().items():
            with contextlib.suppress(psutil.Error):
                if time.time() - process.create_time() > SETTLED_S:
                    size = Size(now, process.memory_info().rss, process.num_fds())
                    self.sizes[name].append(size)

    def processes(self) -> dict[str, psutil.Process]:
        """The launcher and the running roles by name."""
        launcher = psutil.Process(self.launch.process.pid)
        return {LAUNCHER: launcher} | self.launch.children()

    def until(self, condition: Callable[[], object]) -> None:
        """Look until `condition` holds."""
        while not condition():
            self.look()
            time.sleep(LOOK_S)

    def wait(self, due: float) -> None:
        """Look until `due` on the monotonic clock."""
        self.until(lambda: time.monotonic() >= due)

    def recover(self) -> None:
        """Wait for a few more steps; the ledger closes then."""
        self.advance(RECOVERED)
        check_ledger(status(self.launch)["ledger"])

    def advance(self, steps: int = 1) -> None:
        """Wait until the run is so many steps further than it ever was."""
        reached = self.highest
        self.until(lambda: self.highest >= reached + steps)

    def strike(self, verb: str, name: str, rng: random.Random) -> None:
        """One fault, as soon as its victim runs."""
        self.until(lambda: name in self.processes())
        self.faults[f"{verb} {name}"] += 1
        print(f"{time.monotonic() - self.began:7.1f} s  {verb} {name}", flush=True)
        if name == LAUNCHER:
            self.launch.process.kill()
            self.launch.process.communicate()
            tail = self.launch.tail
            self.launch = self.start(self.run_dir, "--resume", self.run_dir)
            self.launch.tail = tail
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process = self.processes()[name]
            if verb == "kill":
                process.kill()
            else:
                with stopped(process):
                    time.sleep(rng.uniform(1.0, STOP_S))

    def finish(self) -> Story:
        """End the run in order; check journal, acknowledgements, updates and repeated takes."""
        self.launch.process.send_signal(signal.SIGTERM)
        code, _ = self.launch.end()
        if code != 128 + signal.SIGTERM:
            raise Broken(f"exit code {code}: {self.launch.logs()}")
        acked = read_acks(self.acks)
        story = check_run(self.run_dir, acked)
        check_updates(self.run_dir, story)
        check_repeats(self.run_dir)
        uses = sum(map(len, story.trained.values()))
        print(
            f"{self.run_dir.name}: {story.lineage} lineages, {story.next_take} takes,"
            f" {uses} uses of groups trained, all of {len(acked)} acknowledged trajectories in the"
            " journal",
            flush=True,
        )
        return story


def slopes(sizes: list[Size], warmup_s: float) -> tuple[float, float, float, float]:
    """Median and growth an hour (as a share of the median) of memory, the same of descriptors.

    The growth is the least-squares slope over what was measured after `warmup_s`.
    """
    late = [size for size in sizes if size.at >= sizes[0].at + warmup_s]
    hours = [size.at / 3600 for size in late]
    found: list[float] = []
    for values in ([s.rss for s in late], [s.descriptors for s in late]):
        median = statistics.median(values)
        found += [median, statistics.linear_regression(hours, values).slope / median]
    return found[0], found[1], found[2], found[3]


def read_acks(path: Path) -> list[Place]:
    """The (group, member) of every ACK that an actor wrote down; a torn last line is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [(int(group), int(member)) for group, member in (line.split() for line in lines)]
