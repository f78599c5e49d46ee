"""What reaches the files."""

import errno
import json
import logging
import math
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta

import numpy as np
import pytest

from evolver_async.config.secrets import without_secrets as without
from evolver_async.durations import since_1970, utc
from evolver_async.launch.run_directory import last_error
from evolver_async.metrics.launches import record
from evolver_async.metrics.writer import JsonlWriter, Metrics, Timers
from evolver_async.process.setup import LogFile, set_up_logging


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.lineage = 2
    metrics.log(3, {"train/success": np.float32(0.5), "note": "x"})
    row = {"step": 3, "lineage": 2, "train/success": 0.5, "note": "x"}
    (written,) = read(tmp_path / "metrics.jsonl")
    assert written.pop("time") and written == row
    metrics.close()


def test_non_finite_numbers_become_null_and_are_named(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(0, {"a": math.nan, "b": np.float64(math.inf), "c": 1})
    metrics.close()
    row = {"step": 0, "lineage": 0, "a": None, "b": None, "c": 1, "non_finite": ["a", "b"]}
    (written,) = read(tmp_path / "metrics.jsonl")
    assert written.pop("time") and written == row


def test_rows_alerts_and_lines_of_logs_have_the_time_with_its_zone(tmp_path):
    """Hosts of a run can have several zones, and files are read in others."""
    metrics, begun = Metrics(tmp_path), time.time()
    metrics.log(1, {})
    metrics.log_histograms(1, {})
    metrics.alert("title", "text")
    metrics.close()
    record(tmp_path, None, [], {})
    set_up_logging(tmp_path / "x.log", logging.CRITICAL)
    logging.getLogger("a").warning("said")
    names = ("metrics", "histograms", "alerts", "launches")
    found = [read(tmp_path / f"{name}.jsonl")[0]["time"] for name in names]
    found.append((tmp_path / "x.log").read_text().partition(" ")[0])
    for text in found:
        at = datetime.fromisoformat(text)
        assert text.endswith("Z") and at.utcoffset() == timedelta(0)
        assert begun - 1 <= at.timestamp() <= time.time() + 1
        assert utc(since_1970(text)) == text


FAREWELL = """
import logging
from evolver_async.process.setup import set_up_logging

class Library:
    def __del__(self):
        logging.warning("farewell")

set_up_logging(None, logging.INFO)
kept = Library()
logging.error("no such task")
"""


@pytest.mark.process
def test_what_a_library_logs_while_python_shuts_down_hides_no_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FAREWELL], capture_output=True, text=True, check=True
    )
    first, second = done.stderr.splitlines()
    assert first.endswith("no such task") and second.endswith("farewell")
    log_file = tmp_path / "a.log"
    log_file.write_text(f"{done.stderr}goodbye\n")
    assert last_error(log_file) == "no such task"
    assert last_error(log_file, since="goodbye") == ""
    log_file.write_text("goodbye\n\n")
    assert last_error(log_file) == ""


def lines(handler: LogFile, numbers: range) -> None:
    for number in numbers:
        handler.handle(logging.LogRecord("one", logging.INFO, "", 1, "line %d", (number,), None))


def test_a_log_that_is_full_begins_anew_and_keeps_what_it_held(tmp_path):
    """Its process's stderr, and a logrotate that empties it, go on in the same file."""
    path, kept = tmp_path / "x.log", tmp_path / "x.log.1"
    handler = LogFile(path, limit_bytes=1000)
    with open(path, "ab", buffering=0) as stderr:
        for start in range(0, 400, 10):
            lines(handler, range(start, start + 10))
            assert path.stat().st_size <= 1100 and (not kept.exists() or kept.stat().st_size < 1200)
        stderr.write(b"from a library\n")
        found = [*kept.read_text().splitlines(), *path.read_text().splitlines()]
        assert found.pop() == "from a library"
        assert found == [f"line {number}" for number in range(400 - len(found), 400)]
        assert len(found) > 100 and [one.name for one in tmp_path.glob("*.log")] == ["x.log"]
        os.truncate(path, 0)
        stderr.write(b"further\n")
        lines(handler, range(1))
    assert path.read_text() == "further\nline 0\n"
    handler.close()


def test_a_log_without_room_for_its_copy_goes_on(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    handler = LogFile(tmp_path / "x.log", limit_bytes=1000)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfile", full)
        lines(handler, range(200))
    assert (tmp_path / "x.log").read_text().splitlines() == [f"line {n}" for n in range(200)]
    lines(handler, range(200, 400))
    assert (tmp_path / "x.log.1").exists() and (tmp_path / "x.log").stat().st_size < 1100
    handler.close()


@pytest.mark.parametrize("torn", [b"", b'{"step": 2, "tra'])
def test_a_torn_last_line_is_cut_off_and_the_file_goes_on(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    writer = JsonlWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert read(path) == [{"step": 1}, {"step": 2}]


def test_timers_add_up_until_drained():
    timers = Timers()
    start = time.perf_counter()
    for _ in range(2):
        with timers("train"):
            sum(range(1000))
    spent = time.perf_counter() - start
    with timers("wait"):
        pass
    drained = timers.drain()
    assert set(drained) == {"time/train_s", "time/wait_s"}
    assert 0 < drained["time/train_s"] <= spent
    assert timers.drain() == {}


def test_secrets_are_left_out_of_the_config():
    config = {
        "judge": {"api_key": "x", "model": "m"},
        "stages": {"tokens": 5, "max_tokens": 3},
        "password": "p",
    }
    assert without(config) == {"judge": {"model": "m"}, "stages": {"tokens": 5, "max_tokens": 3}}
