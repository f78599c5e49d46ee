"""The command `study`: refusals before anything starts, its plan, and whole studies."""

import csv
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from launches import COMMAND, DEADLINE_S, alive, wait_for
from studies import made_study, run_of, write_cold, write_run

from evolver_async.cli import main
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump, load
from evolver_async.runs.watch.runs import END
from evolver_async.study.cells import configs_of
from evolver_async.study.definition import Definition
from evolver_async.study.directory import Study, cold_run, command_of, runs_of, state_of
from evolver_async.study.run_results import TESTED, results_of
from evolver_async.study.scheduler import EndedRun, RunningCell, Scheduler, forget_failures
from evolver_async.study.study_progress import StudyProgress, needs, size_of

RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 64, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 8, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
advantage: {std: batch}
learner: {groups_per_step: 4, minibatches: 1, lr: 5.0e-3, decay: none}
stages:
  - kind: sft
    steps: 3
    expert_fraction: 0.0
    override: {rollout: {group_size: 1}, learner: {groups_per_step: 16, lr: 1.0e-2}}
  - {kind: rl, steps: 6}
eval: {every: 3, episodes: 32, final_episodes: 64}
checkpoint: {every: 3}
launch: {kind: serial}
"""
Ended = Callable[..., tuple[int, str]]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Run `study` in this process; return its exit code, and what it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main(["study", *map(str, arguments), "--out", str(tmp_path / "study")])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learner.lrr=1,2"], "cell lrr-1: learner.lrr: unknown key, did you mean learner.lr?"),
        (["learner.minibatches=1,many"], "cell minibatches-many: learner.minibatches: "),
        (["buffer.max_ready=1,0.5"], "cell max_ready-0.5: buffer.max_ready: must be 0 or at"),
        (["env.name=bandit,frozen_lak"], "cell name-frozen_lak: env.name: "),
        (["learner.lr=1", "--tie", "a.b=learner.lr"], "tie a.b=learner.lr: learner.lr is not swep"),
        (["learner.lr=1,2", "--tie", "learner.lr"], "--tie learner.lr: must be written --tie key="),
        (["--seeds", "4..1"], "seeds: 4..1 ends before it begins"),
        (["--threshold", "high"], "threshold: must be metric=number"),
        (
            ["--threshold", "eval/succes=0.5"],
            "threshold: evaluations have no metric eval/succes",
        ),
        (["--equivalence", "-1"], "equivalence: must be a number of at least 0"),
        (["--jobs", "0"], "--jobs: must be at least 1, is 0"),
        (["run.seed=1,2"], "run.seed: is set by the study itself"),
        (["safety.action=pause"], "safety.action: pause would hold a study without end"),
        (
            ["stages.1.override={safety: {action: pause}}"],
            "safety.action: pause would hold a study without end",
        ),
        (["policy.layers=1,2", "--cold-start"], "--cold-start: cells layers-1 and layers-2 differ"),
        (["stages=[{kind: rl, steps: 3}]", "--cold-start"], "--cold-start: the recipe does not "),
        (["--jobs", "2", "metrics.prometheus=127.0.0.1:9000"], "metrics.prometheus: cells that"),
    ],
)
def test_bad_input_starts_nothing(
    ended: Ended, recipe: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, said = ended(recipe, *arguments)
    assert code == 2
    assert said.startswith(f"evolver-async: {message}") and said.count("\n") == 1, said
    assert not (tmp_path / "study").exists()


def test_a_study_needs_a_recipe_or_a_directory(ended: Ended, tmp_path: Path) -> None:
    assert "needs a study or a recipe first" in ended()[1]
    assert "needs a study or a recipe first" in ended("learner.lr=1,2")[1]
    assert "starpo_z: is neither a file nor the name of a recipe" in ended("starpo_z")[1]
    assert "did you mean studies/lag" in ended("lagg")[1]


def test_a_study_is_not_made_in_the_directory_of_a_run(
    ended: Ended, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "config.yaml").touch()
    code, said = ended(recipe)
    assert code == 2 and f"{tmp_path}/study is the directory of a run" in said
    assert [one.name for one in (tmp_path / "study").iterdir()] == ["config.yaml"]


def test_a_dry_run_prints_the_cells(ended: Ended, recipe: Path, tmp_path: Path) -> None:
    changes = ["actors.weight_lag=0,2", "--tie", "buffer.max_staleness=actors.weight_lag"]
    code, said = ended(recipe, *changes, "--seeds", "0..4", "--jobs", "2", "--dry-run")
    assert code == 0
    assert "weight_lag-2: actors.weight_lag=2 buffer.max_staleness=2\n" in said
    assert "2 cells x 5 seeds = 10 runs, 0 finished, 0 failed, 10 to run\n" in said
    assert "estimate: unknown" in said
    assert not (tmp_path / "study").exists()


def test_a_dry_run_estimates_by_the_first_finished_run(ended: Ended, tmp_path: Path) -> None:
    grid = {"learner.lr": ("1e-3", "1e-4")}
    study = made_study(tmp_path / "study", Definition("r", seeds=(0, 1), grid=grid))
    write_run(run_of(study, "lr-1e-4", 0), [0.5] * 30)  # 2 s a step
    write_run(run_of(study, "lr-1e-3", 1), [0.5])
    code, said = ended("--jobs", "1", "--dry-run")
    assert code == 0 and "2 to run\nestimate: about 0:02:00, " in said
    assert "estimate: about 0:01:00 with --jobs 2, " in ended("--jobs", "2", "--dry-run")[1]


def test_a_path_with_an_equals_sign_is_no_change(
    ended: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lr=1e-3"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    code, said = ended(folder / "recipe.yaml", "learner.lr=1e-3,1e-4", "--dry-run")
    assert code == 0 and "2 cells" in said, said
    assert main(["config", str(folder / "recipe.yaml")]) == 0
    assert main(["train", str(folder / "recipe.yaml"), "run.name=a/b"]) == 2
    assert "run.name" in capsys.readouterr().err


def test_a_shipped_study_is_found_by_name(ended: Ended) -> None:
    code, said = ended("sync_vs_async", "--seeds", "0,1", "eval.every=5", "--dry-run")
    assert code == 0
    assert "sync: buffer.max_staleness=0\n" in said and "= 6 runs" in said


def test_a_study_file_names_its_recipe_relative_to_itself(
    ended: Ended, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: recipe.yaml\ngrid: {learner.lr: [1e-3, 1e-4]}\n")
    code, said = ended(tmp_path / "mine.yaml", "--dry-run")
    assert code == 0 and "lr-1e-3: learner.lr=1e-3\n" in said


def test_a_changed_study_is_refused_before_anything_starts(
    ended: Ended, recipe: Path, tmp_path: Path
) -> None:
    made_study(tmp_path / "study", Definition("r", grid={"learner.lr": ("1e-3", "1e-4")}))
    for option in ([], ["--dry-run"]):
        code, said = ended(recipe, "learner.lr=1e-3,1e-5", *option)
        assert code == 2
        assert "holds another study: grid: was learner.lr=1e-3,1e-4, is learner.lr=1e-3," in said


def test_a_summary_is_rebuilt_without_running(ended: Ended, tmp_path: Path) -> None:
    study = made_study(tmp_path / "study", Definition("r", grid={"learner.lr": ("1e-3", "1e-4")}))
    write_run(run_of(study, "lr-1e-3", 0), [0.5, 0.6])
    code, said = ended("--summary", "--threshold", "eval/success=0.55")
    assert code == 0 and "summary.md" in said
    assert "## To eval/success=0.55" in (study.out / "summary.md").read_text()
    assert not (study.out / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--seeds", "0..1"], "seeds: was 0,1,2, is 0,1"),
        (["--cold-start"], "cold_start: was false, is true"),
        (["starpo_s", "learner.lr=1e-3,1e-4"], "cell lr-1e-3: "),
    ],
)
def test_a_summary_of_another_study_is_refused(
    ended: Ended, tmp_path: Path, arguments: list[str], difference: str
) -> None:
    made_study(tmp_path / "study", Definition("r", grid={"learner.lr": ("1e-3", "1e-4")}))
    code, said = ended("--summary", *arguments)
    assert code == 2 and f"holds another study: {difference}" in said
    assert not (tmp_path / "study" / "summary.md").exists()


def test_finished_and_failed_runs_are_not_started_again(ended: Ended, tmp_path: Path) -> None:
    grid = {"learner.lr": ("1e-3", "1e-4")}
    study = made_study(tmp_path / "study", Definition("r", seeds=(0,), grid=grid))
    write_run(run_of(study, "lr-1e-3", 0), [0.5])
    write_run(run_of(study, "lr-1e-4", 0), [0.5], code=3, reason="weights are nan")
    code, said = ended()
    assert code == 1
    assert "failed: lr-1e-4-s0: weights are nan" in said and "--retry" in said
    assert not (study.out / "logs").exists(), "nothing was started"
    forget_failures(study)
    retried = run_of(study, "lr-1e-4", 0)
    assert state_of(study, retried)[0] == "unfinished"
    assert (retried.directory / END).exists(), "its launcher was not killed"


def test_a_cold_start_comes_before_the_cells_of_its_seed(tmp_path: Path) -> None:
    grid = {"learner.lr": ("1e-3", "1e-4")}
    definition = Definition("r", seeds=(0, 1), grid=grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)

    def ignore(end: EndedRun, left: int) -> None: ...

    names = lambda: [run.name for run in Scheduler(study, 1, ignore).ready()]  # noqa: E731
    assert names() == ["cold-0", "cold-1"]
    write_cold(study, 0, 0.3)
    assert names() == ["lr-1e-3-s0", "lr-1e-4-s0", "cold-1"]


def test_what_is_left_follows_the_first_run_and_cold_start_that_have_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = {"learner.lr": ("1e-3", "1e-4")}
    definition = Definition("r", seeds=(0, 1), grid=grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    progress = StudyProgress(study, 1)
    cold = cold_run(study, 0)
    write_cold(study, 0, 0.3)  # two steps of 2 s
    progress.report(EndedRun(cold, "finished", "", 60.0), 4)
    assert "left 4 runs\n" in capsys.readouterr().out  # how long a run takes is not known yet
    config = Config(stages=[StageConfig(kind="sft", steps=4), StageConfig(steps=4)])
    first = run_of(study, "lr-1e-4", 0)
    tested = {TESTED["eval/success"]: [0.7] * 10}
    write_run(first, [0.4] * 10, before_s=4.0, config=config, metrics=tested)
    progress.report(EndedRun(first, "finished", "", 50.0), 3)
    line = capsys.readouterr().out
    assert "left 0:01:04\n" in line  # three runs of 20 s, a cold start of 4
    assert f"{TESTED['eval/success']} 0.700" in line, "what the summary says"
    assert {one.run.name: one.final for one in results_of(study)}[first.name] == 0.7
    assert needs(study, 2) == (44.0, 3 * size_of(first.directory) + size_of(cold.directory))


def test_a_fork_gets_what_differs_from_the_first_cell(recipe: Path, tmp_path: Path) -> None:
    grid = {"learner.lr": ("1e-3", "1e-4")}
    definition = Definition("r", seeds=(0,), grid=grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    first, second = load(recipe, ["learner.lr=1e-3"]), load(recipe, ["learner.lr=1e-4"])
    study = type(study)(study.out, definition, study.cells, {"lr-1e-3": first, "lr-1e-4": second})
    cold = command_of(study, cold_run(study, 0))
    assert cold[:2] == ["train", str(study.out / "cells" / "lr-1e-3.yaml")]
    assert load(recipe, [cold[-1]]).stages == first.stages[:1]
    cold_config(study, first)
    fork = command_of(study, run_of(study, "lr-1e-4", 0))
    assert fork[1:5] == ["--resume", str(cold_run(study, 0).directory), "--fork", "lr-1e-4-s0"]
    assert load(recipe, fork[-2:]) == second, "learner.lr and all stages"


def cold_config(study: Study, config: Config) -> None:
    """Write the configuration of the first seed's cold start, which trains one stage."""
    cold = cold_run(study, 0).directory
    cold.mkdir(parents=True)
    dump(replace(config, stages=config.stages[:1]), cold / "config.yaml")


def test_a_fork_keeps_the_copies_of_task_files_that_its_cold_start_made(tmp_path: Path) -> None:
    """The stages that are over cannot change, as a path to the original file would be a change."""
    first = StageConfig(kind="sft", steps=3, override={"tasks": {"path": "/given/tasks.jsonl"}})
    config = Config(stages=[first, StageConfig(steps=9)])
    definition = Definition("r", seeds=(0,), cold_start=True)
    study = made_study(tmp_path / "study", definition)
    (cell,) = study.cells
    study = replace(study, configs={cell.name: config})
    copied = replace(first, override={"tasks": {"path": "/cold/tasks_0.jsonl"}})
    cold_config(study, replace(config, stages=[copied]))
    fork = command_of(study, run_of(study, cell.name, 0))
    assert load(None, fork[-1:]).stages == [copied, StageConfig(steps=9)]


def test_the_mappings_of_a_fork_are_those_of_its_cell_alone(recipe: Path, tmp_path: Path) -> None:
    """Arguments are merged over the first cell's configuration, which the cold start has."""
    variants = {
        "one": {
            "safety.rollback": "{learner: {lr: 1e-5}}",
            "eval.sets": "{hard: {tasks: 4, env: {params: {high_probability: 0.4}}}}",
        },
        "other": {
            "safety.rollback": "{loss: {entropy_coef: 0.1}}",
            "eval.sets": "{hard: {tasks: 8}, easy: {tasks: 4}}",
        },
        "none": {},
    }
    common = {"safety.action": "rollback"}
    definition = Definition("r", seeds=(0,), variants=variants, overrides=common, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    configs = configs_of(definition, recipe, study.cells)
    study = replace(study, configs=configs)
    dump(configs["one"], tmp_path / "one.yaml")
    cold_config(study, configs["one"])
    for name in ("other", "none"):
        command = command_of(study, run_of(study, name, 0))
        made = load(tmp_path / "one.yaml", command[5:])
        same = {"run": configs[name].run, "metrics": configs[name].metrics}
        assert replace(made, **same) == configs[name]


def read_cells(out: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(out / "cells.csv", encoding="utf-8", newline="") as file:
        return {(row["cell"], row["seed"]): row for row in csv.DictReader(file)}


SAVING = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit()
signal.signal(signal.SIGINT, save)
print(flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_runs_write_their_checkpoints_when_the_study_itself_fails(tmp_path: Path) -> None:
    """As when nobody reads its output any more."""

    def report(*_: object) -> None:
        raise BrokenPipeError

    study = made_study(tmp_path / "study", Definition("r", seeds=(0, 1)))
    scheduler = Scheduler(study, 2, report)
    saved = tmp_path / "saved"
    for run, program in zip(runs_of(study), ("sys.exit(1)", SAVING), strict=True):
        command = [sys.executable, "-c", f"import sys; {program}", str(saved)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        scheduler.children.append(RunningCell(run, process, time.monotonic()))
    with pytest.raises(BrokenPipeError):
        scheduler.run()
    assert saved.exists()


@pytest.mark.process
def test_an_interrupted_study_goes_on_where_it_was_and_lists_what_failed(
    recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    # A learning rate at which the weights overflow fails at run time alone.
    arguments = ["study", str(recipe), "--out", str(out), "--seeds", "0", "learner.lr=5e-3,1e30"]
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    said = ""
    try:
        while "[1/2] lr-5e-3-s0 finished" not in said:
            said += process.stdout.readline() or pytest.fail(said)
        wait_for(lambda: (out / "logs" / "lr-1e30-s0.log").exists(), "the second run")
        study = psutil.Process(process.pid)  # it makes the log a moment before the process
        children = wait_for(lambda: study.children(recursive=True), "its process")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.terminate()  # and its runs
        process.communicate()
    assert process.returncode == 130, said + rest
    assert f"stopped; continue: evolver-async study --out {out}" in rest
    assert children and not any(map(alive, children)), "no run outlives the study"

    first = (out / "logs" / "lr-5e-3-s0.log").read_text()
    again = [*COMMAND, *arguments, "--jobs", "2"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (out / "logs" / "lr-5e-3-s0.log").read_text() == first, "a finished run is kept"
    cells = read_cells(out)
    assert len(cells) == 2
    assert cells["lr-5e-3", "0"]["state"] == "finished"
    assert cells["lr-5e-3", "0"]["steps"] == "9"
    failed = cells["lr-1e30", "0"]
    assert failed["state"] == "failed" and "nan" in failed["error"], failed
    assert "failed: lr-1e30-s0: " in done.stderr
    summary = (out / "summary.md").read_text()
    assert "- `lr-1e30-s0`: train ended with exit code" in summary
    assert (out / "plots" / "curve_by_step.png").exists()

    logs = {path.name: path.read_text() for path in (out / "logs").iterdir()}
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "0 to run" in done.stdout
    assert {path.name: path.read_text() for path in (out / "logs").iterdir()} == logs
