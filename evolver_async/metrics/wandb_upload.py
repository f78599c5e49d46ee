"""Upload of a run's rows to Weights & Biases: during training, or all at once.

Every upload writes the W&B run from its first row on: W&B replaces a run of the same id that is not
resumed. The W&B run therefore equals metrics.jsonl after any crash, and after a resume it holds the
newest lineage only.
"""

import contextlib
import fcntl
import importlib
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evolver_async.config import ConfigError
from evolver_async.config.load import load_written, to_dict
from evolver_async.config.secrets import without_secrets
from evolver_async.durations import since_1970
from evolver_async.files import remove
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.families import AXES, axis_of, summary_of
from evolver_async.metrics.gauges import GaugeThread
from evolver_async.metrics.histograms import Histogram
from evolver_async.metrics.launches import summary
from evolver_async.metrics.newest_lineage import RowKey, current, key_of
from evolver_async.metrics.tail import Tail
from evolver_async.metrics.wandb_process import (
    SERVER_ALERTS,
    alert_count,
    online,
    read_state,
    write_state,
)
from evolver_async.metrics.wandb_rows import COLUMNS, REPLY_COLUMNS, StepExtras
from evolver_async.terminal import say

POLL_S = 0.5
SAVE_S = 1.0  # between two records of the progress
INIT_S = 15.0  # with a key but no network wandb would stall for 100 s
LOCK_S = 10.0  # until the previous process must have ended


class UploadError(RuntimeError):
    """W&B refuses the rows; the message says why."""


class Upload:
    """One W&B run, and the rows of a run directory that it holds.

    `fallback`: continue offline if the server cannot be reached. `parent`: pid of the process whose
    system metrics W&B records.
    """

    def __init__(self, run_dir: Path, to_server: bool, fallback: bool, parent: int) -> None:
        self.wandb = importlib.import_module("wandb")  # slow to import, so only here
        self.run_dir = run_dir
        self.to_server = to_server
        self.fallback = fallback
        self.parent = parent
        self.config = load_written(run_dir)
        self.state = read_state(run_dir)
        self.state |= {"pid": os.getpid(), "rows": 0, "url": None}
        self.saved = 0.0
        self._open()

    def _open(self) -> None:
        """Start the W&B run again, without any rows."""
        self.rows = Tail(self.run_dir / "metrics.jsonl")
        self.keys: list[RowKey] = []
        self.sent: list[int] = []  # positions of the rows that W&B has
        try:
            self.run = self._init("online" if self.to_server else "offline")
        except self.wandb.Error as error:
            if not self.fallback or not self.to_server:
                raise UploadError(str(error)) from error
            say(f"W&B cannot be reached; the rows are kept offline: {error}", flush=True)
            self.to_server = False
            self.run = self._init("offline")
        self.alerts = Tail(self.run_dir / ALERTS)
        self.alerts_read = 0
        # People are notified once, but an offline directory must hold all alerts.
        self.alerts_sent = self.state.get(SERVER_ALERTS, 0) if self.to_server else 0
        self._drop_superseded()
        self.extras = StepExtras(self.run_dir)
        self.defined: set[str] = {*AXES}  # names of metrics that W&B knows
        for axis in AXES:
            self.run.define_metric(axis)
        self.state["rows"] = 0
        self.state["url"] = self.run.url if self.to_server else None
        self.state["sync"] = None if self.to_server else str(self.directory)
        self._save()

    def _init(self, mode: str) -> Any:
        # W&B names its directories by the second: wait for one without a directory.
        while any((self.run_dir / "wandb").glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-*")):
            time.sleep(0.1)
        settings = self.wandb.Settings(
            init_timeout=INIT_S, console="off", x_stats_pid=self.parent, disable_code=True
        )
        metrics = self.config.metrics
        return self.wandb.init(
            mode=mode,
            settings=settings,
            project=metrics.project,
            entity=metrics.entity or None,
            group=metrics.group or None,
            job_type=metrics.job_type or None,
            tags=metrics.tags or None,
            notes=metrics.notes or None,
            name=self.run_dir.name,
            id=self.state["id"],
            dir=str(self.run_dir),
            config=without_secrets(to_dict(self.config)) | summary(self.run_dir),
        )

    def _drop_superseded(self) -> None:
        """Delete older offline directories of this W&B run: there is one to sync, or none.

        Each of them holds the same run, but less of it, and the last one that is synced would win.
        """
        for old in (self.run_dir / "wandb").glob(f"offline-run-*-{self.state['id']}"):
            if old.resolve() != self.directory.resolve():
                with contextlib.suppress(OSError):  # a helper that ends can still write there
                    remove(old)
        if self.to_server:
            self.state.pop(alert_count(to_server=False), None)

    def send_new(self, last: bool = False) -> int:
        """Send the rows and alerts written since the last call; return the number of rows.

        `last`: there will be no further call, so that all gauges are sent.
        """
        rows = self.rows.rows()
        before, newest = len(self.keys), self.keys[-1].lineage if self.keys else 0
        added = [key_of(row) for row in rows]
        self.keys += added
        # Only a new lineage, or a row that is not of a take, can supersede another row.
        continues = all(one.lineage == newest and one.kind == "take" for one in added)
        kept = set(range(before, len(self.keys)) if continues else current(self.keys))
        if not continues and not kept.issuperset(self.sent):
            self.run.finish()
            self._open()
            return self.send_new(last)
        for index, row in enumerate(rows, before):
            histograms = self.extras.histograms(self.keys[index])
            if index in kept:
                self._log(row | self._media(self.keys[index], histograms))
                self.sent.append(index)
            self.state["rows"] += 1
            self._save(SAVE_S)
        self._count_alerts()  # of the call before: W&B has not failed since
        for alert in self.alerts.rows():
            self.alerts_read += 1
            if self.alerts_read > self.alerts_sent:
                self.run.alert(title=alert["title"], text=alert["text"], level=alert["level"])
        for gauges in self.extras.gauges(last):
            self._log(gauges)
        for name, replies in self.extras.replies():
            table = self.wandb.Table(columns=list(REPLY_COLUMNS), data=replies)
            self.run.log({f"replies/{name}": table})
        self._save()
        return len(rows)

    def _media(self, key: RowKey, histograms: Mapping[str, Histogram]) -> dict[str, Any]:
        """Return the histograms and the table of a row as W&B takes them."""
        media = {
            f"histogram/{name}": self.wandb.Histogram(np_histogram=(one.counts, one.edges()))
            for name, one in histograms.items()
        }
        if turns := self.extras.trajectories(key):
            media["trajectories"] = self.wandb.Table(columns=list(COLUMNS), data=turns)
        return media

    def _log(self, row: Mapping[str, Any]) -> None:
        """Log a row; tell W&B the axis and the summary of every metric that is new.

        Evaluations end late, so their rows have smaller steps than those before them. A row keeps
        the time at which it was written, not that of the upload.
        """
        row = dict(row)
        if (at := row.pop("time", None)) is not None:
            row["_timestamp"] = since_1970(at)
        for name in row.keys() - self.defined:
            self.defined.add(name)
            if (axis := axis_of(name)) is not None:
                self.run.define_metric(name, step_metric=axis, summary=summary_of(name))
        self.run.log(row)

    def _count_alerts(self) -> None:
        self.state[alert_count(self.to_server)] = max(self.alerts_sent, self.alerts_read)

    def _save(self, after_s: float = 0.0) -> None:
        if time.monotonic() - self.saved >= after_s:
            write_state(self.run_dir, self.state)
            self.saved = time.monotonic()

    def finish(self) -> None:
        """Wait until W&B has everything."""
        self.run.finish()
        self._count_alerts()
        self._save()

    @property
    def directory(self) -> Path:
        """Directory of the W&B run on this machine."""
        return Path(self.run.settings.sync_dir)


@contextlib.contextmanager
def exclusive(run_dir: Path, wait_s: float) -> Iterator[None]:
    """Hold the run's upload for this process. ConfigError if another one has it after `wait_s`."""
    deadline = time.monotonic() + wait_s
    with open(run_dir / "wandb.lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{run_dir}: another process sends its metrics to W&B; wait until it ends"
                    ) from None
                time.sleep(POLL_S / 5)
        yield


def follow(run_dir: Path, mode: str, parent: int) -> None:
    """Send rows as they are written until stdin is closed, then the rest."""
    with exclusive(run_dir, LOCK_S):
        GaugeThread(run_dir, "wandb").start()
        upload = Upload(run_dir, online(mode), fallback=mode == "auto", parent=parent)
        closed = False
        while not closed:
            closed = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            upload.send_new(last=closed)
        upload.finish()


def send(run_dir: Path, to_server: bool) -> str:
    """Send a whole run now; return a sentence that says where it is."""
    with exclusive(run_dir, 0.0):
        try:
            upload = Upload(run_dir, to_server, fallback=False, parent=os.getpid())
            upload.send_new(last=True)
            upload.finish()
        except OSError as error:  # W&B's helper process ended
            raise UploadError(str(error)) from error
    repeated = len(upload.keys) - len(upload.sent)
    without = f" (without {repeated} of abandoned lineages)" if repeated else ""
    sent = f"{len(upload.sent)} rows{without} are"
    if to_server:
        return f"{sent} at {upload.state['url']}"
    return f"{sent} in {upload.directory}; to upload them: wandb sync {upload.directory}"
