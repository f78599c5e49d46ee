"""Checks of the learner's sections: selection, advantage, correction, loss, ranks, rollbacks."""

from collections.abc import Iterator

from evolver_async.config.sections import Config
from evolver_async.config.sections.learner import INTERPOLATED, ROUNDING
from evolver_async.extension import is_own

UNCLIPPED = ("cispo", "topr", "vcpo", "m2po", "dppo_tv")  # corrections without a ratio to clip
RELATIVE = {  # values that compare the members of a group
    "advantage": ("grpo", "adca", "rloo", "opob"),
    "selection": ("spread", "top_p", "top_k", "min_p", "resample_on_correct", "dynamic"),
}
PER_TURN = {"grpo_process": "grpo", "gae_bilevel": "gae"}  # and what they are with a single turn


def learner(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Require that updates of a step, correction, loss and ranks fit each other.

    `kind`: of the stage. Those of other kinds than rl train the groups that selection leaves out.
    """
    learner, loss, correction = config.learner, config.loss, config.correction
    selection, kept = config.selection, learner.groups_per_step
    if kind == "rl" and selection.kind == "spread":
        kept = max(1, round(kept * selection.keep))
    elif kind == "rl" and selection.kind == "top_k":
        kept = min(kept, selection.k)
    if learner.minibatches > kept:
        most = f"{kept}, the groups that one step trains"
        yield "learner.minibatches", f"must be at most {most}, is {learner.minibatches}"
    if correction.level == "trajectory" and correction.kind not in ("decoupled", "topr", "vcpo"):
        yield "correction.level", f"must be auto: correction.kind={correction.kind} determines it"
    if correction.level == "token" and correction.kind == "vcpo":
        yield "correction.level", "must be auto: correction.kind=vcpo weighs whole trajectories"
    short = config.policy.decided_dtype == "bfloat16" and correction.anchor == "interpolate"
    if short and correction.kind == "gspo" and min(loss.clip_low, loss.clip_high) < ROUNDING:
        rounds = f"bfloat16 rounds the ratio of a sequence by {ROUNDING}, beyond loss.clip_low and"
        remedies = "loss.clip_high; or raise these, or set policy.dtype=float32"
        yield "correction.anchor", f"must be recompute: {rounds} {remedies}"
    if config.advantage.kind == "vtrace" and correction.kind != "none":
        yield "correction.kind", "must be none: advantage.kind=vtrace has its own correction"
    if loss.kl == "k1" and loss.kl_place == "loss":
        yield (
            "loss.kl",
            "k1 has no gradient in the loss on average: set loss.kl_place=reward, or k2 or k3",
        )
    if len(learner.betas) != 2:
        yield "learner.betas", f"must be two numbers, is {learner.betas}"
    if config.safety.rollback and config.safety.action != "rollback":
        yield "safety.rollback", f"needs safety.action=rollback, which is {config.safety.action}"
    if learner.ranks > 1 and config.launch.kind == "serial":
        yield "learner.ranks", "must be 1: launch.kind=serial is one process"
    if learner.ranks > 1 and ":" in learner.device:
        yield (
            "learner.device",
            f"{learner.device} is one GPU: with learner.ranks > 1 set cuda, and name the GPUs in"
            " launch.gpus.learner",
        )


def groups(config: Config) -> Iterator[tuple[str, str]]:
    """Require groups that are large enough for selection and advantage in an rl stage."""
    selection, advantage, size = config.selection, config.advantage, config.rollout.group_size
    for section, kinds in RELATIVE.items():
        kind = getattr(config, section).kind
        if size == 1 and kind in kinds:
            reason = f"{section}.kind={kind} compares members of a group"
            yield "rollout.group_size", f"must be at least 2: {reason}"
    if config.experience.kind != "none" and config.experience.internalise == "distill":
        guided = round(config.rollout.guided_fraction * size)
        if advantage.kind in RELATIVE["advantage"] and 1 in (guided, size - guided):
            reason = "distill compares guided members with each other, and so the others"
            yield "rollout.guided_fraction", f"leaves one of {size} members alone: {reason}"
    if selection.members > size:
        yield "selection.members", f"must be at most rollout.group_size ({size})"
    if 0 < selection.members < min(4, size):
        allowed = "0 or at least 4 (two good and two bad ones)"
        yield "selection.members", f"must be {allowed}, is {selection.members}"
    if selection.members and selection.kind != "resample_on_correct":
        yield "selection.members", f"must be 0: selection.kind={selection.kind} keeps groups whole"
    if bool(advantage.overlong_cache) != bool(advantage.overlong_limit):
        yield "advantage.overlong_cache", "must be set together with advantage.overlong_limit"
    if advantage.overlong_cache > (limit := advantage.overlong_limit):
        yield "advantage.overlong_cache", f"must be at most advantage.overlong_limit ({limit})"


def demonstrated(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Refuse ways to internalise that a stage of a `kind` other than rl cannot take."""
    experience = config.experience
    if experience.kind == "none" or not config.rollout.guided_fraction:
        return
    if experience.internalise == "distill":
        yield "experience.internalise", "must be none or strip: distill belongs to rl stages"
    if kind == "sft" and experience.internalise != "none":
        follows = "a guided demonstration follows what its experience says"
        yield "experience.internalise", f"must be none, or rollout.guided_fraction 0: {follows}"


def guided(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse settings that training without the prompts' experience does not support."""
    experience, correction, boost = config.experience, config.correction, config.loss.boost
    guided_fraction = config.rollout.guided_fraction
    if experience.kind == "none" or not guided_fraction:
        return
    if experience.internalise != "strip":
        strips_nothing = f"experience.internalise={experience.internalise} strips nothing"
        if experience.strip_fraction < 1:
            yield "experience.strip_fraction", f"must be 1: {strips_nothing}"
        if experience.reliance_coef:
            yield "experience.reliance_coef", f"must be 0: {strips_nothing}"
        if experience.keep_copied and experience.internalise == "none":
            yield "experience.keep_copied", f"must be 0: {strips_nothing}"
        if boost:
            yield "loss.boost", f"must be 0: {strips_nothing}"
        return
    if correction.anchor == "interpolate" and correction.kind in INTERPOLATED:
        yield "correction.anchor", "must be recompute: guided tokens have no interpolated anchor"
    if boost and correction.kind in UNCLIPPED:
        yield "loss.boost", f"must be 0: correction.kind={correction.kind} has no clip to raise"
    stale = correction.kind == "ppo" and correction.guided != "anchor"
    if boost and config.learner.minibatches == 1 and not stale:
        yield "loss.boost", "must be 0: with learner.minibatches=1 no clip takes effect"


def idle(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys that change nothing in an rl stage; another stage may need them."""
    for section in ("selection", "advantage", "correction"):
        chosen = getattr(config, section)
        if chosen.params and not is_own(chosen.kind):
            yield f"{section}.params", f"must be empty: {section}.kind={chosen.kind} reads none"
    share, advantage = config.rollout.guided_fraction, config.advantage
    if config.loss.boost and (config.experience.kind == "none" or not share):
        why = "experience.kind=none" if share else "rollout.guided_fraction=0"
        yield "loss.boost", f"must be 0: with {why} no token loses its experience"
    ends = advantage.kind == "gae_bilevel" and advantage.bootstrap  # discounted by gamma_turn
    if config.rollout.max_turns == 1 and advantage.kind in PER_TURN and not ends:
        same = PER_TURN[advantage.kind]
        problem = f"with rollout.max_turns=1 it is {same} under another name: set {same}"
        yield "advantage.kind", f"{advantage.kind} compares turns; {problem}"
