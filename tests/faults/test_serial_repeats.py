"""Fault 3 in a whole serial run: a learner that dies in any take, and what the next one repeats."""

from pathlib import Path
from typing import Any

import pytest
from live import check_repeats

from evolver_async.config.load import dump, load
from evolver_async.launch.registry import resolve
from evolver_async.launch.serial import run
from evolver_async.process.setup import RoleArgs
from learner.diagnostics.step_rows import StepRows
from learner.state import LearnerState

RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2, archive: all}
advantage: {std: batch}
learner: {groups_per_step: 2, minibatches: 2, lr: 5.0e-3, decay: none}
stages:
  - {kind: sft, steps: 3, override: {rollout: {group_size: 1}}}
  - {kind: rl, steps: 9}
eval: {every: 2, episodes: 4, final_episodes: 4}
checkpoint: {every: 4, keep: 9}
launch: {kind: serial}
"""


class Died(Exception):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("anchor", ["recompute", "interpolate"])
def test_a_serial_run_repeats_its_takes_bitwise_after_every_death(
    anchor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    paths = [f"policy.path={run_dir}/policy", f"weights.dir={tmp_path}"]
    config = load(recipe, [*paths, f"correction.anchor={anchor}"])
    dump(config, run_dir / "config.yaml")
    resolve("prepare")(RoleArgs(address="", name="prepare", incarnation=0, run_dir=run_dir))
    last = [2, 7, 9, 11]  # the take after whose row it dies: in the sft stage, at its end, later
    write = StepRows.write

    def die(self: StepRows, state: LearnerState, take: int, *rest: Any) -> None:
        write(self, state, take, *rest)
        if last and take == last[0]:
            last.pop(0)
            raise Died

    monkeypatch.setattr(StepRows, "write", die)
    while last:
        with pytest.raises(Died):
            run(config, run_dir)
    assert run(config, run_dir) == 0
    assert check_repeats(run_dir) >= 6
