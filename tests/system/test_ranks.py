"""A run whose learner is two processes: one is killed; both go back after an alarm; it ends.

The run of the first test uses functions of a user's own for every key that takes one.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from launches import alive, launching, wait_for
from own_runs import FORMAT, OWN, SUPPORT, check_own_functions

from evolver_async.checkpoint import shards
from evolver_async.checkpoint.checkpoints import load_newest, resumable
from evolver_async.cli import main
from evolver_async.errors import TRAINING_ERROR

STEPS, ENOUGH = 40, 8
MORE = 6  # steps after the resume
RECIPE = f"""
env: {{name: bandit, latency: {{kind: fixed, median_s: 0.05}}}}
policy: {{max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
actors: {{count: 1, groups: 4}}
loss: {{kl_coef: 0.01}}
learner:
  {{groups_per_step: 4, minibatches: 1, decay: none, token_budget: 64, ranks: 2, deadline_s: 60}}
stages:
  - {{kind: rl, steps: {STEPS}}}
eval: {{every: 0, episodes: 4, final_episodes: 4}}
checkpoint: {{every: 2}}
metrics: {{panel: none}}
launch: {{backoff_s: 0.1}}
"""


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "stage_kind" in row]


def test_a_killed_rank_ends_the_learner_which_goes_on_from_its_checkpoint(
    tmp_path, capsys, monkeypatch
):
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    recipe, run_dir = tmp_path / "ranks.yaml", tmp_path / "runs" / "ranks"
    recipe.write_text(RECIPE.replace("metrics: {panel: none}", OWN))
    own = [f"rollout.format={FORMAT}", "loss.boost=0", f"stages.0.steps={10**6}"]
    with launching() as start:
        named = [f"run.dir={run_dir.parent}", f"run.name={run_dir.name}"]
        run = start(run_dir, recipe, *named, *own)
        run.wait_for_steps(4)
        before = run.children()
        assert {"learner", "learner-1"} <= before.keys()
        before["learner-1"].send_signal(signal.SIGKILL)
        wait_for(
            lambda: not any(alive(before[name]) for name in ("learner", "learner-1")),
            "the first rank to end with the other",
        )

        def again() -> dict[str, psutil.Process] | None:
            now = run.children()
            return now if {"learner", "learner-1"} <= now.keys() else None

        after = wait_for(again, "both ranks to be started again")
        assert {after[name].pid for name in ("learner", "learner-1")}.isdisjoint(
            before[name].pid for name in ("learner", "learner-1")
        )
        run.rows()
        run.wait_for_steps(ENOUGH)
        run.process.send_signal(signal.SIGINT)
        code, errors = run.end()
        assert code == 128 + signal.SIGINT, (errors, run.logs())
        assert not any(alive(process) for process in after.values())
    assert "learner was killed by SIGKILL" in (run_dir / "logs" / "launcher.log").read_text()

    newest, manifest = load_newest(run_dir / "checkpoints", run_dir.name)
    names = {path.name for path in newest.iterdir()}
    for part in ("model", "optimizer", "reference"):
        assert {f"{part}.0of2.safetensors", f"{part}.1of2.safetensors"} <= names
    assert shards.read(newest, "model").keys() == shards.read(newest, "reference").keys()
    assert main(["eval", str(run_dir), "--episodes", "4"]) == 0
    assert main(["export", str(run_dir), str(tmp_path / "exported")]) == 0
    assert f"after step {manifest.step}" in capsys.readouterr().out

    end = manifest.step + MORE
    with launching() as start:
        run = start(run_dir, "--resume", run_dir, "learner.ranks=1", f"stages.0.steps={end}")
        code, errors = run.end()
        assert code == 0, (errors, run.logs())
    steps = [int(row["step"]) for row in rows(run_dir)]
    assert steps[-1] == end and set(steps) == set(range(1, end + 1))
    check_own_functions(run_dir)
    newest, _ = load_newest(run_dir / "checkpoints", run_dir.name)
    assert (newest / "model.safetensors").exists()


def test_all_ranks_go_back_to_a_checkpoint_and_on_with_a_smaller_learning_rate(tmp_path):
    """An alarm that fires again: about any group without reward spread, which random play has."""
    recipe, run_dir = tmp_path / "ranks.yaml", tmp_path / "runs" / "ranks"
    recipe.write_text(RECIPE)
    safety = "{action: rollback, rollbacks: 1, warmup: 4, patience: 1, zero_groups: 0.0}"
    changes = [
        f"safety={safety}",
        "loss.entropy_coef=0.1",
        "checkpoint={every: 1, keep: 50, keep_every: 1}",
    ]
    changes += [f"run.dir={run_dir.parent}", f"run.name={run_dir.name}"]
    with launching() as start:
        run = start(run_dir, recipe, *changes)
        code, errors = run.end()
        assert code == TRAINING_ERROR, (errors, run.logs())
    assert "after 1 rollbacks of the stage" in errors
    before, after = [], []
    for row in rows(run_dir):
        (after if row["safety/rollbacks"] else before).append(row)
    assert before[-1]["alarm/zero_variance"] == after[-1]["alarm/zero_variance"] == 1.0
    (same,) = [row for row in before if row["step"] == after[0]["step"]]
    assert after[0]["learner/lr"] == pytest.approx(0.5 * same["learner/lr"])

    # The first checkpoint, its copy, what both ranks saved once they were back, and after a step.
    found = [manifest for _, manifest in resumable(run_dir / "checkpoints")]
    there, *_, again = [manifest for manifest in found if manifest.step == 0]
    on = next(manifest for manifest in found if manifest.step == 1)
    assert found.index(there) < found.index(again) < found.index(on)
    for part in ("model", "optimizer"):
        for rank in range(2):
            name = f"{part}.{rank}of2.safetensors"
            assert again.files[name].sha256 == there.files[name].sha256
            assert on.files[name].sha256 != there.files[name].sha256
