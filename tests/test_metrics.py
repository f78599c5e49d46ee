"""What reaches the files, and the per-lag numbers against loops."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evolver_async.config.secrets import without_secrets as without
from evolver_async.metrics import (
    JsonlWriter,
    LagAccounting,
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


def bucket_of(lag: int) -> str:
    if lag <= 2:
        return str(lag)
    return "3-4" if lag <= 4 else "5-8" if lag <= 8 else "9+"


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_lag_accounting_matches_the_loop(seed, count):
    rng = np.random.default_rng(seed)
    tokens = {
        "lag_N": rng.integers(0, 13, count),
        "w_N": rng.exponential(1, count) + 0.01,
        "r_N": rng.exponential(1, count) + 0.01,
        "log_rho_N": rng.normal(0, 0.5, count),
        "clipped_low_N": rng.random(count) < 0.2,
        "clipped_high_N": rng.random(count) < 0.2,
        "masked_N": rng.random(count) < 0.2,
    }
    accounting = LagAccounting()
    half = count // 2
    for part in (slice(0, half), slice(half, count)):
        accounting.add_tokens(**{name: values[part] for name, values in tokens.items()})
    found = accounting.metrics()

    families = {"offpolicy": list(range(count))}
    for i in range(count):
        families.setdefault(f"lag_{bucket_of(int(tokens['lag_N'][i]))}", []).append(i)
    assert {name.split("/")[0] for name in found} == set(families)
    for family, members in families.items():
        n = len(members)
        w = [tokens["w_N"][i] for i in members]
        rho = [math.exp(tokens["log_rho_N"][i]) for i in members]
        expected = {
            "tokens": n,
            "ess": sum(w) ** 2 / (n * sum(x * x for x in w)),
            "kl": sum(x - 1 - math.log(x) for x in rho) / n,
            "clip_low": sum(bool(tokens["clipped_low_N"][i]) for i in members) / n,
            "clip_high": sum(bool(tokens["clipped_high_N"][i]) for i in members) / n,
            "masked": sum(bool(tokens["masked_N"][i]) for i in members) / n,
            "w_mean": sum(w) / n,
            "w_q50": sorted(w)[n // 2] if n % 2 else sum(sorted(w)[n // 2 - 1 : n // 2 + 1]) / 2,
            "r_mean": sum(tokens["r_N"][i] for i in members) / n,
        }
        for name, value in expected.items():
            assert found[f"{family}/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_trajectories_are_counted_by_their_largest_lag():
    accounting = LagAccounting()
    accounting.add_trajectories(
        lag_P=np.array([0, 4, 9]), reward_P=np.array([0.0, 1.0, 0.5]), length_P=np.array([1, 2, 6])
    )
    found = accounting.metrics()
    assert found["staleness/mean"] == pytest.approx(13 / 3) and found["staleness/max"] == 9
    assert found["offpolicy/length_mean"] == 3 and found["offpolicy/reward_mean"] == 0.5
    assert found["lag_3-4/reward_mean"] == 1 and found["lag_9+/length_mean"] == 6
    assert "lag_1/reward_mean" not in found


def test_nothing_collected_is_nothing_logged():
    assert LagAccounting().metrics() == {}


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


def test_merged_tokens_count_like_ones_own():
    def tokens(accounting, lag):
        names = ("w_N", "r_N", "log_rho_N", "clipped_low_N", "clipped_high_N", "masked_N")
        accounting.add_tokens(lag_N=np.array([lag]), **{name: np.ones(1) for name in names})

    whole, part = LagAccounting(), LagAccounting()
    tokens(whole, 0)
    tokens(part, 1)
    whole.merge(part)
    assert whole.metrics()["offpolicy/tokens"] == 2
