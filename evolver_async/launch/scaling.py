"""The wanted number of actors of a launch, by hand or by what the learner waits for."""

import contextlib
import logging
import math
import re
from pathlib import Path

import psutil

from evolver_async.config import Config
from evolver_async.config.sections.rollout import ActorsConfig
from evolver_async.launch.run_directory import ACTORS
from evolver_async.metrics.tail import Tail

AUTO = "auto"
LEAST_STEPS = 3  # of the learner in a window
BAND = 0.5  # share of the target below which an actor can go
GROWTH = 2.0  # most by which one decision multiplies the actors

ACTOR = ["-m", "evolver_async.cli", "actor"]  # of the command line of an actor
COUNT = re.compile(r"[0-9]{1,5}")  # of actors, in the file

log = logging.getLogger(__name__)


class ActorScaling:
    """Wanted number of actors: `evolver-async scale`, else the controller, else `actors.count`.

    `scale` writes the file `ACTORS` of the run directory, which `resume` removes.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.file = run_dir / ACTORS
        self.actors = config.actors
        self.controller = WaitController(config.actors, Tail(run_dir / "metrics.jsonl"))
        self.count = config.actors.count
        self.asked = AUTO
        self.refused = ""  # content of the file that is no number of actors

    def wanted(self, now: float) -> int:
        """Return the wanted number at the time `now` in seconds."""
        asked = self._asked()
        if asked != AUTO:
            count = int(asked)
        elif self.asked != AUTO and self.actors.adjustable:
            count = self.count  # the controller goes on from there
            self.controller.begin(now)
        elif self.asked != AUTO:
            count, self.controller.cause = self.actors.count, "actors.count"
        else:
            count = self.controller.wanted(self.count, now)
        if count != self.count:
            cause = "evolver-async scale" if asked != AUTO else self.controller.cause
            log.info("actors: %d, before %d (%s)", count, self.count, cause)
        self.count, self.asked = count, asked
        return count

    def _asked(self) -> str:
        """Return what the file says; `auto` without one, and what it asked before if it is none."""
        if not self.file.exists():
            return AUTO
        asked = self.file.read_text(encoding="utf-8", errors="replace").strip()
        if asked == AUTO or (COUNT.fullmatch(asked) and int(asked)):
            self.refused = ""
            return asked
        if asked != self.refused:
            log.error("%s: must be a number from 1 or %s, is %r", self.file, AUTO, asked[:80])
            self.refused = asked
        return self.asked


def running_actors(launcher: int) -> int:
    """Return how many actors a launcher of this host has started that still run.

    `launcher`: its pid. 0 if that is unknown, as in another container.
    """
    found = 0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                found += child.cmdline()[1:4] == ACTOR
    return found


class WaitController:
    """Number of actors for which the learner waits `actors.target` of its time.

    With n actors a learner that waits a share w of its time gets its groups in b / (1 - w), where b
    is the time in which it is busy, so n (1 - target) / (1 - w) actors suffice. It grows to that
    number, at most twofold at a time, and lets one actor go where it waits less than half of the
    target. It decides every `actors.scale_s` seconds. Time before the last change does not count.
    """

    def __init__(self, actors: ActorsConfig, rows: Tail) -> None:
        self.actors = actors
        self.rows = rows
        self.rows.rows()  # of earlier launches
        self.since: float | None = None  # the start of the window
        self.waited: list[float] = []  # share of every step in the window
        self.cause = ""

    def begin(self, now: float) -> None:
        """Begin a window: steps until now do not count."""
        self.rows.rows()
        self.since, self.waited = now, []

    def wanted(self, count: int, now: float) -> int:
        """Return the wanted number where `count` is the present one."""
        if not self.actors.adjustable:
            return count
        low, high = self.actors.bounds()
        if self.since is None or now - self.since < self.actors.scale_s:
            self.since = now if self.since is None else self.since
            return count
        self.waited += [share for row in self.rows.rows() if (share := waited(row)) is not None]
        if len(self.waited) < LEAST_STEPS:
            return count
        waits = sum(self.waited) / len(self.waited)
        self.cause = f"the learner waited {waits:.0%} of its time"
        self.since, self.waited = now, []
        target = self.actors.target
        if waits > target:
            enough = count * (1 - target) / max(1 - waits, 1e-9)
            count = math.ceil(min(enough, GROWTH * count))
        elif waits < BAND * target:
            count -= 1
        return min(max(count, low), high)


def waited(row: dict[str, float]) -> float | None:
    """Return the share of a step in which the learner waited for groups."""
    return row.get("throughput/learner/data")
