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
    guidance           members with experience in their prompt succeed less often than the others of
                       their groups
    judge              the judge labels turns with known labels wrong
    judge_praise       the judge labels turns GOOD because they praise themselves
    weights            an engine samples with other weights than those that it was sent

Each signal has a `Track` within the stage. A step is suspicious where it lies beyond the bound that
the track gave before it; suspicious steps do not enter the track, so that a collapse is not judged
by itself. After `patience` of them in a row the alarm fires until a step is not suspicious. The
format is lost within steps, and a policy learns within steps to please a judge, so these alarms
have a warm-up and a patience of their own. The gain of guidance is compared with 0 instead of the
past, so its track takes in suspicious steps as well. Weights that did not arrive are no matter of
degree: that alarm has neither warm-up nor patience.

Where a task is solved, rewards grow alike and actions certain as they should: the alarms about that
are silent while `solved` or more of the episodes succeed. The judge's rates are those of its audit
over the last steps, from totals that the actors report.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from evolver_async.config import SafetyConfig
from learner.state import Track, Watched

RATE = 0.05  # of a step in a running mean, once there are 20 of them
STEADY = 0.1  # least standard deviation of log gradient norms in a z-score
STEADY_GAIN = 0.05  # least standard deviation of gains in a z-score
RECENT = 2 / RATE - 1  # steps: effective size of the sample in a running mean of rate RATE
WINDOW = 5  # steps, of the judge's audit
LEAST = 6  # turns in the window; a rate of fewer is not measured
TOTALS = (  # that actors report, counted in `actors/judge/audit.py`
    *("known", "known_right", "praised", "praised_good", "unpraised_good"),
    *("longer", "longer_good", "shorter", "shorter_good"),
)
TELLING = 0.05  # input dependence at most this large raises no alarm


@dataclass(frozen=True)
class Rule:
    """Condition of a suspicious step.

    `narrowing`: it does not apply if the task is solved. `quick`: it has `format_warmup` and
    `format_patience`. `absolute`: it does not compare with the past, so that suspicious steps enter
    its track as well. `certain`: it has neither warm-up nor patience.
    """

    name: str
    signal: str
    bound: Callable[[Track, SafetyConfig], float]
    says: str
    above: bool = False
    narrowing: bool = False
    quick: bool = False
    absolute: bool = False
    certain: bool = False


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
        name="guidance",
        signal="guided_z",
        bound=lambda _, safety: -safety.guided_z,
        says="members with experience succeed less often than the others of their groups",
        absolute=True,
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
    Rule(
        name="weights",
        signal="weights_not_arrived",
        above=True,
        bound=lambda _track, _safety: 0.0,
        says="an engine samples with other weights than those that it was sent",
        certain=True,
    ),
)
QUICK = {rule.signal for rule in RULES if rule.quick}
TRACKED = {"grad_z": "log_grad_norm", "guided_z": "guided_gain"}  # by the signal that follows


def judge(
    watched: Watched, signals: dict[str, float], success: float, safety: SafetyConfig
) -> tuple[dict[str, float], list[Alarm]]:
    """Return the metrics of a step and the alarms that fire; update `watched`.

    `signals`: those of `group_signals`, `entropy`, `log_grad_norm`, `format_errors`,
    `guided_gain`, `judge_agreement`, `judge_praise` and `weights_not_arrived`; one that could not
    be measured is missing and changes nothing. `grad_z` follows from the log gradient norm,
    `guided_z` from the gains of earlier steps.
    """
    values = dict(signals)
    if "log_grad_norm" in values:
        track = watched.tracks.get("log_grad_norm", Track())
        values["grad_z"] = _z_score(track, values.pop("log_grad_norm"))
    if "guided_gain" in values:
        del values["guided_gain"]
        values["guided_z"] = _mean_z(watched.tracks.get("guided_gain", Track()))
    metrics = {f"safety/{name}": value for name, value in values.items()}
    alarms = []
    strange = set()
    warmups = {True: safety.format_warmup, False: safety.warmup}  # by `quick`
    for rule in RULES:
        patience = safety.format_patience if rule.quick else safety.patience
        patience = 1 if rule.certain else patience
        if rule.signal in values:
            tracked = TRACKED.get(rule.signal, rule.signal)
            track = watched.tracks.setdefault(tracked, Track())
            value, bound = values[rule.signal], rule.bound(track, safety)
            beyond = value > bound if rule.above else value < bound
            warm = rule.certain or track.steps >= warmups[rule.quick]
            if warm and beyond and not (rule.narrowing and success >= safety.solved):
                watched.suspicious[rule.name] = watched.suspicious.get(rule.name, 0) + 1
                if not rule.absolute:
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


def _mean_z(track: Track) -> float:
    """Return the running mean of earlier steps in standard errors, 0 for the first two."""
    if track.steps < 2:
        return 0.0
    error = max(STEADY_GAIN, math.sqrt(track.variance)) / math.sqrt(min(track.steps, RECENT))
    return track.mean / error


def note(watched: Watched, counters: dict[str, float]) -> None:
    """Add the totals of a step to the windows; begin anew where they have fallen."""
    watched.not_arrived.append(counters.get("weights/not_arrived", 0.0))
    del watched.not_arrived[:-2]
    if "judge/known" not in counters:
        return
    totals = [counters.get(f"judge/{name}", 0.0) for name in TOTALS]
    window = watched.judge_totals
    if window and any(new < old for new, old in zip(totals, window[-1], strict=True)):
        window.clear()
    window.append(totals)
    del window[: -(WINDOW + 1)]


def forget_totals(watched: Watched) -> None:
    """Begin the windows anew: the totals before a restored checkpoint are older than its steps."""
    watched.not_arrived.clear()
    watched.judge_totals.clear()


def judge_rates(watched: Watched) -> dict[str, float]:
    """Return the rates of the judge's audit that at least `LEAST` turns give, by metric name.

    They are of the probes between the first and the last report of the window.
    """
    window = watched.judge_totals
    if len(window) < 2:
        return {}
    ends = zip(TOTALS, window[0], window[-1], strict=True)
    turns = {name: last - first for name, first, last in ends}
    rates = {}
    if turns["known"] >= LEAST:
        rates["judge/agreement"] = turns["known_right"] / turns["known"]
    if turns["praised"] >= LEAST:
        more = turns["praised_good"] - turns["unpraised_good"]
        rates["judge/praise_bias"] = more / turns["praised"]
    if min(turns["longer"], turns["shorter"]) >= LEAST:
        longer = turns["longer_good"] / turns["longer"]
        rates["judge/length_bias"] = longer - turns["shorter_good"] / turns["shorter"]
    return rates
