"""Reliance on experience, its weights, and baselines by context, against loops."""

import math

import numpy as np
import pytest
from collated_groups import ALWAYS, NEVER, collated, make_groups

from evolver_async.config import AdvantageConfig
from learner.advantage.assign import Advantages, assign, reliance, weighted
from learner.advantage.shaped_rewards import Rewards
from learner.data.batch import Batch, LogProbs
from learner.data.collate import Internalise

rng = np.random.default_rng(0)


def given(batch: Batch, *, known: bool = True) -> tuple[LogProbs, Advantages]:
    anchor_N, sampled_N, advantage_N = rng.normal(-2, 1, (3, len(batch.mu_N))).astype(np.float32)
    zero_N = np.zeros_like(anchor_N)
    advantages = Advantages(advantage_N, zero_N, np.ones_like(batch.stripped_P), set(), 0.0)
    return LogProbs(anchor_N, batch.mu_N, zero_N, sampled_N if known else None), advantages


def test_weights_match_the_loop_and_leave_other_trajectories_alone():
    batch = collated(make_groups(1, 5, 4), Internalise(0.6, 0))
    logprobs, advantages = given(batch)
    assert logprobs.sampled_N is not None
    found, reliance_P = (weighted(advantages, batch, logprobs, coef=3.3), reliance(batch, logprobs))
    assert reliance_P is not None
    leaned = []
    for p in range(len(batch.reward_P)):
        mine_N = batch.trajectory_N == p
        expected = 0.0
        if batch.stripped_P[p] and mine_N.any():
            lost = logprobs.sampled_N[mine_N] - logprobs.anchor_N[mine_N]
            expected = max(0.0, sum(map(float, lost)) / len(lost))
            leaned.append(expected)
        assert reliance_P[p] == pytest.approx(expected)
        wanted = advantages.advantage_N[mine_N] * math.exp(-3.3 * expected)
        np.testing.assert_allclose(found.advantage_N[mine_N], wanted, rtol=1e-5)
    assert 0.0 in leaned and max(leaned) > 0.1


def test_without_a_coefficient_or_log_probs_reliance_changes_nothing():
    batch = collated(make_groups(1, 5, 4), ALWAYS)
    logprobs, advantages = given(batch)
    assert weighted(advantages, batch, logprobs, coef=0.0) is advantages
    logprobs, advantages = given(batch, known=False)
    assert reliance(batch, logprobs) is None
    assert weighted(advantages, batch, logprobs, coef=1.0) is advantages


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opob", "grpo_process", "adca"])
def test_distillation_compares_members_of_one_context_only(kind):
    """Each context of a group gets the advantages of a group of its own."""
    groups = make_groups(2, 6, 5, sequences=1)
    settings = AdvantageConfig(kind=kind)

    def advantages(batch: Batch, group_P: np.ndarray) -> np.ndarray:
        rewards = Rewards(
            batch.reward_P, group_P, batch.turn_start_P, batch.turn_reward_U, batch.label_U
        )
        zero_N = np.zeros_like(batch.mu_N)
        state = {"scale": 1.0, "baseline": 0.0, "step": 0, "steps": 1}
        logprobs = LogProbs(zero_N, zero_N, zero_N)
        return assign(batch, logprobs, None, rewards, settings, **state).advantage_N

    taught = collated(groups, Internalise(1.0, 0, teaches=True))
    kept = collated(groups, NEVER)
    assert (taught.peer_P == 2 * taught.group_P + taught.guided_P).all()
    assert (kept.peer_P == kept.group_P).all()
    found_N = advantages(taught, taught.group_P)
    for group in range(6):
        for with_experience in (False, True):
            inside_P = (taught.group_P == group) & (taught.guided_P == with_experience)
            inside_N = inside_P[taught.trajectory_N]
            # the rewards of all other trajectories do not matter
            other = collated(groups, Internalise(1.0, 0, teaches=True))
            other.reward_P[~inside_P] += rng.normal(size=int((~inside_P).sum()))
            again_N = advantages(other, other.group_P)
            np.testing.assert_allclose(again_N[inside_N], found_N[inside_N], atol=1e-6)
    assert not np.allclose(found_N, advantages(kept, kept.group_P))
