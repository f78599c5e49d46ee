"""Built-in kinds of selection, advantage and correction: the one declaration of each.

The choices of a key, inert keys, bounds, checks and the reference of keys follow from these tables,
and `learner` enters a function for every kind (`extension.Builtins`). `reads`: those keys of its
section that not every kind reads. The defaults are those of a function of one's own, which can read
any key. Formulas: docs/algorithms.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SelectionKind:
    """Facts about a selection.

    compares: the members of a group, of which there must be two. drops_zero: groups without spread
    never train, whatever `selection.drop_zero`. refills: the buffer takes more groups until the
    step is full. pairs: a stage of preferences, which takes members of every group, can have it.
    """

    reads: tuple[str, ...] = ()
    compares: bool = False
    drops_zero: bool = False
    refills: bool = False
    pairs: bool = False


@dataclass(frozen=True)
class AdvantageKind:
    """Facts about an estimator of advantages.

    reads_anchor: log-probs of the weights before the step. compares: the members of a group, of
    which there must be two. critic: it reads values. corrects: it has a correction of its own.
    one_turn, unlabelled: the kind that it equals with one turn an episode, and without a judge's
    labels; "" if it is none.
    """

    reads: tuple[str, ...] = ()
    reads_anchor: bool = False
    compares: bool = False
    critic: bool = False
    corrects: bool = False
    one_turn: str = ""
    unlabelled: str = ""


@dataclass(frozen=True)
class CorrectionKind:
    """Facts about a correction.

    reads_anchor: log-probs of the weights before the step, which take a forward pass. clips: the
    loss clips its ratio; of_sequence: which is that of a whole trajectory. scales_lr: the learning
    rate of an update is multiplied by the square root of the effective sample size of its
    trajectories' weights, as a share of their number. level: that of `auto`. bounds: differences
    from BOUNDS, "" always, at a level, or with fresh data.
    """

    reads: tuple[str, ...] = ()
    reads_anchor: bool = True
    clips: bool = True
    of_sequence: bool = False
    scales_lr: bool = False
    level: Literal["token", "trajectory"] = "token"
    bounds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


SELECTIONS = {
    "all": SelectionKind(pairs=True),
    "spread": SelectionKind(("by", "keep", "drop_zero", "scale"), compares=True),
    "top_p": SelectionKind(("by", "p", "scale"), compares=True, drops_zero=True),
    "top_k": SelectionKind(("by", "k", "drop_zero", "scale"), compares=True),
    "min_p": SelectionKind(("by", "p", "drop_zero", "scale"), compares=True),
    "resample_on_correct": SelectionKind(
        ("by", "members", "draw", "scale"), compares=True, drops_zero=True
    ),
    "dynamic": SelectionKind(
        ("by", "scale", "max_refills"), compares=True, drops_zero=True, refills=True, pairs=True
    ),
}
_CRITIC = ("gamma", "lam", "whiten", "bootstrap")
ADVANTAGES = {
    "grpo": AdvantageKind(("std",), compares=True),
    "grpo_process": AdvantageKind(("std",), one_turn="grpo"),
    "adca": AdvantageKind(
        ("std", "alpha", "alpha_final", "length"), compares=True, unlabelled="grpo"
    ),
    "rloo": AdvantageKind(compares=True),
    "reinforce": AdvantageKind(("baseline_decay",)),
    "reward_to_go": AdvantageKind(("baseline_decay", "gamma_turn"), one_turn="reinforce"),
    "opob": AdvantageKind(("std",), compares=True, reads_anchor=True),
    "gae": AdvantageKind(_CRITIC, critic=True),
    "gae_bilevel": AdvantageKind((*_CRITIC, "gamma_turn"), critic=True, one_turn="gae"),
    "vtrace": AdvantageKind(
        (*_CRITIC, "rho_max", "c_max"), critic=True, reads_anchor=True, corrects=True
    ),
}
CORRECTIONS = {
    "none": CorrectionKind(),
    "ppo": CorrectionKind(reads_anchor=False),
    "decoupled": CorrectionKind(
        ("anchor", "level", "w_max"), bounds={"trajectory": {"w_max": 5.0}}
    ),
    "icepop": CorrectionKind(("anchor", "low", "high")),
    "geo_mask": CorrectionKind(
        ("anchor", "low", "high"),
        bounds={"": {"low": 0.8, "high": 1.25}, "fresh": {"low": 0.99, "high": 1.01}},
    ),
    "cispo": CorrectionKind(("epsilon",), reads_anchor=False, clips=False),
    "gspo": CorrectionKind(
        ("anchor", "w_max"), of_sequence=True, bounds={"": {"clip_low": 3e-4, "clip_high": 4e-4}}
    ),
    "topr": CorrectionKind(("level",), reads_anchor=False, clips=False, level="trajectory"),
    "vcpo": CorrectionKind(
        ("w_max",),
        reads_anchor=False,
        clips=False,
        scales_lr=True,
        level="trajectory",
        bounds={"": {"w_max": 8.0}},
    ),
    "m2po": CorrectionKind(("w_max", "second_moment"), clips=False, bounds={"": {"w_max": 20.0}}),
    "dppo_tv": CorrectionKind(
        ("w_max", "divergence"), reads_anchor=False, clips=False, bounds={"": {"w_max": 20.0}}
    ),
}
BOUNDS = {"w_max": 2.0, "low": 0.5, "high": 5.0, "clip_low": 0.2, "clip_high": 0.28}
KINDS: dict[str, Mapping[str, SelectionKind | AdvantageKind | CorrectionKind]] = {
    "selection": SELECTIONS,
    "advantage": ADVANTAGES,
    "correction": CORRECTIONS,
}
