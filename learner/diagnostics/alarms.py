"""Collapse warnings: departures of a step from the earlier steps of its stage. Pure.

    reward_spread      the members of a group are rewarded ever more alike (RAGEN's echo trap, where
                       the spread falls off a cliff tens of steps before the mean reward does)
    zero_variance      hardly any group has two different rewards, so hardly any teaches anything
    entropy_low        the policy hardly chooses any more
    entropy_high       the policy falls apart
    input_dependence   the first turn says less and less about the prompt it answers (RAGEN-2's
                       template collapse, which entropy does not see)
    grad_norm          gradients far larger than before, which come with a collapse or bring it on
    format_errors      many more turns than before cannot be parsed
    judge              the judge labels turns with known labels wrong
    judge_praise       the judge labels turns GOOD because they praise themselves

Each signal has a `Track` within the stage. A step is suspicious where it lies beyond the bound that
the track gave before it; suspicious steps do not enter the track, so that a collapse is not judged
by itself. After `patience` of them in a row the alarm fires until a step is not suspicious. The
format is lost within steps, and a policy learns within steps to please a judge, so these alarms
have a warm-up and a patience of their own.

Where a task is solved, rewards grow alike and actions certain as they should: the alarms about that
are silent while `solved` or more of the episodes succeed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evolver_async.config import SafetyConfig
from evolver_async.schema import Array, Group, Role, Trajectory
from learner.data.selection import reward_spread
from learner.state import Track, Watched

RATE = 0.05  # of a step in a running mean, once there are 20 of them
STEADY = 0.1  # least standard deviation of log gradient norms in a z-score
TELLING = 0.05  # input dependence at most this large raises no alarm


@dataclass(frozen=True)
class Rule:
    """Condition of a suspicious step.

    `narrowing`: it does not apply if the task is solved. `quick`: it has `format_warmup` and
    `format_patience`.
    """

    name: str
    signal: str
    bound: Callable[[Track, SafetyConfig], float]
    says: str
    above: bool = False
    narrowing: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Alarm:
    """Alarm that fires: `value` of its rule's signal is beyond `bound`, for `steps` in a row.

    `begins`: it did not fire at the step before.
    """

    rule: Rule
    value: float
    bound: float
    steps: int
    begins: bool

    @property
    def name(self) -> str:
        return self.rule.name

    def __str__(self) -> str:
        side = "above" if self.rule.above else "below"
        return (
            f"{self.name}: {self.rule.says} ({self.rule.signal} {self.value:.3g} is {side}"
            f" {self.bound:.3g}, for {self.steps} steps)"
        )


RULES = (
    Rule(
        name="reward_spread",
        signal="reward_spread",
        narrowing=True,
        bound=lambda track, safety: safety.spread_share * track.peak,
        says="the members of a group are rewarded ever more alike",
    ),
    Rule(
        name="zero_variance",
        signal="zero_groups",
        above=True,
        narrowing=True,
        bound=lambda _, safety: safety.zero_groups,
        says="hardly any group has two different rewards",
    ),
    Rule(
        name="entropy_low",
        signal="entropy",
        narrowing=True,
        bound=lambda track, safety: max(safety.entropy_floor, safety.entropy_share * track.first),
        says="the policy hardly chooses any more",
    ),
    Rule(
        name="entropy_high",
        signal="entropy",
        above=True,
        bound=lambda track, safety: safety.entropy_rise * track.first,
        says="the policy falls apart",
    ),
    Rule(
        name="input_dependence",
        signal="input_dependence",
        narrowing=True,
        bound=lambda track, safety: (
            safety.dependence_share * track.peak if track.peak > TELLING else -math.inf
        ),
        says="the actions depend less and less on the prompt",
    ),
    Rule(
        name="grad_norm",
        signal="grad_z",
        above=True,
        bound=lambda _, safety: safety.grad_z,
        says="the gradients are far larger than before",
    ),
    Rule(
        name="format_errors",
        signal="format_errors",
        above=True,
        bound=lambda track, safety: track.least + safety.format_rise,
        says="many more turns than before cannot be parsed",
        quick=True,
    ),
    Rule(
        name="judge",
        signal="judge_agreement",
        bound=lambda _, safety: safety.judge_agreement,
        says="the judge labels turns with known labels wrong",
        quick=True,
    ),
    Rule(
        name="judge_praise",
        signal="judge_praise",
        above=True,
        bound=lambda _, safety: safety.judge_praise,
        says="the judge labels turns GOOD because they praise themselves",
        quick=True,
    ),
)
QUICK = {rule.signal for rule in RULES if rule.quick}


def judge(
    watched: Watched, signals: dict[str, float], success: float, safety: SafetyConfig
) -> tuple[dict[str, float], list[Alarm]]:
    """Return the metrics of a step and the alarms that fire; update `watched`.

    `signals`: those of `group_signals`, `entropy`, `log_grad_norm`, `format_errors`,
    `judge_agreement` and `judge_praise`; one that could not be measured is missing and changes
    nothing. `grad_z` follows from the log gradient norm.
    """
    values = dict(signals)
    if "log_grad_norm" in values:
        track = watched.tracks.get("log_grad_norm", Track())
        values["grad_z"] = _z_score(track, values.pop("log_grad_norm"))
    metrics = {f"safety/{name}": value for name, value in values.items()}
    alarms = []
    strange = set()
    warmups = {True: safety.format_warmup, False: safety.warmup}  # by `quick`
    for rule in RULES:
        patience = safety.format_patience if rule.quick else safety.patience
        if rule.signal in values:
            tracked = "log_grad_norm" if rule.signal == "grad_z" else rule.signal
            track = watched.tracks.setdefault(tracked, Track())
            value, bound = values[rule.signal], rule.bound(track, safety)
            beyond = value > bound if rule.above else value < bound
            warm = track.steps >= warmups[rule.quick]
            if warm and beyond and not (rule.narrowing and success >= safety.solved):
                watched.suspicious[rule.name] = watched.suspicious.get(rule.name, 0) + 1
                strange.add(tracked)
            else:
                watched.suspicious[rule.name] = 0
            if (steps := watched.suspicious[rule.name]) >= patience:
                alarms.append(Alarm(rule, value, bound, steps, begins=steps == patience))
        fires = watched.suspicious.get(rule.name, 0) >= patience
        metrics[f"alarm/{rule.name}"] = float(fires)
    for name in signals.keys() - strange:
        _follow(watched.tracks.setdefault(name, Track()), signals[name], warmups[name in QUICK])
    return metrics, alarms


def _follow(track: Track, value: float, warmup: int) -> None:
    """Add a step: plain means of the first 20, exponentially weighted ones after them."""
    track.steps += 1
    rate = max(1 / track.steps, RATE)
    away = value - track.mean
    track.mean += rate * away
    track.variance = (1 - rate) * (track.variance + rate * away**2)
    if track.steps == warmup:
        track.first = track.peak = track.least = track.mean
    elif track.steps > warmup:
        track.peak = max(track.peak, track.mean)
        track.least = min(track.least, track.mean)


def _z_score(track: Track, value: float) -> float:
    """Return the standard deviations above the mean of earlier steps; 0 for the first two."""
    if track.steps < 2:
        return 0.0
    return (value - track.mean) / max(STEADY, math.sqrt(track.variance))


def group_signals(groups: list[Group]) -> dict[str, float]:
    """Return signals of the groups before selection; only those with several members count.

    reward_spread: mean over groups of the population std of the rewards. zero_groups: share of
    groups in which it is 0. input_dependence: see there.
    """
    several = [group for group in groups if len(group.trajectories) > 1]
    if not several:
        return {}
    spreads = np.array([reward_spread(group) for group in several])
    signals = {"reward_spread": float(spreads.mean()), "zero_groups": float((spreads == 0).mean())}
    turns = [[x for x in map(_first_turn, group.trajectories) if len(x)] for group in several]
    turns = [group for group in turns if len(group) > 1]
    if len(turns) > 1:
        signals["input_dependence"] = input_dependence(turns)
    return signals


def input_dependence(turns: list[list[Array]]) -> float:
    """Return the share of first turns' variation that lies between prompts, about 0 to 1.

    `turns`: by group (at least two, each of one prompt), by member (at least two), the tokens that
    it wrote. With h_i the histogram of member i's tokens, as shares,

        same  = mean of h_i·h_j over pairs of members of one group, averaged over groups
        cross = mean of m_x·m_y over pairs of groups, m_x the mean histogram of group x
        own   = mean of h_i·h_i, averaged over groups
        dependence = (same - cross) / (own - cross)

    the intraclass correlation (Fisher) of token histograms; the terms are unbiased, because no pair
    holds the same member twice. It stands for the mutual information of prompt and action; RAGEN-2
    scores actions under each other's prompts: that takes forward passes, and a plug-in
    estimate out of a group's few members would be mostly bias. 0: members of a group resemble each
    other no more than those of others, or everybody writes the same; 1: the prompt decides all.
    """
    members_G = np.array([len(group) for group in turns])
    group_M = np.repeat(np.arange(len(turns)), members_G)
    lengths_M = np.array([len(tokens) for group in turns for tokens in group])
    vocabulary, flat = np.unique(
        np.concatenate([tokens for group in turns for tokens in group]), return_inverse=True
    )
    kinds = len(vocabulary)
    pairs, counts = np.unique(  # (member, token), so that no array is members times tokens
        np.repeat(np.arange(len(group_M)), lengths_M) * kinds + flat, return_counts=True
    )
    member, kind = np.divmod(pairs, kinds)
    shares = counts / lengths_M[member]
    own_G = np.bincount(group_M[member], weights=shares**2, minlength=len(turns))
    sums_GV = np.bincount(
        group_M[member] * kinds + kind, weights=shares, minlength=len(turns) * kinds
    ).reshape(len(turns), kinds)
    same = ((sums_GV**2).sum(1) - own_G) / (members_G * (members_G - 1))
    own = own_G / members_G
    means_GV = sums_GV / members_G[:, None]
    groups = len(turns)
    squares = (means_GV**2).sum()
    cross = float((means_GV.sum(0) ** 2).sum() - squares) / (groups * (groups - 1))
    varies = float(np.mean(own)) - cross
    return (float(np.mean(same)) - cross) / varies if varies > 1e-9 else 0.0


def _first_turn(trajectory: Trajectory) -> Array:
    """Return the ACTION tokens of the first turn."""
    sequence = trajectory.sequences[0]
    return sequence.tokens[(sequence.roles == Role.ACTION) & (sequence.turns == 0)]
