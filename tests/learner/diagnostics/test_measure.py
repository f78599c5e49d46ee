"""Numbers of a step against loops: those of every family of tokens and trajectories, and credit."""

import math
from dataclasses import replace

import numpy as np
import pytest
from budget import examples
from collated_groups import ALWAYS, collated, make_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from evolver_async.config import AdvantageConfig, Config
from learner.advantage.assign import Advantages
from learner.advantage.shaped_rewards import rewards_of
from learner.data.batch import Batch, LogProbs
from learner.diagnostics.measure import (
    Credit,
    credit_metrics,
    label_metrics,
    token_metrics,
    trajectory_metrics,
)
from learner.loss.accounting import Accounting


def bucket_of(lag: int) -> str:
    if lag <= 2:
        return str(lag)
    return "3-4" if lag <= 4 else "5-8" if lag <= 8 else "9+"


def families_of(lags: np.ndarray, stripped: np.ndarray) -> dict[str, list[int]]:
    """Who belongs to which family."""
    families = {"offpolicy": list(range(len(lags)))}
    for i, lag in enumerate(lags):
        families.setdefault(f"lag_{bucket_of(int(lag))}", []).append(i)
        if stripped.any():
            side = "offpolicy_guided" if stripped[i] else "offpolicy_unguided"
            families.setdefault(side, []).append(i)
    return families


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([0.0, 0.3, 1.0]))
def test_accounting_of_tokens_matches_the_loop(seed, count, share):
    rng = np.random.default_rng(seed)
    tokens = {
        "lag_N": rng.integers(0, 13, count),
        "stripped_N": rng.random(count) < share,
        "swapped_N": rng.random(count) < share,
        "w_N": rng.exponential(1, count) + 0.01,
        "r_N": rng.exponential(1, count) + 0.01,
        "log_rho_N": rng.normal(0, 0.5, count),
        "log_moved_N": rng.normal(0, 0.5, count),
        "clipped_low_N": rng.random(count) < 0.2,
        "clipped_high_N": rng.random(count) < 0.2,
        "masked_N": rng.random(count) < 0.2,
    }
    accounting = Accounting()
    half = count // 2
    for part in (slice(0, half), slice(half, count)):
        accounting.add_tokens(**{name: values[part] for name, values in tokens.items()})
    found = token_metrics(accounting)

    families = families_of(tokens["lag_N"], tokens["stripped_N"])
    if tokens["swapped_N"].any():
        families["offpolicy_swapped"] = np.flatnonzero(tokens["swapped_N"]).tolist()
    assert {name.split("/")[0] for name in found} == set(families)
    for family, members in families.items():
        n = len(members)
        w = [tokens["w_N"][i] for i in members]
        rho = [math.exp(tokens["log_rho_N"][i]) for i in members]
        expected = {
            "tokens": n,
            "ess": sum(w) ** 2 / (n * sum(x * x for x in w)),
            "kl": sum(x - 1 - math.log(x) for x in rho) / n,
            "clip_low": sum(bool(tokens["clipped_low_N"][i]) for i in members) / n,
            "clip_high": sum(bool(tokens["clipped_high_N"][i]) for i in members) / n,
            "masked": sum(bool(tokens["masked_N"][i]) for i in members) / n,
            "swapped": sum(bool(tokens["swapped_N"][i]) for i in members) / n,
            "w_mean": sum(w) / n,
            "w_q50": sorted(w)[n // 2] if n % 2 else sum(sorted(w)[n // 2 - 1 : n // 2 + 1]) / 2,
            "r_mean": sum(tokens["r_N"][i] for i in members) / n,
        }
        for name, value in expected.items():
            assert found[f"{family}/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@given(st.integers(0, 10**6), st.integers(1, 20), st.sampled_from([0.0, 0.4, 1.0]))
def test_metrics_of_trajectories_match_the_loop(seed, count, share):
    rng = np.random.default_rng(seed)
    lag_P, stripped_P = rng.integers(0, 13, count), rng.random(count) < share
    reward_P, length_P = rng.normal(size=count), rng.integers(1, 50, count)
    batch = replace(
        collated(make_groups(seed, 1, 1)),
        lag_P=np.append(lag_P, 99),
        stripped_P=np.append(stripped_P, True),
        reward_P=np.append(reward_P, np.nan),
        length_P=np.append(length_P, 1),
    )
    found = trajectory_metrics(batch, np.append(np.ones(count, bool), False))
    families = families_of(lag_P, stripped_P)
    assert {name.split("/")[0] for name in found} == {*families, "staleness"}
    for family, members in families.items():
        mean_reward = sum(reward_P[i] for i in members) / len(members)
        mean_length = sum(length_P[i] for i in members) / len(members)
        assert found[f"{family}/reward_mean"] == pytest.approx(mean_reward)
        assert found[f"{family}/length_mean"] == pytest.approx(mean_length)
        assert found[f"{family}/trajectories"] == len(members)
    assert found["staleness/mean"] == pytest.approx(lag_P.mean())
    assert found["staleness/max"] == lag_P.max()


def test_nothing_collected_is_nothing_logged():
    assert token_metrics(Accounting()) == {}


def one_token(accounting: Accounting, lag: int) -> None:
    names = (
        "w_N",
        "r_N",
        "log_rho_N",
        "log_moved_N",
        "clipped_low_N",
        "clipped_high_N",
        "masked_N",
    )
    accounting.add_tokens(
        lag_N=np.array([lag]),
        stripped_N=np.array([False]),
        swapped_N=np.array([False]),
        **{name: np.ones(1) for name in names},
    )


def test_what_is_merged_counts_like_ones_own():
    whole, part = Accounting(), Accounting()
    one_token(whole, 0)
    one_token(part, 1)
    whole.add_boosted(tokens=2, freed=1, bound=0)
    part.add_boosted(tokens=2, freed=1, bound=1)
    whole.merge(part)
    found = token_metrics(whole)
    assert found["offpolicy/tokens"] == 2
    assert found["boost/tokens"] == 4
    assert found["boost/freed_fraction"] == 0.5 and found["boost/bound_fraction"] == 0.25


def test_without_a_token_to_boost_there_are_no_fractions():
    accounting = Accounting()
    accounting.add_boosted(tokens=0, freed=0, bound=0)
    assert token_metrics(accounting) == {}


def credit_of(batch: Batch, stage: Config, **logprobs: np.ndarray) -> Credit:
    """Credit of a batch whose advantages are 0 and whose trajectories all train."""
    zero_N, none_P = np.zeros_like(batch.mu_N), np.zeros_like(batch.stripped_P)
    scored = LogProbs(**{"anchor_N": zero_N, "old_N": zero_N, "reference_N": zero_N} | logprobs)
    rewards = rewards_of(batch, scored, stage.loss, stage.advantage)
    advantages = Advantages(zero_N, zero_N, ~none_P, set(), 0.0)
    return Credit(scored, None, rewards, advantages, none_P)


def test_overlong_penalties_are_measured_where_there_is_a_limit() -> None:
    batch, stage = collated(make_groups(0, 3, 2)), Config()
    assert batch.length_P.max() > 2
    assert credit_metrics(batch, credit_of(batch, stage), stage) == {}
    for limit, cache in ((100, 10), (4, 2)):
        stage.advantage = AdvantageConfig(overlong_limit=limit, overlong_cache=cache)
        lost_P = np.clip((limit - cache - batch.length_P) / cache, -1, 0)
        assert credit_metrics(batch, credit_of(batch, stage), stage) == {
            "overlong/share": (lost_P < 0).mean(), "overlong/mean": lost_P.mean()
        }  # fmt: skip


def test_reliance_is_measured_whatever_its_coefficient() -> None:
    batch, stage = collated(make_groups(1, 5, 4), ALWAYS), Config()
    sampled_N = np.random.default_rng(0).normal(size=len(batch.mu_N)).astype(np.float32)
    credit = credit_of(batch, stage, sampled_N=sampled_N)
    leaned = [
        max(0.0, sampled_N[batch.trajectory_N == p].mean())
        for p in np.flatnonzero(batch.stripped_P & (batch.length_P > 0))
    ]
    found = credit_metrics(batch, credit, stage)
    assert found == {"experience/reliance": pytest.approx(np.mean(leaned), rel=1e-5)}
    assert credit_metrics(batch, credit_of(batch, stage), stage) == {}, "nothing was scored"


def test_label_metrics_count_turns():
    found = label_metrics(np.array([1, 0, -1, 1]))
    assert found == {"judge/labelled_share": 0.75, "judge/good_share": 2 / 3}
    assert label_metrics(np.array([0])) == {"judge/labelled_share": 0.0}
    assert label_metrics(np.array([])) == {"judge/labelled_share": 0.0}
