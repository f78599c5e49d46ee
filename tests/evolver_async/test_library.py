"""The library trains a recipe and gives its results, as a script or a notebook uses it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from process_mark import started

from evolver_async import Config, load_run, train
from evolver_async.config import ConfigError, StageConfig
from evolver_async.config.load import dump
from evolver_async.metrics.writer import JsonlWriter
from evolver_async.runs.results.loaded_run import RunResults
from evolver_async.runs.results.trajectories import TrajectoryGone
from evolver_async.schema import Role

ROOT = Path(__file__).parents[2]
SHORT = (
    "launch.kind=serial",
    "stages.0.steps=3",
    "stages.1.steps=5",
    "eval.every=2",
    "eval.episodes=8",
    "eval.episodes=8",
    "eval.final_episodes=0",
    "checkpoint.every=3",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResults:
    started.append("a whole run")
    directory = tmp_path_factory.mktemp("runs")
    return train(ROOT / "configs" / "bandit.yaml", *SHORT, f"run.dir={directory}", "run.name=tiny")


@pytest.mark.process
def test_the_package_is_cheap_to_import() -> None:
    code = "import sys, evolver_async; print([n for n in ('numpy', 'torch') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_listed() -> None:
    import evolver_async

    assert {"Config", "load_run", "train"} <= set(dir(evolver_async))
    with pytest.raises(AttributeError, match="has no attribute 'learn'"):
        _ = evolver_async.learn  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.process
def test_a_run_gives_its_metrics_evaluations_and_checkpoints(run: RunResults) -> None:
    assert run.end.state == "finished" and run.missing == ""
    assert isinstance(run.config, Config) and run.config.env.name == "bandit"
    np.testing.assert_array_equal(run.steps["step"], np.arange(1, 9))
    assert run.steps["train/reward_mean"].dtype == np.float64
    assert np.isfinite(run.evaluations["eval/success"]).all()
    assert run.checkpoints[-1].step == 8 and run.checkpoints[-1].path.is_dir()
    assert "finished, 8 steps" in repr(run)


@pytest.mark.process
def test_the_trajectories_of_a_step_are_those_of_its_metrics(run: RunResults) -> None:
    for row in run.steps:
        trained = run.trained_at(int(row["step"]))
        assert np.mean([one.reward for one in trained]) == pytest.approx(row["train/reward_mean"])
        if row["stage_kind"] == "rl":
            lags = [one.lag for one in trained]
            assert np.mean(lags) == pytest.approx(row["staleness/mean"])


@pytest.mark.process
def test_a_trajectory_is_decoded_with_its_text(run: RunResults) -> None:
    one = next(one for one in run.trajectories if one.kind == "rollout")
    whole = one.load()
    assert (whole.group_id, whole.member, whole.reward) == (one.group, one.member, one.reward)
    (prompt, action) = run.text(whole.sequences)[:2]
    assert prompt[0] == "PROMPT" and "pull the arm" in prompt[1]
    assert action[0] == "ACTION" and int((whole.sequences[0].roles == Role.ACTION).sum())
    evaluated = next(one for one in run.trajectories if one.kind == "eval")
    with pytest.raises(TrajectoryGone, match="eval episodes are only counted"):
        evaluated.load()


@pytest.mark.process
def test_a_mistake_in_a_recipe_is_a_config_error() -> None:
    started.append("a whole run")
    with pytest.raises(ConfigError, match=r"learner\.rate"):
        train(ROOT / "configs" / "bandit.yaml", "learner.rate=1")
    with pytest.raises(ConfigError, match=r"learner\.(rate){100}"):
        train(ROOT / "configs" / "bandit.yaml", f"learner.{'rate' * 100}=1")
    with pytest.raises(ConfigError, match="max_length"):
        broken = Config()
        broken.policy.max_length = 1
        train(broken)


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        load_run(tmp_path)


def test_a_run_that_has_only_begun_is_empty(tmp_path: Path) -> None:
    dump(Config(stages=[StageConfig(steps=5)]), tmp_path / "config.yaml")
    run = load_run(tmp_path)
    assert (len(run.steps), run.trajectories, run.checkpoints) == (0, [], [])
    assert run.end.state == "killed"
    assert "has no journal" in run.missing and run.tokenizer is None
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        run.text([])


def test_rows_of_abandoned_lineages_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    dump(Config(stages=[StageConfig(steps=5)]), tmp_path / "config.yaml")
    rows = JsonlWriter(tmp_path / "metrics.jsonl")
    for lineage, step in ((1, 1), (1, 2), (2, 2)):
        rows.write({"step": step, "lineage": lineage, "stage_kind": "rl"})
    rows.close()
    assert load_run(tmp_path).steps["lineage"].tolist() == [1, 2]
    assert load_run(tmp_path, abandoned=True).steps["lineage"].tolist() == [1, 1, 2]
