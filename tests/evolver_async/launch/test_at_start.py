"""The untouched model is evaluated before the first step, once, and stays to be compared with."""

import json
from pathlib import Path

import pytest
from serial_recipe import RECIPE
from serial_runs import Finished, trainer

from evolver_async.checkpoint import history
from evolver_async.checkpoint.directory import valid
from evolver_async.config import ConfigError
from evolver_async.config.load import load, load_written
from evolver_async.launch.creation import create
from evolver_async.results.run import load_run
from evolver_async.watch.runs import end, summary
from learner.run.checkpoint import Checkpoints
from learner.run.evaluations import EvaluationTracker
from learner.schedule import Stages
from learner.state import LearnerState

pytestmark = pytest.mark.process

SHORT = ("stages.0.steps=3", "stages.1.steps=4", "eval.every=2", "eval.episodes=16")
CHANGES = (*SHORT, "eval.final_episodes=16", "checkpoint.every=2", "checkpoint.keep_best=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    train = trainer(tmp_path_factory.mktemp("start"), RECIPE)
    return train("run", *CHANGES, "eval.at_start=always")


def evaluated(run_dir: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "eval/success" in row]


def test_its_point_is_step_0_of_every_curve(finished: Finished) -> None:
    first, *later = evaluated(finished.run_dir)
    assert (first["step"], first["eval/version"], first["eval/episodes"]) == (0, 0, 16)
    assert later and all(row["step"] > 0 for row in later)
    assert load_run(finished.run_dir).evaluations["step"].tolist()[0] == 0
    lines = summary(finished.run_dir, end(finished.run_dir, 0))
    assert f"{first['eval/success']:.3f} before the first step" in lines[0]


def test_its_checkpoint_stays_however_good_later_ones_are(finished: Finished) -> None:
    found = {manifest.step: path for path, manifest in valid(finished.run_dir / "checkpoints")}
    note = history.evaluation_of(found[0])
    assert note is not None and note.success == evaluated(finished.run_dir)[0]["eval/success"]
    assert 2 not in found, "others go"


def test_a_resume_at_step_0_does_not_evaluate_it_again(finished: Finished) -> None:
    config = load_written(finished.run_dir)
    checkpoints = Checkpoints(finished.run_dir, config)
    found = {manifest.step: path for path, manifest in valid(finished.run_dir / "checkpoints")}
    state = LearnerState.read(found[0])
    assert [one.version for one in state.pending] == [0], "it was written before the result"
    known = checkpoints.untouched(found[0])
    assert known is not None and checkpoints.untouched(found[max(found)]) is None
    tracker = EvaluationTracker(None, None, config.eval)  # pyright: ignore[reportArgumentType]
    tracker.know(state, known)
    assert tracker.ask_again(state, Stages(config)) is None and state.eval_success == known.success


def test_auto_is_for_a_model_that_was_trained_before(tmp_path: Path, finished: Finished) -> None:
    changes = [f"run.dir={tmp_path}", *CHANGES]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    tiny, _ = create(load(recipe, [*changes, "run.name=tiny"]), recipe)
    assert tiny.eval.at_start == "never"
    own = f"policy.path={finished.run_dir}/policy"
    given, _ = create(load(recipe, [*changes, "run.name=own", own]), recipe)
    assert given.eval.at_start == "always"
    never, _ = create(load(recipe, [*changes, "run.name=no", own, "eval.at_start=never"]), recipe)
    assert never.eval.at_start == "never"
    with pytest.raises(ConfigError, match=r"eval\.at_start: must be one of"):
        load(recipe, ["eval.at_start=perhaps"])
