"""A slow reference for every built-in selection, advantage and correction.

In loops, and in the notation of docs/algorithms.md. `tests/learner/test_kinds.py` demands one for
each kind.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slow_gae import slow_gae

from evolver_async.config import AdvantageConfig, CorrectionConfig, SelectionConfig
from evolver_async.config.values import kinds as declared

# Selections: the spreads of a step's groups → the indices of those that train.


def taken(
    spreads: list[float], drops_zero: bool, ends: Callable[[set[int], float, float], bool]
) -> set[int]:
    """Group by group, largest spread first, until the rule is fulfilled.

    `ends`: of the groups that are taken, the sum of their spreads and the next spread.
    """
    kept, total = set[int](), 0.0
    for i, spread in sorted(enumerate(spreads), key=lambda pair: -pair[1]):
        if ends(kept, total, spread) or (spread == 0 and drops_zero):
            break
        kept.add(i)
        total += spread
    return kept


def spread(spreads: list[float], c: SelectionConfig) -> set[int]:
    most = max(1, round(c.keep * len(spreads)))
    return taken(spreads, c.drop_zero, lambda kept, total, next_: len(kept) == most)


def top_p(spreads: list[float], c: SelectionConfig) -> set[int]:
    enough = c.p * sum(spreads) - 1e-6
    return taken(spreads, True, lambda kept, total, next_: total >= enough)


def top_k(spreads: list[float], c: SelectionConfig) -> set[int]:
    return taken(spreads, c.drop_zero, lambda kept, total, next_: len(kept) == c.k)


def min_p(spreads: list[float], c: SelectionConfig) -> set[int]:
    least = c.p * max(spreads) - 1e-6
    return taken(spreads, c.drop_zero, lambda kept, total, next_: next_ < least)


def with_spread(spreads: list[float], c: SelectionConfig) -> set[int]:
    return {i for i, one in enumerate(spreads) if one > 0}


SELECTIONS: dict[str, Callable[[list[float], SelectionConfig], set[int]]] = {
    "all": lambda spreads, c: set(range(len(spreads))),
    "spread": spread,
    "top_p": top_p,
    "top_k": top_k,
    "min_p": min_p,
    "resample_on_correct": with_spread,
    "dynamic": with_spread,
}

# Advantages without a critic: groups of members → the advantages of all turns.

Turn = tuple[float, int]  # its reward and its label
Groups = list[list[tuple[float, list[Turn]]]]  # a member: its outcome and its turns


@dataclass
class Seen:
    """Numbers of a step, and of its trajectories one after the other."""

    alpha: float
    baseline: float
    log_weights: list[float]
    lengths: list[int]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def scaled(x: float, group: list[float], batch: list[float], kind: str) -> float:
    if len(set(group)) == 1:
        return 0.0
    scale = {"group": std(group), "batch": std(batch), "none": 1.0}[kind]
    return x / (scale + (1e-6 if kind != "none" else 0.0))


def z(x: float, group: list[float], batch: list[float], kind: str) -> float:
    return scaled(x - mean(group), group, batch, kind)


def outcomes(groups: Groups) -> list[float]:
    return [R for group in groups for R, _ in group]


def grpo(groups: Groups, seen: Seen, c: AdvantageConfig) -> list[float]:
    everything, expected = outcomes(groups), []
    for group in groups:
        R = outcomes([group])
        expected += [z(R_i, R, everything, c.std) for R_i, turns in group for _ in turns]
    return expected


def grpo_process(groups: Groups, seen: Seen, c: AdvantageConfig) -> list[float]:
    everything = [r for group in groups for _, turns in group for r, _ in turns]
    expected = []
    for group in groups:
        r_group = [r for _, turns in group for r, _ in turns]
        for _, turns in group:
            z_i = [z(r, r_group, everything, c.std) for r, _ in turns]
            expected += [sum(z_i[k:]) for k in range(len(turns))]
    return expected


def falls_back(group: list[tuple[float, list[Turn]]]) -> bool:
    """True if a member has turns and no label: a group like this is that of grpo."""
    return any(turns and not any(label for _, label in turns) for _, turns in group)


def adca(groups: Groups, seen: Seen, c: AdvantageConfig) -> list[float]:
    everything, expected = outcomes(groups), []
    for group in groups:
        judged = [[label for _, label in turns if label] for _, turns in group if turns]
        labelled = bool(judged) and not falls_back(group)
        if labelled:
            mu = mean([mean(l_i) for l_i in judged])
            v = mean([mean([(l_ik - mu) ** 2 for l_ik in l_i]) for l_i in judged])
        for R_i, turns in group:
            rho_i, K = z(R_i, outcomes([group]), everything, c.std), len(turns)
            c_i = [0.0] * K
            for k, (_, l_ik) in enumerate(turns):
                if l_ik and labelled and math.sqrt(v) >= 1e-6:
                    c_i[k] = seen.alpha * (l_ik - mu) / math.sqrt(v)
            scale = 1 / math.sqrt(K) if c.length == "sqrt" and K and labelled else 1.0
            expected += [scale * (rho_i + sum(c_i[k:])) for k in range(K)]
    return expected


def rloo(groups: Groups, seen: Seen, c: AdvantageConfig) -> list[float]:
    expected = []
    for group in groups:
        R = outcomes([group])
        for i, (R_i, turns) in enumerate(group):
            others = [R_j for j, R_j in enumerate(R) if j != i]
            A_i = R_i - mean(others) if others else 0.0
            expected += [A_i for _ in turns]
    return expected


def reinforce(groups: Groups, seen: Seen, c: AdvantageConfig) -> list[float]:
    return [R_i - seen.baseline for group in groups for R_i, turns in group for _ in turns]


def reward_to_go(groups: Groups, seen: Seen, c: AdvantageConfig) -> list[float]:
    expected = []
    for R_i, turns in (one for group in groups for one in group):
        r = [r for r, _ in turns]
        r[-1:] = [r_K + R_i - sum(r) for r_K in r[-1:]]
        for k in range(len(r)):
            G_k = sum(c.gamma_turn ** (j - k) * r[j] for j in range(k, len(r)))
            expected.append(G_k - seen.baseline)
    return expected


def opob(groups: Groups, seen: Seen, c: AdvantageConfig) -> list[float]:
    everything, expected, first = outcomes(groups), [], 0
    for group in groups:
        R, rows = outcomes([group]), range(first, first + len(group))
        v = [math.exp(2 * seen.log_weights[i]) * max(seen.lengths[i], 1) for i in rows]
        b = sum(v_i * R_i for v_i, R_i in zip(v, R, strict=True)) / sum(v)
        for R_i, turns in group:
            expected += [scaled(R_i - b, R, everything, c.std) for _ in turns]
        first += len(group)
    return expected


# Advantages with a critic: a trajectory → advantages and returns of its tokens.


@dataclass
class Episode:
    """Turns of (reward, value, w) by token, and V behind the last token (0: it had ended)."""

    turns: list[list[tuple[float, float, float]]]
    after: float

    @property
    def tokens(self) -> list[tuple[float, float, float]]:
        return [token for turn in self.turns for token in turn]


Estimated = tuple[list[float], list[float]]


def gae(episode: Episode, c: AdvantageConfig) -> Estimated:
    r, V = ([token[i] for token in episode.tokens] for i in range(2))
    A = slow_gae(r, V, episode.after, c.gamma, c.lam)
    return A, [a + v for a, v in zip(A, V, strict=True)]


def gae_bilevel(episode: Episode, c: AdvantageConfig) -> Estimated:
    R = [sum(r for r, _, _ in turn) for turn in episode.turns]
    V = [turn[-1][1] for turn in episode.turns]
    A = slow_gae(R, V, episode.after, c.gamma_turn, c.lam)
    advantages, returns = list[float](), list[float]()
    for k, turn in enumerate(episode.turns):
        rewards, values = [0.0] * (len(turn) - 1) + [A[k] + V[k]], [v for _, v, _ in turn]
        inside = slow_gae(rewards, values, 0.0, c.gamma, c.lam)
        advantages += inside
        returns += [a + v for a, v in zip(inside, values, strict=True)]
    return advantages, returns


def vtrace(episode: Episode, c: AdvantageConfig) -> Estimated:
    """vs_t = V_t + Σ_{j>=t} γ^{j-t} (Π_{i<j} c_i) ρ_j δ_j, as the paper has it."""
    r, V, w = ([one[i] for one in episode.tokens] for i in range(3))
    V = [*V, episode.after]
    rho, cut = [min(c.rho_max, x) for x in w], [c.lam * min(c.c_max, x) for x in w]
    n = len(r)
    vs = []
    for t in range(n):
        total, passed = V[t], 1.0
        for j in range(t, n):
            total += c.gamma ** (j - t) * passed * rho[j] * (r[j] + c.gamma * V[j + 1] - V[j])
            passed *= cut[j]
        vs.append(total)
    vs.append(episode.after)
    return [rho[t] * (r[t] + c.gamma * vs[t + 1] - V[t]) for t in range(n)], vs[:n]


WITHOUT_CRITIC: dict[str, Callable[[Groups, Seen, AdvantageConfig], list[float]]] = {
    "grpo": grpo,
    "grpo_process": grpo_process,
    "adca": adca,
    "rloo": rloo,
    "reinforce": reinforce,
    "reward_to_go": reward_to_go,
    "opob": opob,
}
WITH_CRITIC: dict[str, Callable[[Episode, AdvantageConfig], Estimated]] = {
    "gae": gae,
    "gae_bilevel": gae_bilevel,
    "vtrace": vtrace,
}

# Corrections: a token of a step → its objective and the derivative by its theta.

KINDS: list[tuple[str, Any]] = [  # of corrections, with their levels
    (kind, level)
    for kind, facts in declared.CORRECTIONS.items()
    for level in (("token", "trajectory") if "level" in facts.reads else (facts.level,))
]
UNCLIPPED = [kind for kind, facts in declared.CORRECTIONS.items() if not facts.clips]
LOW, HIGH, DUAL = 0.2, 0.28, 3.0  # of the clipped loss


def L(x: float, A: float, high: float) -> float:
    value = min(x * A, min(max(x, 1 - LOW), 1 + high) * A)
    return max(value, DUAL * A) if A < 0 else value


@dataclass
class Token:
    """Token t of a step, of whose tokens these are the numbers; letters as in the table."""

    t: int
    advantages: list[float]
    theta: list[float]
    mu: list[float]
    anchor: list[float]
    member: list[int]
    high: float = HIGH

    def __post_init__(self) -> None:
        theta, mu, anchor, t = self.theta, self.mu, self.anchor, self.t
        own = [u for u in range(len(theta)) if self.member[u] == self.member[t]]
        self.A = self.advantages[t]
        self.r, self.q = math.exp(theta[t] - anchor[t]), math.exp(theta[t] - mu[t])
        self.w = math.exp(anchor[t] - mu[t])
        self.W = math.prod(math.exp(anchor[u] - mu[u]) for u in own)
        self.Q = math.prod(math.exp(theta[u] - mu[u]) for u in own)
        self.geo = self.W ** (1 / len(own))
        self.s = math.exp(sum(theta[u] - anchor[u] for u in own) / len(own))
        self.change = math.exp(theta[t]) - math.exp(mu[t])

    def of_L(self, weight: float, x: float) -> tuple[float, float]:
        A = self.A
        free = (A > 0 and x <= 1 + self.high) or (A < 0 and 1 - LOW <= x <= DUAL)
        return weight * L(x, A, self.high), weight * x * A if free else 0.0

    def of_theta(self, weight: float) -> tuple[float, float]:
        return weight * self.A * self.theta[self.t], weight * self.A

    def kept(self, limit: float) -> bool:
        """M2PO trains the token: outliers leave one by one until the mean is small enough."""
        A, mu, anchor = self.advantages, self.mu, self.anchor
        moment = {t: (anchor[t] - mu[t]) ** 2 for t in range(len(mu))}
        held = [t for t in moment if (anchor[t] - mu[t]) * A[t] > 0]
        if self.t not in held:
            return True
        while held and sum(moment[t] for t in held) / len(held) > limit:
            held.remove(max(held, key=lambda t: moment[t]))
        return self.t in held


def by_level(c: CorrectionConfig, token: float, trajectory: float) -> float:
    return trajectory if c.level == "trajectory" else token


CORRECTIONS: dict[str, Callable[[Token, CorrectionConfig], tuple[float, float]]] = {
    "none": lambda x, c: x.of_L(1, x.r),
    "ppo": lambda x, c: x.of_L(1, x.q),
    "decoupled": lambda x, c: x.of_L(min(by_level(c, x.w, x.W), c.w_max), x.r),
    "icepop": lambda x, c: x.of_L((c.low <= x.w <= c.high) * x.w, x.r),
    "geo_mask": lambda x, c: x.of_L(c.low <= x.geo <= c.high, x.r),
    "gspo": lambda x, c: x.of_L(min(x.geo, c.w_max), x.s),
    "cispo": lambda x, c: x.of_theta(min(x.q, 1 + c.epsilon)),
    "topr": lambda x, c: x.of_theta(1 if x.A > 0 else min(by_level(c, x.q, x.Q), 1)),
    "vcpo": lambda x, c: x.of_theta(min(x.Q, c.w_max)),
    "m2po": lambda x, c: x.of_theta(x.kept(c.second_moment) * min(x.q, c.w_max)),
    "dppo_tv": lambda x, c: x.of_theta(
        not (x.change * x.A > 0 and abs(x.change) > c.divergence) and min(x.q, c.w_max)
    ),
}
ORACLES = {
    "selection": SELECTIONS,
    "advantage": WITHOUT_CRITIC | WITH_CRITIC,
    "correction": CORRECTIONS,
}
