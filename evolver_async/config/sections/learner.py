"""Sections about training: selection, advantage, correction, loss, optimizer, safety."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from evolver_async.config.sections.rollout import Device
from evolver_async.config.values.kinds import (
    ADVANTAGES,
    BOUNDS,
    CORRECTIONS,
    SELECTIONS,
    AdvantageKind,
    CorrectionKind,
    SelectionKind,
)
from evolver_async.config.values.rules import (
    Count,
    FilePath,
    Fraction,
    Open,
    Positive,
    PositiveFraction,
    PositiveOrInfinite,
    Range,
    Scope,
    Variable,
)
from evolver_async.extension import is_own

OF_RUN = Scope.RUN | Scope.LEARNER  # all stages share the key, which the learner alone reads
LEFT_OPEN = -1.0  # value of a bound that correction.kind determines


@dataclass
class SelectionConfig:
    """The groups of a step that train."""

    kind: Annotated[str, Open(*SELECTIONS)] = "all"
    # the spread of a group: of its rewards, or of its successes, so that terms that only shape the
    # reward do not train a group that failed throughout
    by: Literal["reward", "success"] = "reward"
    keep: PositiveFraction = 0.5  # share of the groups, those with the largest std
    # share of all std that is kept (top_p); least std, as a share of the largest one (min_p)
    p: PositiveFraction = 0.9
    k: Count = 8  # number of groups
    drop_zero: bool = True  # drop groups without spread
    members: int = 0  # members of a group that are kept; 0: all
    # good members by lowest penalty, or inverse to the penalty
    draw: Literal["lowest", "inverse"] = "lowest"
    # factor on advantages: none, the share of groups kept, or its square root
    scale: Literal["none", "linear", "sqrt"] = "none"
    # refills of a step without any spread after which the run ends
    max_refills: Annotated[Count, Scope.STAGE] = 10
    max_empty: Count = 5  # consecutive empty steps after which the run ends
    params: dict[str, Any] = field(default_factory=dict)  # of a function of one's own

    @property
    def facts(self) -> SelectionKind:
        """Return the declaration of the kind."""
        return SELECTIONS.get(self.kind, SelectionKind())


@dataclass
class AdvantageConfig:
    """The advantage estimator."""

    kind: Annotated[str, Open(*ADVANTAGES)] = "grpo"
    # divide by the std of the group or of the batch, or not at all
    std: Literal["group", "batch", "none"] = "group"
    # rollout.players: what a player's rewards are compared with: those of the same player in the
    # group, or those of all its players
    baseline: Literal["player", "shared"] = "player"
    # b <- decay * b + (1 - decay) * mean reward, or return, from 0 at the beginning of a stage
    baseline_decay: Fraction = 0.9
    alpha: float = 0.1  # weight of the judge's labels beside the outcome
    # from 0: the end of a cosine of alpha over the stage's steps; -1: alpha is constant
    alpha_final: Annotated[float, Range(ge=-1)] = -1.0
    length: Literal["none", "sqrt"] = "none"  # sqrt divides by the square root of the turns
    gamma: Fraction = 1.0  # the discount by token
    lam: Fraction = 1.0  # lambda, from one-step (0) to whole returns (1)
    gamma_turn: Fraction = 0.95  # the discount by turn
    whiten: bool = True  # mean 0 and std 1 over the step's ACTION tokens
    # a truncated episode ends with the value after its last token, a place where the critic is
    # never trained; false: with 0
    bootstrap: bool = False
    rho_max: PositiveOrInfinite = 1.0  # truncation of a token's own importance weight
    c_max: PositiveOrInfinite = 1.0  # truncation of the weights that carry corrections back
    overlong_limit: int = 0  # ACTION tokens at which a trajectory's reward is 1 less; 0: never
    overlong_cache: int = 0  # ACTION tokens before the limit over which the reward falls
    params: dict[str, Any] = field(default_factory=dict)  # of a function of one's own

    @property
    def facts(self) -> AdvantageKind:
        """Return the declaration of the kind."""
        return ADVANTAGES.get(self.kind, AdvantageKind())


@dataclass
class RewardModelConfig:
    """The reward model that stages of kind reward_model train, from pairs."""

    # directory that it begins as, of a causal language model or a sequence classifier with one
    # label, with the policy's tokenizer; "": the policy as it is when the first such stage begins
    path: Annotated[str, FilePath(), OF_RUN | Scope.WEIGHTS] = ""
    # weight of the squared sum of a pair's rewards, which keeps their mean near 0
    centre_coef: float = 0.0


@dataclass
class CriticConfig:
    """The value function of the kinds of advantage that read one; absent for others."""

    # a head on the policy, or a separate model
    kind: Annotated[Literal["shared", "separate"], OF_RUN | Scope.WEIGHTS] = "shared"
    lr: Positive = 1e-3  # of the critic's own weights; constant
    clip: PositiveOrInfinite = 0.2  # largest change of a value in one step
    coef: Positive = 0.5  # weight of the value loss
    warmup: int = 0  # first learner steps of the critic, which leave the policy unchanged


@dataclass
class CorrectionConfig:
    """The off-policy correction."""

    kind: Annotated[str, Open(*CORRECTIONS)] = "decoupled"
    # one more forward pass, or a mixture by the version lag; the other kinds do not compare an
    # anchor with mu
    anchor: Literal["recompute", "interpolate"] = "recompute"
    # old log-probs of guided tokens
    guided: Literal["stale", "anchor", "behaviour"] = "stale"
    # weights per token or per trajectory
    level: Literal["auto", "token", "trajectory"] = "auto"
    # truncation of the importance weight
    w_max: Annotated[float, Range(gt=0, infinite=True, also=LEFT_OPEN)] = LEFT_OPEN
    # smaller weights are masked; fresh: buffer.max_staleness 0 in float32
    low: Annotated[float, Range(le=1, also=LEFT_OPEN)] = LEFT_OPEN
    # larger weights are masked; fresh: as above
    high: Annotated[float, Range(ge=1, infinite=True, also=LEFT_OPEN)] = LEFT_OPEN
    # its weights are truncated at 1 + epsilon
    epsilon: Annotated[float, Range(infinite=True)] = 4.0
    second_moment: Positive = 0.04  # largest mean square of log w of the tokens that train
    divergence: PositiveFraction = 0.2  # largest change of a token's probability
    # share of tokens without gradient above which a warning is logged; five such steps end the run
    max_masked: Fraction = 0.9
    params: dict[str, Any] = field(default_factory=dict)  # of a function of one's own

    @property
    def facts(self) -> CorrectionKind:
        """Return the declaration of the kind; of one's own, the learner knows more."""
        return CORRECTIONS.get(self.kind, CorrectionKind())


@dataclass
class LossConfig:
    """The policy loss."""

    # 1 minus the least ratio that the loss follows where A < 0
    clip_low: Annotated[float, Range(gt=0, lt=1, also=LEFT_OPEN)] = LEFT_OPEN
    # the largest ratio that it follows where A > 0, minus 1
    clip_high: Annotated[float, Range(gt=0, infinite=True, also=LEFT_OPEN)] = LEFT_OPEN
    # upper clip of tokens whose experience was stripped; 0: clip_high. It acts only where the
    # updates of one step move tokens beyond clip_high
    boost: Annotated[float, Range(infinite=True)] = 0.0
    dual_clip: Annotated[float, Range(ge=1, infinite=True)] = 3.0
    # how far the updates of a step may move the policy, as KL in nats per token over the data of an
    # update, from the anchor if correction.anchor=recompute, else from what the data is corrected
    # from. Data beyond it end their step, and the update that led data there is taken back
    target_kl: PositiveOrInfinite = math.inf
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_norm"] = "token_mean"
    norm_tokens: Count = 1024  # sequence_sum_norm: the constant length
    kl: Literal["k1", "k2", "k3"] = "k3"  # k3 ends at 10, as in verl: beyond it has no gradient
    kl_coef: float = 0.0  # 0 loads no reference
    kl_place: Literal["loss", "reward"] = "loss"  # k1 only as reward
    entropy_coef: float = 0.0
    dpo_beta: Positive = 0.1  # dpo stages: strength of the pull towards the reference
    # dpo stages: weight of the better member's negative log-likelihood, the mean over its tokens.
    # It keeps both members of a pair from becoming unlikely together
    dpo_nll_coef: float = 0.0
    kto_beta: Positive = 0.1  # kto stages: strength of the pull towards the reference
    kto_desirable: Positive = 1.0  # kto stages: weight of the episodes that succeeded ...
    kto_undesirable: Positive = 1.0  # ... and of those that failed
    # episodes that a limit of tokens or of time ended (rollout.max_tokens in the last turn,
    # policy.max_length, env.episode_timeout_s) give no gradient; they stay in the baseline of their
    # group
    mask_truncated: bool = False
    entropy_top_k: int = 0  # the bonus raises entropy among the k likeliest tokens only; 0: all


@dataclass
class TeacherConfig:
    """A model that the policy is distilled from, on the ACTION tokens that it trains on."""

    # a Hugging Face directory, or for all stages together the id of a hub, downloaded as
    # policy.download says; "" without url: no teacher
    path: Annotated[str, FilePath(hub=True)] = ""
    # an OpenAI-compatible endpoint instead, up to and including /v1, whose completions have
    # prompt_logprobs (vLLM); its model has the policy's tokenizer
    url: Annotated[str, OF_RUN] = ""
    model: Annotated[str, OF_RUN] = ""  # url: its name there
    key_env: Annotated[Variable, OF_RUN] = ""  # url: environment variable that holds the API key
    timeout_s: Annotated[Positive, OF_RUN] = 60.0  # url: of one call
    retries: Annotated[int, OF_RUN] = 5  # url: of a failed call, with growing pauses
    concurrency: Annotated[Count, OF_RUN] = 16  # url: calls in flight of one rank
    top_k: Annotated[Count, OF_RUN] = 20  # url: likeliest tokens of each place; all others are one
    coef: float = 1.0  # weight of the divergence; 0: no teacher
    # weight of the stage's own loss beside it, rewards or imitation; 0: distillation alone
    loss_coef: float = 1.0
    # KL(student || teacher), KL(teacher || student), or the generalised Jensen-Shannon divergence.
    # A teacher with another tokenizer has the first alone
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    # jsd: share of the teacher in the mixture that both are compared with
    beta: Annotated[float, Range(gt=0, lt=1)] = 0.5
    temperature: Positive = 1.0  # of both distributions


# Standard deviation of the mean log-ratio of a sequence of 22 tokens that bfloat16 alone makes.
ROUNDING = 0.0135


def by_kind(
    correction: CorrectionConfig, loss: LossConfig, *, fresh: bool = False
) -> tuple[CorrectionConfig, LossConfig]:
    """Return both sections with the open level and bounds replaced by those of `correction.kind`.

    The anchor of a kind that compares no anchor with mu is `recompute`; a correction of one's own
    may compare them. `fresh`: no data is older than the weights it trains, and its log-probs are
    exact.
    """
    facts = correction.facts
    compares = "anchor" in facts.reads or is_own(correction.kind)
    anchor = correction.anchor if compares else "recompute"
    level = facts.level if correction.level == "auto" else correction.level
    bounds = BOUNDS.copy()
    for case in ("", level, *(["fresh"] if fresh else ())):
        bounds |= facts.bounds.get(case, {})

    def closed(section: CorrectionConfig | LossConfig) -> dict[str, Any]:
        values = vars(section)
        return {name: bounds[name] for name in bounds if values.get(name) == LEFT_OPEN}

    correction = replace(correction, anchor=anchor, level=level, **closed(correction))
    return correction, replace(loss, **closed(loss))


@dataclass
class LearnerConfig:
    """The training loop."""

    groups_per_step: Annotated[Count, Scope.STAGE] = 32  # B: groups of one step
    minibatches: Count = 4  # optimizer updates of one pass over a step's groups
    epochs: Count = 1  # passes over a step's groups
    # tokens of a pass, with padding, shared ones once; 0: what a GPU holds
    token_budget: int = 16384
    # rows one behind the other in a single one, instead of padded
    packing: Annotated[bool, OF_RUN] = True
    # what packed rows share at their beginnings is computed once: auto on a CPU where it can be
    # (float32, no sliding window); always on a GPU in half precision, too, and refuses a model or
    # device where it cannot
    prefix_trees: Annotated[Literal["auto", "always", "never"], OF_RUN] = "auto"
    # recompute layers in the backward pass, for less memory
    gradient_checkpointing: Annotated[bool, OF_RUN] = False
    # of layers that are recomputed: keep their inputs in the host's memory, not in that of a GPU
    offload_activations: Annotated[bool, OF_RUN] = False
    # layers compiled by torch: first passes take a minute or more, later starts find the code
    # in TORCHINDUCTOR_CACHE_DIR, or else ~/.cache/evolver_async
    compile: Annotated[bool, OF_RUN] = False
    # tokens of one chunk of the vocabulary projection, whose logits exist at once; 0: as many as
    # 128 MiB of logits in float32 hold, on a GPU 512 MiB
    logprob_chunk: int = 0
    lr: float = 5e-4
    warmup_steps: int = 5  # learner steps
    decay: Literal["none", "linear", "cosine"] = "linear"  # over the stage's steps
    # share of the stage's steps before the decay begins
    decay_start: Annotated[float, Range(lt=1)] = 0.0
    lr_final: Fraction = 0.1  # share of lr at the end of the stage
    betas: Annotated[list[Annotated[float, Range(lt=1)]], OF_RUN] = field(
        default_factory=lambda: [0.9, 0.99]
    )
    # of Adam; a larger one limits the drift of tokens that are never sampled
    eps: Annotated[Positive, OF_RUN] = 1e-8
    weight_decay: Annotated[float, OF_RUN] = 0.0
    grad_clip: PositiveOrInfinite = 0.5
    max_bad_steps: Annotated[Count, OF_RUN] = 3  # consecutive non-finite steps before the run ends
    device: Annotated[Device, OF_RUN] = "auto"
    threads: Annotated[Count, OF_RUN] = 1
    # processes that share one learner: weights, optimizer and micro-batches
    ranks: Annotated[Count, Scope.RUN] = 1
    # with equally many ranks: this one, and those of `evolver-async ranks RUN_DIR --host N`,
    # or nodes of Ray
    hosts: Annotated[Count, Scope.RUN] = 1
    # the ranks that share weights and optimizer: all, or those of each host, which then has a
    # whole copy, and hosts send each other gradients alone
    sharding: Annotated[Literal["all", "host"], Scope.RUN] = "all"
    # ranks that compute each row together, a part of its tokens each: for rows that one cannot hold
    context_parallel: Annotated[Count, Scope.RUN] = 1
    # tcp://host:port of this host, at which the ranks of several hosts meet
    address: Annotated[str, Scope.RUN] = ""
    # allows an address of other hosts; nothing is encrypted there
    trusted_network: Annotated[bool, Scope.RUN] = False
    # of a common operation of the ranks; then the learner restarts
    deadline_s: Annotated[Positive, Scope.RUN] = 600.0

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each of its hosts."""
        return self.ranks // self.hosts

    @property
    def shards(self) -> int:
        """The number of ranks that share one copy of the weights."""
        return self.ranks if self.sharding == "all" else self.ranks_per_host


def lr_at(step: int, settings: LearnerConfig, *, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of a stage of `steps` steps.

    It rises linearly to `lr` over `warmup_steps`, stays, and from `decay_start · steps` on falls
    (`linear` or `cosine`) to `lr_final · lr` at the stage's last step. `none`, or a stage without a
    bound (`steps` 0), never decays.
    """
    lr, warmup_steps, decay = settings.lr, settings.warmup_steps, settings.decay
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if decay == "none" or steps == 0:
        return lr
    # the last step at the full rate
    begin = max(warmup_steps, int(settings.decay_start * steps)) - 1
    share = min(max((step - begin) / max(steps - 1 - begin, 1), 0.0), 1.0)
    if decay == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    else:
        assert decay == "linear", decay
    return lr * (1 - share * (1 - settings.lr_final))


@dataclass
class SafetyConfig:
    """Refusal of impossible trajectories, and alarms that detect a collapse of training.

    Alarms watch rl stages. Each fires after `patience` consecutive suspicious steps.
    """

    # warn logs; checkpoint also writes one; pause also stops until `unpause`; rollback continues
    # from the best evaluated checkpoint before the alarm, else the last, with the next three keys
    action: Literal["warn", "checkpoint", "pause", "rollback"] = "warn"
    rollbacks: Count = 3  # of a stage; one more alarm ends the run
    rollback_lr: PositiveFraction = 0.5  # factor on learner.lr at every rollback
    # keys with the scopes stage and learner, from the first rollback to the end of the stage
    rollback: dict[str, Any] = field(default_factory=dict)
    # with policy.path: largest multiple of the rate for such a model (docs/configuration.md) that
    # learner.lr may be, ten times as much in supervised stages; more is refused
    max_lr: PositiveOrInfinite = 10.0
    max_reward: Positive = 1e6  # a trajectory with a larger reward, of either sign, is refused
    warmup: Annotated[int, Range(ge=2)] = 10  # first steps of a stage, which are not suspicious
    patience: Count = 5  # consecutive suspicious steps before an alarm fires
    solved: Fraction = 0.8  # success from which equal rewards and certain actions are no alarm
    # of the largest mean reward std within groups: below is suspicious
    spread_share: Fraction = 0.1
    zero_groups: Fraction = 0.9  # share of groups without any reward spread: above is suspicious
    entropy_share: Fraction = 0.05  # of the entropy at the stage's beginning: below is suspicious
    entropy_floor: float = 0.01  # nats per token: below is suspicious
    # times the entropy at the stage's beginning: above is suspicious
    entropy_rise: Annotated[float, Range(ge=1, infinite=True)] = 3.0
    dependence_share: Fraction = 0.25  # of the largest input dependence: below is suspicious
    # standard deviations of the log gradient norm: above is suspicious
    grad_z: Annotated[float, Range(infinite=True)] = 5.0
    # standard errors of the gain of guided members: so far below 0 is suspicious
    guided_z: Annotated[float, Range(gt=0, infinite=True)] = 3.0
    # of train/format_errors over its least mean: above is suspicious
    format_rise: Fraction = 0.25
    # of the turns with a known label that the judge labels right: below is suspicious
    judge_agreement: Fraction = 0.5
    # GOOD among turns that praise themselves, minus the same turns without: above is suspicious
    judge_praise: Fraction = 0.3
    # warmup of the alarms on format errors and on the judge, which change in a few steps
    format_warmup: Count = 2
    format_patience: Count = 3  # patience of the same alarms
