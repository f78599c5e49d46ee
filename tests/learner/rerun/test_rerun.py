"""A rerun repeats a run bit by bit, names what differs, and trains with other settings."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serial_runs import Finished, trainer

from evolver_async.checkpoint.checkpoints import CheckpointError, resumable
from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.launch.forking import fork
from evolver_async.launch.run_directory import locked
from evolver_async.launch.serial import run as run_serially
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.study.rerun import plan
from learner.diagnostics.step_rows import StepRows
from learner.rerun.main import RerunOutcome, rerun
from learner.state import LearnerState

pytestmark = pytest.mark.process

RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2, weight_lag: 1}
buffer: {max_staleness: 3, archive: all}
advantage: {std: batch}
learner: {groups_per_step: 4, minibatches: 2, lr: 5.0e-3, decay: none, token_budget: 512}
stages:
  - kind: sft
    steps: 12
    expert_fraction: 0.0
    override: {rollout: {group_size: 1}, learner: {groups_per_step: 16, lr: 1.0e-2}}
  - {kind: rl, steps: 10}
eval: {every: 5, episodes: 4, final_episodes: 4}
checkpoint: {every: 6, keep: 9}
launch: {kind: serial}
"""
STAGES = """
env: {name: frozen_lake, params: {size: 3, grid: first}}
policy: {max_length: 320, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 4, max_turns: 4, max_tokens: 8}
actors: {count: 2, groups: 4}
tasks: {train: 20}
buffer: {archive: all}
learner: {groups_per_step: 8, minibatches: 2, lr: 5.0e-3, decay: none}
stages:
  - {kind: world_model, steps: 2}
  - {kind: sft, steps: 3, override: {rollout: {group_size: 1}}}
  - {kind: dpo, steps: 2, reset_optimizer: true}
  - {kind: rl, steps: 2, refresh_reference: true, override: {loss: {kl_coef: 0.1}}}
eval: {every: 0, episodes: 4, final_episodes: 4}
checkpoint: {every: 3, keep: 9}
launch: {kind: serial}
"""
GUIDED = """
env: {name: frozen_lake, params: {size: 3, slippery: false, grid: first}}
policy: {max_length: 320, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
tasks: {train: 8}
rollout: {group_size: 4, max_turns: 5, max_tokens: 4}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2, archive: all}
experience: {kind: contrast, similarity: 0.99}
judge: {kind: rule}
advantage: {kind: adca}
learner: {groups_per_step: 4, minibatches: 2, lr: 3.0e-3, decay: none, token_budget: 2048}
stages:
  - kind: sft
    steps: 20
    expert_fraction: 0.5
    override:
      experience: {internalise: none}
      rollout: {group_size: 2, guided_fraction: 0.5}
      learner: {groups_per_step: 16, minibatches: 1, lr: 1.0e-2}
  - {kind: rl, steps: 4}
eval: {every: 0, episodes: 4, final_episodes: 4}
launch: {kind: serial}
"""


class Died(Exception):
    """Stands for SIGKILL."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("bandit"), RECIPE)


@pytest.fixture(scope="module")
def base(train: Callable[..., Finished]) -> Finished:
    finished = train("base")
    assert any(finished.rl("loss/grad_norm")), "it has learned something"
    assert max(finished.rl("staleness/max")) >= 1
    return finished


@pytest.fixture
def copied(base: Finished, tmp_path: Path) -> Path:
    """A copy of the run, for a test to damage."""
    return Path(shutil.copytree(base.run_dir, tmp_path / "copied"))


def again(
    run_dir: Path, *changes: str, steps: tuple[int, int] | None = None, out: Path | None = None
) -> RerunOutcome:
    return rerun(plan(load_run(run_dir), changes, steps, out), lambda step: None)


def said(run_dir: Path, **options: Any) -> str:
    return "\n".join(again(run_dir, **options).lines)


def files_of(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.name != "lock"}


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("correction.anchor=interpolate",),
        ("correction.kind=icepop", "loss.kl_coef=0.1"),
        ("correction.kind=vcpo", "advantage.kind=opob", "loss.boost=0"),
        ("correction.kind=none", "advantage.kind=vtrace"),
        (
            "advantage.kind=reinforce",
            "selection.kind=top_k",
            "selection.drop_zero=false",
            "selection.k=2",
        ),
        ("policy.lora.rank=2", "buffer.reuse=2", "actors.weight_lag=0"),
    ],
    ids=lambda changes: " ".join(changes) or "recompute",
)
def test_a_serial_run_is_repeated_bit_by_bit(
    changes: tuple[str, ...], train: Callable[..., Finished]
) -> None:
    name = "_".join(change.partition("=")[2] for change in changes) or "defaults"
    short = ["stages.0.steps=8", "stages.1.steps=6", "checkpoint.keep=2"]  # the first one is gone,
    finished = train(name, *short, *changes)  # and the rerun begins with the policy
    outcome = again(finished.run_dir)
    kept = len(resumable(finished.run_dir / "checkpoints"))
    assert outcome.lines[0].startswith(f"bitwise equal: 14 steps, {kept} checkpoints"), outcome
    assert outcome.code == 0 and kept >= 2


@pytest.mark.parametrize(("recipe", "steps"), [(STAGES, 9), (GUIDED, 24)], ids=["stages", "guided"])
def test_every_kind_of_stage_and_stripped_experience_are_repeated(
    recipe: str, steps: int, tmp_path: Path
) -> None:
    finished = trainer(tmp_path, recipe)("run")
    outcome = again(finished.run_dir)
    assert outcome.code == 0, outcome
    assert outcome.lines[0].startswith(f"bitwise equal: {steps} steps")


def test_a_run_whose_learner_died_is_repeated_along_the_line_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = [13, 20]
    write = StepRows.write

    def die(self: StepRows, state: LearnerState, take: int, *rest: Any) -> None:
        write(self, state, take, *rest)
        if deaths and take == deaths[0]:
            deaths.pop(0)
            raise Died

    monkeypatch.setattr(StepRows, "write", die)
    with pytest.raises(Died):
        trainer(tmp_path, RECIPE)("run")
    results = load_run(tmp_path / "run")
    with pytest.raises(Died):
        run_serially(results.config, results.path)
    assert run_serially(results.config, results.path) == 0
    assert max(row["lineage"] for row in load_run(results.path).rows) == 3
    assert said(results.path).startswith("bitwise equal: 22 steps")


def test_a_rerun_only_reads_the_run_and_needs_no_lock(base: Finished) -> None:
    before = files_of(base.run_dir)
    with locked(base.run_dir):  # as a launcher holds it
        assert "bitwise equal" in said(base.run_dir)
    assert files_of(base.run_dir) == before


def test_the_first_wanted_step_begins_at_the_checkpoint_before_it(base: Finished) -> None:
    steps = [manifest.step for _, manifest in resumable(base.run_dir / "checkpoints")]
    begin = max(step for step in steps if step < 20)
    assert begin > 0
    (line,) = again(base.run_dir, steps=(20, 21)).lines
    assert line.startswith(f"bitwise equal: {21 - begin} steps, ")


def test_a_changed_metric_is_named(copied: Path) -> None:
    path = copied / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(row for row in rows if row["step"] == 15 and "stage_kind" in row)
    row["loss/policy"] += 1e-12
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    outcome = again(copied)
    assert outcome.code == 1
    title, metric, tensors = outcome.lines
    assert "different from the run in steps 1 to 22" in title
    assert metric.startswith(f"step 15: loss/policy is {row['loss/policy']!r} in metrics.jsonl")
    assert "checkpoints are equal" in tensors


def test_a_removed_row_is_named(copied: Path) -> None:
    path = copied / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step": 15, ' not in line))
    assert "step 15: metrics.jsonl has no row of it" in said(copied)


def test_a_changed_tensor_is_named(copied: Path) -> None:
    newest, _ = resumable(copied / "checkpoints")[-1]
    tensors = load_file(newest / "model.safetensors")
    name = sorted(tensors)[1]
    bits = tensors[name].view(torch.int32)
    bits.view(-1)[3] ^= 1  # the last bit of one number
    save_file(tensors, newest / "model.safetensors")
    outcome = again(copied)
    assert outcome.code == 1
    _, difference = outcome.lines
    assert difference.startswith(f"step 22: {newest.name}: model/{name} differs in 1 of ")


def test_other_settings_train_other_weights_on_the_same_data(
    base: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "other"
    assert main(["rerun", str(base.run_dir), "learner.lr=1e-4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "effective sample size" in printed and "of the" in printed
    head, *table = printed[printed.index("mean over the steps") :].splitlines()
    assert head.split()[-3:] == ["run", "rerun", "change"] and "last step" in printed
    assert all(len(line) <= 80 for line in table if not line.startswith("/"))
    results = load_run(out)
    theirs, ours = load_run(base.run_dir).steps, results.steps
    assert list(ours["step"]) == list(range(1, 23)) == list(theirs["step"])
    assert list(ours["train/reward_mean"]) == list(theirs["train/reward_mean"]), "the same data"
    assert list(ours["loss/policy"][:12]) != list(theirs["loss/policy"][12:])
    assert results.config.learner.lr == 1e-4
    assert results.config.run.name == "other" and results.end.state == "finished"
    assert [one.step for one in results.checkpoints] == [22]
    origin = json.loads((out / "origin.json").read_text())
    assert origin["kind"] == "rerun" and origin["run"] == str(base.run_dir)
    assert origin["changes"] == {"learner.lr": 1e-4}
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["watch", "--once", str(out)]) == 0
    assert main(["export", str(out), str(tmp_path / "exported")]) == 0
    assert main(["status", str(out)]) == 2
    assert "was trained by rerun" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["none", "ppo", "icepop", "m2po"])
def test_another_correction_changes_the_losses_from_its_first_step(
    kind: str, base: Finished, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    again(base.run_dir, f"correction.kind={kind}", "loss.boost=0", steps=(16, 22), out=out)
    theirs = [row for row in load_run(base.run_dir).steps.rows if row["step"] >= 16]
    ours = load_run(out).steps.rows
    assert [row["step"] for row in ours] == list(range(16, 23))
    assert ours[0]["train/reward_mean"] == theirs[0]["train/reward_mean"]
    assert [row["loss/entropy"] for row in ours] != [row["loss/entropy"] for row in theirs]


def test_cut_episodes_can_be_masked_in_a_rerun(base: Finished, tmp_path: Path) -> None:
    out = tmp_path / "out"
    again(base.run_dir, "loss.mask_truncated=true", steps=(16, 22), out=out)
    rows = load_run(out).steps.rows
    shares = [row["train/masked_truncated"] for row in rows]
    assert len(shares) == 7 and 0 < max(shares) <= 1, "some were cut"
    assert all(share <= row["train/truncated"] for share, row in zip(shares, rows, strict=True))
    last = load_file(load_run(out).checkpoints[-1].path / "model.safetensors")
    assert any(not torch.equal(one, base.tensors[f"model/{name}"]) for name, one in last.items())


def test_the_steps_before_the_first_changed_one_are_the_runs_own(
    base: Finished, tmp_path: Path
) -> None:
    """A setting that only warns leaves every number as it was, whichever step it begins with."""
    for first in (1, 15):
        out = tmp_path / f"from_{first}"
        again(base.run_dir, "correction.max_masked=0.7", steps=(first, 22), out=out)
        theirs = {row["step"]: row for row in load_run(base.run_dir).steps.rows}
        for row in load_run(out).steps.rows:
            for name in ("loss/policy", "loss/grad_norm", "offpolicy/ess", "version"):
                assert row.get(name) == theirs[row["step"]].get(name), (first, row["step"], name)
        newest = load_run(out).checkpoints[-1].path
        for name, tensor in load_file(newest / "model.safetensors").items():
            assert torch.equal(tensor, base.tensors[f"model/{name}"]), name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["buffer.reuse=2"], "buffer.reuse: cannot change in a rerun, which trains on the data"),
        (["env.name=frozen_lake"], "env."),
        (["rollout.temperature=0.5"], "rollout.temperature: cannot change"),
        (["judge.kind=rule"], "judge.kind: cannot change"),
        (["run.seed=3"], "run.seed: cannot change"),
        (["actors.count=3"], "actors.count: cannot change"),
        (["policy.dtype=bfloat16"], "policy.dtype: cannot change"),
        (["learner.groups_per_step=8"], "learner.groups_per_step: cannot change"),
        (["stages.1.override.rollout.group_size=8"], "stages.1.override.rollout.group_size: "),
        (["stages.1.steps=30"], "stages.1.steps: cannot change"),
        (["selection.kind=dynamic"], "selection.kind: cannot become dynamic"),
        (["correction.kind=nine"], "correction.kind: must be one of"),
        (["loss.clip=0.1"], "loss.clip: unknown key"),
        (["learner.lr=5e-3"], "learner.lr=5e-3: changes nothing in steps 1 to 22"),
        (
            ["stages.0.override.learner.grad_clip=0.5", "--steps", "14..20"],
            "stages.0.override.learner.grad_clip=0.5: changes nothing in steps 14 to 20",
        ),
        (["--out", "somewhere"], "--out: needs changes"),
        (["--steps", "3"], "--steps: must be A..B"),
        (["--steps", "0..3"], "--steps: must be A..B"),
        (["--steps", "3..40"], "--steps: 40: the run's last complete step is 22"),
    ],
)
def test_impossible_reruns_are_refused_by_key(
    arguments: list[str],
    sentence: str,
    base: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["rerun", str(base.run_dir), *arguments]) == 2
    assert f"evolver-async: {sentence}" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_an_existing_directory_is_not_written_over(base: Finished, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists; choose another"):
        again(base.run_dir, "learner.lr=1e-4", out=tmp_path)


def test_a_run_of_several_ranks_is_refused(copied: Path) -> None:
    path = copied / "config.yaml"
    text = path.read_text().replace("ranks: 1", "ranks: 2").replace("kind: serial", "kind: local")
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"learner\.ranks: the run had 2"):
        again(copied)


def test_a_damaged_checkpoint_is_not_begun_from(copied: Path) -> None:
    path = next(path for path, found in resumable(copied / "checkpoints") if found.step == 18)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        again(copied, steps=(20, 21))


def test_a_fork_without_its_first_checkpoint_begins_at_a_kept_one(
    base: Finished, tmp_path: Path
) -> None:
    shutil.copytree(base.run_dir, tmp_path / "base")
    settings = ["stages.1.steps=20", "checkpoint.keep=2", "checkpoint.keep_every=6"]
    settings += [f"run.dir={tmp_path}", f"weights.dir={tmp_path}"]
    config, run_dir = fork(tmp_path / "base", "forked", settings, None)
    assert run_serially(config, run_dir) == 0
    with pytest.raises(ConfigError, match=r"came from .*base; --steps 7\.\.N begins at"):
        again(run_dir)
    (line,) = again(run_dir, steps=(9, 10)).lines
    assert line.startswith("bitwise equal: ")
