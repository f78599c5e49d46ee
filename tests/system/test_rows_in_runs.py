"""Whole runs that learn from what an earlier run has played: mixed with episodes, and alone."""

import json
from pathlib import Path

import pytest
import torch
from serial_recipe import RECIPE
from serial_runs import Finished, trainer

from evolver_async.cli import main
from evolver_async.runs.results.loaded_run import load_run

STAGE = "{{kind: rl, steps: {steps}, data: {{path: {path}, weight: {weight}}}}}"
FEW = ("eval.every=0", "eval.episodes=16", "eval.final_episodes=0", "checkpoint.every=3")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trajectories of a short run, that keeps its journal."""
    directory = tmp_path_factory.mktemp("logs")
    train = trainer(directory, RECIPE)
    stages = "stages=[{kind: rl, steps: 4}]"
    made = train("played", stages, "buffer.archive=all", "buffer.segment_bytes=65536", *FEW)
    assert main(["ingest", str(directory / "out"), str(made.run_dir)]) == 0
    return directory / "out" / "trajectories.jsonl"


def test_a_run_directory_becomes_the_trajectories_that_it_played(logs: Path) -> None:
    run_dir = logs.parent.parent / "played"
    rows = [json.loads(line) for line in logs.read_text().splitlines()]
    played = [one for one in load_run(run_dir).trajectories if one.kind == "rollout"]
    assert len(rows) == len(played) >= 4 * 4 * 8
    assert [row["source"] for row in rows] == [f"{run_dir}, trajectory {one.id}" for one in played]
    for row, one in zip(rows, played, strict=True):
        (sequence,), (made,) = row["sequences"], one.load().sequences
        assert sequence["tokens"] == made.tokens.tolist()
        assert (row["reward"], row["weights"]) == (one.reward, str(one.oldest))


def runs_of(directory: Path, logs: Path, weight: float, name: str) -> Finished:
    stage = STAGE.format(steps=6, path=logs, weight=weight)
    return trainer(directory, RECIPE)(name, f"stages=[{stage}]", *FEW)


def test_a_mixed_run_is_the_same_again_and_has_its_share_of_rows(
    tmp_path: Path, logs: Path
) -> None:
    first, second = (runs_of(tmp_path, logs, 0.5, name) for name in ("one", "two"))
    assert first.numbers() == second.numbers()
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name
    shares = first.rl("data/share")
    assert len(shares) == 6 and abs(sum(shares) / 6 - 0.5) < 0.2
    assert max(first.rl("lag_recorded/trajectories")) > 0 and first.rl("train/success")


def test_weight_1_plays_no_episode_to_train_on(tmp_path: Path, logs: Path) -> None:
    made = runs_of(tmp_path, logs, 1.0, "alone")
    assert made.rl("data/share") == [1.0] * 6
    assert not made.rl("train/success") and not made.rl("staleness/mean")
    kinds = {one.kind for one in load_run(made.run_dir).trajectories}
    assert "rollout" not in kinds and "demo" in kinds
    assert made.rl("learner/updates") and made.rl("loss/grad_norm")


def test_rows_of_all_stages_are_measured_where_they_alone_are_learnt(tmp_path: Path) -> None:
    """The section `data` of the run: an rl stage is measured by its evaluations."""
    rows = tmp_path / "rows"
    rows.mkdir()
    for name in ("train", "validation"):
        talks = [{"prompt": f"{name} {one}?", "completion": "left"} for one in range(8)]
        (rows / f"{name}.jsonl").write_text("\n".join(map(json.dumps, talks)))
    data = f"{{path: {rows}, weight: 0.5}}"
    stages = "[{kind: sft, steps: 2}, {kind: rl, steps: 3}]"
    made = trainer(tmp_path, RECIPE)("all", f"data={data}", f"stages={stages}", *FEW)
    measured = [row["stage_kind"] for row in made.rows if "validation/rows" in row]
    assert measured == ["sft"]
    assert max(made.rl("data/conversations")) > 0
