"""The corrections against loops in the notation of the algorithms page, and identities."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import DUAL, HIGH, KINDS, LOW, ORACLES, UNCLIPPED, Token

from evolver_async.config import CorrectionConfig, LossConfig
from evolver_async.config.sections.learner import by_kind
from evolver_async.errors import TrainingError
from evolver_async.schema import Array
from learner.loss.applied import corrected_tokens, prepared
from learner.loss.correction import (
    CORRECTIONS,
    ActionTokens,
    Corrected,
    StepTokens,
    correction,
)
from learner.loss.ratios import (
    guided_old,
    interpolated_anchor,
    log_rho,
    trajectory_mean,
    trajectory_sum,
)
from learner.loss.terms import clipped_objective, unclipped_objective

CLIPPED = [(kind, level) for kind, level in KINDS if kind not in UNCLIPPED]


def draw(seed: int, tokens: int = 40) -> dict[str, torch.Tensor]:
    """Log-probs of a step; some tokens have not moved since they were sampled."""
    generator = torch.Generator().manual_seed(seed)
    mu_N = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 4
    anchor_N = mu_N + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    anchor_N[5::8] = mu_N[5::8]
    theta_N = anchor_N + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    return {
        "theta_N": theta_N.requires_grad_(),
        "old_N": mu_N,
        "anchor_N": anchor_N,
        "trajectory_N": torch.randint(0, 5, (tokens,), generator=generator),
    }


def advantage(seed: int, tokens: int = 40) -> torch.Tensor:
    """Advantages of its tokens; some are 0."""
    generator = torch.Generator().manual_seed(seed + 1)
    advantage_N = torch.randn(tokens, generator=generator, dtype=torch.float64)
    advantage_N[7::8] = 0.0
    return advantage_N


def gradient(objective: torch.Tensor, theta_N: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(objective.sum(), theta_N)
    return found


def step_of(old_N: Array, anchor_N: Array, advantage_N: Array) -> StepTokens:
    """A step of one trajectory of fresh tokens."""
    return StepTokens(old_N, anchor_N, advantage_N, *(np.zeros(len(old_N), int) for _ in range(4)))


def objective(
    data: dict[str, torch.Tensor], A_N: torch.Tensor, settings: CorrectionConfig
) -> tuple[torch.Tensor, Corrected]:
    """The objective of every token, and what the correction made of it."""
    settings, _ = by_kind(settings, LossConfig())
    constants = (data["old_N"].numpy(), data["anchor_N"].detach().numpy(), A_N.numpy())
    step = step_of(*constants)
    tokens = ActionTokens(
        data["theta_N"],
        data["old_N"],
        data["anchor_N"],
        A_N,
        data["trajectory_N"],
        torch.from_numpy(prepared(settings, step)).to(A_N.dtype),
        *[torch.zeros_like(data["trajectory_N"])] * 3,
    )
    corrected = CORRECTIONS.of(settings.kind)(tokens, settings)
    if settings.facts.clips:
        clipped = clipped_objective(
            corrected.ratio_N, A_N, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
        )
    else:
        clipped = unclipped_objective(corrected.ratio_N, A_N)
    return corrected.weight_N * clipped.objective_N, corrected


@pytest.mark.parametrize(("kind", "level"), KINDS)
@given(
    seed=st.integers(0, 10**6),
    w_max=st.sampled_from([1.2, 2.0, math.inf]),
    bounds=st.sampled_from([(0.5, 5.0), (0.8, 1.25), (0.99, 1.01), (1.0, math.inf)]),
    epsilon=st.sampled_from([0.0, 0.3, 4.0]),
)
@settings(max_examples=examples(25))
def test_objective_and_gradient_match_the_loop(kind, level, seed, w_max, bounds, epsilon):
    data, A_N = draw(seed), advantage(seed)
    low, high = bounds
    correction = CorrectionConfig(
        kind=kind, level=level, w_max=w_max, low=low, high=high, epsilon=epsilon
    )
    found_N, corrected = objective(data, A_N, correction)
    gradient_N = gradient(found_N, data["theta_N"])
    theta, mu, anchor, member = (values.tolist() for values in data.values())
    for t in range(len(theta)):
        token = Token(t, A_N.tolist(), theta, mu, anchor, member)
        value, slope = ORACLES["correction"][kind](token, correction)
        assert float(found_N[t].detach()) == pytest.approx(value, rel=1e-9)
        assert float(gradient_N[t]) == pytest.approx(slope, rel=1e-9)
        q, unanchored = math.exp(theta[t] - mu[t]), not correction.facts.reads_anchor
        w, r = math.exp(anchor[t] - mu[t]), math.exp(theta[t] - anchor[t])
        assert float(corrected.w_N[t]) == pytest.approx(q if unanchored else w)
        assert float(corrected.r_N[t]) == pytest.approx(q if unanchored else r)
    assert not corrected.weight_N.requires_grad


def test_without_lag_all_corrections_of_the_token_ratio_are_the_same():
    data, A_N = draw(0), advantage(0)
    data["anchor_N"] = data["old_N"]
    results = []
    for kind, level in CLIPPED:
        if kind != "gspo":  # its ratio is the trajectory's
            correction = CorrectionConfig(kind=kind, level=level, w_max=math.inf)
            objective_N, _ = objective(data, A_N, correction)
            results.append((objective_N.detach(), gradient(objective_N, data["theta_N"])))
    for objective_N, gradient_N in results[1:]:
        assert torch.equal(objective_N, results[0][0])
        assert torch.equal(gradient_N, results[0][1])


def test_ratio_one_gives_the_plain_policy_gradient():
    data, A_N = draw(1), advantage(1)
    data["anchor_N"] = data["old_N"] = data["theta_N"].detach()
    for kind, level in KINDS:
        objective_N, _ = objective(data, A_N, CorrectionConfig(kind=kind, level=level))
        plain = gradient(A_N * data["theta_N"], data["theta_N"])
        assert torch.equal(gradient(objective_N, data["theta_N"]), plain)


def test_gspo_has_the_gradient_of_the_clipped_ratio_of_whole_sequences():
    """Summed over a trajectory's tokens and divided by their number: d/dtheta of L(s) itself."""
    data, A_N = draw(3), advantage(3)
    data["anchor_N"] = data["old_N"]
    member_N = data["trajectory_N"]
    A_N = A_N[member_N]  # one advantage a trajectory
    length_N = trajectory_sum(torch.ones_like(A_N), member_N)
    found_N, _ = objective(data, A_N, CorrectionConfig(kind="gspo"))
    found = gradient(found_N / length_N, data["theta_N"])
    whole = torch.zeros((), dtype=torch.float64)
    for p in member_N.unique():
        own = member_N == p
        s = (data["theta_N"] - data["anchor_N"])[own].mean().exp()[None]
        whole = (
            whole
            + clipped_objective(
                s, A_N[own][:1], clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
            ).objective_N.sum()
        )
    torch.testing.assert_close(found, gradient(whole, data["theta_N"]))


def test_a_mask_takes_tokens_or_whole_trajectories():
    """Lag moves one token of the first trajectory far, both of the second a little."""
    mu_N = torch.full((4,), -1.0)
    anchor_N = mu_N + torch.tensor([0.0, 2.0, 0.1, 0.1])
    data = {
        "theta_N": anchor_N.clone().requires_grad_(),
        "old_N": mu_N,
        "anchor_N": anchor_N,
        "trajectory_N": torch.tensor([0, 0, 1, 1]),
    }
    _, token = objective(data, torch.ones(4), CorrectionConfig(kind="icepop"))
    torch.testing.assert_close(
        token.weight_N, torch.tensor([1.0, 0.0, 1.1052, 1.1052]), atol=1e-4, rtol=0
    )
    _, whole = objective(data, torch.ones(4), CorrectionConfig(kind="geo_mask", low=0.8, high=1.25))
    assert whole.weight_N.tolist() == [0, 0, 1, 1]


def test_unbounded_decoupled_weights_give_the_importance_weighted_gradient():
    data, A_N = draw(2), advantage(2)
    _, corrected = objective(data, A_N, CorrectionConfig(w_max=math.inf))
    found = gradient(corrected.weight_N * corrected.ratio_N * A_N, data["theta_N"])
    q_N = (data["theta_N"] - data["old_N"]).detach().exp()
    torch.testing.assert_close(found, q_N * A_N)


def test_interpolated_anchor_follows_the_lag():
    theta_N = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    mu_N = torch.tensor([-2.0, -2.0, -2.0])
    anchor_N = interpolated_anchor(theta_N, mu_N, torch.tensor([0, 1, 3]))
    torch.testing.assert_close(anchor_N, torch.tensor([-2.0, -1.5, -1.25]))
    assert not anchor_N.requires_grad


def test_weights_carry_no_gradient_and_extremes_stay_finite():
    theta_N = torch.tensor([0.0, -500.0], requires_grad=True)
    mu_N = torch.tensor([-500.0, 0.0])
    member_N = torch.zeros(2, dtype=torch.int64)
    A_N = torch.tensor([-1.0, -1.0])
    for kind, level in KINDS:
        for anchor_N in (theta_N.detach(), mu_N):
            data = {
                "theta_N": theta_N,
                "old_N": mu_N,
                "anchor_N": anchor_N,
                "trajectory_N": member_N,
            }
            objective_N, corrected = objective(data, A_N, CorrectionConfig(kind=kind, level=level))
            assert not corrected.weight_N.requires_grad
            assert torch.isfinite(gradient(objective_N, theta_N)).all()


# Largest gradient of a token by its log-prob, in units of its advantage.
BOUNDS = {"none": 3, "ppo": 3, "decoupled": 15, "icepop": 15, "geo_mask": 3, "gspo": 6}
BOUNDS |= {"cispo": 5, "topr": 1, "vcpo": 8, "m2po": 20, "dppo_tv": 20}


@pytest.mark.parametrize(("kind", "level"), KINDS)
@pytest.mark.parametrize("log_ratio", [7.0, -7.0, 40.0, -40.0])
@pytest.mark.parametrize("moved", ["anchor_N", "theta_N", "both"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_no_update_is_one_token(
    kind: str, level: str, log_ratio: float, moved: str, advantage: float
) -> None:
    """One token of 1,000 whose log-prob is wrong, alone in its trajectory, which is the worst."""
    tokens = 1000
    old_N = torch.full((tokens,), -0.1, dtype=torch.float64)
    old_N[0] = min(-0.1, -0.1 - log_ratio)  # no log-prob is above 0
    anchor_N, theta_N = old_N.clone(), old_N.clone()
    theta_N[0] += log_ratio
    if moved != "theta_N":
        anchor_N[0] += log_ratio
    if moved == "anchor_N":
        theta_N[0] = old_N[0]
    data = {
        "theta_N": theta_N.requires_grad_(),
        "old_N": old_N,
        "anchor_N": anchor_N,
        "trajectory_N": torch.arange(tokens),
    }
    A_N = torch.ones(tokens, dtype=torch.float64)
    A_N[::2] = -1.0
    A_N[0] = advantage
    objective_N, _ = objective(data, A_N, CorrectionConfig(kind=kind, level=level))
    gradient_N = gradient(objective_N, data["theta_N"]).abs()
    assert float(gradient_N[0]) <= BOUNDS[kind]
    assert float(gradient_N[0]) < float(gradient_N[1:].norm()), "less than the others together"


def test_trajectory_sums_reach_every_token():
    sums_N = trajectory_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]))
    assert sums_N.tolist() == [5, 2, 5]
    means_N = trajectory_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]))
    assert means_N.tolist() == [2.5, 2, 2.5]


def test_log_rho_is_constant_and_bounded():
    theta_N = torch.tensor([-1.0, 0.0], requires_grad=True)
    found = log_rho(theta_N, torch.tensor([-1.5, -500.0]))
    assert found.tolist() == [0.5, 20.0] and not found.requires_grad


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(25))
def test_the_weight_of_a_guided_token_is_what_its_kind_says(seed):
    """Guided tokens: stale w = exp(anchor_e - mu), anchor w = 1, behaviour w = exp(anchor - mu)."""
    rng = np.random.default_rng(seed)
    mu, anchor, anchor_e, theta = -rng.exponential(1, (4, 20))
    expected = {
        "stale": np.exp(anchor_e - mu),
        "anchor": np.ones(20),
        "behaviour": np.exp(anchor - mu),
    }
    for kind, w in expected.items():
        old = torch.from_numpy(guided_old(kind, mu, anchor, anchor_e))
        theta_N, anchor_N = torch.from_numpy(theta), torch.from_numpy(anchor)
        data = {
            "theta_N": theta_N,
            "old_N": old,
            "anchor_N": anchor_N,
            "trajectory_N": torch.zeros(20, dtype=torch.int64),
        }
        A_N = torch.ones(20)
        _, found = objective(data, A_N, CorrectionConfig(kind="decoupled", w_max=math.inf))
        np.testing.assert_allclose(found.weight_N.numpy(), w)
        np.testing.assert_allclose(found.ratio_N.numpy(), np.exp(theta - anchor))
        # ppo bounds q = r w: the lag is in its ratio, the removed context is not under `stale`
        _, q = objective(data, A_N, CorrectionConfig(kind="ppo"))
        np.testing.assert_allclose(q.ratio_N.numpy(), np.exp(theta - anchor) * w)
        _, ignored = objective(data, A_N, CorrectionConfig(kind="none"))
        assert (ignored.weight_N == 1).all()


def test_removing_the_context_of_a_good_token_holds_it_back_only_as_behaviour():
    """0.9 with experience, 0.09 without it, sampled by the anchor itself: w = 0.1 or 1."""
    mu = anchor_e = np.log(np.array([0.9]))
    anchor = np.log(np.array([0.09]))
    w = {
        kind: float(np.exp(anchor - guided_old(kind, mu, anchor, anchor_e))[0])
        for kind in ("stale", "anchor", "behaviour")
    }
    assert w == pytest.approx({"stale": 1.0, "anchor": 1.0, "behaviour": 0.1})


def spread_over_tokens(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """Correction that returns what `settings.params` say is wrong, in place of the right value."""
    ratio_N = (tokens.theta_N - tokens.anchor_N).exp()
    constant_N = ratio_N.detach()
    whole = Corrected(ratio_N, constant_N, constant_N, constant_N)
    wrong = {
        "column": lambda: replace(whole, ratio_N=ratio_N[:, None]),
        "single": lambda: replace(whole, weight_N=ratio_N.detach().mean()),
        "short": lambda: replace(whole, w_N=whole.w_N[1:]),
        "number": lambda: replace(whole, weight_N=1.0),
        "constant": lambda: replace(whole, ratio_N=ratio_N.detach()),
        "live": lambda: replace(whole, weight_N=ratio_N),
        "tuple": lambda: (ratio_N, ratio_N),
        "metric": lambda: replace(whole, metrics={"age": ratio_N.mean()}),
        "list": lambda: replace(whole, metrics=[1.0]),
        "name": lambda: replace(whole, metrics={"a/b": ratio_N.detach()}),
        "nothing": lambda: whole,
    }
    return wrong[settings.params["wrong"]]()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("column", r"ratio_N as \(40, 1\), not as a tensor of \(40,\): one number a token"),
        ("single", r"weight_N as \(\), not as a tensor of \(40,\)"),
        ("short", r"w_N as \(39,\), not as a tensor of \(40,\)"),
        ("number", r"weight_N as float, not as a tensor of \(40,\)"),
        ("constant", "ratio_N without a gradient"),
        ("live", "weight_N with a gradient"),
        ("tuple", "tuple, not Corrected"),
        ("metric", r"metrics\['age'\] that is no tensor of \(40,\)"),
        ("list", "metrics as list"),
        ("name", "metrics with the name 'a/b'"),
        ("nothing", ""),
    ],
)
def test_a_result_that_is_not_one_number_a_token_is_named_with_its_function(
    wrong: str, said: str
) -> None:
    kind = f"{__name__}:spread_over_tokens"
    settings = CorrectionConfig(kind=kind, params={"wrong": wrong})
    theta_N, constant_N = torch.zeros(40, requires_grad=True), torch.zeros(40)
    tokens = ActionTokens(theta_N, *[constant_N] * 8)
    if not said:
        assert corrected_tokens(tokens, settings)
        return
    with pytest.raises(TrainingError, match=rf"^correction\.kind: {kind} returned {said}"):
        corrected_tokens(tokens, settings)


def spoils(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """Correction that changes the input that `settings.params` name."""
    ratio_N = (tokens.theta_N - tokens.anchor_N).exp()
    getattr(tokens, settings.params["changed"]).mul_(-1)
    constant_N = ratio_N.detach()
    return Corrected(ratio_N, constant_N, constant_N, constant_N)


@pytest.mark.parametrize("changed", ["theta_N", "old_N", "advantage_N", "lag_N"])
def test_a_function_that_changes_what_the_loss_reads_is_named(changed: str) -> None:
    kind = f"{__name__}:spoils"
    settings = CorrectionConfig(kind=kind, params={"changed": changed})
    theta_N = torch.zeros(40, requires_grad=True) * 1
    tokens = ActionTokens(theta_N, *[torch.zeros(40) for _ in range(8)])
    said = rf"^correction\.kind: {kind} changed its input {changed} in place"
    with pytest.raises(TrainingError, match=said):
        corrected_tokens(tokens, settings)


def weights_of_a_step(tokens: StepTokens, settings: CorrectionConfig) -> Any:
    """Prepare what `settings.params` say."""
    old_N, anchor_N = tokens.old_N, tokens.anchor_N
    match settings.params["prepares"]:
        case "short":
            return np.ones(len(old_N) - 1)
        case "long":
            return np.ones(len(old_N) + 1)
        case "single":
            return 0.5
        case "nothing":
            return None
        case "words":
            return ["one"] * len(old_N)
        case "changes":
            tokens.advantage_N[:] = 1.0
            tokens.lag_N[:] = 7
            torch.from_numpy(anchor_N).sub_(torch.from_numpy(old_N)).exp_()
            return anchor_N * tokens.advantage_N
        case "gradient":
            return torch.ones(len(old_N), requires_grad=True)
        case "raises":
            raise KeyError("sigma")
    return torch.from_numpy(np.full(len(old_N), 0.5))


@correction(prepare=weights_of_a_step)
def prepares(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """Correction by what was prepared."""
    ratio_N = (tokens.theta_N - tokens.anchor_N).exp()
    w_N = ratio_N.detach()
    return Corrected(ratio_N, tokens.prepared_N, w_N, w_N)


def prepared_by(prepares: str) -> Array:
    settings = CorrectionConfig(kind=f"{__name__}:prepares", params={"prepares": prepares})
    return prepared(settings, step_of(*(np.zeros(40, np.float32) for _ in range(3))))


@pytest.mark.parametrize(
    ("prepares", "said"),
    [
        ("short", r"shape \(39,\), not shape \(40,\): one number a token"),
        ("long", r"shape \(41,\), not"),
        ("single", r"shape \(\), not"),
        ("nothing", r"shape \(\), not"),
        ("gradient", r"Tensor \(Can't call numpy.*\), not"),
        ("words", r"list \(could not convert string to float.*\), not"),
    ],
)
def test_a_step_that_is_prepared_otherwise_than_a_number_a_token_is_named(
    prepares: str, said: str
) -> None:
    named = rf"^correction\.kind: prepare of {__name__}:prepares returned {said}"
    with pytest.raises(TrainingError, match=named):
        prepared_by(prepares)
    assert (prepared_by("") == np.full(40, 0.5, np.float32)).all()


@pytest.mark.filterwarnings("error")
def test_a_step_that_is_prepared_in_place_stays_as_it_is() -> None:
    """Through torch.from_numpy too, which writes to read-only arrays."""
    settings = CorrectionConfig(kind=f"{__name__}:prepares", params={"prepares": "changes"})
    tokens = step_of(*(np.full(40, value, np.float32) for value in (-1.0, -1.0, 5.0)))
    assert (prepared(settings, tokens) == 1.0).all()
    left = tokens.old_N, tokens.anchor_N, tokens.advantage_N, tokens.lag_N
    assert [set(array_N) for array_N in left] == [{-1.0}, {-1.0}, {5.0}, {0}]


def test_an_exception_while_a_step_is_prepared_is_followed_by_its_key() -> None:
    with pytest.raises(KeyError) as caught:
        prepared_by("raises")
    note = f"correction.kind: prepare of {__name__}:prepares raised KeyError"
    assert caught.value.__notes__[0].startswith(note)
