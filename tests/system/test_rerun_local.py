"""A run of several processes, whose data is stale as it happens, is repeated bit by bit."""

from pathlib import Path

from launches import launching

from evolver_async.cli import main
from evolver_async.runs.results.loaded_run import load_run

RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 4, weight_lag: 1}
buffer: {max_staleness: 3, archive: all}
advantage: {std: batch}
correction: {anchor: interpolate}
learner: {groups_per_step: 4, minibatches: 2, lr: 5.0e-3, decay: none, token_budget: 512}
stages: [{kind: rl, steps: 12}]
eval: {every: 0, episodes: 4, final_episodes: 0}
checkpoint: {every: 5}
metrics: {panel: none}
"""


def test_a_local_run_with_stale_data_is_repeated_bit_by_bit(tmp_path: Path, capsys) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    with launching() as launch:
        run = launch(tmp_path / "run", recipe, f"run.dir={tmp_path}", "run.name=run")
        run.wait_for_steps(12, deadline_s=300.0)
        code, errors = run.end()
        assert code == 0, f"{errors}; {run.logs()}"
    assert max(load_run(run.run_dir).steps["staleness/max"]) >= 1
    assert main(["rerun", str(run.run_dir)]) == 0
    assert "bitwise equal: 12 steps" in capsys.readouterr().out
    assert main(["rerun", str(run.run_dir), "learner.lr=1e-4", "--out", str(tmp_path / "o")]) == 0
    assert len(load_run(tmp_path / "o").steps) == 12
