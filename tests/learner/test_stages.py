"""Whole serial runs: every kind of stage, tasks from files and mixtures, dynamic sampling."""

import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from serial_runs import Finished, trainer

from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.state import records
from evolver_async.checkpoint.checkpoints import load_newest
from evolver_async.config import SafetyConfig
from evolver_async.config.load import dump, load
from evolver_async.errors import TrainingError
from evolver_async.launch.serial import run as launch_serial
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.metrics.tail import Tail
from learner.tools.export import export_reward_model

pytestmark = pytest.mark.process

LAKE = """
env: {name: frozen_lake, params: {size: 3, grid: first}}
policy: {max_length: 320, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 4, max_turns: 4, max_tokens: 8}
actors: {count: 1, groups: 4}
tasks: {train: 20}
learner: {groups_per_step: 8, minibatches: 1, lr: 5.0e-3, decay: none}
stages: [{kind: world_model, steps: 12}, {kind: sft, steps: 6}, {kind: rl, steps: 2}]
eval: {every: 0, episodes: 8, final_episodes: 8}
checkpoint: {every: 100}
launch: {kind: serial}
"""
SAFETY = SafetyConfig()
BANDIT = """
env: {name: bandit, params: {high_probability: 1.0}}
policy: {max_length: 64, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 8, max_turns: 1, max_tokens: 4}
actors: {count: 1, groups: 4}
advantage: {std: batch}
learner: {groups_per_step: 4, minibatches: 1, lr: 5.0e-3, decay: none}
stages:
  - kind: sft
    steps: 25
    expert_fraction: 0.0
    override: {rollout: {group_size: 1}, learner: {groups_per_step: 16, lr: 1.0e-2}}
  - kind: rl
    steps: 6
eval: {every: 0, episodes: 32, final_episodes: 64}
checkpoint: {every: 100}
launch: {kind: serial}
"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("lake"), LAKE)


@pytest.fixture(scope="module")
def bandit(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("bandit"), BANDIT)


def of_stage(finished: Finished, kind: str, name: str) -> list[float]:
    return [row[name] for row in finished.rows if row.get("stage_kind") == kind and name in row]


def arrivals(finished: Finished) -> list[records.Granted]:
    """The groups that were granted, in order."""
    journal = Journal(finished.run_dir / "journal", 1 << 26, 0)
    try:
        found = [records.decode(head) for head, _ in journal.replay()]
    finally:
        journal.close()
    return [record for record in found if isinstance(record, records.Granted)]


def test_world_modelling_then_imitation_then_reinforcement(lake: Callable[..., Finished]) -> None:
    run = lake("model", "rollout.max_turns=6")  # the longest way among its tasks
    losses = of_stage(run, "world_model", "loss/policy")
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    assert set(of_stage(run, "world_model", "train/success")) == {1.0}, "the expert's own way"
    kinds = [granted.kind for granted in arrivals(run) if granted.pinned is None]
    assert sorted(set(kinds), key=kinds.index) == ["branch", "demo", "rollout"]
    versions = [row["version"] for row in run.rows if "version" in row]
    assert versions[10:13] == [0, 1, 1] and versions[16:19] == [1, 2, 3]
    assert run.rl("ledger/received")[-1] >= 2 * 8 * 4


def test_reflections_are_learned_like_demonstrations(lake: Callable[..., Finished]) -> None:
    run = lake(
        "reflect",
        "rollout.think=true",
        "rollout.max_tokens=100",
        "env.params.grid=never",
        "policy.max_length=512",
        "rollout.group_size=2",
        "stages=[{kind: reflect, alternatives: 2, steps: 8}, {kind: rl, steps: 1}]",
        "learner.lr=1e-2",
    )
    losses = of_stage(run, "reflect", "loss/policy")
    assert losses[-1] < 0.8 * losses[0]
    kinds = [granted.kind for granted in arrivals(run) if granted.pinned is None]
    assert sorted(set(kinds), key=kinds.index) == ["branch", "rollout"]


def test_contexts_grow_from_stage_to_stage(lake: Callable[..., Finished]) -> None:
    """Where a context is full, its episode ends: the longer one has room for more turns."""
    run = lake(
        "lengths",
        "env.params.grid=never",
        "rollout.max_turns=9",
        "rollout.max_tokens=40",
        "stages=[{steps: 1, override: {policy: {max_length: 160}}}, {steps: 1}]",
    )
    first, second = run.rl("train/turns_mean")
    assert first < second


def test_preferences_are_learned_from_pairs_and_published_once(
    bandit: Callable[..., Finished],
) -> None:
    run = bandit("dpo", "stages.1.kind=dpo", "stages.1.steps=8")
    assert of_stage(run, "dpo", "loss/policy")[0] == pytest.approx(0.6931, abs=0.01)
    versions = of_stage(run, "dpo", "version")
    assert versions == 7 * [1.0] + [2.0]
    assert run.rows[-1]["eval/success"] > 0.9


CHAIN = """[
  {kind: sft, steps: 25, expert_fraction: 0.0, override: {rollout: {group_size: 1},
    learner: {groups_per_step: 16, lr: 1.0e-2}}},
  {kind: reward_model, steps: 12},
  {kind: rl, steps: 8, refresh_reference: true, override: {
    reward: {terms: [reward_model, {name: env, weight: 0}]}, advantage: {kind: gae},
    loss: {kl_coef: 0.05}}}]"""


def test_the_classic_chain_learns_by_a_reward_model_and_a_kl_to_the_reference(
    bandit: Callable[..., Finished], tmp_path: Path
) -> None:
    run = bandit("chain", f"stages={CHAIN}", "learner.epochs=2")
    accuracy = of_stage(run, "reward_model", "reward_model/accuracy")
    assert len(accuracy) == 12 and accuracy[-1] == 1.0
    assert run.rl("train/reward/reward_model")[0] == pytest.approx(run.rl("train/reward_mean")[0])
    assert set(run.rl("learner/updates")) == {2.0}
    assert run.rl("loss/kl")[0] < 1e-3 < run.rl("loss/kl")[-1]
    assert run.rl("train/success")[-1] > run.rl("train/success")[0]
    export_reward_model(run.run_dir, tmp_path / "out")
    assert {one.name for one in (tmp_path / "out").iterdir()} >= {"config.json", "tokenizer.json"}


def test_a_run_that_loses_its_format_within_steps_is_saved_by_a_rollback(
    bandit: Callable[..., Finished],
) -> None:
    run = bandit(
        "lost",
        "stages.1.steps=16",
        # an entropy bonus that outweighs all rewards makes turns unreadable, whatever is sampled
        "stages.1.override={learner: {lr: 0.3, warmup_steps: 0}, loss: {entropy_coef: 10.0}}",
        "safety={action: rollback, rollback_lr: 0.001}",
        "checkpoint.every=4",
    )
    rollbacks, errors = run.rl("safety/rollbacks"), run.rl("train/format_errors")
    lost = rollbacks.count(0.0)
    assert lost < SAFETY.warmup + SAFETY.patience + 2, "sooner than the other alarms can fire"
    assert run.rl("alarm/format_errors")[lost - 1] == 1.0
    assert errors[0] < 0.1 and min(errors[lost - SAFETY.format_patience : lost]) > 0.5
    assert errors[-1] < 0.1


def test_a_mixture_reports_every_environment(bandit: Callable[..., Finished]) -> None:
    parts = "[{env: bandit, weight: 3}, {env: frozen_lake, params: {size: 3, grid: never}}]"
    run = bandit(
        "mixture",
        f"tasks.mixture={parts}",
        "policy.max_length=128",
        "stages.0.steps=5",
        "stages.1.steps=4",
    )
    envs = [granted.task.env for granted in arrivals(run) if granted.pinned is None]
    assert envs.count("bandit") / len(envs) == pytest.approx(0.75, abs=0.05)
    for name in ("bandit", "frozen_lake"):
        values = of_stage(run, "sft", f"train/success/{name}")
        assert len(values) == 5 and all(0 <= value <= 1 for value in values)
    held_out = [granted for granted in arrivals(run) if granted.pinned is not None]
    assert {one.task.env for one in held_out} == {"bandit", "frozen_lake"}
    splits = {(one.task.split, one.episode is None) for one in held_out}
    assert splits == {("validation", True), ("test", False)}, "test at the end, and decides nothing"


def test_a_file_of_tasks_is_trained_and_evaluated_by_its_splits(
    bandit: Callable[..., Finished], tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"seed": n, "split": "test" if n < 4 else "train", "id": f"n{n}", "query": "pull"}
        for n in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    run = bandit("file", f"tasks.path={path}", "stages.0.steps=3", "stages.1.steps=2")
    granted = arrivals(run)
    trained = {one.task.task_id for one in granted if one.pinned is None}
    assert trained == {f"bandit/train/n{n}" for n in range(4, 12)}
    evaluated = {one.task.task_id for one in granted if one.pinned is not None}
    assert {"/".join(name.split("/")[:3]) for name in evaluated} == {
        f"bandit/test/n{n}" for n in range(4)
    }


def test_dynamic_sampling_trains_full_batches_with_spread_alone(
    bandit: Callable[..., Finished],
) -> None:
    run = bandit("dynamic", "selection.kind=dynamic", "stages.1.steps=5")
    assert run.rl("train/zero_spread") == 5 * [0.0]
    assert statistics.mean(run.rl("train/success")[:2]) < 0.9


def test_dynamic_sampling_of_what_is_mastered_ends_the_run_with_the_reason(
    bandit: Callable[..., Finished],
) -> None:
    with pytest.raises(TrainingError, match=r"take 26: selection\.max_refills: \d+ groups since"):
        bandit(
            "mastered",
            "selection={kind: dynamic, max_refills: 2}",
            "stages.0.expert_fraction=1.0",
            "stages.0.steps=26",
            "rollout.temperature=0.05",
        )


def written(directory: Path, *, validated: bool = False) -> list[str]:
    """Files of texts, conversations and preferences, as stages that learn from them, and are
    measured on others."""
    words = ["up", "down", "left", "right"]
    texts = [{"text": f"{a} {b}"} for a in words for b in words]
    talks = [{"prompt": f"{a}?", "completion": b} for a, b in pairwise(words)]
    talks.append({"prompt": "down " * 400, "completion": "up"})  # beyond policy.max_length
    pairs = [{"prompt": f"{a}?", "chosen": a, "rejected": "no"} for a in words]
    stages = []
    for kind, rows in (("text", texts), ("sft", talks), ("dpo", pairs)):
        path, held_out = directory / f"{kind}.jsonl", directory / f"{kind}_held_out.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        held_out.write_text("\n".join(map(json.dumps, rows[1:])))
        data = f"{{path: {path}, validation: {held_out}}}" if validated else f"{{path: {path}}}"
        stages.append(f"{{kind: {kind}, steps: 8, data: {data}}}")
    return [f"stages=[{', '.join(stages)}]", "learner.groups_per_step=4", "eval.episodes=0"]


def test_rows_of_files_are_learnt_without_an_episode(
    bandit: Callable[..., Finished], tmp_path: Path
) -> None:
    run = bandit("rows", *written(tmp_path))
    for kind in ("text", "sft", "dpo"):
        losses = of_stage(run, kind, "loss/policy")
        assert len(losses) == 8 and losses[-1] < 0.8 * losses[0]
    assert of_stage(run, "dpo", "dpo/accuracy")[-1] == 1
    granted = arrivals(run)
    assert {record.kind for record in granted} == {"demo"}
    assert {len(record.members) for record in granted} == {1, 2}
    assert run.rows[-1]["ledger/filtered"] == 8, "the row that is too long, in every pass"
    assert run.rows[-1]["failures/data"] >= 8
    assert not [row for row in run.rows if "eval/success" in row or "validation/rows" in row]


def validations(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """What rows that never train said, by step."""
    return {
        row["step"]: {name: row[name] for name in row if name.startswith("validation/")}
        for row in current_rows(rows)
        if "validation/rows" in row
    }


def test_a_run_that_stopped_within_its_rows_goes_on_with_the_next_ones(
    bandit: Callable[..., Finished], tmp_path: Path
) -> None:
    bare = bandit("bare", *written(tmp_path))
    arguments = [*written(tmp_path, validated=True), "eval.every=2", "eval.at_start=always"]
    whole = bandit("whole", *arguments)
    assert whole.tensors.keys() == bare.tensors.keys(), "rows that are measured teach nothing"
    assert all(torch.equal(one, bare.tensors[name]) for name, one in whole.tensors.items())
    found = validations(whole.rows)
    assert [*found] == [*range(0, 25, 2)]
    for first, last, metric in ((0, 8, "perplexity"), (10, 16, "perplexity"), (18, 24, "margin")):
        better = found[last]["validation/loss"] < found[first]["validation/loss"]
        assert better and f"validation/{metric}" in found[last]
    assert found[24]["validation/accuracy"] == 1 and found[24]["validation/rows"] == 3
    trained = {one.task.task_id for one in arrivals(whole)}
    assert trained and not [name for name in trained if "held_out" in name]
    part = bandit("part", *arguments, "stages.2.steps=3")
    config = load(part.run_dir / "config.yaml", ["stages.2.steps=8"])
    dump(config, part.run_dir / "config.yaml")
    assert launch_serial(config, part.run_dir) == 0
    newest, _ = load_newest(part.run_dir / "checkpoints", "part")
    for name, tensor in load_file(newest / "model.safetensors").items():
        assert torch.equal(tensor, whole.tensors[f"model/{name}"]), name
    again = validations(Tail(part.run_dir / "metrics.jsonl").rows())
    assert {step: again[step] for step in found} == found
