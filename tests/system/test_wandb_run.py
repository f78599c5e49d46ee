"""A whole run with W&B offline: processes stand still or are killed, the run is stopped."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, launching, wait_for
from live import child, stopped
from wandb_records import files, history, records, run_record, step_rows

from evolver_async.cli import main
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.gauges import SYSTEM
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.metrics.tail import Tail
from evolver_async.metrics.wandb_process import OFFLINE_ALERTS

pytestmark = pytest.mark.process

RECIPE = """
env: {name: bandit, latency: {kind: fixed, median_s: 0.1}}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
learner: {groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}
stages: [{kind: rl, hours: 1}]
selection: {drop_zero: false, max_empty: 100000}
safety: {warmup: 100000}
buffer: {warn_s: 3}
eval: {every: 20, episodes: 4}
checkpoint: {every: 4}
metrics: {panel: none, wandb: offline, samples_every: 1, group: tests}
launch: {backoff_s: 0.1}
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with launching() as start:
        yield start


def titles(run_dir: Path) -> list[str]:
    return [row["title"] for row in Tail(run_dir / ALERTS).rows()]


def silent(run: Launch, name: str) -> list[dict[str, Any]]:
    found = run.status()["stalled"]
    return [one for one in found if one["who"] == name and one["silent"]]


def check_stalls(run: Launch) -> None:
    """Stop the learner, an actor and the buffer in turn: people are told, and the run goes on."""
    progress = wait_for(lambda: run.status()["progress"], "a learner")
    json.dumps(progress)
    with stopped(child(run, "learner")):
        (stall,) = wait_for(lambda: silent(run, "learner"), "the learner's stall")
        assert "last heard in" in stall["what"]
        wait_for(lambda: told(run, "learner was not heard for"), "the alert about the learner")
    with stopped(child(run, "actor-1")):
        wait_for(lambda: "stall of actor-1" in titles(run.run_dir), "the stall")
    run.rows()
    run.wait_for_steps(2)
    with stopped(child(run, "buffer")):
        wait_for(lambda: told(run, "the buffer does not answer for"), "the alert about the buffer")
    run.rows()
    run.wait_for_steps(2)
    log = run.run_dir / "logs" / "launcher.log"
    wait_for(lambda: "the buffer answers again" in log.read_text(), "its answer")


def told(run: Launch, text: str) -> bool:
    return any(row["text"].startswith(text) for row in Tail(run.run_dir / ALERTS).rows())


def test_stalls_and_kills_of_a_run_lose_no_row_and_are_told_to_people(
    start: Callable[..., Launch], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    run_dir = tmp_path / "run"
    run = start(run_dir, recipe, f"run.dir={tmp_path}", "run.name=run")
    run.wait_for_steps(3)
    check_stalls(run)
    child(run, "actor-0").kill()
    wait_for(lambda: "restart of actor-0" in titles(run_dir), "the restart of the actor")
    child(run, "learner").kill()
    run.wait_for_row(lambda row: row["lineage"] == 2, "a step of its successor")
    names = {"launcher", "buffer", "learner", "actor-0", "actor-1", "wandb"}
    lines = Tail(run_dir / SYSTEM)
    seen: set[str] = set()
    wait_for(lambda: seen.update(r["process"] for r in lines.rows()) or names <= seen, "all gauges")
    run.process.send_signal(signal.SIGINT)
    run.end()
    if json.loads((run_dir / "wandb.json").read_text())[OFFLINE_ALERTS] < len(titles(run_dir)):
        assert main(["wandb", str(run_dir), "--mode", "offline"]) == 0  # a busy machine
    file = files(run_dir)[-1]
    wanted = current_rows(Tail(run_dir / "metrics.jsonl").rows())
    rows = step_rows(file)
    assert [(r["lineage"], r["step"]) for r in rows] == [(r["lineage"], r["step"]) for r in wanted]
    trained = [row for row in rows if "offpolicy/ess" in row]
    assert all("histogram/weights.values" in row for row in trained)
    assert any("trajectories.path" in row for row in trained)
    known = {key.split("/")[1] for row in history(file) for key in row if key[:8] == "process/"}
    assert names <= known
    alerts = {record.alert.title for record in records(file) if record.HasField("alert")}
    crashes = {
        f"{event} of {name}" for event in ("crash", "restart") for name in ("actor-0", "learner")
    }
    assert crashes | {"stall of actor-1", "run stopped"} <= alerts
    assert {one.stem for one in files(run_dir)} == {f"run-{run_record(file).run_id}"}
    assert run_record(file).run_group == "tests"
    steps = [row["progress/env_steps"] for row in rows if "stage_kind" in row]
    assert steps == sorted(steps) and steps[0] == 8
