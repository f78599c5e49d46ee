"""The rows of a run directory as a Weights & Biases run: followed while it trains, or sent at once.

A W&B run is written from its first row on every time: W&B replaces a run of the same id that is not
resumed. So it holds what metrics.jsonl holds, whatever died in between and wherever the parts were
written, and of a resumed run the newest lineage alone.
"""

import contextlib
import fcntl
import importlib
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evolver_async.config import ConfigError
from evolver_async.config.load import load, to_dict
from evolver_async.config.secrets import without_secrets
from evolver_async.metrics.lineages import Mark, current, mark
from evolver_async.metrics.tail import Tail
from evolver_async.metrics.wandb_process import ALERTS, online, read_state, write_state

POLL_S = 0.5
SAVE_S = 1.0  # between two notes of how far it has come
INIT_S = 15.0  # with a key but no network wandb would stall for 100 s
LOCK_S = 10.0  # for the process before this one to be gone


class UploadError(RuntimeError):
    """W&B does not take the rows; says why."""


class Upload:
    """One W&B run and how much of a run directory it holds.

    `fallback`: go on offline when the server cannot be reached. `parent`: the pid that W&B's system
    metrics are about.
    """

    def __init__(self, run_dir: Path, to_server: bool, fallback: bool, parent: int) -> None:
        self.wandb = importlib.import_module("wandb")  # slow to import, so only here
        self.run_dir = run_dir
        self.to_server = to_server
        self.fallback = fallback
        self.parent = parent
        self.config = load(run_dir / "config.yaml")
        self.state = read_state(run_dir)
        self.state |= {"pid": os.getpid(), "rows": 0, "url": None}
        self.saved = 0.0
        self._open()

    def _open(self) -> None:
        """Begin the W&B run anew; nothing of the run directory is in it yet."""
        self.rows = Tail(self.run_dir / "metrics.jsonl")
        self.marks: list[Mark] = []
        self.given: list[int] = []  # positions of the rows that W&B has
        try:
            self.run = self._init("online" if self.to_server else "offline")
        except self.wandb.Error as error:
            if not self.fallback or not self.to_server:
                raise UploadError(str(error)) from error
            print(f"W&B cannot be reached, rows are kept offline: {error}", flush=True)
            self.to_server = False
            self.run = self._init("offline")
        self.alerts = Tail(self.run_dir / ALERTS)
        self.alerts_seen = 0
        # People are notified once. A directory made offline is to hold all there is.
        self.known = self.state.get("alerts", 0) if self.to_server else 0
        self.run.define_metric("*", step_metric="step")  # late evaluations have smaller steps
        self.state["rows"] = 0
        self.state["url"] = self.run.url if self.to_server else None
        self._save()

    def _init(self, mode: str) -> Any:
        self._wait_for_a_new_second()
        settings = self.wandb.Settings(
            init_timeout=INIT_S, console="off", x_stats_pid=self.parent, disable_code=True
        )
        return self.wandb.init(
            mode=mode,
            settings=settings,
            project=self.config.metrics.project,
            name=self.run_dir.name,
            id=self.state["id"],
            dir=str(self.run_dir),
            config=without_secrets(to_dict(self.config)),
        )

    def _wait_for_a_new_second(self) -> None:
        """W&B names its directories by the second; two must not share one."""
        while any((self.run_dir / "wandb").glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
            time.sleep(0.1)

    def take_in(self) -> int:
        """Send the rows and alerts written since the last call; returns how many rows."""
        rows = self.rows.rows()
        before, newest = len(self.marks), self.marks[-1].lineage if self.marks else 0
        added = [mark(row) for row in rows]
        self.marks += added
        # Nothing is superseded but by a new lineage, or by a row beside the takes of one.
        goes_on = all(one.lineage == newest and one.kind == "take" for one in added)
        kept = set(range(before, len(self.marks)) if goes_on else current(self.marks))
        if not goes_on and not kept.issuperset(self.given):
            self.run.finish()
            self._open()
            return self.take_in()
        for index, row in enumerate(rows, before):
            if index in kept:
                self.run.log(row)
                self.given.append(index)
            self.state["rows"] += 1
            self._save(SAVE_S)
        self.state["alerts"] = max(self.known, self.alerts_seen)  # W&B still lives
        for alert in self.alerts.rows():
            self.alerts_seen += 1
            if self.alerts_seen > self.known:
                self.run.alert(title=alert["title"], text=alert["text"])
        self._save()
        return len(rows)

    def _save(self, after_s: float = 0.0) -> None:
        if time.monotonic() - self.saved >= after_s:
            self.saved = time.monotonic()
            write_state(self.run_dir, self.state)

    def finish(self) -> None:
        """Wait until W&B has everything."""
        self.run.finish()
        self._save()

    @property
    def place(self) -> Path:
        """The directory of the W&B run on this machine."""
        return Path(self.run.settings.sync_dir)


@contextlib.contextmanager
def alone(run_dir: Path, wait_s: float) -> Iterator[None]:
    """Hold the run's upload for this process. ConfigError if another one does after `wait_s`."""
    deadline = time.monotonic() + wait_s
    with open(run_dir / "wandb.lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{run_dir}: a process of the run sends its metrics to W&B by itself"
                    ) from None
                time.sleep(POLL_S / 5)
        yield


def follow(run_dir: Path, mode: str, parent: int) -> None:
    """Send what is written until stdin is closed, then the rest."""
    with alone(run_dir, LOCK_S):
        upload = Upload(run_dir, online(mode), fallback=mode == "auto", parent=parent)
        closed = False
        while not closed:
            closed = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            upload.take_in()
        upload.finish()


def send(run_dir: Path, to_server: bool) -> str:
    """Send a whole run now; returns one sentence that says where it is."""
    with alone(run_dir, 0.0):
        try:
            upload = Upload(run_dir, to_server, fallback=False, parent=os.getpid())
            upload.take_in()
            upload.finish()
        except OSError as error:  # W&B's helper process died
            raise UploadError(str(error)) from error
    said = f"{len(upload.given)} of {len(upload.marks)} rows are"
    if to_server:
        return f"{said} at {upload.state['url']}"
    return f"{said} in {upload.place}; to upload them: wandb sync {upload.place}"
