"""An agent of one's own, trained in a real run: OpenAI's client in a loop of tool calls."""

import statistics
from pathlib import Path

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


@pytest.mark.slow
def test_an_agent_that_calls_tools_learns_which_arm_to_pull(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, recipe = tmp_path / "policy", tmp_path / "recipe.yaml"
    policy.mkdir()
    make_policy(policy)
    recipe.write_text(RECIPE.format(policy=policy, length=LENGTH, steps=STEPS, runs=tmp_path))
    run_dir = tmp_path / "agents"
    with launching() as launch:
        one = launch(run_dir, recipe)
        one.wait_for_steps(STEPS)
        code, errors = one.end()
        assert code == 0, (errors, one.logs())
    rows = Tail(run_dir / "metrics.jsonl").rows()
    success = [row["train/success"] for row in rows if "train/success" in row]
    before, after = statistics.fmean(success[:3]), statistics.fmean(success[-3:])
    assert before < 0.7 and after >= before + 0.1, success
    assert next(row["train/turns_mean"] for row in rows if "train/success" in row) > 1.5
    last = next(row for row in reversed(rows) if "agent/episodes" in row)
    assert last["agent/sequences"] == last["agent/episodes"]  # every loop stayed one sequence
    assert last["agent/exceptions"] == last["agent/refused"] == 0
    assert main(["eval", str(run_dir), "--episodes", "8"]) == 0
    assert "success 1.000" in capsys.readouterr().out
