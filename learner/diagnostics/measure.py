"""Metrics and histograms of one step, made once, after its updates, from what it kept. Pure.

Names and meanings: docs/metrics.md. Those of the take alone are in `rollouts`; alarms, times and
totals of the actors join them in the row of the step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from evolver_async.config import Config
from evolver_async.metrics.histograms import Histogram, integers, linear, logarithmic
from evolver_async.schema import Array, Group
from learner.advantage.assign import Advantages, reliance
from learner.advantage.group_relative import unlabelled_groups
from learner.advantage.shaped_rewards import Rewards, overlong, penalises, reward_kl
from learner.data.batch import Batch, LogProbs, Values
from learner.data.players import NON_FINITE, TARGET_KL, TRUNCATED, fates
from learner.data.selection import Selected, resampling_metrics
from learner.diagnostics.rollouts import group_signals, taken_metrics
from learner.loss.accounting import OWN, Accounting, kl_of
from learner.loss.correction import facts_of
from learner.optimize.distillation import DISTILL_KL, DISTILL_TOKENS
from learner.optimize.teaching import TEACHER_KL, TEACHER_TOKENS
from learner.optimize.updates import Applied
from learner.ranks.layer_times import slowest

BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
BUCKET_ENDS = (0, 1, 2, 4, 8)  # the largest lag of every bucket but the last
QUANTILES = (0.05, 0.5, 0.95)
PER_OCTAVE = 4  # bins of a histogram from a weight or a ratio to its double
LENGTHS_PER_OCTAVE = 2


@dataclass(frozen=True)
class Credit:
    """Values of an rl step by which its tokens train.

    masked_P bool: trajectories without a gradient by `loss.mask_truncated`.
    """

    logprobs: LogProbs
    values: Values | None
    rewards: Rewards
    advantages: Advantages
    masked_P: Array


@dataclass(frozen=True)
class Trained:
    """One step of a stage of this kind: its groups, tensors and decisions.

    groups: those of the take; split: those of their players; chosen: those of `split` that train.
    batch, applied: None if none was chosen. credit: of an rl step.
    """

    kind: str
    groups: list[Group]
    split: list[Group]
    chosen: Selected
    batch: Batch | None = None
    applied: Applied | None = None
    credit: Credit | None = None

    def lost(self) -> dict[str, list[int]]:
        """Return the indices of the chosen groups that are in no applied update, by reason."""
        lost = {NON_FINITE: set[int](), TARGET_KL: set[int](), TRUNCATED: set[int]()}
        if self.batch is not None and self.credit is not None:
            unfit, masked_P = self.credit.advantages.left_out, self.credit.masked_P
            masked, others = (self.batch.group_P[of_P].tolist() for of_P in (masked_P, ~masked_P))
            lost[NON_FINITE] |= unfit
            lost[TRUNCATED] |= set(masked).difference(others) - unfit
        if self.applied is not None:
            cut = self.applied.beyond is not None and self.applied.failure is None
            lost[TARGET_KL if cut else NON_FINITE] |= self.applied.left_out
        return {why: sorted(indices) for why, indices in lost.items() if indices}

    def trained_groups(self) -> list[Group]:
        """Return the chosen groups that are in an applied update."""
        lost = {index for indices in self.lost().values() for index in indices}
        return [group for index, group in enumerate(self.chosen.groups) if index not in lost]


@dataclass(frozen=True)
class StepResult:
    """Fate of the groups of one take: ids that trained, and ids that did not, by reason.

    `updates`: optimizer updates that were applied; `tokens`: ACTION tokens in them. data: of an rl
    step that trained.
    """

    trained: list[int]
    filtered: dict[str, list[int]]
    updates: int
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    data: Trained | None = None

    @classmethod
    def of(cls, trained: Trained, stage: Config) -> "StepResult":
        """Sum up and measure a step of `stage`."""
        groups, applied = trained.chosen.groups, trained.applied
        lost = {why: [groups[i].group_id for i in found] for why, found in trained.lost().items()}
        kept = [group.group_id for group in trained.trained_groups()]
        return cls(
            *fates(kept, trained.chosen.filtered | lost),
            len(applied.updates) if applied is not None else 0,
            applied.tokens if applied is not None else 0,
            *measure(trained, stage),
            trained if trained.credit is not None else None,
        )

    def rates(self, seconds: float) -> dict[str, float]:
        """Return trained ACTION tokens and consumed groups per second of a step of `seconds`."""
        groups = len(self.trained) + sum(len(ids) for ids in self.filtered.values())
        return {
            "throughput/tokens_per_s": self.tokens / seconds,
            "throughput/groups_per_s": groups / seconds,
        }


def measure(trained: Trained, stage: Config) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Return the metrics and the histograms of a step, by name."""
    metrics = taken_metrics(stage, trained.groups, trained.split)
    if trained.kind == "rl":
        signals = group_signals(trained.split)
        metrics |= {f"safety/{name}": value for name, value in signals.items()}
    if (kept := trained.chosen.kept) is not None:
        metrics["selection/kept_share"] = len(kept) / len(trained.split)
        if "members" in stage.selection.facts.reads:
            metrics |= resampling_metrics([trained.split[i] for i in kept], trained.chosen.groups)
    batch, applied, credit = trained.batch, trained.applied, trained.credit
    if batch is None or applied is None:
        return metrics, {}
    trained_P = np.ones_like(batch.stripped_P)
    if credit is not None:
        trained_P = applied.trained_P(batch)
        metrics |= credit_metrics(batch, credit, stage)
    metrics |= update_metrics(
        applied, scaled=credit is not None and facts_of(stage.correction).scales_lr
    )
    if credit is not None:
        metrics |= token_metrics(applied.accounting) | trajectory_metrics(batch, trained_P)
    parts = ({one.part for one in group.trajectories} for group in trained.trained_groups())
    for name, count in Counter(name for names in parts for name in names if name).items():
        metrics[f"player/{name}/trained_groups"] = float(count)
    if applied.failure is not None:
        metrics["alarm/non_finite"] = 1.0
    return metrics, step_histograms(batch, trained_P, credit and applied.accounting)


def credit_metrics(batch: Batch, credit: Credit, stage: Config) -> dict[str, float]:
    """Measure penalties of rewards, advantages, values, labels and stripping of an rl step."""
    metrics: dict[str, float] = {}
    advantages, finite_N = credit.advantages, credit.advantages.finite_P[batch.trajectory_N]
    if stage.loss.mask_truncated:
        metrics["train/masked_truncated"] = float(credit.masked_P.mean())
    if penalises(stage.loss):
        kl_N = reward_kl(credit.logprobs, stage.loss)
        metrics["loss/kl"] = float(kl_N.mean()) if len(kl_N) else 0.0
    if limit := stage.advantage.overlong_limit:
        bonus_P = overlong(batch.length_P, limit=limit, cache=stage.advantage.overlong_cache)
        metrics["overlong/share"] = float((bonus_P < 0).mean())
        metrics["overlong/mean"] = float(bonus_P.mean())
    if stage.advantage.facts.unlabelled:
        metrics["advantage/alpha"] = advantages.alpha
        metrics["advantage/unlabelled_groups"] = float(unlabelled_groups(credit.rewards))
    metrics |= {f"advantage/own/{name}": value for name, value in advantages.own.items()}
    if credit.values is not None and finite_N.any():
        value_N, return_N = credit.values.value_N[finite_N], advantages.return_N[finite_N]
        metrics |= fit_metrics(value_N, return_N)
    stripped_P = batch.stripped_P & (batch.length_P > 0)
    if stripped_P.any() and (reliance_P := reliance(batch, credit.logprobs)) is not None:
        metrics["experience/reliance"] = float(reliance_P[stripped_P].mean())
    if stage.experience.keep_copied and batch.guided_P.any():
        metrics["experience/kept_copied"] = float(batch.copied_P[batch.guided_P].mean())
    return metrics | (label_metrics(batch.label_U) if stage.judge.kind != "none" else {})


def label_metrics(label_U: Array) -> dict[str, float]:
    """Return the share of turns that the judge labelled, and the share of GOOD among these."""
    given_U = label_U != 0
    metrics = {"judge/labelled_share": float(given_U.mean()) if len(given_U) else 0.0}
    if given_U.any():
        metrics["judge/good_share"] = float((label_U[given_U] > 0).mean())
    return metrics


def fit_metrics(value_N: Array, return_N: Array) -> dict[str, float]:
    """Measure how well the values before a step's updates predicted its returns.

    critic/explained: 1 - Var(G - V)/Var(G); absent if all returns are the same.
    """
    metrics = {"critic/value": float(value_N.mean()), "critic/return": float(return_N.mean())}
    spread = float(np.var(return_N))
    if spread > 0:
        metrics["critic/explained"] = 1 - float(np.var(return_N - value_N)) / spread
    return metrics


def update_metrics(applied: Applied, *, scaled: bool) -> dict[str, float]:
    """Average the terms of the updates of a step; measure its limits and its slowest rank.

    scaled: the correction scales the learning rate.
    """
    metrics = {"learner/lr": applied.lr, "learner/updates": float(len(applied.updates))}
    metrics["learner/token_budget"] = applied.token_budget
    if applied.taken_back is not None:
        metrics["learner/taken_back"] = float(applied.taken_back)
    if applied.led is not None and not applied.taken_back:
        metrics["offpolicy/kl_moved"] = applied.led
    if applied.beyond is not None:
        metrics["offpolicy/kl_beyond"] = applied.beyond
    sums = Counter[str]()
    for one in applied.updates:
        norms = zip(("loss/grad_norm", "critic/grad_norm"), one.grad_norms, strict=False)
        sums.update(one.terms | dict(norms))
        sums.update({"learner/lr_scale": one.scale} if scaled else {})
    if taught := sums.pop(DISTILL_TOKENS, 0):
        metrics[DISTILL_KL] = sums.pop(DISTILL_KL) / taught
    if TEACHER_KL in sums:
        total, known = sums.pop(TEACHER_KL), sums.pop(TEACHER_TOKENS)
        metrics["teacher/share"] = known / applied.tokens
        if known:
            metrics[TEACHER_KL] = total / known
    metrics |= {name: value / len(applied.updates) for name, value in sums.items()}
    return metrics | (slowest(applied.layer_times) if applied.layer_times else {})


def token_metrics(accounting: Accounting) -> dict[str, float]:
    """Return statistics of the tokens of the applied updates; {} if there are none.

    `offpolicy/<name>` over all tokens; if experience was stripped also `offpolicy_guided/<name>`
    over the stripped and `offpolicy_unguided/<name>` over the other tokens;
    `offpolicy_swapped/<name>` over tokens that newer weights sampled than the first token of their
    sequence; `lag_<bucket>/<name>` for every bucket that has tokens; `boost/<name>` after a boost.
    """
    found: dict[str, float] = {}
    if accounting.tokens:
        found |= _by_family(accounting.columns(), _token_statistics)
    if count := accounting.boosted["tokens"]:
        found |= {
            "boost/tokens": float(count),
            "boost/freed_fraction": accounting.boosted["freed"] / count,
            "boost/bound_fraction": accounting.boosted["bound"] / count,
        }
    return found


def trajectory_metrics(batch: Batch, kept_P: Array) -> dict[str, float]:
    """Return `staleness/<name>` and, by the families of tokens, statistics of the kept ones."""
    if not kept_P.any():
        return {}
    lag_P = batch.lag_P[kept_P]
    found = {"staleness/mean": float(lag_P.mean()), "staleness/max": float(lag_P.max())}
    columns = {
        "lag": lag_P,
        "stripped": batch.stripped_P[kept_P],
        "reward": batch.reward_P[kept_P],
        "length": batch.length_P[kept_P],
    }
    return found | _by_family(columns, _trajectory_statistics)


def _by_family(
    columns: dict[str, Array], statistics: Callable[[dict[str, Array]], dict[str, float]]
) -> dict[str, float]:
    """Return statistics of all data, of stripped and of other data, of swapped data, and of every
    lag bucket."""
    stripped, buckets = columns["stripped"], np.searchsorted(BUCKET_ENDS, columns["lag"])
    families: dict[str, Array] = {}
    if stripped.any():
        families = {"offpolicy_guided": stripped, "offpolicy_unguided": ~stripped}
    if "swapped" in columns:  # of tokens, not of whole trajectories
        families["offpolicy_swapped"] = columns["swapped"]
    families |= {f"lag_{BUCKETS[i]}": buckets == i for i in np.unique(buckets)}
    families = {"offpolicy": np.ones(len(stripped), bool)} | families
    found: dict[str, float] = {}
    for family, inside in families.items():
        if inside.any():
            numbers = statistics({name: column[inside] for name, column in columns.items()})
            found |= {f"{family}/{name}": value for name, value in numbers.items()}
    return found


def _token_statistics(tokens: dict[str, Array]) -> dict[str, float]:
    """Return ess = (Σw)²/(nΣw²), kl = mean(rho - 1 - ln rho), shares and quantiles."""
    w, log_rho = tokens["w"], tokens["log_rho"]
    statistics = {
        "tokens": float(len(w)),
        "ess": float(w.sum() ** 2 / (len(w) * (w**2).sum())),
        "kl": kl_of(log_rho),
    }
    for name in ("clip_low", "clip_high", "masked", "swapped"):
        statistics[name] = float(tokens[name].mean())
    for name in ("w", "r"):
        statistics[f"{name}_mean"] = float(tokens[name].mean())
        for share, value in zip(QUANTILES, np.quantile(tokens[name], QUANTILES), strict=True):
            statistics[f"{name}_q{round(100 * share):02d}"] = float(value)
    for name, column in tokens.items():
        if name.startswith(OWN) and (known := column[~np.isnan(column)]).size:
            statistics[name] = float(known.mean())
    return statistics


def _trajectory_statistics(trajectories: dict[str, Array]) -> dict[str, float]:
    return {
        "reward_mean": float(trajectories["reward"].mean()),
        "length_mean": float(trajectories["length"].mean()),
        "trajectories": float(len(trajectories["reward"])),
    }


def step_histograms(
    batch: Batch, kept_P: Array, accounting: Accounting | None = None
) -> dict[str, Histogram]:
    """Return the histograms of the trajectories `kept_P` and of the tokens of `accounting`.

    weights, ratios: of ACTION tokens, anchor over behaviour and policy over anchor. lags, rewards,
    lengths: of trajectories; lags in versions, lengths in ACTION tokens.
    """
    found = {
        "rewards": linear(batch.reward_P[kept_P]),
        "lengths": logarithmic(batch.length_P[kept_P], LENGTHS_PER_OCTAVE),
    }
    if accounting is not None:
        found["lags"] = integers(batch.lag_P[kept_P])
        found["weights"] = logarithmic(accounting.column("w"), PER_OCTAVE)
        found["ratios"] = logarithmic(accounting.column("r"), PER_OCTAVE)
    return {name: one for name, one in found.items() if one is not None}
