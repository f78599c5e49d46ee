"""What reaches the files."""

import json
import math
import time

import numpy as np
import pytest
from launches import wait_for

from evolver_async.config.secrets import without_secrets as without
from evolver_async.metrics import (
    JsonlWriter,
    Metrics,
    Timers,
    WandbSink,
    wandb_id,
    wandb_mode,
)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(3, {"train/success": np.float32(0.5), "note": "x"})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 3, "train/success": 0.5, "note": "x"}]
    metrics.close()


def test_non_finite_numbers_become_null_and_are_named(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.log(0, {"a": math.nan, "b": np.float64(math.inf), "c": 1})
    metrics.close()
    row = {"step": 0, "a": None, "b": None, "c": 1, "non_finite": ["a", "b"]}
    assert read(tmp_path / "metrics.jsonl") == [row]


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


def test_wandb_is_online_only_with_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # whose .netrc may hold one
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_mode("auto") == "online"
    assert wandb_mode("offline") == "offline"


def test_wandb_offline_gets_the_same_rows_beside_the_jsonl(tmp_path):
    metrics = Metrics(tmp_path, wandb="offline", project="p", name="n", config={"a": {"b": 1}})
    metrics.log(1, {"train/success": 0.5})
    metrics.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "train/success": 0.5}]


def test_secrets_are_left_out_of_the_config():
    config = {
        "judge": {"api_key": "x", "model": "m"},
        "stages": {"tokens": 5, "max_tokens": 3},
        "password": "p",
    }
    assert without(config) == {"judge": {"model": "m"}, "stages": {"tokens": 5, "max_tokens": 3}}


def test_wandb_finds_a_key_in_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb_mode("auto") == "offline"
    file = tmp_path / ".netrc"
    file.write_text("machine example.org login a password b\n")
    file.chmod(0o600)
    assert wandb_mode("auto") == "offline"
    file.write_text("machine api.wandb.ai login user password k\n")
    assert wandb_mode("auto") == "online"
    file.write_text("nonsense")
    assert wandb_mode("auto") == "offline"


def test_a_restart_continues_the_same_wandb_run(tmp_path):
    ids = []
    for _ in range(2):
        metrics = Metrics(tmp_path, wandb="offline", project="p", name="n")
        (_, sink) = metrics.sinks
        assert isinstance(sink, WandbSink)
        ids.append(sink.run.id)
        metrics.close()
    assert ids[0] == ids[1] == wandb_id(tmp_path)
    (tmp_path / "other").mkdir()
    assert wandb_id(tmp_path / "other") != ids[0]


def test_an_alert_reaches_wandb_where_it_is_on_and_no_row(tmp_path):
    for directory, wandb in ((tmp_path / "on", "offline"), (tmp_path / "off", "disabled")):
        directory.mkdir()
        metrics = Metrics(directory, wandb=wandb, project="p", name="n")
        metrics.log(1, {"a": 1})
        metrics.alert("reward hacking", "the judge and the outcome part")
        metrics.close()
        assert read(directory / "metrics.jsonl") == [{"step": 1, "a": 1}]
    assert not (tmp_path / "off" / "wandb").exists()
    (record,) = (tmp_path / "on" / "wandb").glob("offline-run-*/run-*.wandb")
    for text in (b"reward hacking", b"the judge and the outcome part"):  # W&B takes its time
        wait_for(lambda text=text: text in record.read_bytes(), f"{text!r} in {record}")
