"""Agents of one's own, trained in real runs: a loop of tool calls, and two players of a game."""

import statistics
from pathlib import Path
from typing import Any

import pytest
from arm_agent import LENGTH, make_policy
from launches import launching

from evolver_async.cli import main
from evolver_async.metrics.tail import Tail

STEPS = 24
RECIPE = """
env: {{name: bandit, params: {{low: 0.0, high_probability: 1.0}}}}
policy: {{path: {policy}, max_length: {length}}}
rollout: {{agent: "tests.support.arm_agent:puller", group_size: 8, max_turns: 3, max_tokens: 64}}
actors: {{count: 1, groups: 6}}
buffer: {{max_staleness: 2, warn_s: 4}}  # counters come every second
advantage: {{std: batch}}
learner:
  {{groups_per_step: 6, minibatches: 2, lr: 1e-3, eps: 1e-5, token_budget: 4096}}
stages: [{{kind: rl, steps: {steps}}}]
eval: {{every: 0, episodes: 32, final_episodes: 32}}
metrics: {{panel: none}}
run: {{dir: {runs}, name: agents}}
"""


def rows_of(recipe: Path, run_dir: Path, steps: int) -> list[dict[str, Any]]:
    """Train as the recipe says; return the rows of metrics."""
    with launching() as launch:
        one = launch(run_dir, recipe)
        one.wait_for_steps(steps)
        code, errors = one.end()
        assert code == 0, (errors, one.logs())
    return Tail(run_dir / "metrics.jsonl").rows()


@pytest.mark.slow
def test_an_agent_that_calls_tools_learns_which_arm_to_pull(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, recipe = tmp_path / "policy", tmp_path / "recipe.yaml"
    policy.mkdir()
    make_policy(policy)
    recipe.write_text(RECIPE.format(policy=policy, length=LENGTH, steps=STEPS, runs=tmp_path))
    run_dir = tmp_path / "agents"
    rows = rows_of(recipe, run_dir, STEPS)
    success = [row["train/success"] for row in rows if "train/success" in row]
    before, after = statistics.fmean(success[:3]), statistics.fmean(success[-3:])
    assert before < 0.7 and after >= before + 0.1, success
    assert next(row["train/turns_mean"] for row in rows if "train/success" in row) > 1.5
    last = next(row for row in reversed(rows) if "agent/episodes" in row)
    assert last["agent/sequences"] == last["agent/episodes"]  # every loop stayed one sequence
    assert last["agent/exceptions"] == last["agent/refused"] == 0
    assert main(["eval", str(run_dir), "--episodes", "8"]) == 0
    assert "success 1.000" in capsys.readouterr().out


GAME = """
env: {{name: bandit}}
policy: {{hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64, max_length: 64}}
rollout:
  {{agent: "tests.support.higher_card:play", players: [even, odd], group_size: 8, max_turns: 2,
    max_tokens: 8}}
actors: {{count: 1, groups: 8}}
advantage: {{std: batch}}
learner: {{groups_per_step: 8, minibatches: 1, lr: 5e-3, eps: 1e-5, decay: none}}
stages: [{{kind: rl, steps: {steps}}}]
eval: {{every: 0, episodes: 16, temperature: 1.0}}
metrics: {{panel: none, samples: 4, samples_every: 1}}
run: {{dir: {runs}, name: game}}
"""


@pytest.mark.slow
def test_two_players_of_one_policy_learn_from_rewards_that_cancel_out(tmp_path: Path) -> None:
    recipe, steps = tmp_path / "recipe.yaml", 14
    recipe.write_text(GAME.format(steps=steps, runs=tmp_path))
    run_dir = tmp_path / "game"
    rows = rows_of(recipe, run_dir, steps)
    trained = [row for row in rows if "player/even/reward" in row]
    assert len(trained) == steps
    assert all(row["train/reward_mean"] == 0.0 for row in trained), "no whole episode can teach"
    for player in ("even", "odd"):
        high = [row[f"env/{player}"] for row in trained]
        before, after = statistics.fmean(high[:2]), statistics.fmean(high[-2:])
        assert after >= before + 0.2 and after >= 0.85, high
    for row in trained:
        assert row["player/even/reward"] == pytest.approx(-row["player/odd/reward"])
    (evaluated,) = [row for row in rows if row.get("eval/episodes")][-1:]
    assert evaluated["eval/env/even"] >= 0.8 and "eval/player/odd/reward" in evaluated
    samples = Tail(run_dir / "samples" / f"step_{steps:06d}.jsonl").rows()
    assert {row["player"] for row in samples} <= {"even", "odd"} and samples
