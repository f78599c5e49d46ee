"""A whole run with experience whose service is killed, again and again."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launches import DEADLINE_S, Launch, alive, launching, wait_for

from actors.experience.experience_service import open_pool
from evolver_async.config.load import load

RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}, latency: {kind: fixed, median_s: 0.05}}
policy: {max_length: 128, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
tasks: {train: 4}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 1, groups: 2}
buffer: {lease_s: 2.0}
experience: {kind: contrast, similarity: 0.99, timeout_s: 0.5}
learner: {groups_per_step: 2, minibatches: 2, decay: none, token_budget: 512}
stages:
  - kind: sft
    steps: 20
    expert_fraction: 0.0
    override:
      rollout: {group_size: 1, guided_fraction: 0}
      learner: {groups_per_step: 16, minibatches: 1, lr: 1.0e-2}
  - kind: rl
    steps: 1000000
eval: {every: 0, episodes: 4}
checkpoint: {every: 10}
metrics: {panel: none}
launch: {restarts: 1, backoff_s: 0.1}
"""


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start


def test_a_run_outlives_its_experience_service_and_finds_it_again(
    tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + f"run: {{dir: {tmp_path}, name: run}}\n")
    run_dir = tmp_path / "run"
    run = launch(run_dir, recipe)
    run.wait_for_row(lambda row: row.get("experience/retrieved_share") == 0.5, "guided members")
    log = run_dir / "logs" / "launcher.log"

    first = run.children()["experience"]
    first.kill()
    second = wait_for(
        lambda: (found := run.children().get("experience")) and found != first and found,
        "another service",
    )
    run.wait_for_row(lambda row: row.get("experience/outages", 0) > 0, "the outage to be counted")
    run.rows()
    run.wait_for_row(lambda row: row.get("experience/retrieved_share") == 0.5, "guided members")

    second.kill()
    wait_for(lambda: not alive(second), "the end of the second service")
    run.rows()
    run.wait_for_row(lambda row: row.get("experience/retrieved_share") == 0, "unguided groups")
    run.wait_for_steps(5)
    given_up = "experience was killed by SIGKILL and is not started again"
    wait_for(lambda: given_up in log.read_text(), "the launcher's word about it")
    assert "experience" not in run.children()

    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 128 + signal.SIGINT
    pool = open_pool(load(run_dir / "config.yaml").experience, run_dir)
    kept = {number: entry.content for number, entry in pool.entries.items()}
    pool.close()
    assert kept, "whole after two kills"

    again = launch(run_dir, "--resume", run_dir)
    row = again.wait_for_row(lambda row: row.get("experience/pool_size", 0) > 0, "the pool")
    assert row["experience/pool_size"] >= len(kept)
    again.wait_for_row(lambda row: row.get("experience/retrieved_share") == 0.5, "guided members")
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
