"""What Prometheus reads of a run, over its own protocol."""

import contextlib
import json
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from launches import wait_for
from prometheus_client.parser import text_string_to_metric_families

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load
from evolver_async.launch.creation import create
from evolver_async.process.http_address import check_free
from evolver_async.runs.watch import prometheus

AMOUNT = {"groups": 2, "trajectories": 8, "tokens": 80}
STATUS: dict[str, Any] = {
    "actors": {"actor-0": {}, "actor-1": {}},
    "actors_not_shown": 1,
    "groups": {"open": 3, "ready": 4, "taken": 2},
    "ledger": {
        "received": {"rollout": AMOUNT, "demo": AMOUNT},
        "held": {"rollout": {"open": AMOUNT}},
        "trained": {},
        "filtered": {"rollout": {"spread": AMOUNT}},
        "evicted": {},
    },
    "failures": [{"kind": "agent", "count": 2}, {"kind": "agent", "count": 3}],
    "outstanding": 5,
    "limit": 8,
    "take": 7,
    "stage": 1,
    "stalled": [],
    "progress": {"step": 3, "share": 0.25, "eta_s": 30.0},
    "journal": {"bytes": 1000, "disk_free_bytes": 2000},
}
ROWS = [
    {"step": 6, "lineage": 1, "stage_kind": "rl", "train/success": 0.1},
    {
        "step": 7,
        "lineage": 1,
        "stage_kind": "rl",
        "train/success": 0.5,
        "offpolicy/ess": float("nan"),
        "buffer/limit": 9,
        "time/wait_s": 1.0,
        "throughput/learner/data": 0.25,
    },
    {"step": 7, "lineage": 1, "eval/episodes": 64, "eval/success": 0.75},
]


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def scraped(address: str) -> dict[str, float]:
    """Every sample by its name and labels; the parser refuses what Prometheus would."""
    with urllib.request.urlopen(f"http://{address}/metrics") as reply:
        text = reply.read().decode()
    samples = [s for one in text_string_to_metric_families(text) for s in one.samples]
    found = {s.name + "".join(f"{{{v}}}" for v in s.labels.values()): s.value for s in samples}
    assert len(found) == len(samples), "a name is given twice"
    return found


@pytest.fixture
def config() -> Config:
    config = Config()
    config.metrics.prometheus = free_address()
    return config


def test_the_newest_row_and_the_buffers_status_are_served(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"address": "ipc:///none", "launches": 1}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    async def ask(address: str, keys: Path | None, timeout_s: float) -> dict[str, Any]:
        return STATUS

    monkeypatch.setattr(prometheus, "ask", ask)
    with prometheus.served(tmp_path, config):
        found = scraped(config.metrics.prometheus)
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(ROWS[1] | {"step": 8}) + "\n")
        assert scraped(config.metrics.prometheus)["evolver_step"] == 8
    expected = {
        "evolver_step": 7,
        "evolver_train_success": 0.5,
        "evolver_eval_success": 0.75,
        "evolver_learner_wait_share": 0.25,
        "evolver_up": 1,
        "evolver_actors": 3,
        "evolver_groups{ready}": 4,
        "evolver_trajectories{received}": 16,
        "evolver_trajectories{held}": 8,
        "evolver_trajectories{filtered}": 8,
        "evolver_trajectories{trained}": 0,
        "evolver_failures{agent}": 5,
        "evolver_buffer_limit": 9,
        "evolver_buffer_journal_bytes": 1000,
    }
    assert {name: found[name] for name in expected} == expected
    assert "evolver_offpolicy_ess" not in found, "it is not finite"


def test_an_evaluation_that_ends_late_is_not_the_newest(tmp_path: Path, config: Config) -> None:
    late = ROWS[2] | {"step": 6, "eval/success": 0.25}
    resumed = ROWS[2] | {"step": 5, "lineage": 2, "eval/success": 0.5}
    path = tmp_path / "metrics.jsonl"
    with prometheus.served(tmp_path, config):
        for row, newest in ((ROWS[2], 0.75), (late, 0.75), (resumed, 0.5)):
            with open(path, "a") as file:
                file.write(f"{json.dumps(row)}\n")
            assert scraped(config.metrics.prometheus)["evolver_eval_success"] == newest


def test_an_evaluation_of_steps_that_the_run_has_left_is_not_the_newest(
    tmp_path: Path, config: Config
) -> None:
    played = [ROWS[2] | {"step": step, "eval/success": step / 8} for step in (2, 4)]
    took = [ROWS[0] | {"step": 3, "lineage": 2}, ROWS[0] | {"step": 4, "lineage": 2}]
    lines = [f"{json.dumps(row)}\n" for row in (*played, *took)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with prometheus.served(tmp_path, config):
        assert scraped(config.metrics.prometheus)["evolver_eval_success"] == 0.25


def test_idle_clients_take_neither_files_nor_threads_of_the_launcher(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "MOST_CLIENTS", 3, raising=False)
    monkeypatch.setattr(prometheus, "CLIENT_S", 0.3, raising=False)
    host, port = config.metrics.prometheus.split(":")
    with prometheus.served(tmp_path, config):
        before = threading.active_count()
        with contextlib.ExitStack() as held:
            idle = [
                held.enter_context(socket.create_connection((host, int(port)), timeout=10))
                for _ in range(20)
            ]
            for one in idle:  # all are hung up on: most at once, the others when their time is over
                with contextlib.suppress(ConnectionError):
                    one.sendall(b"GET /metrics HTT")
                    assert one.recv(1) == b""
                assert threading.active_count() <= before + 3
        wait_for(lambda: threading.active_count() <= before, "the end of their threads")
        assert scraped(config.metrics.prometheus)["evolver_up"] == 0


def test_scrapes_at_the_same_time_read_each_row_once(tmp_path: Path, config: Config) -> None:
    """As those of two servers for one run, of which each gives an alarm if the other is down."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(ROWS[0] | {'step': one})}\n" for one in range(30_000)))
    collector = prometheus.RunMetrics(tmp_path, config)
    together = threading.Barrier(4)

    def scrape() -> None:
        together.wait()
        list(collector.collect())

    scrapes = [threading.Thread(target=scrape) for _ in range(4)]
    for one in scrapes:
        one.start()
    for one in scrapes:
        one.join()
    assert collector.tail.offset == path.stat().st_size


def test_a_run_without_rows_and_without_an_answer_is_down(tmp_path: Path, config: Config) -> None:
    with prometheus.served(tmp_path, config):
        assert scraped(config.metrics.prometheus) == {"evolver_up": 0}


def test_an_address_that_is_taken_is_named(tmp_path: Path, config: Config) -> None:
    with (
        prometheus.served(tmp_path, config),
        pytest.raises(ConfigError, match=r"metrics.prometheus: 127.0.0.1:\d+: Address already"),
        prometheus.served(tmp_path, config),
    ):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::]"])
def test_a_run_is_not_made_if_its_address_is_taken(
    tmp_path: Path, config: Config, host: str
) -> None:
    config.metrics.prometheus = f"{host}:{config.metrics.prometheus.rpartition(':')[2]}"
    config.launch.kind, config.run.dir = "serial", str(tmp_path / "runs")
    config.stages[0].steps = 1
    check_free("metrics.prometheus", config.metrics.prometheus)
    with (
        prometheus.served(tmp_path, config),
        pytest.raises(ConfigError, match=r"metrics.prometheus: \S+:\d+: Address already in use$"),
    ):
        create(config, None)
    assert not [*tmp_path.glob("runs/*")]


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "nowhere.invalid:80", "no..where:80"])
def test_an_address_that_is_none_is_refused_before_a_start(address: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics.prometheus: {address}: "):
        check_free("metrics.prometheus", address)


def test_an_address_is_no_url() -> None:
    with pytest.raises(ConfigError, match=r"metrics.prometheus: .*host:port"):
        load(None, ["metrics.prometheus=tcp://127.0.0.1:80"])
