"""Weights & Biases beside a run: the real package, offline, with its helper killed and stopped."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from launches import DEADLINE_S, alive, wait_for
from wandb_records import files, history, records, step_rows

from evolver_async.cli import main
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump
from evolver_async.durations import since_1970, utc
from evolver_async.metrics import tail, wandb_process
from evolver_async.metrics.alerts import alert
from evolver_async.metrics.gauges import PERIOD_S, SYSTEM
from evolver_async.metrics.replies import SavedReply, save
from evolver_async.metrics.tail import Tail, append_row
from evolver_async.metrics.wandb_process import (
    has_key,
    online,
    read_state,
    sync_of,
    url_of,
    write_state,
)
from evolver_async.metrics.wandb_rows import CELL_CHARS, REPLY_COLUMNS
from evolver_async.metrics.wandb_upload import Upload, exclusive, send
from evolver_async.metrics.writer import Metrics

pytestmark = pytest.mark.process


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # its .netrc could hold a key
    path = tmp_path / "run"
    path.mkdir()
    dump(Config(stages=[StageConfig(steps=5)]), path / "config.yaml")
    monkeypatch.setattr(wandb_process, "CLOSE_S", DEADLINE_S)  # on a busy machine it takes its time
    return path


@pytest.fixture
def metrics(run_dir: Path) -> Iterator[Metrics]:
    opened = Metrics(run_dir, wandb="offline")
    yield opened
    if not opened.rows.file.closed:
        opened.close()


def log(metrics: Metrics, lineage: int, step: int, success: float = 0.0) -> None:
    values = {"lineage": lineage, "stage_kind": "rl", "time_s": 1.0, "train/success": success}
    metrics.log(step, values)


def newest(run_dir: Path) -> list[tuple[int, int]]:
    """Lineage and step of the rows in the newest of W&B's directories."""
    return [(row["lineage"], row["step"]) for row in step_rows(files(run_dir)[-1])]


def sent(metrics: Metrics) -> int:
    assert metrics.upload is not None
    return metrics.upload.sent()


def helper(metrics: Metrics) -> psutil.Process:
    """W&B's own helper process, below the one that sends the rows."""
    assert metrics.upload is not None and metrics.upload.process is not None
    ours = psutil.Process(metrics.upload.process.pid)
    return next(c for c in ours.children(recursive=True) if c.name().startswith("wandb-core"))


def test_a_key_makes_auto_online(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = run_dir.parent / ".netrc"
    assert not online("auto") and not online("offline") and online("online")
    netrc.write_text("machine example.org login a password b\n")
    netrc.chmod(0o600)
    assert not has_key()
    netrc.write_text("machine api.wandb.ai login user password k\n")
    assert has_key() and online("auto") and not online("offline")
    netrc.write_text("nonsense")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert has_key()


def test_w_and_b_gets_the_rows_and_the_alerts(metrics: Metrics, run_dir: Path) -> None:
    for step in range(1, 4):
        log(metrics, 1, step, step / 4)
    metrics.alert("reward hacking", "the judge and the outcome part")
    metrics.close()
    (file,) = files(run_dir)
    rows = step_rows(file)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["train/success"] for row in rows] == [0.25, 0.5, 0.75]
    (alert,) = [record.alert for record in records(file) if record.HasField("alert")]
    assert (alert.title, alert.text) == ("reward hacking", "the judge and the outcome part")
    assert (file.parent / "logs" / "debug.log").stat().st_size > 0
    assert (run_dir / "logs" / "wandb.log").stat().st_size > 0
    assert url_of(run_dir) is None, "offline there is no page"


def test_a_killed_helper_costs_neither_the_run_nor_a_row(
    metrics: Metrics,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wandb_process, "PAUSE_S", 0.1)
    assert metrics.upload is not None
    metrics.upload.pause_s = 0.1
    log(metrics, 1, 1)
    metrics.alert("first", "before the kill")
    wait_for(lambda: sent(metrics) == 1, "the first row")
    victim = helper(metrics)
    victim.kill()
    steps = iter(range(2, 10**6))

    def another() -> bool:
        started = time.monotonic()
        log(metrics, 1, next(steps))
        assert time.monotonic() - started < DEADLINE_S / 2, "the learner must not wait for W&B"
        time.sleep(0.05)
        return metrics.upload is not None and metrics.upload.restarts == 1

    wait_for(another, "a restart")
    metrics.close()
    written = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert newest(run_dir) == [(1, row["step"]) for row in written]
    assert max(row["wandb/missing"] for row in written) > 0
    assert written[-1]["wandb/restarts"] == 1
    assert "the process that sends metrics to W&B ended" in caplog.text
    alerts = [r.alert.title for r in records(files(run_dir)[-1]) if r.HasField("alert")]
    assert alerts == ["first"]


def test_a_helper_that_hangs_is_replaced(
    metrics: Metrics, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metrics.upload is not None and metrics.upload.process is not None
    log(metrics, 1, 1)
    wait_for(lambda: sent(metrics) == 1, "the first row")
    stopped = helper(metrics)
    metrics.upload.process.send_signal(signal.SIGSTOP)  # as it were in a call without an end
    stopped.suspend()
    metrics.upload.pause_s = 0.0
    monkeypatch.setattr(wandb_process, "STUCK_S", 0.2)
    log(metrics, 1, 2)
    wait_for(lambda: log(metrics, 1, 2) or metrics.upload.process is None, "the end of it")  # pyright: ignore[reportOptionalMemberAccess]
    monkeypatch.setattr(wandb_process, "STUCK_S", DEADLINE_S)
    wait_for(lambda: not alive(stopped), "the end of W&B's helper")
    log(metrics, 1, 3)
    metrics.close()
    assert newest(run_dir)[-1] == (1, 3)


def test_the_end_of_a_run_waits_for_w_and_b_only_so_long(
    metrics: Metrics,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert metrics.upload is not None and metrics.upload.process is not None
    log(metrics, 1, 1)
    wait_for(lambda: sent(metrics) == 1, "the first row")
    metrics.upload.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(wandb_process, "CLOSE_S", 0.2)
    log(metrics, 1, 2)
    metrics.close()
    assert f"evolver-async wandb {run_dir}" in caplog.text
    assert main(["wandb", str(run_dir)]) == 0
    # W&B's helper can write the last of them after the call.
    wait_for(lambda: newest(run_dir) == [(1, 1), (1, 2)], "the rows in W&B's file")


def test_every_restart_writes_the_same_run_from_its_first_row(run_dir: Path) -> None:
    for lineage, steps in ((1, (1, 2, 3)), (2, (2, 3, 4))):
        metrics = Metrics(run_dir, wandb="offline")
        for step in steps:
            log(metrics, lineage, step)
        metrics.close()
    assert newest(run_dir) == [(1, 1), (2, 2), (2, 3), (2, 4)]
    runs = {file.name for file in files(run_dir)}
    assert runs == {f"run-{read_state(run_dir)['id']}.wandb"}
    assert len(files(run_dir)) == 1, "there is one directory to sync"
    assert sync_of(run_dir) == str(files(run_dir)[0].parent)


def test_rows_keep_their_times_when_they_are_sent_again(run_dir: Path) -> None:
    """W&B shows wall time by `_timestamp`, which else is that of the upload."""
    metrics = Metrics(run_dir)
    log(metrics, 1, 1)
    metrics.close()
    (row,) = Tail(run_dir / "metrics.jsonl").rows()
    later = row | {"time": utc(1_000_000.25), "step": 2}
    append_row(run_dir / "metrics.jsonl", later)
    gauge = {"time": 2_000_000.5, "process": "actor-0", "host": "h", "rss_bytes": 1.0}
    append_row(run_dir / SYSTEM, gauge)
    for _ in range(2):
        send(run_dir, False)
        wait_for(lambda: len(history(files(run_dir)[-1])) == 3, "all rows in W&B's file")
        times = [one["_timestamp"] for one in history(files(run_dir)[-1])]
        assert times == [since_1970(row["time"]), 1_000_000.25, 2_000_000.5]
    assert len(files(run_dir)) == 1


def test_a_process_that_cannot_start_and_a_damaged_state_harm_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "no memory")

    (run_dir / "wandb.json").write_text("{")
    monkeypatch.setattr(wandb_process.subprocess, "Popen", refuse)
    monkeypatch.setattr(wandb_process, "PAUSE_S", 0.0)
    metrics = Metrics(run_dir, wandb="offline")
    log(metrics, 1, 1)
    log(metrics, 1, 2)
    metrics.close()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert len(read_state(run_dir)["id"]) == 8
    (run_dir / "wandb.json").write_text("{")
    assert url_of(run_dir) is None


def test_a_new_lineage_within_one_process_replaces_what_w_and_b_has(
    metrics: Metrics, run_dir: Path
) -> None:
    for step in (1, 2, 3):
        log(metrics, 1, step)
    wait_for(lambda: sent(metrics) == 3, "three rows")
    log(metrics, 2, 2)
    metrics.close()
    assert newest(run_dir) == [(1, 1), (2, 2)]


def test_a_run_that_w_and_b_never_saw_is_sent_afterwards(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["wandb", str(run_dir)]) == 2
    assert "has no metrics yet" in capsys.readouterr().err
    metrics = Metrics(run_dir)
    log(metrics, 1, 1)
    log(metrics, 1, 2)
    log(metrics, 2, 2)
    metrics.close()
    assert not (run_dir / "wandb").exists()
    assert main(["wandb", str(run_dir)]) == 0
    (file,) = files(run_dir)
    said = f"2 rows (without 1 of abandoned lineages) are in {file.parent}; to upload them: "
    assert f"{said}wandb sync" in capsys.readouterr().out
    # W&B's helper can write the last of them after the call.
    wait_for(lambda: newest(run_dir) == [(1, 1), (2, 2)], "the rows in W&B's file")
    with exclusive(run_dir, 0.0):
        assert main(["wandb", str(run_dir)]) == 2
    assert "another process sends its metrics to W&B" in capsys.readouterr().err


class RecordedRun:
    """A run of W&B that keeps its rows, and the titles of its alerts."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.url = f"https://example.org/{mode}"
        self.settings = SimpleNamespace(sync_dir=".")
        self.titles: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def alert(self, title: str, text: str, level: str) -> None:
        self.titles.append(title)

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None: ...


class ReachableServer(ModuleType):
    """The package wandb with a server that takes everything."""

    Error = RuntimeError
    Settings = Histogram = Table = SimpleNamespace

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[RecordedRun] = []

    def init(self, mode: str, **_: object) -> RecordedRun:
        self.runs.append(RecordedRun(mode))
        return self.runs[-1]


def test_rows_of_steps_do_not_wait_for_the_gauges_of_the_whole_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an upload that begins late looks stuck while it sends them, and is begun again."""
    server = ReachableServer()
    monkeypatch.setitem(sys.modules, "wandb", server)
    monkeypatch.setattr(tail, "PIECE_BYTES", 1000)
    metrics = Metrics(run_dir)
    log(metrics, 1, 1)
    for number in range(100):
        line = {"time": number * PERIOD_S, "process": "actor-0", "host": "h", "rss_bytes": 1.0}
        append_row(run_dir / SYSTEM, line)
    upload = Upload(run_dir, True, fallback=False, parent=os.getpid())
    upload.send_new()
    log(metrics, 1, 2)
    upload.send_new()
    upload.send_new(last=True)
    steps = [row.get("step") for row in server.runs[0].rows]
    assert steps.count(None) == 100 and {1, 2} < {*steps}
    assert steps.index(2) < 50


def test_every_saved_evaluation_is_a_table_once_and_again_after_a_change(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ReachableServer()
    monkeypatch.setitem(sys.modules, "wandb", server)
    log(Metrics(run_dir), 1, 1)
    saved = run_dir / "evaluations"
    saved.mkdir()

    def keep(name: str, text: str, changed: float) -> None:
        one = SavedReply(
            evaluated="m", task="t", success=True, reward=1.0, turns=1, prompt="p", reply=text
        )
        save(saved / name, [one])
        os.utime(saved / name, (changed, changed))

    keep("a.jsonl", "x" * 9000, 1.0)
    (saved / "torn.jsonl").write_text("{")
    upload = Upload(run_dir, True, fallback=False, parent=os.getpid())

    def tables() -> list[tuple[str, str]]:
        upload.send_new()
        found = [row for one in server.runs for row in one.rows if "step" not in row]
        place = REPLY_COLUMNS.index("reply")
        return [(name, one.data[0][place]) for row in found for name, one in row.items()]

    (first,) = tables()
    assert first[0] == "replies/a" and len(first[1]) == CELL_CHARS + 1
    assert len(tables()) == 1
    keep("a.jsonl", "changed", 2.0)
    keep("b.jsonl", "other", 3.0)
    assert tables()[1:] == [("replies/b", "other"), ("replies/a", "changed")]
    assert capsys.readouterr().out.count("torn.jsonl") == 1


def test_alerts_that_were_kept_offline_reach_the_server_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ReachableServer()
    monkeypatch.setitem(sys.modules, "wandb", server)
    alert(run_dir, "first", "before any upload")
    for to_server in (False, True, True, False):
        send(run_dir, to_server)
    alert(run_dir, "second", "after them")
    send(run_dir, True)
    assert [(run.mode, run.titles) for run in server.runs] == [
        ("offline", ["first"]),
        ("online", ["first"]),
        ("online", []),
        ("offline", ["first"]),
        ("online", ["second"]),
    ]


def test_the_end_of_a_run_sends_the_server_the_alerts_that_were_kept_offline(
    metrics: Metrics, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.alert("first", "without a server")
    log(metrics, 1, 1)
    metrics.close()
    assert wandb_process.send_rest(run_dir, "offline"), "nothing was left"
    calls: list[list[str]] = []

    def noted(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(wandb_process.subprocess, "run", noted)
    assert wandb_process.send_rest(run_dir, "online")
    assert [command[-2:] for command in calls] == [["--mode", "online"]]


def test_online_without_a_key_is_refused_before_the_start(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = run_dir / "config.yaml"
    changes = ["metrics.wandb=online", f"run.dir={tmp_path}/runs", "run.name=x"]
    assert main(["train", str(recipe), *changes]) == 2
    assert "metrics.wandb: online needs a key" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_page_of_the_run_is_named_to_those_who_watch(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "https://wandb.ai/someone/evolver-async/runs/abc"
    write_state(run_dir, {"id": "abc", "url": url})
    assert main(["watch", "--once", str(run_dir)]) == 0
    assert f"W&B: {url}" in capsys.readouterr().out
