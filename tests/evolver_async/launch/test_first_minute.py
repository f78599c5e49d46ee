"""The first minute of a run: the untouched model's success, its first reply, what it can learn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from serial_recipe import RECIPE
from serial_runs import Finished, trainer

from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import valid
from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.config.load import load, load_written
from evolver_async.errors import TrainingError
from evolver_async.launch.creation import create
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.tail import Tail
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.runs.watch.runs import end, summary
from learner.run.checkpoint import Checkpoints
from learner.run.evaluations import EvaluationTracker
from learner.schedule import Stages
from learner.state import LearnerState

pytestmark = pytest.mark.process

SHORT = ("stages.0.steps=25", "stages.1.steps=4", "eval.every=2", "eval.episodes=16")
CHANGES = (*SHORT, "eval.final_episodes=0", "checkpoint.every=2", "checkpoint.keep_best=1")


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


def test_a_recipe_with_a_bare_model_is_evaluated_like_a_run(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    model = f"policy.path={finished.run_dir}/policy"
    assert main(["eval", str(recipe), "--episodes", "16", model]) == 0
    bare = capsys.readouterr().out
    assert main(["eval", str(finished.run_dir), "--episodes", "16", "--step", "0"]) == 0
    of_run = capsys.readouterr().out
    assert bare.startswith(f"{finished.run_dir}/policy: success ")
    assert bare.partition(": ")[2] == of_run.partition(": ")[2]
    first = evaluated(finished.run_dir)[0]
    assert f"success {first['eval/success']:.3f}" in bare


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["{recipe}"], "policy.path: is empty"),
        (["{recipe}", "policy.path=nowhere"], "policy.path: .*nowhere is not a directory"),
        (["{recipe}", "policy.path={run}/policy", "--step", "3"], "--step: needs"),
        (["{recipe}", "loss.kl=k9"], r"loss\.kl: must be one of"),
        (["{run}", "loss.kl=k1"], "loss.kl=k1: a run is evaluated as it is"),
        (["neither"], "neither: is not a run directory"),
    ],
)
def test_what_cannot_be_evaluated_is_named(
    arguments: list[str],
    named: str,
    finished: Finished,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    places = {"recipe": recipe, "run": finished.run_dir}
    assert main(["eval", *(one.format(**places) for one in arguments)]) == 2
    assert re.search(named, capsys.readouterr().err)


def alerts_of(run_dir: Path) -> list[dict[str, Any]]:
    return [
        row
        for row in Tail(run_dir / ALERTS).rows()
        if row["title"] in ("nothing to learn", "refills")
    ]


def test_a_run_whose_first_data_teach_nothing_says_so_and_shows_its_first_reply(
    tmp_path: Path,
) -> None:
    """The tiny preset without demonstrations: it writes no answer that can be read."""
    train = trainer(tmp_path, RECIPE)
    untaught = train(
        "untaught", "stages=[{kind: rl, steps: 3}]", "eval.episodes=4", "eval.final_episodes=0"
    )
    (alert,) = alerts_of(untaught.run_dir)
    assert alert["console"] and "rollout." in alert["text"]
    text = (untaught.run_dir / "first_reply.txt").read_text()
    assert text.startswith("first reply (task ") and "no success" in text
    assert re.search(r"^  prompt \| .*<", text, re.MULTILINE), "special tokens are visible"
    assert re.search(r"^  reply  \| ", text, re.MULTILINE)


def test_groups_that_dynamic_sampling_leaves_out_before_any_step_are_told(tmp_path: Path) -> None:
    train = trainer(tmp_path, RECIPE)
    changes = "stages=[{kind: rl, steps: 3}]", "selection={kind: dynamic, max_refills: 4}"
    with pytest.raises(TrainingError, match=r"selection\.max_refills"):
        train("refilled", *changes, "rollout.format_penalty=0")
    run_dir = tmp_path / "refilled"
    first, second = alerts_of(run_dir)
    assert (first["title"], second["title"]) == ("nothing to learn", "refills")
    assert (run_dir / "first_reply.txt").exists() and not (run_dir / "metrics.jsonl").read_text()


def test_a_run_that_learns_raises_no_alarm_about_its_first_data(finished: Finished) -> None:
    assert alerts_of(finished.run_dir) == []
    text = (finished.run_dir / "first_reply.txt").read_text()
    assert "greedy" in text, "of the untouched model's evaluation"
