"""The ranks of a learner on a host beside that of its launcher.

They end and start again together, as those of the launcher's host do. A rank that is lost anywhere
ends all of them at their next common operation, and they meet again at `learner.address`.
"""

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load_written
from evolver_async.durations import utc
from evolver_async.errors import USER_ERROR
from evolver_async.launch.child import FINAL, Child, LocalSpawner, ending
from evolver_async.terminal import say

POLL_S = 0.2
PAUSE_S = 2.0  # between two starts
# In a row. The first of them may have read the configuration before a resume wrote it anew.
MOST_REFUSALS = 3


@dataclass
class RankHost:
    """Ranks of host `host`, from 1, of the run in `run_dir`."""

    run_dir: Path
    host: int
    started: int = 0
    signals: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Keep the ranks running until the first rank ends them. Return an exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.signals.append(number))
        self._wait_for_run()
        refusals = 0
        while not self.signals:
            code = self._play()
            if code == 0 or self.signals:
                break
            refusals = refusals + 1 if code == USER_ERROR else 0
            if code in FINAL and not 0 < refusals < MOST_REFUSALS:
                return code
            time.sleep(PAUSE_S)
        return 128 + self.signals[0] if self.signals else 0

    def _wait_for_run(self) -> None:
        config = self.run_dir / "config.yaml"
        if not config.is_file():
            say(f"waits for {config}")
        while not (config.is_file() or self.signals):
            time.sleep(POLL_S)

    def _play(self) -> int:
        """Run the ranks once. Return the exit code of the one that failed, 0 if none did."""
        config = load_written(self.run_dir)
        ranks = ranks_of(config, self.host)
        self.started += 1
        spawner = LocalSpawner(config, self.run_dir, "", None)  # rank 0 alone talks to the buffer
        first = ranks[0]
        process = spawner.start("learner", f"learner-{first}", self.started, first)
        child = Child("learner", "learner", process, self.started, first=first)
        child.others = spawner.start_others("learner", "learner", self.started, first)
        say(
            f"{utc()} ranks {first} to {ranks[-1]} of {self.run_dir.name}"
            f" meet the others at {config.learner.address}"
        )
        try:
            code = self._end_of(child)
        finally:
            for process in child.processes:
                process.kill()
                process.wait()
        if code:
            name, _ = child.failed_process
            say(f"{utc()} {name} {ending(code)}: {spawner.last_error(child)}")
        return code

    def _end_of(self, child: Child) -> int:
        """Wait until a rank has failed, or all have ended; return the code, 0 after a signal."""
        while not self.signals:
            if code := child.poll():
                return code
            if all(process.poll() is not None for process in child.processes):
                break
            time.sleep(POLL_S)
        return 0


def ranks_of(config: Config, host: int) -> range:
    """Return the ranks of a host beside the launcher's. Raises ConfigError."""
    learner = config.learner
    if learner.hosts == 1:
        raise ConfigError("learner.hosts: is 1: the launcher starts all ranks of this run")
    if not 0 < host < learner.hosts:
        beside = f"1 to {learner.hosts - 1} of learner.hosts={learner.hosts}"
        raise ConfigError(f"--host {host}: must be {beside}; host 0 is the launcher's")
    return range(host * learner.ranks_per_host, (host + 1) * learner.ranks_per_host)
