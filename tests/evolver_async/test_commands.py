"""The commands about recipes and runs: what they list, print, guess and say at the end."""

import json
import os
from pathlib import Path

import pytest

from evolver_async import __version__
from evolver_async.checkpoint.checkpoints import save
from evolver_async.cli import main
from evolver_async.commands.recipes import recipe_path
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump, load, load_written, stage_config
from evolver_async.config.sections.learner import lr_at
from evolver_async.launch.resumption import raised_rate
from evolver_async.launch.run_directory import locked
from evolver_async.metrics import tail
from evolver_async.runs.watch import runs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("stages: [{kind: rl, steps: 5}]\n")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory as an earlier launch leaves it, without checkpoints."""
    path = tmp_path / "runs" / "earlier"
    path.mkdir(parents=True)
    dump(Config(stages=[StageConfig(steps=5)]), path / "config.yaml")
    (path / "lock").touch()
    return path


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"evolver-async {__version__}\n"


def test_help_lists_what_people_use_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["actor", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
    said = capsys.readouterr().out
    for name in ("train", "status", "runs", "config", "wandb", "--connect", "--keys"):
        assert name in said
    for name in ("prepare", "launcher", "learner  ", "--incarnation", "--parent", "--meeting"):
        assert name not in said


@pytest.mark.parametrize(("given", "meant"), [("trian", "train"), ("stauts", "status")])
def test_a_misspelled_command_is_guessed(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([given])
    assert f"{given}: unknown command, did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("group_size", "rollout.group_size"),
        ("grup_size", "rollout.group_size"),
        ("actors.group_size", "rollout.group_size"),
        ("learner.lrr", "learner.lr"),
        ("lr", "critic.lr or learner.lr"),
    ],
)
def test_a_key_without_its_section_is_guessed(
    recipe: Path, given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", str(recipe), f"{given}=8"]) == 2
    said = capsys.readouterr().err
    assert said == f"evolver-async: {given}: unknown key, did you mean {meant}?\n"


def test_config_prints_what_would_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["actors.count=3", "learner.ranks=2", f"run.dir={tmp_path}/runs", "env.name=bandit"]
    assert main(["config", str(recipe), *changes]) == 0
    out = capsys.readouterr().out
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(out)
    chosen = load(recipe, [*changes, "rollout.format=think_answer"])
    assert load(resolved) == chosen, "what is printed is a recipe itself, with `auto` resolved"
    stage = "stage 0: rl in bandit by think_answer turns, until 5"
    for part in ("a learner of 2 ranks, 3 actors", stage, "# steps: 5"):
        assert part in out
    assert not (tmp_path / "runs").exists()


def test_config_prints_what_every_stage_overrides(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "env: {name: bandit}, rollout: {group_size: 4}, learner: {groups_per_step: 16}"
    change = f"stages=[{{kind: rl, steps: 5}}, {{kind: rl, steps: 7, override: {{{own}}}}}]"
    assert main(["config", str(recipe), change]) == 0
    out = capsys.readouterr().out
    turns = "think_answer turns"
    for stage in (
        f"0: rl in frozen_lake by {turns}, until 5 steps, each step of 32 groups of 8",
        f"1: rl in bandit by {turns}, until 7 steps, each step of 16 groups of 4",
    ):
        assert f"# stage {stage}\n" in out
    assert "# steps: 12\n" in out


def test_runs_are_listed_with_how_they_ended(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"lineage": 1, "step": 3, "eval/success": 0.5, "eval/episodes": 8, "eval/distinct": 7}
    (run_dir / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    for code, state in ((None, "killed"), (0, "finished"), (130, "stopped"), (3, "failed")):
        if code is not None:
            runs.end(run_dir, code, "it fell apart")
        assert main(["runs", str(run_dir.parent)]) == 0
        head, line = capsys.readouterr().out.splitlines()
        assert head.split() == ["name", "state", "step", "success", "distinct", "changed"]
        assert line.split()[:5] == ["earlier", state, "3", "0.500", "7"]
    with locked(run_dir):
        assert main(["runs", str(run_dir.parent)]) == 0
        assert "running" in capsys.readouterr().out
    assert main(["runs", str(run_dir / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_the_list_of_runs_fits_a_terminal(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = run_dir.rename(run_dir.with_name("frozen_lake-20261125-153924"))
    row = {"lineage": 1, "step": 123456, "eval/success": 0.5, "eval/episodes": 8}
    (named / "metrics.jsonl").write_text(f"{json.dumps(row | {'eval/distinct': 255})}\n")
    (named.with_name("empty")).mkdir()
    (named.with_name("empty") / "config.yaml").touch()
    os.utime(named.with_name("empty") / "config.yaml", (1e8, 1e8))
    assert main(["runs", str(named.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(len(line) <= 80 for line in lines), lines
    assert lines[1].split()[:5] == ["empty", "killed", "0", "–", "–"]
    assert lines[1].split()[5].startswith("1973-03-")


def test_the_list_reads_as_much_of_the_metrics_as_it_shows(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late evaluation, one of steps that a resume has left, and none in the last rows."""

    def take(lineage: int, step: int) -> dict[str, object]:
        return {"lineage": lineage, "step": step, "stage_kind": "rl"}

    def evaluation(lineage: int, step: int, success: float) -> dict[str, object]:
        numbers = {"eval/success": success, "eval/episodes": 8, "eval/distinct": 8}
        return {"lineage": lineage, "step": step, **numbers}

    rows = [
        *[take(1, step) for step in range(1, 101)],
        *[evaluation(1, 70, 0.7), evaluation(1, 90, 0.9)],
        *[take(2, step) for step in range(81, 201)],
        evaluation(2, 20, 0.2),
        *[take(2, step) for step in range(201, 301)],
    ]
    path = run_dir / "metrics.jsonl"
    for size, success in ((len(rows), "0.700"), (100, "–")):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:size]))
        for piece in (200, 2000, 1 << 19):
            monkeypatch.setattr(tail, "PIECE_BYTES", piece)
            assert main(["runs", str(run_dir.parent)]) == 0
            line = capsys.readouterr().out.splitlines()[1]
            assert line.split()[2:4] == [str(rows[size - 1]["step"]), success]

    read = []
    monkeypatch.setattr(tail, "row_of", lambda line: read.append(line) or json.loads(line))
    monkeypatch.setattr(tail, "PIECE_BYTES", 200)
    rows = [*[take(1, step) for step in range(1, 1001)], evaluation(1, 999, 0.5), take(1, 1001)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["runs", str(run_dir.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2:4] == ["1001", "0.500"]
    assert len(read) < 30


def test_a_run_whose_files_are_damaged_hides_no_other(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run_dir.parent / "other"
    other.mkdir()
    (other / "config.yaml").touch()
    (other / "metrics.jsonl").write_text('{"step": 3}\n')  # of which lineage it does not say
    assert main(["runs", str(run_dir.parent)]) == 0
    states = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:])
    assert states == {"earlier": "killed", "other": "unreadable"}


def test_the_last_lines_say_how_it_ended_and_what_comes_next(run_dir: Path) -> None:
    rows = [
        {
            "lineage": 1,
            "step": step,
            "eval/success": success,
            "eval/episodes": 8,
            "eval/distinct": 3,
            "eval/stage": 0.0,
        }
        for step, success in ((2, 0.75), (5, 0.5))
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    newest = save(run_dir / "checkpoints", 5, lambda path: None, run_id="earlier", keep=2)
    said = runs.summary(run_dir, runs.end(run_dir, 0))
    begin, end = said[0].split(" over 8 episodes, 3 distinct (best 0.750 at step 2)")
    assert begin.startswith("finished at step 5, eval success 0.500 (95 % ") and not end
    untouched = rows[0] | {"step": 0, "eval/success": 0.25, "eval/distinct": 64}
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(f"{json.dumps(untouched)}\n")
    said = runs.summary(run_dir, runs.end(run_dir, 0))
    assert "0.250 before the first step, +0.250 (95 % " in said[0]
    assert said[1] == f"checkpoint: {newest}"
    assert f"evolver-async export {run_dir} OUT" in said[-1]
    assert any("stages.0.steps=10" in line for line in said)
    stage = StageConfig(kind="dpo", steps=5, until_success=0.5)
    dump(Config(stages=[stage]), run_dir / "config.yaml")
    said = runs.summary(run_dir, runs.end(run_dir, 0))
    assert any(line.endswith(" stages.0.steps=10 stages.0.until_success=…") for line in said)
    said = runs.summary(run_dir, runs.end(run_dir, 130))
    assert said[0].startswith("stopped at step 5") and not any("not saved" in one for one in said)
    save(run_dir / "checkpoints", 3, lambda path: None, run_id="earlier", keep=2)
    for code in (130, 1):
        said = runs.summary(run_dir, runs.end(run_dir, code))
        assert any(one.startswith("not saved: the last 2 steps") for one in said)
    assert said[-1] == f"continue: evolver-async train --resume {run_dir}"
    (run_dir / "logs").mkdir()
    moment = "2026-01-01T12:00:00.123Z"
    lines = (
        f"{moment} ERROR launch: actor-0 cannot go on: {moment} ERROR actors.main: no tokenizer\n"
        f"{moment} INFO launch: ended\n"
    )
    (run_dir / "logs" / "launcher.log").write_text(lines)
    said = runs.summary(run_dir, runs.end(run_dir, 2))
    assert said[0] == "failed with exit code 2: actor-0 cannot go on: no tokenizer"
    assert said[1] == f"logs: {run_dir}/logs"
    with open(run_dir / "logs" / "launcher.log", "a") as log:
        log.write(
            f"{moment} ERROR launch: actor-0 is not started again:\n  line 3\nKeyError: 'x'\n"
        )
    assert runs.end(run_dir, 1).reason == "actor-0 is not started again:\n  line 3\nKeyError: 'x'"
    assert said[-1] == f"continue: evolver-async train --resume {run_dir}"


@pytest.mark.parametrize("rollbacks", [0, 2])
def test_the_command_that_extends_a_run_keeps_its_learning_rate(
    run_dir: Path, rollbacks: int
) -> None:
    """The schedule of twice the steps is far above its end at the step that comes next."""
    steps = 20
    stage_of(run_dir, take=steps, rollbacks=rollbacks)
    config = load_written(run_dir)
    rate = lr_at(steps - 1, stage_config(config, 0, rollbacks).learner, steps=steps)
    row = {"lineage": 1, "step": steps, "stage_kind": "dpo", "learner/lr": rate}
    (run_dir / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    said = runs.summary(run_dir, runs.end(run_dir, 0))
    (command,) = (line for line in said if line.startswith("extend: "))
    _, _, changes = command.partition(f"{run_dir} ")
    longer = resumed(config, changes.split())
    assert longer.stages[0].steps == 2 * steps
    learner = stage_config(longer, 0, rollbacks).learner
    assert lr_at(steps, learner, steps=2 * steps) == pytest.approx(rate, rel=1e-4)
    assert lr_at(steps, stage_config(config, 0, rollbacks).learner, steps=2 * steps) > 4 * rate


def stage_of(run_dir: Path, *, take: int, rollbacks: int = 0, **learner: object) -> None:
    """A run in its only stage, of 20 steps, whose rate falls to a tenth; `take` are done."""
    config = Config(stages=[StageConfig(kind="dpo", steps=20)])
    vars(config.learner).update({"lr_final": 0.1} | learner)
    dump(config, run_dir / "config.yaml")
    state = {"take": take, "stage_take": 0, "stage": 0, "rollbacks": rollbacks}
    write = lambda made: (made / "state.json").write_text(json.dumps(state))  # noqa: E731
    save(run_dir / "checkpoints", take, write, run_id=run_dir.name, keep=9)


@pytest.mark.parametrize("take", [12, 20])  # in the middle, and after the end
@pytest.mark.parametrize("rollbacks", [0, 2])
def test_a_rate_that_rises_with_the_steps_of_a_stage_is_told_with_the_keys_that_keep_it(
    run_dir: Path, take: int, rollbacks: int
) -> None:
    stage_of(run_dir, take=take, rollbacks=rollbacks)
    before = load_written(run_dir)
    after = load_written(run_dir, ["stages.0.steps=40"])
    (said,) = raised_rate(before, after, run_dir)

    def rate(config: Config, *, steps: int) -> float:
        return lr_at(take, stage_config(config, 0, rollbacks).learner, steps=steps)

    was, rises = rate(before, steps=20), rate(after, steps=40)
    assert said.startswith("stages[0].steps: ")
    assert f" {was:.3g} " in said and f" {rises:.3g}," in said and rises > 1.3 * was
    keys = [word for word in said.split() if word.startswith("stages.0.override.")]
    kept = load_written(run_dir, ["stages.0.steps=40", *keys])
    assert rate(kept, steps=40) == pytest.approx(was, rel=0.01)
    assert raised_rate(before, kept, run_dir) == []


@pytest.mark.parametrize(
    ("done", "changes"),
    [
        (20, []),
        (20, ["stages+={kind: dpo, steps: 40}"]),
        (20, ["stages.0.steps=40", "learner.lr=1e-3"]),  # asked for
        (12, ["stages.0.steps=15"]),
        (0, ["stages.0.steps=40"]),
    ],
)
def test_a_rate_that_does_not_rise_by_itself_is_not_told(
    run_dir: Path, done: int, changes: list[str]
) -> None:
    stage_of(run_dir, take=done)
    before, after = load_written(run_dir), load_written(run_dir, changes)
    assert raised_rate(before, after, run_dir) == []


def test_a_constant_rate_or_a_run_without_a_checkpoint_says_nothing(run_dir: Path) -> None:
    changed = ["stages.0.steps=40"]
    assert raised_rate(load_written(run_dir), load_written(run_dir, changed), run_dir) == []
    stage_of(run_dir, take=20, decay="none")
    assert raised_rate(load_written(run_dir), load_written(run_dir, changed), run_dir) == []


def resumed(config: Config, changes: list[str]) -> Config:
    """The configuration of a run with these changes of a command line."""
    return load(None, [f"stages=[{{kind: dpo, steps: {config.stages[0].steps}}}]", *changes])


def test_the_best_success_is_that_of_evaluations_like_the_last(run_dir: Path) -> None:
    """A cold start on easier tasks succeeds more often than the stage that follows."""
    stages = [
        StageConfig(steps=5, override={"env": {"params": {"size": 3}}}),
        StageConfig(steps=5),
        StageConfig(steps=5, override={"learner": {"lr": 0.1}}),
    ]
    dump(Config(stages=stages), run_dir / "config.yaml")
    numbers = {"lineage": 1, "eval/episodes": 8, "eval/distinct": 3}
    evaluated = ((5, 0, 1.0), (8, 1, 0.75), (10, 1, 0.25), (15, 2, 0.5))
    rows = [
        numbers | {"step": step, "eval/stage": float(stage), "eval/success": success}
        for step, stage, success in evaluated
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = runs.summary(run_dir, runs.end(run_dir, 0))
    assert "eval success 0.500 (" in said[0] and "(best 0.750 at step 8)" in said[0]


def test_the_last_lines_name_the_alarms_and_their_steps(run_dir: Path) -> None:
    fired = {"alarm/entropy": (2, 4, 5, 7), "alarm/reward_spread": (3,)}
    rows = [
        {"lineage": 1, "step": step, "stage_kind": "rl", "time_s": float(step)}
        | {name: float(step in steps) for name, steps in fired.items()}
        for step in range(1, 9)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    steps = "entropy at steps 2 and 4 and 1 more, reward_spread at step 3"
    line = f"alarms: {steps}; remedies: docs/alarms.md"
    for code in (0, 130, 3):
        assert line in runs.summary(run_dir, runs.end(run_dir, code, "reason"))
    (run_dir / "metrics.jsonl").write_text(f"{json.dumps(rows[0])}\n")
    assert "alarm" not in "".join(runs.summary(run_dir, runs.end(run_dir, 0)))


def test_a_recipe_is_found_by_name_and_by_path(recipe: Path) -> None:
    assert recipe_path("frozen_lake").samefile(ROOT / "configs" / "frozen_lake.yaml")
    assert recipe_path("gpu/grpo_roc").samefile(ROOT / "configs" / "gpu" / "grpo_roc.yaml")
    assert recipe_path(str(recipe)) == recipe


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("frozen_lak", "did you mean frozen_lake?"),
        ("gpu/grpo_rok", "did you mean gpu/grpo_roc or "),
        ("configs/gpu/sokoban.yaml", "did you mean sokoban?"),
        ("zzzz", "the name of a recipe (evolver-async recipes lists the names)"),
    ],
)
def test_a_wrong_recipe_gets_the_names_that_are_close(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", given]) == 2
    assert meant in capsys.readouterr().err


def test_recipes_are_listed_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    *lines, _, where, studies = capsys.readouterr().out.splitlines()
    files = {*(ROOT / "configs").rglob("*.yaml")} - {*(ROOT / "configs/studies").iterdir()}
    assert len(lines) == len(files)
    assert (
        "evolver-async study NAME: cold_start, correction, early_experience, evidence," in studies
    )
    assert all(line.split()[1:] and line.endswith((".", "…")) for line in lines)
    assert str(ROOT / "configs") in where


def test_a_run_is_deleted_and_nothing_that_it_links_to(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run_dir.parents[1] / "model"
    model.mkdir()
    (model / "weights").touch()
    (run_dir / "policy").symlink_to(model)
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "weights").symlink_to(model / "weights")
    link = run_dir.with_name("link")
    link.symlink_to(run_dir)
    assert main(["rm", str(link)]) == 2
    with locked(run_dir):
        assert main(["rm", str(run_dir)]) == 2
    assert "is already running" in capsys.readouterr().err
    assert (run_dir / "config.yaml").exists() and (run_dir / "policy").is_symlink()
    assert main(["rm", str(model)]) == 2, "it is no run"
    assert main(["rm", str(run_dir)]) == 0
    assert not run_dir.exists() and (model / "weights").exists()
