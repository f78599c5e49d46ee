"""Rows of files in rl steps: trajectories of logs as off-policy data, conversations supervised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from updates import FORKS, config, groups, guided_groups, same, step, tiny, updater

from evolver_async.buffer.tasks.logged import row_of, trajectory_of
from evolver_async.config import AdvantageConfig, Config, CorrectionConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.schema import Group, Role, VersionRun, WeightId
from learner.state import LearnerState

__all__ = ["tiny"]

RL = [StageConfig(kind="rl", steps=3)]


def of_files(data: list[Group], policy: str, **facts: Any) -> list[Group]:
    """The same groups as rows of files: they have no versions."""
    found = []
    for group in data:
        members = []
        for one in group.trajectories:
            row = trajectory_of(json.loads(json.dumps(row_of(one))), {})
            changed = {"sequences": row.sequences, "policy": policy, "reward": row.reward, **facts}
            members.append(msgspec.structs.replace(one, **changed))
        task = msgspec.structs.replace(group.task, origin="recorded")
        found.append(msgspec.structs.replace(group, task=task, kind="demo", trajectories=members))
    return found


def plain(count: int) -> list[Group]:
    """Groups of four members with two turns each, none guided."""
    found = guided_groups(count)
    for group in found:
        for one in group.trajectories:
            (sequence,) = one.sequences
            roles = np.where(sequence.roles == Role.EXPERIENCE, Role.PROMPT, sequence.roles)
            runs = [VersionRun(weights=WeightId(lineage=1, step=0), tokens=4)]
            one.sequences = [
                msgspec.structs.replace(sequence, roles=roles.astype(np.uint8), versions=runs)
            ]
    return found


def settings_of(tiny: Path, kind: str, **others: Any) -> Config:
    made = config(tiny, RL, minibatches=2)
    correction = CorrectionConfig(kind=kind, **others)
    return replace(made, advantage=AdvantageConfig(), correction=correction)


@pytest.mark.parametrize(
    ("kind", "others"),
    [("decoupled", {}), ("ppo", {}), ("vcpo", {}), ("m2po", {}), ("gspo", {})],
)
def test_logged_trajectories_train_as_the_same_ones_sampled_by_old_versions(
    tiny: Path, tmp_path: Path, kind: str, others: dict[str, Any]
) -> None:
    settings, found = settings_of(tiny, kind, **others), []
    for data in (plain(3), of_files(plain(3), "logged")):
        made = updater(settings, tmp_path)
        found.append((made, step(made, data)))
    (left, played), (right, logged) = found
    for name, ours in left.model.state_dict().items():
        assert torch.allclose(ours, right.model.state_dict()[name], atol=1e-6, rtol=0), name
    assert not same(left.model, updater(settings, tmp_path).model)
    for name in ("loss/policy", "loss/grad_norm", "offpolicy/ess", "offpolicy/kl"):
        assert logged.metrics[name] == pytest.approx(played.metrics[name], abs=1e-6), name


def test_a_log_has_a_lag_of_its_own_and_tells_nothing_of_the_policy(
    tiny: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny, "decoupled")
    alone = step(updater(settings, tmp_path), of_files(plain(2), "logged")).metrics
    assert "lag_0/tokens" not in alone and "staleness/mean" not in alone
    assert alone["lag_recorded/tokens"] == alone["offpolicy/tokens"] == 32
    assert "train/success" not in alone and "safety/reward_spread" not in alone
    data = plain(4)
    both = step(updater(settings, tmp_path), [*data[:2], *of_files(data[2:], "logged")]).metrics
    assert both["lag_recorded/trajectories"] == 8 and both["staleness/max"] == 0
    assert both["lag_0/tokens"] + both["lag_recorded/tokens"] == both["offpolicy/tokens"]
    assert both["train/success"] == 0.5


def test_no_anchor_is_interpolated_between_a_log_and_the_policy(tiny: Path, tmp_path: Path) -> None:
    """Versions lie on a line, to which the log's policy does not belong."""
    tensors = []
    for anchor in ("interpolate", "recompute"):
        made = updater(settings_of(tiny, "decoupled", anchor=anchor), tmp_path)
        step(made, of_files(plain(3), "logged"))
        tensors.append(made.model.state_dict())
    for name, ours in tensors[0].items():
        assert torch.allclose(ours, tensors[1][name], atol=1e-6, rtol=0), name


@pytest.mark.parametrize(
    ("kind", "others"), [("decoupled", {"anchor": "interpolate"}), ("decoupled", {}), ("ppo", {})]
)
def test_the_age_of_a_log_ends_no_step(
    tiny: Path, tmp_path: Path, kind: str, others: dict[str, Any]
) -> None:
    """Only what a step has moved counts, whatever the correction reads."""
    settings = settings_of(tiny, kind, **others)
    settings.loss.target_kl = 0.05
    data = of_files(plain(4), "logged")
    for group in data:
        for one in group.trajectories:
            (sequence,) = one.sequences
            far = np.where(sequence.roles == Role.ACTION, sequence.logprobs - 2, 0)
            one.sequences = [msgspec.structs.replace(sequence, logprobs=far.astype(np.float32))]
    found = step(updater(settings, tmp_path), data).metrics
    assert found["offpolicy/kl"] > 1 and found["offpolicy/kl_moved"] < 0.05
    assert found["learner/updates"] == 2 and found["learner/taken_back"] == 0


def gradient(settings: Config, run_dir: Path, data: list[Group], kind: str) -> dict[str, Any]:
    """The gradient of a step, unclipped, by parameter; and its metrics."""
    made, found = updater(settings, run_dir), dict[str, torch.Tensor]()

    def note(*_: Any) -> None:
        found.update(
            {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
        )

    made.optimizer.register_step_pre_hook(note)
    state = LearnerState(lineage=1, take=7, stage_take=7)
    result = made.step(kind, stage_config(settings, 0), data, state, FORKS, 3)
    return {**found, "metrics": result.metrics}


@pytest.mark.parametrize("kind", ["decoupled", "vcpo", "m2po", "none"])
def test_conversations_have_the_supervised_gradient_times_the_share_of_their_tokens(
    tiny: Path, tmp_path: Path, kind: str
) -> None:
    """The played groups have equal rewards, so that no gradient is theirs."""
    made = config(tiny, RL)
    learner = replace(made.learner, grad_clip=1e9)
    made = replace(made, learner=learner, advantage=AdvantageConfig())
    made = replace(made, correction=CorrectionConfig(kind=kind))
    supervised = replace(made, stages=[StageConfig(kind="sft", steps=3)])
    played = plain(2)
    for group in played:
        for one in group.trajectories:
            one.reward = 0.5
    data = of_files(groups(5, length=6)[2:], "recorded", reward=1.0, success=True)
    alone = gradient(supervised, tmp_path, data, "sft")
    mixed = gradient(made, tmp_path, [*played, *data], "rl")
    share = 15 / (15 + 32)
    for name in alone.keys() - {"metrics"}:
        assert torch.allclose(mixed[name], share * alone[name], atol=1e-6, rtol=1e-4), name
    assert mixed["metrics"]["offpolicy/tokens"] == 32, "they have no ratio"
    assert mixed["metrics"]["loss/supervised"] == pytest.approx(
        share * alone["metrics"]["loss/policy"], abs=1e-6
    )
    only = gradient(made, tmp_path, data, "rl")
    for name in alone.keys() - {"metrics"}:
        assert torch.allclose(only[name], alone[name], atol=1e-6, rtol=1e-4), name


def test_a_row_that_was_left_out_trains_nothing_and_compares_with_nothing(
    tiny: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny, "decoupled")
    data = of_files(plain(3), "logged")
    few = [msgspec.structs.replace(group, trajectories=group.trajectories[:3]) for group in data]
    with_gaps = of_files(plain(3), "logged")
    for group in with_gaps:
        last, (sequence,) = group.trajectories[3], group.trajectories[3].sequences
        gone = np.zeros(len(sequence), np.uint8)
        group.trajectories[3] = msgspec.structs.replace(
            last,
            policy="recorded",
            sequences=[
                msgspec.structs.replace(
                    sequence, roles=gone, logprobs=np.zeros(len(sequence), np.float32)
                )
            ],
        )
    left, right = updater(settings, tmp_path), updater(settings, tmp_path)
    step(left, few)
    step(right, with_gaps)
    assert same(left.model, right.model)
