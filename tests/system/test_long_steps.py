"""What people are told of processes that stand still, in a real run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, launching, wait_for
from live import child, stopped

from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.tail import Tail

pytestmark = pytest.mark.process

RECIPE = """
env: {name: bandit, latency: {kind: fixed, median_s: 0.1}}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 1, groups: 2}
learner: {groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}
stages: [{kind: rl, hours: 1}]
selection: {drop_zero: false, max_empty: 100000}
safety: {warmup: 100000}
buffer: {warn_s: 3, lease_s: 600}
eval: {every: 0, episodes: 4, final_episodes: 0}
metrics: {panel: none, wandb: disabled}
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start


def told(run: Launch, text: str) -> str:
    """Wait for the alert that begins with a text; return all of it."""

    def found() -> str:
        texts = (row["text"] for row in Tail(run.run_dir / ALERTS).rows())
        return next((one for one in texts if one.startswith(text)), "")

    return wait_for(found, text)


def silent(run: Launch, name: str) -> list[dict[str, Any]]:
    found = run.status()["stalled"]
    return [one for one in found if one["who"] == name and one["silent"]]


def test_stopped_processes_are_told_and_the_buffer_too(
    start: Callable[..., Launch], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    run = start(tmp_path / "run", recipe, f"run.dir={tmp_path}", "run.name=run")
    run.wait_for_steps(3)
    progress = wait_for(lambda: run.status()["progress"], "a learner")
    json.dumps(progress)
    with stopped(child(run, "learner")):
        (stall,) = wait_for(lambda: silent(run, "learner"), "the learner's stall")
        assert "last heard in" in stall["what"]
        told(run, "learner was not heard for")
    run.rows()
    run.wait_for_steps(2)
    with stopped(child(run, "buffer")):
        told(run, "the buffer does not answer for")
    run.rows()
    run.wait_for_steps(2)
    log = run.run_dir / "logs" / "launcher.log"
    wait_for(lambda: "the buffer answers again" in log.read_text(), "its answer")
