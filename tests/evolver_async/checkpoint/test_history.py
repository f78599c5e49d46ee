"""Checkpoints by step and by success; runs that are extended, gone back in, and forked."""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.experience.pool_file import FILE, Store
from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.stages import evaluation_digest
from evolver_async.buffer.state import records
from evolver_async.buffer.tasks.row_files import rows_of
from evolver_async.checkpoint import history, shards
from evolver_async.checkpoint.checkpoints import (
    STATE,
    CheckpointError,
    is_left,
    load_newest,
    resumable,
    save,
    valid,
)
from evolver_async.checkpoint.history import CheckpointEvaluation
from evolver_async.cli import main
from evolver_async.config import PolicyConfig, TasksConfig
from evolver_async.config.load import dump, load
from evolver_async.launch.forking import _start_anew, fork
from evolver_async.launch.resumption import check_continues, choose, resume
from evolver_async.launch.run_directory import config_of

pytestmark = pytest.mark.process

SHAPE = {
    "max_length": 64,
    "hidden_size": 16,
    "layers": 1,
    "heads": 2,
    "intermediate_size": 32,
}
TASKS = '{"split": "train", "seed": 1}\n{"split": "test", "seed": 2}\n'
RECIPE = """
env: {name: bandit}
policy: SHAPE
rollout: {group_size: 2, max_turns: 1, max_tokens: 2}
actors: {count: 1, groups: 2}
advantage: {kind: reinforce}
learner: {groups_per_step: 2, minibatches: 1, decay: none}
stages: [{kind: sft, steps: 2}, {kind: rl, steps: 6}]
eval: {every: 2, episodes: 4, final_episodes: 6}
checkpoint: {every: 1, keep_every: 3}
metrics: {panel: none}
launch: {kind: serial}
"""


# ---- one directory


def written(
    directory: Path, *steps: int, keep: int = 99, lasting: Sequence[Path] = ()
) -> list[Path]:
    """Checkpoints of these steps, each with its own weights."""

    def write(made: Path) -> None:
        (made / "model").write_text(f"weights of {step}")
        (made / "state.json").write_text(json.dumps({"take": step}))

    paths = []
    for step in steps:
        paths.append(save(directory, step, write, run_id="run", keep=keep, lasting=lasting))
    return paths


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def evaluated(path: Path, success: float, digest: str = "a") -> None:
    history.note(path, CheckpointEvaluation(success=success, episodes=8, digest=digest))


def test_the_best_is_that_of_the_newest_tasks_and_of_equals_the_newer(checkpoints: Path) -> None:
    one, two, three, four, five = written(checkpoints, 1, 2, 3, 4, 5)
    assert history.best(valid(checkpoints)) == []
    evaluated(one, 0.9)
    assert history.best(valid(checkpoints)) == [one]
    for path, success in ((two, 0.2), (three, 0.5), (four, 0.5)):
        evaluated(path, success, digest="b")
    assert history.best(valid(checkpoints)) == [four, three, two], "one was asked other tasks"
    (four / history.EVALUATION).write_text("{")
    assert history.best(valid(checkpoints)) == [three, two]
    assert history.choose(checkpoints, "run", history.BEST)[0] == three
    assert history.choose(checkpoints, "run", None)[0] == five


def test_a_copy_that_a_later_start_made_does_not_hide_the_evaluation(checkpoints: Path) -> None:
    (first,) = written(checkpoints, 1)
    evaluated(first, 0.9)
    again, other = written(checkpoints, 1, 2, lasting=[first])
    assert history.best(valid(checkpoints)) == [first]
    evaluated(other, 0.5)
    assert history.best(valid(checkpoints)) == [first, other]
    evaluated(again, 0.9)
    assert history.best(valid(checkpoints)) == [again, other], "copies count once"
    written(checkpoints, 3)
    assert again.exists() and not first.exists()


def test_a_step_is_chosen_whole_or_refused_with_what_there_is(checkpoints: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3, only of none"):
        history.choose(checkpoints, "run", 3)
    _, second, _ = written(checkpoints, 3, 3, 5)
    assert history.choose(checkpoints, "run", 3)[0] == second
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4, only of 3, 5$"):
        history.choose(checkpoints, "run", 4)
    with pytest.raises(CheckpointError, match="no checkpoint was evaluated"):
        history.choose(checkpoints, "run", "best")
    with pytest.raises(CheckpointError, match="belongs to run run, not to other"):
        history.choose(checkpoints, "other", 3)
    (second / "model").write_text("weights of 4")
    with pytest.raises(CheckpointError, match="is damaged"):
        history.choose(checkpoints, "run", 3)


def test_going_back_leaves_what_came_after_and_resumes_from_the_copy(checkpoints: Path) -> None:
    first, second, third = written(checkpoints, 1, 2, 3)
    evaluated(second, 0.5)
    made = history.go_back(checkpoints, second, lambda state: state.update(rollbacks=1))
    assert load_newest(checkpoints, "run")[0] == made
    assert history.numbers(made) == {"take": 2, "discard": True, "rollbacks": 1}
    assert history.numbers(second) == {"take": 2}, "a copy is not written through"
    assert (made / "model").read_text() == "weights of 2"
    assert [path for path, _ in resumable(checkpoints)] == [first, second, made]
    assert is_left(third) and history.choose(checkpoints, "run", 3)[0] == third
    assert history.best(valid(checkpoints)) == [made]
    (made / "model").unlink()
    assert load_newest(checkpoints, "run")[0] == second, "never one that was left"


def test_a_checkpoint_that_its_run_drops_while_it_is_copied_is_named(
    checkpoints: Path, tmp_path: Path
) -> None:
    written(checkpoints, 1, 2)
    chosen, manifest = history.choose(checkpoints, "run", 1)
    written(checkpoints, 3, 4, keep=2)
    with pytest.raises(CheckpointError, match=f"{chosen}: was dropped by its run"):
        history.copy(chosen, manifest.files, tmp_path / "new", "new", lambda state: state["take"])
    assert not (tmp_path / "new").exists()
    chosen, manifest = history.choose(checkpoints, "run", 4)
    with pytest.raises(CheckpointError, match=f"{chosen}: was dropped by its run"):
        history.copy(
            chosen, manifest.files, tmp_path / "new", "new", lambda _: (chosen / "model").unlink()
        )


def test_the_next_checkpoint_drops_what_was_left_unless_it_is_to_last(checkpoints: Path) -> None:
    paths = written(checkpoints, 1, 2, 3, 4)
    history.go_back(checkpoints, paths[0], lambda _: None)
    write = lambda made: (made / "model").write_text("new")  # noqa: E731
    save(checkpoints, 2, write, run_id="run", keep=2, lasting=[paths[2]])
    names = [path.name for path, _ in valid(checkpoints)]
    assert names == ["000003-step-3", "000005-step-1", "000006-step-2"]


# ---- a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has come to its end."""
    directory = tmp_path_factory.mktemp("history")
    (directory / "recipe.yaml").write_text(RECIPE.replace("SHAPE", json.dumps(SHAPE)))
    train(directory / "recipe.yaml", f"run.dir={directory}", "run.name=run")
    return directory / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return shutil.copytree(finished, tmp_path / "run")


def train(*arguments: object) -> None:
    assert main(["train", *map(str, arguments)]) == 0


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "stage_kind" in row]


def steps(run_dir: Path) -> list[int]:
    return sorted({manifest.step for _, manifest in valid(run_dir / "checkpoints")})


def taken(run_dir: Path) -> list[tuple[int, set[int]]]:
    """The groups of every take, in order."""
    journal = Journal(run_dir / "journal", 1 << 26, 0)
    try:
        found = [records.decode(head) for head, _ in journal.replay()]
    finally:
        journal.close()
    return [(one.take, set(one.groups)) for one in found if isinstance(one, records.GroupsTaken)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_every_nth_and_the_best_are_kept_besides_the_newest(finished: Path) -> None:
    found = valid(finished / "checkpoints")
    (best,) = history.best(found)[:1]
    successes = [note.success for path, _ in found if (note := history.evaluation_of(path))]
    assert set(steps(finished)) == {3, 6, 7, 8, history.numbers(best)["take"]}
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    evaluations = [row["eval/success"] for row in map(json.loads, lines) if "eval/success" in row]
    assert max(successes) == max(evaluations) and len(evaluations) >= 3
    chosen = history.evaluation_of(history.best(found)[0])
    assert chosen is not None and chosen.success == max(evaluations)


def test_a_checkpoint_is_evaluated_and_exported_by_its_step(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(finished), "--episodes", "2", "--step", "3"]) == 0
    assert f"{finished}, step 3: success" in capsys.readouterr().out
    assert main(["export", str(finished), str(tmp_path / "out"), "--step", "best"]) == 0
    best = history.numbers(history.best(valid(finished / "checkpoints"))[0])["take"]
    assert f"the policy after step {best} of" in capsys.readouterr().out
    assert "no checkpoint of step 4, only of 3, " in refused(
        capsys, "export", finished, tmp_path / "no", "--step", "4"
    )
    assert not (tmp_path / "no").exists()


def test_weights_that_are_no_numbers_are_not_exported(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(finished, tmp_path / finished.name)
    checkpoints = run_dir / "checkpoints"
    before = resumable(checkpoints)[-1][0]

    def fill(directory: Path) -> None:
        for file in [one for one in before.iterdir() if one.name in ("model.safetensors", STATE)]:
            shutil.copy(file, directory)
        tensors = shards.read(directory, "model")
        tensors[sorted(tensors)[-1]].view(-1)[0] = torch.nan
        shards.write(directory, "model", tensors)

    save(checkpoints, 9, fill, run_id=run_dir.name, keep=99)
    said = refused(capsys, "export", run_dir, tmp_path / "no")
    assert sorted(shards.read(before, "model"))[-1] in said and "--step" in said
    assert not (tmp_path / "no").exists()
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--step", "8"]) == 0


def test_a_run_that_was_moved_and_renamed_is_evaluated_and_exported(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(finished, tmp_path / "renamed")
    text = (moved / "config.yaml").read_text()
    text = text.replace(str(finished), str(tmp_path / "gone"))
    (moved / "config.yaml").write_text(text)
    (moved / "tasks_0").mkdir()
    changes = [f"tasks.path={tmp_path}/gone/tasks_0"]
    assert config_of(moved, changes).tasks.path == str(moved / "tasks_0")
    assert config_of(moved).policy.path == str(moved / "policy")
    assert main(["eval", str(moved), "--episodes", "2"]) == 0
    assert main(["export", str(moved), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file(), capsys.readouterr()


def test_as_many_episodes_are_evaluated_as_the_run_says(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = shutil.copytree(finished, tmp_path / finished.name)
    dump(load(finished / "config.yaml", ["eval.episodes=3"]), same / "config.yaml")
    assert main(["eval", str(same)]) == 0
    assert "over 3 validation episodes" in capsys.readouterr().out, "eval.episodes"
    assert "--episodes: must be at least 1, is 0" in refused(
        capsys, "eval", finished, "--episodes", 0
    )


def test_a_finished_run_says_how_it_can_go_on(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "train", "--resume", finished)
    assert "is finished; to continue, lengthen its last stage (stages.1.steps=…)" in said
    for change in ("stages.0.steps=9", "stages=[{kind: rl, steps: 9}]"):
        assert "stages[0]: cannot change, as it is over at step 8" in refused(
            capsys, "train", "--resume", finished, change
        )
    directory = finished.parent / "best"
    shutil.copytree(finished, directory / finished.name)
    copied = directory / finished.name / "checkpoints"
    awaiting = [one for one, _ in valid(copied) if history.numbers(one)["pending"]][-1]
    assert history.numbers(awaiting)["finished"], "it waits for its last evaluation alone"
    config = load(finished / "config.yaml")
    check_continues(finished, config, config, history.numbers(awaiting))  # which a resume awaits
    for one, _ in valid(copied):
        (one / history.EVALUATION).unlink(missing_ok=True)
    history.note(awaiting, CheckpointEvaluation(success=1.0, episodes=4, digest="last"))
    assert "is finished" in refused(
        capsys, "train", "--resume", copied.parent, "--step", "best", "--fork", "x"
    ), "a fork evaluates nothing that its run has asked for"
    assert "with --fork, which names the new run" in refused(
        capsys, "train", "--resume", finished, "--fork", "x", "run.name=y"
    )
    assert "policy.layers: cannot change in a fork: the run was started with 1" in refused(
        capsys, "train", "--resume", finished, "--fork", "x", "policy.layers=2"
    )
    for name in ("a/b", "..", ""):
        assert "--fork: must be a plain directory name" in refused(
            capsys, "train", "--resume", finished, "--fork", name, "stages.1.steps=9"
        )
    assert "--step: needs the run to start from; add --resume RUN_DIR" in refused(
        capsys, "train", "recipe.yaml", "--step", "1"
    )
    assert not (finished.parent / "x").exists()


def test_a_longer_stage_and_another_one_go_on_where_the_run_had_ended(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--resume", run_dir, "stages.1.steps=8")
    assert "learner.lr" not in capsys.readouterr().out, "it is constant"
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 11))
    train("--resume", run_dir, "stages+={kind: sft, steps: 2}")
    assert [(row["step"], row["stage"]) for row in rows(run_dir)][10:] == [(11, 2), (12, 2)]
    assert history.numbers(load_newest(run_dir / "checkpoints", run_dir.name)[0])["finished"]


def test_the_task_file_of_an_appended_stage_becomes_part_of_the_run(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more.jsonl").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    stage = "stages+={kind: sft, steps: 1, override: {tasks: {path: more.jsonl}}}"
    own = {"path": str(run_dir / "tasks_0")}
    config = resume(run_dir, [stage])
    assert config == load(run_dir / "config.yaml")
    assert config.stages[2].override["tasks"] == own
    (tmp_path / "more.jsonl").rename(tmp_path / "other.jsonl")
    config = resume(run_dir, [stage.replace("more", "other")])
    assert config.stages[2].override["tasks"] == own
    assert config.stages[3].override["tasks"] == {"path": str(run_dir / "tasks_1")}
    assert resume(run_dir, []) == config


def test_a_run_that_was_moved_goes_on_and_is_forked(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TASKS)
    rows_of(TasksConfig(path=str(tmp_path / "t.jsonl"))).save(run_dir / "tasks_0")
    text = (run_dir / "config.yaml").read_text()
    begun = dataclasses.replace(
        load(run_dir / "config.yaml"),
        policy=PolicyConfig(**SHAPE, path=str(run_dir / "policy")),
        tasks=TasksConfig(path=str(run_dir / "tasks_0")),
    )
    assert str(run_dir) not in text, "the copy still names the run that it was copied from"
    dump(begun, run_dir / "config.yaml")
    moved = tmp_path / "a #b" / "run"
    moved.parent.mkdir()
    run_dir.rename(moved)
    config, made = fork(moved, "forked", ["stages.1.steps=7"], None)
    assert made == moved.parent / "forked"
    assert config.tasks.path == str(made / "tasks_0")
    run_dir.symlink_to(moved)  # the paths in config.yaml exist, and lead here
    config = resume(moved, ["stages.1.steps=7"])
    assert (config.policy.path, config.tasks.path) == (
        str(moved / "policy"),
        str(moved / "tasks_0"),
    )
    assert load(moved / "config.yaml") == config, "its processes read it there"


def test_a_rate_that_a_longer_stage_raises_is_on_the_console(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that goes on and of its fork."""
    config = load(run_dir / "config.yaml")
    dump(
        dataclasses.replace(config, learner=dataclasses.replace(config.learner, decay="linear")),
        run_dir / "config.yaml",
    )
    for more in (["--fork", "longer"], []):
        train("--resume", run_dir, *more, "stages.1.steps=8")
        assert "stages.1.override.learner.decay=none" in capsys.readouterr().out


def test_a_fork_has_the_experience_and_counts_groups_of_its_own(run_dir: Path) -> None:
    store = Store(run_dir / "experience" / FILE)
    store.set_unguided(3, 0.5)
    assert store.take_group("0/0/0")
    store.commit()  # its service still runs
    _, made = fork(run_dir, "learned", ["stages.1.steps=9"], None)
    forked = Store(made / "experience" / FILE)
    assert forked.unguided() == (3, 0.5) and forked.take_group("0/0/0")
    forked.close()
    store.close()


def test_an_evaluation_after_a_change_is_not_compared_with_those_before(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    before = history.best(valid(checkpoints))
    assert len(before) > 1
    train("--resume", run_dir, "stages.1.steps=8", "eval.split=test")
    after = history.best(valid(checkpoints))
    assert after and not set(before) & set(after)


def test_success_is_comparable_for_the_same_held_out_tasks_alone(tmp_path: Path) -> None:
    def digest(*changes: str) -> str:
        return evaluation_digest(load(None, ["stages=[{steps: 1}]", *changes]))

    (tmp_path / "a.jsonl").write_text(TASKS)
    (tmp_path / "b.jsonl").write_text(TASKS)
    (tmp_path / "c.jsonl").write_text(TASKS.replace("2", "3"))
    files = [digest(f"tasks.path={tmp_path}/{name}.jsonl") for name in "abc"]
    assert files[0] == files[1] != files[2]
    assert digest() == digest("tasks.train=9", "learner.lr=1e-3", "eval.episodes=3")
    changes = ("env.params.size=5", "eval.split=test", "eval.temperature=1")
    assert len({digest(), files[0], *map(digest, changes)}) == 5
    assert digest("env.params={x: {1: 2}}") != digest("env.params={x: {2: 2}}")


def test_a_run_that_goes_back_takes_other_groups_from_there(run_dir: Path) -> None:
    before = taken(run_dir)
    assert [take for take, _ in before] == list(range(8))
    train("--resume", run_dir, "--step", "6", "learner.lr=1e-4")
    again = taken(run_dir)[len(before) :]
    assert [take for take, _ in again] == [6, 7]
    assert not set.union(*(groups for _, groups in before)) & set.union(*(g for _, g in again))
    assert [row["step"] for row in rows(run_dir)] == [*range(1, 9), 7, 8]
    assert rows(run_dir)[-1]["learner/lr"] == 1e-4 and rows(run_dir)[5]["learner/lr"] > 1e-4


def test_a_run_goes_back_beyond_what_its_journal_holds(run_dir: Path) -> None:
    train("--resume", run_dir, "--step", "3")
    assert [row["step"] for row in rows(run_dir)] == [*range(1, 9), *range(4, 9)]
    train("--resume", run_dir, "stages.1.steps=7")
    assert rows(run_dir)[-1]["step"] == 9
    train("--resume", run_dir, "--step", "best")
    best = history.numbers(load_newest(run_dir / "checkpoints", "run")[0])
    assert best["lineage"] == 4


def test_a_fork_leaves_the_run_it_came_from_as_it_was(finished: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    train("--resume", finished, "--step", "3", "--fork", "new", f"run.dir={tmp_path}", "run.seed=7")
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    assert [row["step"] for row in rows(tmp_path / "new")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "new" / "policy" / "config.json").is_file()


def test_a_fork_goes_back_to_the_checkpoint_that_it_began_with(
    finished: Path, tmp_path: Path
) -> None:
    notes = [history.evaluation_of(path) for path, _ in valid(finished / "checkpoints")]
    (digest,) = {note.digest for note in notes if note is not None}
    _, made = fork(finished, "new", [f"run.dir={tmp_path}", "buffer.archive=all"], 3)
    ((first, _),) = valid(made / "checkpoints")
    evaluated(first, 2.0, digest)  # better than any that the fork will train
    train("--resume", made)
    train("--resume", made, "--step", "best")
    assert [(row["lineage"], row["step"]) for row in rows(made)] == [
        *((1, step) for step in (1, 2, 3, 4, 5)),
        *((2, step) for step in (1, 2, 3, 4, 5)),
    ]
    assert main(["rerun", str(made)]) == 0


def test_a_fork_keeps_its_environment_steps_and_its_buffer_counts_explorations_anew() -> None:
    state = {"take": 9, "stage_take": 5, "env_steps": 100, "explored_turns": 7}
    _start_anew(state)
    assert (state["take"], state["stage_take"]) == (0, -4)
    assert (state["env_steps"], state["explored_turns"]) == (107, 0)


def test_a_fork_with_other_tasks_does_not_compare_itself_with_the_old_ones(
    finished: Path, tmp_path: Path
) -> None:
    for name, change, noted in (
        ("same", "learner.lr=1e-4", True),
        ("more", "tasks.train=3", True),
        ("other", "eval.split=test", False),
        ("longer", "rollout.max_turns=2", False),
    ):
        changes = [f"run.dir={tmp_path}", change, "stages.1.steps=9"]
        _, made = fork(finished, name, changes, "best")
        (checkpoint,) = [path for path, _ in valid(made / "checkpoints")]
        assert (history.evaluation_of(checkpoint) is not None) == noted


def damage(run_dir: Path, intact: int = -1) -> None:
    """Change a byte of the weights in every checkpoint but those of one step."""
    for path, manifest in valid(run_dir / "checkpoints"):
        if manifest.step != intact:
            content = bytearray((path / "model.safetensors").read_bytes())
            content[-1] ^= 1
            (path / "model.safetensors").unlink()  # copies are links to it
            (path / "model.safetensors").write_bytes(content)


def advised(said: str, name: str) -> list[str]:
    """The arguments of the command that an error names, for a run of this name."""
    command = shlex.split(said[said.rindex("evolver-async train") :])
    return [name if one == "NAME" else one for one in command[1:]]


def test_the_advice_without_a_valid_checkpoint_works(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a run, and that of its fork, which began with a checkpoint of the run."""
    before = load(run_dir / "config.yaml")
    own = dataclasses.replace(before.policy, path=str(run_dir / "policy"))
    dump(dataclasses.replace(before, policy=own), run_dir / "config.yaml")
    _, forked = fork(run_dir, "forked", [], 6)
    for one in (run_dir, forked):
        damage(one)
    command = advised(refused(capsys, "train", "--resume", run_dir), "anew")
    assert main([*command, "stages.0.steps=1", "stages.1.steps=1"]) == 0
    anew = run_dir.parent / "anew"
    assert [row["step"] for row in rows(anew)] == [1, 2]
    contents = [
        {path.name: path.read_bytes() for path in (one / "policy").iterdir()}
        for one in (run_dir, anew)
    ]
    assert contents[0] == contents[1]
    command = advised(refused(capsys, "train", "--resume", forked), "again")
    assert str(run_dir) in command and command[command.index("--step") + 1] == "6"
    assert "--step 0" in refused(capsys, "train", "--resume", run_dir, "--fork", "without-step")


def test_a_damaged_run_goes_on_from_a_checkpoint_that_it_had_left(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    history.go_back(checkpoints, history.choose(checkpoints, "run", 6)[0], lambda _: None)
    left = [one.step for path, one in valid(checkpoints) if is_left(path)][-1]
    damage(run_dir, left)
    with pytest.raises(CheckpointError, match="SHA-256") as caught:
        choose(run_dir, None)
    command = advised(str(caught.value), "")
    assert command[-2:] == ["--step", str(left)] and is_left(choose(run_dir, left)[0])
