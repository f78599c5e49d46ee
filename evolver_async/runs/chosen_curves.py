"""Curves that are shown of a run, by section: the report draws them all, the terminal some."""

from collections.abc import Sequence
from dataclasses import dataclass, field

UNIT = (0.0, 1.0)


@dataclass(frozen=True)
class Curve:
    """One figure: the metrics in it, by legend. Those that no row has are left out.

    For the terminal, which draws the first two metrics and the first of the evaluations: `short`
    is the title there, which names the first one, `within` a range that is always shown.
    """

    title: str
    metrics: dict[str, str]
    evaluations: dict[str, str] = field(default_factory=dict)
    log: bool = False
    short: str = ""
    within: tuple[float, float] | None = None


SUCCESS = Curve(
    "Success",
    {"train/success": "training"},
    {"eval/success": "evaluation"},
    short="success",
    within=UNIT,
)
REWARD = Curve(
    "Reward",
    {"train/reward_mean": "training"},
    {"eval/reward_mean": "evaluation"},
    short="reward",
)
POLICY_LOSS = Curve(
    "Policy loss", {"loss/policy": "policy loss", "validation/loss": "validation"}, short="loss"
)
ENTROPY = Curve("Entropy", {"loss/entropy": "entropy"}, short="entropy")
STALENESS = Curve(
    "Staleness in versions",
    {"staleness/mean": "mean", "staleness/max": "maximum"},
    short="staleness",
    within=UNIT,
)
TOKENS = Curve(
    "Tokens per second",
    {"throughput/tokens_per_s": "trained ACTION tokens"},
    short="trained tokens/s",
    within=UNIT,
)
GROUPS = Curve(
    "Groups in the buffer",
    {"buffer/ready": "ready", "buffer/open": "open"},
    short="ready groups",
    within=UNIT,
)
EVICTED = Curve(
    "Evicted share",
    {"censor/evicted_share": "evicted share"},
    short="evicted share",
    within=(0.0, 0.01),
)
OVERVIEW = (SUCCESS, REWARD, POLICY_LOSS, STALENESS, ENTROPY, TOKENS)

LEARNING = (
    REWARD,
    SUCCESS,
    POLICY_LOSS,
    ENTROPY,
    Curve(
        "Preferences: share in the right order",
        {
            "dpo/accuracy": "dpo",
            "kto/accuracy": "kto",
            "reward_model/accuracy": "reward model",
            "validation/accuracy": "validation",
        },
    ),
    Curve("Gradient norm", {"loss/grad_norm": "policy", "critic/grad_norm": "critic"}, log=True),
    Curve("KL to the reference", {"loss/kl": "KL"}),
    Curve("Value loss", {"loss/value": "value loss"}),
    Curve("Turns per episode", {"train/turns_mean": "training"}, {"eval/turns_mean": "evaluation"}),
    Curve(
        "Errors",
        {
            "train/format_errors": "format errors",
            "train/invalid_actions": "invalid actions",
            "train/tool_errors": "tool errors",
        },
    ),
)
OFFPOLICY = (
    STALENESS,
    Curve(
        "Effective sample size",
        {
            "offpolicy/ess": "all tokens",
            "offpolicy_guided/ess": "stripped (guided)",
            "offpolicy_unguided/ess": "unguided",
        },
        short="effective sample size",
        within=UNIT,
    ),
    Curve(
        "KL (behaviour ‖ policy)",
        {
            "offpolicy/kl": "all tokens",
            "offpolicy_guided/kl": "stripped (guided)",
            "offpolicy_unguided/kl": "unguided",
        },
        short="KL to the behaviour",
    ),
    Curve(
        "Share of tokens clipped or masked",
        {
            "offpolicy/clip_low": "clipped low",
            "offpolicy/clip_high": "clipped high",
            "offpolicy/masked": "masked",
        },
    ),
)
DATA = (
    GROUPS,
    Curve(
        "Ledger: trajectories since the start",
        {
            "ledger/received": "received",
            "ledger/trained": "trained",
            "ledger/filtered": "filtered",
            "ledger/evicted": "evicted",
        },
    ),
    Curve(
        "Refused on arrival",
        {"ledger/rejected": "rejected", "ledger/duplicate": "duplicate", "ledger/stale": "stale"},
    ),
    EVICTED,
    Curve(
        "Evicted against trained: ratios",
        {"censor/length_ratio": "length", "censor/seconds_ratio": "seconds"},
    ),
    Curve("Success of trained minus evicted", {"censor/success_gap": "gap"}),
)
PUBLISHING = (
    Curve("Seconds to publish", {"time/publish_s": "time/publish_s", "weights/publish_s": "wait"}),
    Curve("Published version", {"version": "version"}),
    TOKENS,
)
EXPERIENCE = (
    Curve(
        "Success of guided and of unguided members",
        {"experience/guided_success": "guided", "experience/unguided_success": "unguided"},
        {"eval/success": "evaluation (unguided)"},
        short="guided",
        within=UNIT,
    ),
    Curve(
        "Gain: guided minus unguided success, with its upper 95 % bound",
        {"guidance/gain": "newest 200 groups", "guidance/upper": "upper"},
        short="gain",
        within=(0.0, 0.0),
    ),
    Curve(
        "Guided share of the groups, wasted share of these",
        {"guidance/groups": "guided", "guidance/wasted": "wasted of these"},
        short="guided groups",
        within=(0.0, 0.01),
    ),
    Curve(
        "Reliance on the experience, nats per token",
        {"experience/reliance": "reliance"},
        short="reliance, nats",
        within=(0.0, 0.01),
    ),
    Curve(
        "Stripped tokens that only loss.boost lets learn",
        {"boost/freed_fraction": "freed", "boost/bound_fraction": "at its bound too"},
        short="freed share",
        within=(0.0, 0.01),
    ),
)
LABELS = (
    Curve(
        "Judge: labelled turns, and GOOD among them",
        {"judge/labelled_share": "labelled", "judge/good_share": "GOOD"},
        short="labelled turns",
        within=UNIT,
    ),
)
AUDIT = (
    Curve(
        "Judge: agreement with known labels",
        {"judge/agreement": "agreement"},
        short="judge agreement",
        within=UNIT,
    ),
    Curve(
        "Judge: biases in the share of GOOD",
        {"judge/praise_bias": "praise", "judge/length_bias": "length"},
        short="praise bias",
        within=(0.0, 0.0),
    ),
)
QUESTIONING = (
    Curve(
        "Synthetic tasks",
        {
            "questioning/pool_size": "in the pool",
            "questioning/tried": "tried",
            "questioning/useful": "partly solved",
        },
        short="synthetic tasks",
        within=UNIT,
    ),
    Curve(
        "Candidates from explorations",
        {"questioning/candidates": "candidates", "questioning/accepted": "accepted"},
    ),
    Curve(
        "Explorations since the start",
        {"questioning/explored_turns": "turns", "questioning/explored": "episodes"},
        short="explored turns",
        within=UNIT,
    ),
)

ENGINE = (
    Curve(
        "Engine: KV cache in use, prompts found in it",
        {"engine/kv_use": "in use", "engine/reused_share": "reused"},
    ),
    Curve(
        "Engine: waiting requests, preemptions, restarts",
        {
            "engine/waiting": "waiting",
            "engine/preemptions": "preemptions",
            "engine/restarts": "restarts",
        },
    ),
)


@dataclass(frozen=True)
class Mechanism:
    """Curves of one mechanism; a run with none of `marks` does not show it.

    `name`: that of its text in `watch/row_texts.py`. `meaning`: a sentence on how to read them.
    """

    name: str
    section: str
    marks: Sequence[str]
    curves: Sequence[Curve]
    meaning: str


MECHANISMS = (
    Mechanism(
        "guidance",
        "Experience and judge",
        ("experience/guided_success",),
        EXPERIENCE,
        "Guided members of a group have experience in their prompt; other members and evaluations"
        " have none. Guidance pays while the upper bound of its gain is above 0; groups that are"
        " guided after that are wasted. Reliance is what the experience is worth to answers from"
        " which it was stripped: it is 0 if the policy knows the content by itself.",
    ),
    Mechanism(
        "judge",
        "Experience and judge",
        ("judge/labelled_share",),
        LABELS,
        "The judge labels turns GOOD or BAD; adca combines the labels with the outcome.",
    ),
    Mechanism(
        "audit",
        "Experience and judge",
        ("judge/agreement", "judge/praise_bias", "judge/length_bias"),
        AUDIT,
        "The audit asks the judge about copies: agreement is the share of turns with a known label"
        " that it labels right, a bias the rise of the share of GOOD in turns that praise"
        " themselves, or in the longer ones.",
    ),
    Mechanism(
        "questioning",
        "Questioning",
        ("questioning/explored",),
        QUESTIONING,
        "Turns of explorations are the cost of synthetic tasks. Only tasks that the policy solves"
        " in part teach something.",
    ),
    Mechanism(
        "engine",
        "Engine",
        ("engine/restarts",),
        ENGINE,
        "vLLM: a full KV cache with preemptions needs a larger engine.kv_cache_bytes, or fewer"
        " engine.slots.",
    ),
)
