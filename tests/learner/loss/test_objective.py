"""Loss of a whole rl update, and a loop over tokens in the notation of docs/algorithms.md."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from budget import examples
from collated_groups import NEVER, collated, make_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import CORRECTIONS, KINDS, UNCLIPPED, Token

from evolver_async.config import CorrectionConfig, LossConfig
from evolver_async.config.sections.learner import by_kind
from learner.data.batch import Batch, LogProbs
from learner.data.collate import Internalise
from learner.diagnostics.offpolicy import Accounting
from learner.loss.correction import ActionTokens, Corrected, StepTokens, correction
from learner.loss.objective import Objective
from learner.loss.policy import token_scale
from learner.loss.ratios import guided_old

CPU = torch.device("cpu")


def filled(seed: int, strip: Internalise, guided: str) -> tuple[Batch, dict[str, np.ndarray]]:
    """A batch, and random log-probs by name: mu, old, anchor, anchor_e, theta, and A."""
    batch = collated(make_groups(seed, 3, 3), strip)
    rng = np.random.default_rng(seed)
    mu = batch.mu_N.astype(np.float64)
    shape = mu.shape
    anchor, anchor_e = mu + rng.normal(0, 0.3, shape), mu + rng.normal(0, 0.3, shape)
    theta = anchor + rng.normal(0, 0.4, shape)
    stripped_N = batch.stripped_N
    old = mu.copy()
    old[stripped_N] = guided_old(guided, mu[stripped_N], anchor[stripped_N], anchor_e[stripped_N])
    A = rng.normal(size=len(batch.turn_reward_U))[batch.turn_at_N].astype(np.float32)
    data = {"old": old, "anchor": anchor, "anchor_e": anchor_e, "theta": theta}
    return batch, data | {"mu": mu, "A": A.astype(np.float64)}


def objective_of(
    batch: Batch,
    data: dict[str, np.ndarray],
    correction: CorrectionConfig,
    loss: LossConfig,
    *,
    boosts: bool = False,
) -> Objective:
    logprobs = LogProbs(data["anchor"], data["old"], np.zeros_like(data["mu"]))
    advantage_N = data["A"].astype(np.float32)
    return Objective(
        correction, loss, batch, logprobs, advantage_N, interpolates=False, boosts=boosts
    )


def expected_loss(
    batch: Batch,
    data: dict[str, np.ndarray],
    correction: CorrectionConfig,
    loss: LossConfig,
    tokens: list[int],
) -> float:
    """-Σ objective / tokens, token by token."""

    def w(t: int) -> float:
        mu, anchor, anchor_e = (float(data[name][t]) for name in ("mu", "anchor", "anchor_e"))
        if not batch.stripped_P[batch.trajectory_N[t]] or correction.guided == "behaviour":
            return math.exp(anchor - mu)
        return math.exp(anchor_e - mu) if correction.guided == "stale" else 1.0

    old = [float(data["anchor"][t]) - math.log(w(t)) for t in range(len(data["mu"]))]
    A, theta, anchor = (data[name].tolist() for name in ("A", "theta", "anchor"))
    total = 0.0
    for t in tokens:
        boosted = loss.boost and batch.stripped_P[batch.trajectory_N[t]]
        high = loss.boost if boosted else loss.clip_high
        token = Token(t, A, theta, old, anchor, batch.trajectory_N.tolist(), high)
        total += CORRECTIONS[correction.kind](token, correction)[0]
    return -total / len(tokens)


def aged(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """Correction by the lag of a token, which logs what it sees."""
    ratio_N = (tokens.theta_N - tokens.anchor_N).exp()
    weight_N = 0.5 ** tokens.lag_N.to(ratio_N.dtype)
    seen = {"lag": tokens.lag_N, "position": tokens.position_N, "group": tokens.group_N}
    late_N = torch.where(tokens.position_N > 0, tokens.lag_N.to(ratio_N.dtype), torch.nan)
    metrics = {name: x_N.double() for name, x_N in seen.items()} | {"late": late_N}
    return Corrected(ratio_N, weight_N, torch.ones_like(weight_N), ratio_N.detach(), metrics)


@pytest.mark.parametrize("budget", [40, 10_000])
def test_an_own_correction_sees_lag_place_and_group_and_logs_numbers(budget: int) -> None:
    batch, data = filled(3, NEVER, "anchor")
    batch = replace(batch, lag_N=np.arange(len(batch.mu_N)) % 4)
    correction = CorrectionConfig(kind=f"{__name__}:aged")
    accounting = Accounting()
    objective = objective_of(batch, data, *by_kind(correction, LossConfig()))
    theta = torch.from_numpy(data["theta"])
    minibatch = batch.whole()
    for micro in minibatch.micro_batches(budget, CPU):
        theta_N = theta[micro.index_N].requires_grad_()
        objective(theta_N, torch.zeros_like(theta_N), micro, minibatch, accounting)
    position_N, seen = [], dict.fromkeys(range(len(batch.length_P)), 0)
    written = sorted(range(len(batch.mu_N)), key=lambda t: (batch.turn_at_N[t], t))
    for token in written:
        position_N.append(seen[int(batch.trajectory_N[token])])
        seen[int(batch.trajectory_N[token])] += 1
    late = [batch.lag_N[t] for t, place in zip(written, position_N, strict=True) if place]
    found = Accounting.unpacked(accounting.packed()).metrics()
    assert found["offpolicy/own/lag"] == pytest.approx(batch.lag_N.mean())
    assert found["offpolicy/own/position"] == pytest.approx(np.mean(position_N))
    assert found["offpolicy/own/group"] == pytest.approx(batch.group_P[batch.trajectory_N].mean())
    assert found["offpolicy/own/late"] == pytest.approx(np.mean(late))
    assert found["lag_2/own/lag"] == 2 and found["lag_3-4/own/lag"] == 3


def first_of_old_groups(tokens: StepTokens, settings: CorrectionConfig) -> np.ndarray:
    """Prepare the largest lag of the group for the first token of a trajectory, -1 for others."""
    lag_G = np.zeros(tokens.group_N.max() + 1)
    np.maximum.at(lag_G, tokens.group_N, tokens.lag_N)
    assert len(set(tokens.trajectory_N)) == (tokens.position_N == 0).sum()
    return np.where(tokens.position_N == 0, lag_G[tokens.group_N], -1)


@correction(prepare=first_of_old_groups)
def aged_by_step(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """Correction that logs what was prepared, beside what it sees itself."""
    ratio_N = (tokens.theta_N - tokens.anchor_N).exp()
    w_N = ratio_N.detach()
    fits_N = (tokens.prepared_N >= tokens.lag_N) == (tokens.position_N == 0)
    metrics = {"prepared": tokens.prepared_N.double(), "fits": fits_N.double()}
    return Corrected(ratio_N, w_N, w_N, w_N, metrics)


def test_what_an_own_correction_prepares_sees_lag_place_and_group_of_the_whole_step() -> None:
    batch, data = filled(3, NEVER, "anchor")
    batch = replace(batch, lag_N=np.arange(len(batch.mu_N)) % 4)
    kind = CorrectionConfig(kind=f"{__name__}:aged_by_step")
    objective = objective_of(batch, data, *by_kind(kind, LossConfig()))
    accounting, minibatch = Accounting(), batch.whole()
    for micro in minibatch.micro_batches(40, CPU):  # several: no one of them sees the whole groups
        theta_N = torch.from_numpy(data["theta"][micro.index_N.numpy()]).requires_grad_()
        objective(theta_N, torch.zeros_like(theta_N), micro, minibatch, accounting)
    group_N, expected = batch.group_P[batch.trajectory_N], np.full(len(batch.mu_N), -1.0)
    for token in np.flatnonzero(batch.position_N == 0):
        expected[token] = batch.lag_N[group_N == group_N[token]].max()
    found = accounting.metrics()
    assert found["offpolicy/own/prepared"] == pytest.approx(expected.mean())
    assert found["offpolicy/own/fits"] == 1.0


@pytest.mark.parametrize(("kind", "level"), KINDS)
@pytest.mark.parametrize("guided", ["stale", "anchor", "behaviour"])
@given(
    seed=st.integers(0, 10**6),
    boost=st.sampled_from([0.0, 0.6]),
    fraction=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=examples(15))
def test_an_update_over_mixed_data_matches_the_loop(kind, level, guided, seed, boost, fraction):
    batch, data = filled(seed, Internalise(fraction, 0), guided)
    correction = CorrectionConfig(
        kind=kind, level=level, guided=guided, w_max=1.5, low=0.8, high=1.25, epsilon=0.2
    )
    loss = LossConfig(clip_low=0.2, clip_high=0.28, boost=0.0 if kind in UNCLIPPED else boost)
    boost = loss.boost
    boosts = batch.sampled is not None and boost > 0
    objective = objective_of(batch, data, correction, loss, boosts=boosts)
    accounting = Accounting()
    for minibatch in batch.whole().split(2, key=seed):
        total, tokens = 0.0, []
        for micro in minibatch.micro_batches(60, CPU):
            at = micro.index_N.numpy()
            tokens += at.tolist()
            theta_N = torch.from_numpy(data["theta"][at])
            value, terms = objective(theta_N, -theta_N, micro, minibatch, accounting)
            assert float(value) == pytest.approx(float(terms["loss/policy"]))
            total += float(value)
        expected = expected_loss(batch, data, correction, loss, tokens)
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)
    check_accounting(accounting.metrics(), batch, data, correction, loss)


def check_accounting(
    found: dict[str, float],
    batch: Batch,
    data: dict[str, np.ndarray],
    correction: CorrectionConfig,
    loss: LossConfig,
) -> None:
    """KL(mu||theta) and r of guided and unguided tokens apart; what became of boosted tokens."""
    stripped_N = batch.stripped_N
    if not len(stripped_N):
        return
    unanchored = not correction.facts.reads_anchor
    r = np.exp(data["theta"] - (data["old"] if unanchored else data["anchor"]))
    log_rho = data["theta"] - data["mu"]
    sides = {"offpolicy": np.ones_like(stripped_N)}
    if stripped_N.any():
        sides |= {"offpolicy_guided": stripped_N, "offpolicy_unguided": ~stripped_N}
    for family, inside in sides.items():
        if inside.any():
            kl = float((np.exp(log_rho) - 1 - log_rho)[inside].mean())
            assert found[f"{family}/kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
            assert found[f"{family}/r_mean"] == pytest.approx(float(r[inside].mean()), rel=1e-4)
            assert found[f"{family}/tokens"] == inside.sum()
    if not stripped_N.any():
        assert not any("guided" in name for name in found)
    good = stripped_N & (data["A"] > 0)
    if not loss.boost or not good.any():
        assert not any(name.startswith("boost/") for name in found)
        return
    x = r
    if correction.kind == "gspo":  # what is clipped is the geometric mean over the trajectory
        lengths = np.bincount(batch.trajectory_N)
        x = np.exp(np.bincount(batch.trajectory_N, weights=np.log(r)) / np.maximum(lengths, 1))
        x = x[batch.trajectory_N]
    bound = (x[good] > 1 + loss.boost).mean()
    freed = ((x[good] > 1 + loss.clip_high) & (x[good] <= 1 + loss.boost)).mean()
    assert found["boost/tokens"] == good.sum()
    assert found["boost/bound_fraction"] == pytest.approx(float(bound))
    assert found["boost/freed_fraction"] == pytest.approx(float(freed))


def test_bounds_left_open_never_reach_the_loss():
    closed, _ = by_kind(CorrectionConfig(), LossConfig())
    batch, data = filled(0, Internalise(0.0, 0), "stale")
    for one in (
        (CorrectionConfig(), LossConfig(clip_low=0.2, clip_high=0.28)),
        (closed, LossConfig()),
    ):
        with pytest.raises(AssertionError, match="stage_config"):
            objective_of(batch, data, *one)


def test_masked_tokens_are_those_that_no_gradient_reaches():
    batch, data = filled(11, Internalise(1.0, 0), "stale")
    settings = by_kind(CorrectionConfig(), LossConfig(boost=0.6))
    objective = objective_of(batch, data, *settings, boosts=True)
    accounting = Accounting()
    (minibatch,) = batch.whole().split(1, key=0)
    (micro,) = minibatch.micro_batches(10**6, CPU)
    theta_N = torch.from_numpy(data["theta"][micro.index_N.numpy()]).requires_grad_()
    value, _ = objective(theta_N, -theta_N, micro, minibatch, accounting)
    (gradient_N,) = torch.autograd.grad(value, theta_N)
    masked = accounting.metrics()["offpolicy/masked"]
    assert 0 < masked == pytest.approx(float((gradient_N == 0).double().mean()))


@pytest.mark.parametrize("kind", ["icepop", "geo_mask"])
def test_masked_tokens_stay_in_the_denominator_and_are_counted(kind):
    """With every weight out of bounds the loss is 0 and all is masked; with wider bounds not."""
    batch, data = filled(5, Internalise(0.0, 0), "stale")
    (minibatch,) = batch.whole().split(1, key=0)
    (micro,) = minibatch.micro_batches(10**6, CPU)
    theta_N = torch.from_numpy(data["theta"][micro.index_N.numpy()])

    def masked(low: float, high: float) -> tuple[float, float]:
        accounting = Accounting()
        settings = by_kind(CorrectionConfig(kind=kind, low=low, high=high), LossConfig())
        objective = objective_of(batch, data, *settings)
        value, _ = objective(theta_N, -theta_N, micro, minibatch, accounting)
        return float(value), accounting.metrics()["offpolicy/masked"]

    assert masked(1.0, 1.0) == (0.0, 1.0)
    value, share = masked(0.9, 1.1)
    assert value != 0 and 0 < share < 1


def test_a_trajectory_in_several_contexts_counts_once():
    """`sequence_mean`: splitting one sequence's tokens over two contexts leaves every weight."""
    groups = make_groups(21, 2, 3, sequences=3)
    batch = collated(groups, Internalise(0.0, 0))
    (minibatch,) = batch.whole().split(1, key=0)
    (micro,) = minibatch.micro_batches(10**6, CPU)
    shares = np.zeros(len(batch.length_P))
    scale_N = token_scale(
        "sequence_mean",
        micro.length_N,
        tokens=minibatch.tokens,
        trajectories=minibatch.trajectories,
        norm_tokens=1,
    )
    np.add.at(shares, batch.trajectory_N[micro.index_N.numpy()], scale_N.numpy())
    assert len(batch.trajectory_R) > len(minibatch.members)  # some have several rows
    np.testing.assert_allclose(shares[minibatch.members], 1 / minibatch.trajectories, rtol=1e-5)
