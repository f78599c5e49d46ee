"""A run whose weights are broadcast: one actor is killed, another let go, and it finishes."""

import json
import re
from pathlib import Path

from launches import launching, wait_for

from evolver_async.cli import main

RECIPE = """
env: {name: bandit, latency: {kind: fixed, median_s: 0.05}}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
learner: {groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}
weights: {kind: collective, deadline_s: 60, bucket_bytes: 4096}
stages:
  - {kind: rl, steps: 60}
eval: {every: 30, episodes: 8, final_episodes: 8}
metrics: {panel: none}
launch: {backoff_s: 0.1}
"""


def test_a_run_over_the_collective_channel_waits_for_no_actor_that_dies_or_leaves(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    run_dir = tmp_path / "run"
    with launching() as launch:
        run = launch(run_dir, recipe, f"run.dir={tmp_path}", "run.name=run")
        run.wait_for_steps(5)
        log = run_dir / "logs" / "learner.log"
        wait_for(lambda: re.search("weights go to .*actor-0", log.read_text()), "actor-0 to join")
        run.children()["actor-0"].kill()
        wait_for(lambda: "actor-0 has left the weights" in log.read_text(), "its death to be seen")
        assert main(["scale", str(run_dir), "actors=1"]) == 0
        wait_for(lambda: "actor-1 has left the weights" in log.read_text(), "actor-1 to leave")
        code, errors = run.end()
        assert code == 0, errors + run.logs()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "stage_kind" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    assert max(row["staleness/max"] for row in steps) <= 4, "nobody sampled with old weights"
    assert sum("eval/success" in row for row in rows) >= 2, "evaluated with exactly their weights"
    said = log.read_text()
    assert "did not confirm" not in said and "no progress" not in said, "the deadline is never met"
    assert said.count("weights go to") >= 3
