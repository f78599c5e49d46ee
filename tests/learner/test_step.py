"""One rl step as a whole: effects of selection and shaping on what is trained."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from buffer_world import trajectory
from updates import FORKS, config, same, tiny, updater

from evolver_async.config import AdvantageConfig, Config, SelectionConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.schema import Group, Sampling, Task, Ticket, TurnFlag, WeightId
from learner.diagnostics.measure import StepResult
from learner.state import LearnerState
from learner.step import Updater

__all__ = ["tiny"]  # the fixture: the smallest policy there is

STAGES = [StageConfig(kind="rl", steps=3)]


def group_of(group_id: int, rewards: list[float], lengths: list[int] | None = None) -> Group:
    """A group with these rewards; `lengths`: the tokens of its members, else 4."""
    ticket = Ticket(
        group_id=group_id,
        task=Task(task_id="t", env="t", split="train", map_seed=0),
        kind="rollout",
        stage=0,
        members=list(range(len(rewards))),
        guided=[],
        dynamics_seed=0,
        attempt=0,
        weights=WeightId(lineage=1, step=0),
        lease_s=1.0,
        sampling=Sampling(temperature=1.0, max_tokens=4),
    )
    members = [
        trajectory(ticket, member, length=length, reward=reward)
        for member, (reward, length) in enumerate(
            zip(rewards, lengths or [4] * len(rewards), strict=True)
        )
    ]
    return Group(
        group_id=group_id, task=ticket.task, kind="rollout", stage=0, use=0, trajectories=members
    )


def settings_of(tiny: Path, selection: SelectionConfig, limit: int = 0, cache: int = 0) -> Config:
    advantage = AdvantageConfig(kind="grpo", std="none", overlong_limit=limit, overlong_cache=cache)
    return replace(config(tiny, STAGES), selection=selection, advantage=advantage)


def step(settings: Config, run_dir: Path, groups: list[Group]) -> tuple[Updater, StepResult]:
    learner = updater(settings, run_dir)
    return learner, learner.step(
        "rl", stage_config(settings, 0), groups, LearnerState(lineage=1), FORKS, 3
    )


def test_only_resampled_members_train_and_their_group_counts_once(tiny, tmp_path):
    selection = SelectionConfig(kind="resample_on_correct", members=4)
    groups = [group_of(10, [1.0] * 3 + [0.0] * 5), group_of(11, [0.0] * 8)]
    groups[0].trajectories[0].turn_flags |= np.uint8(TurnFlag.FORMAT_ERROR)
    _, outcome = step(settings_of(tiny, selection), tmp_path, groups)
    assert outcome.trained == [10] and outcome.filtered == {"zero_spread": [11]}
    assert outcome.data is not None
    (kept,) = outcome.data.chosen.groups
    assert [one.member for one in kept.trajectories if one.reward] == [1, 2]
    assert len(kept.trajectories) == 4
    assert outcome.tokens == sum(one.action_tokens for one in kept.trajectories)
    assert sorted(outcome.data.credit.advantages.advantage_N.tolist()) == pytest.approx(
        sorted([0.5] * (outcome.tokens // 2) + [-0.5] * (outcome.tokens // 2))
    )  # relative to the mean of those that are kept
    assert outcome.metrics["selection/members_left_out"] == 4


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 0.5), ("sqrt", 0.5**0.5)])
def test_advantages_shrink_with_the_share_that_is_kept(tiny, tmp_path, scale, factor):
    groups = [group_of(10, [1.0, 0.0]), group_of(11, [1.0, 1.0])]
    selection = SelectionConfig(kind="top_p", scale=scale)
    _, outcome = step(settings_of(tiny, selection), tmp_path, groups)
    assert outcome.data is not None
    found = np.abs(outcome.data.credit.advantages.advantage_N)
    np.testing.assert_allclose(found, 0.5 * factor, rtol=1e-6)
    assert outcome.metrics["selection/kept_share"] == 0.5


def test_a_step_that_keeps_nothing_leaves_the_policy_as_it_is(tiny, tmp_path):
    settings = settings_of(tiny, SelectionConfig(kind="top_p"))
    learner, outcome = step(settings, tmp_path, [group_of(10, [1.0, 1.0])])
    assert outcome.updates == 0 and outcome.trained == []
    assert outcome.filtered == {"zero_spread": [10]}
    untouched = policy.load_model(str(tiny), dtype="float32", device="cpu")
    assert same(learner.model, untouched)


def test_the_longest_trajectory_of_equal_outcomes_is_the_worst(tiny, tmp_path):
    """Of 7 ACTION tokens on a ramp from 4 to 10 half of the reward goes; shorter ones keep it."""
    group = group_of(10, [1.0, 1.0, 1.0], [2, 4, 8])
    lengths = [one.action_tokens for one in group.trajectories]
    settings = settings_of(tiny, SelectionConfig(), limit=10, cache=6)
    _, outcome = step(settings, tmp_path, [group])
    bonus = np.clip((10 - 6 - np.array(lengths)) / 6, -1, 0)
    assert bonus.min() < 0 == bonus.max()
    assert outcome.data is not None
    expected_P = bonus - bonus.mean()
    np.testing.assert_allclose(
        outcome.data.credit.advantages.advantage_N,
        expected_P[outcome.data.batch.trajectory_N],
        rtol=1e-5,
    )
    assert outcome.metrics["overlong/mean"] == pytest.approx(bonus.mean())
    assert outcome.metrics["overlong/share"] == pytest.approx((bonus < 0).mean())
    assert outcome.metrics["train/reward_mean"] == 1.0  # what the environment gave
