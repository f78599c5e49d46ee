"""Advantages of a batch by an estimator of one's own."""

from dataclasses import replace

import numpy as np
import pytest
from collated_groups import NEVER, collated, make_groups

from evolver_async.config import AdvantageConfig
from evolver_async.errors import TrainingError
from learner.advantage.assign import assign
from learner.advantage.group_relative import EstimatorInput
from learner.advantage.shaped_rewards import Rewards
from learner.data.batch import LogProbs


def unfit(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> object:
    """Estimator that returns what `settings.params` say is wrong, in place of the right value."""
    turn_U, member_P = np.ones(len(rewards.trajectory_U)), np.ones(len(rewards.reward_P))
    return {
        "members": (member_P, given.baseline),
        "number": (1.0, given.baseline),
        "alone": turn_U,
        "no baseline": (turn_U, None),
        "texts": (["good"] * len(turn_U), given.baseline),
        "nothing": None,
        "right": (turn_U.tolist(), np.float32(given.baseline)),
    }[settings.params["wrong"]]


def younger(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> object:
    """Estimator that halves the advantage for every version of lag, and logs what it met."""
    assert len(given.lag_P) == len(rewards.reward_P)
    given.metrics["lag"] = float(given.lag_P.max())
    return 0.5**given.lag_U, given.baseline


@pytest.mark.parametrize("lost", [False, True])
def test_an_own_estimator_sees_the_lag_and_logs_numbers(lost: bool) -> None:
    batch = collated(make_groups(1, 5, 4), NEVER)
    lag_N = np.arange(len(batch.mu_N)) % 3
    lag_P = np.zeros(len(batch.lag_P), np.int64)
    np.maximum.at(lag_P, batch.trajectory_N, lag_N)
    batch = replace(batch, lag_N=lag_N, lag_P=lag_P)
    reward_P = batch.reward_P.copy()
    reward_P[0] = np.nan if lost else reward_P[0]
    rewards = Rewards(
        reward_P, batch.group_P, batch.turn_start_P, batch.turn_reward_U, batch.label_U
    )
    zero_N = np.zeros_like(batch.mu_N)
    settings = AdvantageConfig(kind=f"{__name__}:younger")
    state = {"scale": 1.0, "baseline": 0.0, "step": 0, "steps": 1}
    found = assign(batch, LogProbs(zero_N, zero_N, zero_N), None, rewards, settings, **state)
    for token, turn in enumerate(batch.turn_at_N):
        oldest = max(lag_N[batch.turn_at_N == turn])
        trains = found.finite_P[batch.trajectory_N[token]]
        assert found.advantage_N[token] == (0.5**oldest if trains else 0.0)
    assert found.finite_P.all() == (not lost)
    assert found.own["lag"] == lag_P[found.finite_P].max()


@pytest.mark.parametrize(
    "wrong", ["members", "number", "alone", "no baseline", "texts", "nothing", "right"]
)
def test_a_result_that_is_not_one_number_a_turn_ends_training_with_its_name(wrong: str) -> None:
    batch = collated(make_groups(1, 5, 4), NEVER)
    rewards = Rewards(
        batch.reward_P, batch.group_P, batch.turn_start_P, batch.turn_reward_U, batch.label_U
    )
    kind, zero_N = f"{__name__}:unfit", np.zeros_like(batch.mu_N)
    settings = AdvantageConfig(kind=kind, params={"wrong": wrong})
    given = batch, LogProbs(zero_N, zero_N, zero_N), None, rewards, settings
    state = {"scale": 1.0, "baseline": 0.0, "step": 0, "steps": 1}
    if wrong == "right":
        assert (assign(*given, **state).advantage_N == 1).all()
        return
    with pytest.raises(TrainingError, match=rf"^advantage\.kind: {kind} returned .*one a turn"):
        assign(*given, **state)
