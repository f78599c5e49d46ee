"""The sections about training: selection, advantage, correction, loss, optimizer, safety."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Selection:
    """Which groups of a step train."""

    kind: str = "all"  # all, spread, top_p, top_k, min_p, resample_on_correct or dynamic
    keep: float = 0.5  # spread: the fraction of groups kept, those with the largest reward std
    p: float = 0.9  # top_p: the share of all std that is kept; min_p: of the largest std, the least
    k: int = 8  # top_k: the number of groups kept
    drop_zero: bool = True  # spread, top_k, min_p: drop groups whose rewards are all the same
    members: int = 0  # resample_on_correct: the members of a group that are kept; 0: all
    draw: str = "lowest"  # resample_on_correct: good ones by lowest penalty, or inverse to it
    scale: str = "none"  # advantages times the share of groups kept: none, linear or sqrt of it
    max_refills: int = 10  # dynamic: the run ends after so many steps' groups with equal rewards
    max_empty: int = 5  # this many empty steps in a row end the run


@dataclass
class Advantage:
    """The advantage estimator."""

    kind: str = "grpo"  # grpo, grpo_process, adca, rloo, reinforce, gae, gae_bilevel or vtrace
    std: str = "group"  # grpo, grpo_process, adca: divide by the group's std, the batch's, or none
    baseline_decay: float = 0.9  # reinforce: b <- decay * b + (1 - decay) * mean reward
    alpha: float = 0.1  # adca: weight of the judge's labels beside the outcome
    alpha_final: float = -1.0  # adca: >= 0: where a cosine over the stage's steps takes alpha
    length: str = "none"  # adca: none, or sqrt (divide by the square root of the turns)
    gamma: float = 1.0  # with a critic (gae, gae_bilevel, vtrace): the discount by token
    lam: float = 1.0  # with a critic: lambda, from one-step (0) to whole returns (1)
    gamma_turn: float = 0.95  # gae_bilevel: the discount by turn
    whiten: bool = True  # with a critic: mean 0 and std 1 over the step's ACTION tokens
    bootstrap: bool = True  # with a critic: truncated episodes end with its value; else with 0
    rho_max: float = 1.0  # vtrace: truncation of a token's own importance weight
    c_max: float = 1.0  # vtrace: truncation of what passes later corrections on
    overlong_limit: int = 0  # ACTION tokens at which a trajectory's reward is 1 less; 0: never
    overlong_cache: int = 0  # ACTION tokens before the limit over which it becomes less


@dataclass
class Critic:
    """Who values tokens for advantage.kind gae, gae_bilevel and vtrace; not there for others."""

    kind: str = "shared"  # shared (a head on the policy) or separate (a model of its own)
    lr: float = 1e-3  # of the weights that are the critic's alone; constant
    clip: float = 0.2  # how far an update may take a value from where its step found it
    coef: float = 0.5  # weight of the values' loss
    warmup: int = 0  # the critic's first learner steps, in which the policy is left as it is


@dataclass
class Correction:
    """The off-policy correction."""

    kind: str = "decoupled"  # none, ppo, decoupled, icepop, geo_mask, cispo, gspo or topr
    anchor: str = (
        "recompute"  # recompute (one more forward) or interpolate (from the version lag; read by
        # decoupled, icepop, geo_mask and gspo: the other kinds do not compare an anchor with mu)
    )
    guided: str = "stale"  # what old is for guided tokens: stale, anchor or behaviour
    level: str = "auto"  # decoupled, topr: weights per token or trajectory; auto: topr trajectory
    w_max: float = -1.0  # truncation of the importance weight; -1: 2, decoupled by trajectory 5
    low: float = -1.0  # icepop, geo_mask: smaller weights are masked; -1: 0.5, geo_mask 0.8
    high: float = -1.0  # icepop, geo_mask: larger weights are masked; -1: 5, geo_mask 1.25
    epsilon: float = 4.0  # cispo: its weights are truncated at 1 + epsilon
    max_masked: float = 0.9  # warn when a larger share of tokens has zero gradient


@dataclass
class Loss:
    """The policy loss."""

    clip_low: float = -1.0  # -1: 0.2; with correction.kind=gspo, a sequence's ratio, 0.0003
    clip_high: float = -1.0  # -1: 0.28, gspo 0.0004
    boost: float = 0.6  # upper clip of tokens whose experience was stripped; 0: clip_high
    dual_clip: float = 3.0
    aggregation: str = "token_mean"  # token_mean, sequence_mean or sequence_sum_norm
    norm_tokens: int = 1024  # sequence_sum_norm: the constant length
    kl: str = "k3"  # k1, k2 or k3
    kl_coef: float = 0.0  # 0 loads no reference
    kl_place: str = "loss"  # loss or reward; k1 only as reward
    entropy_coef: float = 0.0
    dpo_beta: float = 0.1  # dpo stages: how much a preference may move the policy
    entropy_top_k: int = 0  # the bonus raises entropy among the k likeliest tokens only; 0: all


INTERPOLATED = ("decoupled", "icepop", "geo_mask", "gspo")  # they compare an anchor with mu
LEFT_OPEN = -1.0  # a bound that is what correction.kind wants
LEVELS = {"topr": "trajectory"}  # all others: token
BOUNDS = {"w_max": 2.0, "low": 0.5, "high": 5.0, "clip_low": 0.2, "clip_high": 0.28}
BOUNDS_OF = {  # what differs, by kind and level
    ("decoupled", "trajectory"): {"w_max": 5.0},
    ("geo_mask", "token"): {"low": 0.8, "high": 1.25},
    ("gspo", "token"): {"clip_low": 3e-4, "clip_high": 4e-4},
}


def by_kind(correction: Correction, loss: Loss) -> tuple[Correction, Loss]:
    """Both with the level and the bounds that are left open as `correction.kind` wants them.

    The values are the defaults of the table in algorithms §2. A kind that compares no anchor with
    mu has nothing to interpolate: its anchor is `recompute`.
    """
    anchor = correction.anchor if correction.kind in INTERPOLATED else "recompute"
    level = correction.level
    if level == "auto":
        level = LEVELS.get(correction.kind, "token")
    bounds = BOUNDS | BOUNDS_OF.get((correction.kind, level), {})

    def closed(section: Correction | Loss) -> dict[str, Any]:
        values = vars(section)
        return {name: bounds[name] for name in bounds if values.get(name) == LEFT_OPEN}

    correction = replace(correction, anchor=anchor, level=level, **closed(correction))
    return correction, replace(loss, **closed(loss))


@dataclass
class Learner:
    """The training loop."""

    groups_per_step: int = 32  # B: groups of one step
    minibatches: int = 4  # optimizer updates of one step
    token_budget: int = 16384  # tokens (padding included) of a pass; 0: what a GPU's memory holds
    packing: bool = False  # rows one behind the other in a single one, instead of padded
    gradient_checkpointing: bool = False  # compute layers again in the backward pass: less memory
    logprob_chunk: int = 4096  # tokens of one chunk of the vocabulary projection, at most
    lr: float = 5e-4
    warmup_steps: int = 5  # learner steps
    decay: str = "linear"  # none, linear or cosine, over the stage's steps
    decay_start: float = 0.0  # share of the stage's steps before the decay begins
    lr_final: float = 0.1  # share of lr at the end of the stage
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    eps: float = 1e-8  # of Adam; larger keeps tokens that are never sampled from drifting
    weight_decay: float = 0.0
    grad_clip: float = 0.5
    max_bad_steps: int = 3  # non-finite steps in a row before the run ends
    device: str = "auto"
    threads: int = 1
    ranks: int = 1  # processes that share one learner: weights, optimizer and micro-batches
    deadline_s: float = 600.0  # for what the ranks do together; past it the learner is restarted


@dataclass
class Safety:
    """What no trajectory can hold, what counts as a collapse, what is done about one.

    Alarms watch rl stages; each fires after `patience` suspicious steps in a row.
    """

    action: str = (
        "warn"  # warn; checkpoint: and write one; pause: and stop until told to go on; rollback: go
        # on from the last checkpoint that was written before, with the next three keys
    )
    rollbacks: int = 3  # of a stage; an alarm after so many ends the run
    rollback_lr: float = 0.5  # every rollback multiplies learner.lr by this
    rollback: dict[str, Any] = field(
        # from the first rollback to the end of the stage: keys of selection, advantage,
        # correction, loss and learner
        default_factory=dict
    )
    max_reward: float = 1e6  # a trajectory with a larger reward, of either sign, is refused
    warmup: int = 10  # steps of a stage before anything is suspicious
    patience: int = 5  # suspicious steps in a row before an alarm fires
    solved: float = 0.8  # success from which equal rewards and certain actions are no alarm
    spread_share: float = 0.1  # of the largest mean reward std within groups: below is suspicious
    zero_groups: float = 0.9  # share of groups without any reward spread: above is suspicious
    entropy_share: float = 0.05  # of the entropy at the stage's beginning: below is suspicious
    entropy_floor: float = 0.01  # nats per token: below is suspicious
    entropy_rise: float = 3.0  # times the entropy at the stage's beginning: above is suspicious
    dependence_share: float = 0.25  # of the largest input dependence: below is suspicious
    grad_z: float = 5.0  # standard deviations of the log gradient norm: above is suspicious
    format_rise: float = 0.25  # of train/format_errors over its least mean: more is suspicious
    format_warmup: int = 2  # warmup of the alarm on format errors, which rise in a few steps
    format_patience: int = 3  # patience of the same alarm
