"""Curves of a run's page, by section."""

from collections.abc import Sequence
from dataclasses import dataclass

from evolver_async.runs.report.plots.curve_plots import Curve

LEARNING = (
    Curve("Reward", {"train/reward_mean": "training"}, {"eval/reward_mean": "evaluation"}),
    Curve("Success", {"train/success": "training"}, {"eval/success": "evaluation"}),
    Curve("Policy loss", {"loss/policy": "policy loss"}),
    Curve("Entropy", {"loss/entropy": "entropy"}),
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
    Curve("Staleness in versions", {"staleness/mean": "mean", "staleness/max": "maximum"}),
    Curve(
        "Effective sample size",
        {
            "offpolicy/ess": "all tokens",
            "offpolicy_guided/ess": "stripped (guided)",
            "offpolicy_unguided/ess": "unguided",
        },
    ),
    Curve(
        "KL (behaviour ‖ policy)",
        {
            "offpolicy/kl": "all tokens",
            "offpolicy_guided/kl": "stripped (guided)",
            "offpolicy_unguided/kl": "unguided",
        },
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
    Curve("Evicted share", {"censor/evicted_share": "evicted share"}),
    Curve(
        "Evicted against trained: ratios",
        {"censor/length_ratio": "length", "censor/seconds_ratio": "seconds"},
    ),
    Curve("Success of trained minus evicted", {"censor/success_gap": "gap"}),
)
PUBLISHING = (
    Curve("Seconds to publish", {"time/publish_s": "time/publish_s", "weights/publish_s": "wait"}),
    Curve("Published version", {"version": "version"}),
    Curve("Tokens per second", {"throughput/tokens_per_s": "trained ACTION tokens"}),
)
EXPERIENCE = (
    Curve(
        "Success of guided and of unguided members",
        {"experience/guided_success": "guided", "experience/unguided_success": "unguided"},
        {"eval/success": "evaluation (unguided)"},
    ),
    Curve(
        "Gain: guided minus unguided success",
        {"guidance/gain": "newest 200 groups", "guidance/upper": "upper 95 % bound"},
    ),
    Curve(
        "Guided share of the groups, wasted share of these",
        {"guidance/groups": "guided", "guidance/wasted": "wasted of these"},
    ),
    Curve("Reliance on the experience, nats per token", {"experience/reliance": "reliance"}),
    Curve(
        "Stripped tokens that only loss.boost lets learn",
        {"boost/freed_fraction": "freed", "boost/bound_fraction": "at its bound too"},
    ),
)
LABELS = (
    Curve(
        "Judge: labelled turns, and GOOD among them",
        {"judge/labelled_share": "labelled", "judge/good_share": "GOOD"},
    ),
)
AUDIT = (
    Curve("Judge: agreement with known labels", {"judge/agreement": "agreement"}),
    Curve(
        "Judge: biases in the share of GOOD",
        {"judge/praise_bias": "praise", "judge/length_bias": "length"},
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
    ),
    Curve(
        "Candidates from explorations",
        {"questioning/candidates": "candidates", "questioning/accepted": "accepted"},
    ),
    Curve(
        "Explorations since the start",
        {"questioning/explored_turns": "turns", "questioning/explored": "episodes"},
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

    `name`: that of its text in `watch/row_texts.py`. `meaning`: a sentence on how to read the curves.
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
