"""Supervision of the process that sends metrics.jsonl to Weights & Biases, by the learner.

W&B can crash, hang or refuse rows. It runs in a process of its own (`wandb_upload`) that follows
the files of the run directory, so that its failures do not reach the learner. A process that ended
or makes no progress is replaced; its successor sends every row again, so rows are missing only
while no process works. `evolver-async wandb RUN` sends rows that are missing at the end.
"""

import contextlib
import json
import logging
import netrc
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evolver_async.files import parsed
from evolver_async.metrics.alerts import count

STATE = "wandb.json"  # id of the W&B run, and the progress of its process
SERVER_ALERTS = "server_alerts"  # in STATE: number of alerts that the server has got
OFFLINE_ALERTS = "offline_alerts"  # in STATE: number of alerts in the newest offline directory
SERVER = "https://api.wandb.ai"
STUCK_S = 90.0  # without progress while rows wait: more than an attempt to reach W&B takes
CLOSE_S = 15.0  # for the rest of the rows, when the run ends
REST_S = 60.0  # for all rows and the last alerts, after a failure
PAUSE_S = 5.0  # before the first restart, doubled for each further one
LONGEST_PAUSE_S = 600.0
HEALTHY_S = 600.0  # a process that ran this long resets the pause

log = logging.getLogger(__name__)


def read_state(directory: Path) -> dict[str, Any]:
    """Read the W&B state of a run directory, at least its `id`; make it if it is unreadable."""
    path = directory / STATE
    try:
        return parsed(path.read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s: cannot be read (%s); the rows go to a new W&B run", path, error)
    state = {"id": secrets.token_hex(4)}
    write_state(directory, state)
    return state


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace the W&B state of a run directory."""
    part = directory / f".{STATE}"
    part.write_text(json.dumps(state))
    part.replace(directory / STATE)


def online(mode: str) -> bool:
    """True if rows go to a server; `auto` means: if there is a key."""
    return mode == "online" or (mode == "auto" and has_key())


def has_key() -> bool:
    """True if there is a key for W&B's server, in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER)).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except FileNotFoundError:
        return False
    except (OSError, netrc.NetrcParseError) as error:
        log.warning("%s: cannot be read: %s", Path.home() / ".netrc", error)
        return False


def alert_count(to_server: bool) -> str:
    """Return the key of the state that counts the alerts sent to the server, or kept offline."""
    return SERVER_ALERTS if to_server else OFFLINE_ALERTS


def sync_of(directory: Path) -> str | None:
    """Return the directory of the run for `wandb sync`, None if a server has the rows."""
    try:
        return parsed((directory / STATE).read_text()).get("sync")
    except (FileNotFoundError, ValueError):
        return None


def url_of(directory: Path) -> str | None:
    """Return the page of the run at W&B, None if there is none."""
    try:
        return parsed((directory / STATE).read_text()).get("url")
    except (FileNotFoundError, ValueError):
        return None


def _environment() -> dict[str, str]:
    """Return the environment of an upload process.

    If this process uses W&B itself, its helper process must not hold the upload's run, too: after
    the upload is killed, the helper would refuse the id of the run to the successor.
    """
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}


def send_rest(directory: Path, mode: str) -> bool:
    """Send what the run's own upload has left after its end; False if that fails.

    That upload ends with the learner, so it does not know of a failure after it. Nothing is sent
    twice: if the alerts are with W&B, the rows are too. Alerts that were kept offline are not with
    a server.
    """
    begun = (directory / "metrics.jsonl").exists()  # without rows there is no W&B run
    held = read_state(directory).get(alert_count(online(mode)), 0)
    if not begun or held >= count(directory):
        return True
    command = [sys.executable, "-m", "evolver_async.cli", "wandb", str(directory), "--mode", mode]
    with open(directory / "logs" / "wandb.log", "ab") as output:
        try:
            sent = subprocess.run(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=REST_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return sent.returncode == 0


class UploadSupervisor:
    """Supervisor of the upload process by its handle; no call waits, except `close`."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.directory = directory
        self.mode = mode
        self.restarts = 0
        self.pause_s = PAUSE_S
        self.due = 0.0
        self.started = 0.0
        self.progress = (0, 0.0)  # rows sent, and the time of the last change
        self.process: subprocess.Popen[bytes] | None = None
        read_state(directory)
        self._start()

    def sent(self) -> int:
        """Return the number of rows that the running process has sent to W&B."""
        state = read_state(self.directory)
        here = self.process is not None and state.get("pid") == self.process.pid
        return state.get("rows", 0) if here else 0

    def supervise(self, rows: int) -> dict[str, float]:
        """Replace the process if it ended or hangs; return metrics. `rows` are those written."""
        now = time.monotonic()
        sent = self.sent()
        if sent != self.progress[0] or sent >= rows:
            self.progress = (sent, now)
        if self.process is None:
            if now >= self.due:
                self.restarts += 1
                self._start()
        elif self.process.poll() is not None:
            self._plan_restart(f"ended with exit code {self.process.returncode}", rows, now)
        elif now - self.progress[1] > STUCK_S:
            self._kill()
            self._plan_restart(f"made no progress for {STUCK_S:.0f} s", rows, now)
        return {"wandb/missing": float(max(0, rows - sent)), "wandb/restarts": float(self.restarts)}

    def close(self, rows: int) -> None:
        """Let the process send the remaining rows, for at most `CLOSE_S`."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        if self._end() != 0:
            words = "W&B lacks %d of %d rows; send them with: evolver-async wandb %s"
            log.warning(words, rows - self.sent(), rows, self.directory)

    def _end(self) -> int | None:
        """Wait for the end of the process; return its exit code, None if it had to be killed."""
        if self.process is None:
            return None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return None

    def _start(self) -> None:
        """Start the process, or plan a later attempt if that fails."""
        self.started = time.monotonic()
        self.progress = (0, self.started)
        try:
            self.process = self._spawn()
        except OSError as error:
            self._plan_restart(f"could not be started ({error})", 0, self.started)

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the process with its output in logs/wandb.log; it ends when its stdin is closed."""
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        with open(logs / "wandb.log", "ab") as output:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "evolver_async.cli", "wandb", str(self.directory)),
                    *("--follow", "--mode", self.mode, "--parent", str(os.getpid())),
                ],
                env=_environment(),
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _plan_restart(self, how: str, rows: int, now: float) -> None:
        if now - self.started > HEALTHY_S:
            self.pause_s = PAUSE_S
        words = "the process that sends metrics to W&B %s; %d rows wait; training continues, the"
        words += " next attempt is in %.0f s (see %s)"
        log.warning(words, how, rows, self.pause_s, self.directory / "logs" / "wandb.log")
        self.process, self.due = None, now + self.pause_s
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s)

    def _kill(self) -> None:
        """Kill the process and W&B's own helper, which would outlive it."""
        assert self.process is not None
        pid = self.process.pid
        helpers: list[str] = []
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                helpers += children.read_text().split()
        self.process.kill()
        self.process.wait()
        for helper in helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(helper), signal.SIGKILL)
