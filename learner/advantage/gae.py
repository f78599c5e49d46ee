"""Advantages of single tokens from a critic's values: GAE, bi-level GAE, V-trace. Pure.

Token t+1 is the trajectory's next ACTION token, whatever was observed, and in whatever context.
Everything is float64. Formulas: docs/algorithms.md, Advantages.
"""

from dataclasses import dataclass

import numpy as np

from evolver_async.schema import Array

EPSILON = 1e-6


@dataclass(frozen=True)
class Tokens:
    """N ACTION tokens of P trajectories, one after another in the order they were written.

    reward_N; value_N (V, read where the token is predicted); turn_N int64 (its turn among those of
    all trajectories, never falling); start_P int64[P+1] (the tokens of trajectory p are
    start_P[p]:start_P[p+1]); after_P (V behind the last token: 0 where the episode had ended).
    """

    reward_N: Array
    value_N: Array
    turn_N: Array
    start_P: Array
    after_P: Array


@dataclass(frozen=True)
class Estimate:
    """Advantages before whitening, and `return_N`, the targets of the critic."""

    advantage_N: Array
    return_N: Array


def gae(tokens: Tokens, *, gamma: float, lam: float) -> Estimate:
    """Return A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t; the return is A + V."""
    next_N = following(tokens.value_N, tokens.after_P, tokens.start_P)
    delta_N = tokens.reward_N + gamma * next_N - tokens.value_N
    advantage_N = backwards(delta_N, np.full_like(delta_N, gamma * lam), tokens.start_P)
    return Estimate(advantage_N, advantage_N + tokens.value_N)


def gae_bilevel(tokens: Tokens, *, gamma: float, lam: float, gamma_turn: float) -> Estimate:
    """Apply GAE over turns, then within each turn towards its turn-level return.

    With V_k of turn k's last token and γ' = gamma_turn: A_k = Σ_{j>=k} (γ'λ)^{j-k} δ_j,
    δ_j = R_j + γ' V_{j+1} - V_j, G_k = A_k + V_k. Token GAE inside of turn k has the reward G_k at
    its last token and V = 0 behind it.
    """
    if not len(tokens.value_N):
        return Estimate(tokens.value_N, tokens.value_N)
    begin_K = np.flatnonzero(np.diff(tokens.turn_N, prepend=-1))  # of the turns that have tokens
    end_K = np.append(begin_K[1:], len(tokens.turn_N)) - 1
    turns = Tokens(
        reward_N=np.add.reduceat(tokens.reward_N, begin_K),
        value_N=tokens.value_N[end_K],
        turn_N=np.arange(len(begin_K)),
        start_P=np.searchsorted(begin_K, tokens.start_P),
        after_P=tokens.after_P,
    )
    reward_N = np.zeros_like(tokens.reward_N)
    reward_N[end_K] = gae(turns, gamma=gamma_turn, lam=lam).return_N
    inside = Tokens(
        reward_N=reward_N,
        value_N=tokens.value_N,
        turn_N=tokens.turn_N,
        start_P=np.append(begin_K, len(tokens.turn_N)),
        after_P=np.zeros(len(begin_K)),
    )
    return gae(inside, gamma=gamma, lam=lam)


def vtrace(
    tokens: Tokens, w_N: Array, *, gamma: float, lam: float, rho_max: float, c_max: float
) -> Estimate:
    """Compute V-trace (IMPALA): returns vs and advantages ρ_t (r_t + γ vs_{t+1} - V_t).

    ρ_t = min(rho_max, w_t), c_t = λ min(c_max, w_t), vs_t = V_t + ρ_t δ_t + γ c_t (vs_{t+1} -
    V_{t+1}). w_N: the token's probability under the present policy over the one that it
    was sampled with.
    """
    rho_N, c_N = np.minimum(rho_max, w_N), lam * np.minimum(c_max, w_N)
    next_N = following(tokens.value_N, tokens.after_P, tokens.start_P)
    delta_N = tokens.reward_N + gamma * next_N - tokens.value_N
    vs_N = tokens.value_N + backwards(rho_N * delta_N, gamma * c_N, tokens.start_P)
    vs_next_N = following(vs_N, tokens.after_P, tokens.start_P)
    return Estimate(rho_N * (tokens.reward_N + gamma * vs_next_N - tokens.value_N), vs_N)


def whitened(advantage_N: Array) -> Array:
    """Return (A - mean) / (std + 1e-6) over all tokens; 0 if they are all the same."""
    if not len(advantage_N) or np.ptp(advantage_N) == 0:
        return np.zeros_like(advantage_N)
    return (advantage_N - advantage_N.mean()) / (advantage_N.std() + EPSILON)


def place_rewards(
    turn_reward_U: Array, turn_N: Array, start_P: Array, turn_start_P: Array
) -> Array:
    """Place every turn's reward at its last token: reward_N.

    A turn without tokens gives its reward to the token before it, else to the trajectory's first;
    the rewards of a trajectory without tokens are dropped. turn_N, start_P: as in `Tokens`;
    the turns of trajectory p are turn_start_P[p]:turn_start_P[p+1] of turn_reward_U. Tokens of the
    turns 0, 0, 2 and the turns' rewards .1, .2, 1 give 0, .3, 1.
    """
    trajectory_U = np.repeat(np.arange(len(start_P) - 1), np.diff(turn_start_P))
    last_U = np.searchsorted(turn_N, np.arange(len(turn_reward_U)), side="right") - 1
    place_U = np.maximum(last_U, start_P[trajectory_U])
    has_U = np.diff(start_P)[trajectory_U] > 0
    return np.bincount(place_U[has_U], weights=turn_reward_U[has_U], minlength=len(turn_N))


def following(x_N: Array, after_S: Array, start_S: Array) -> Array:
    """Return x_{t+1} within each segment start_S[s]:start_S[s+1], after_S[s] at its end."""
    next_N = np.append(x_N[1:], 0.0)[: len(x_N)]
    has_S = np.diff(start_S) > 0
    next_N[start_S[1:][has_S] - 1] = after_S[has_S]
    return next_N


def backwards(step_N: Array, factor_N: Array, start_S: Array) -> Array:
    """Return x_t = step_t + factor_t x_{t+1} within each segment, 0 behind its end."""
    lengths_S = np.diff(start_S)
    present_ST = np.arange(lengths_S.max(initial=0)) < lengths_S[:, None]
    step_ST, factor_ST = np.zeros(present_ST.shape), np.zeros(present_ST.shape)
    step_ST[present_ST], factor_ST[present_ST] = step_N, factor_N
    x_S = np.zeros(len(lengths_S))
    for t in reversed(range(present_ST.shape[1])):
        x_S = step_ST[:, t] + factor_ST[:, t] * x_S
        step_ST[:, t] = x_S
    return step_ST[present_ST]
