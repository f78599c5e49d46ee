"""Checks of the learner's sections: selection, advantage, correction, loss, ranks, rollbacks."""

from collections.abc import Iterator

from evolver_async.config.checks.address_checks import endpoint, open_address
from evolver_async.config.effective.inert import guided_members
from evolver_async.config.sections import Config
from evolver_async.config.sections.learner import ROUNDING


def learner(config: Config) -> Iterator[tuple[str, str]]:
    """Require that correction, loss, optimizer and ranks fit each other."""
    learner, loss, correction = config.learner, config.loss, config.correction
    short = config.policy.decided_dtype == "bfloat16" and correction.anchor == "interpolate"
    if short and correction.facts.of_sequence and min(loss.clip_low, loss.clip_high) < ROUNDING:
        rounds = f"bfloat16 rounds the ratio of a sequence by {ROUNDING}, beyond loss.clip_low and"
        remedies = "loss.clip_high; or raise these, or set policy.dtype=float32"
        yield "correction.anchor", f"must be recompute: {rounds} {remedies}"
    if loss.kl == "k1" and loss.kl_place == "loss":
        yield (
            "loss.kl",
            "k1 has no gradient in the loss on average: set loss.kl_place=reward, or k2 or k3",
        )
    if len(learner.betas) != 2:
        yield "learner.betas", f"must be two numbers, is {learner.betas}"
    if learner.ranks > 1 and config.launch.kind == "serial":
        yield "learner.ranks", "must be 1: launch.kind=serial is one process"
    if learner.ranks > 1 and ":" in learner.device:
        yield (
            "learner.device",
            f"{learner.device} is one GPU: with learner.ranks > 1 set cuda, and name the GPUs in"
            " launch.gpus.learner",
        )
    if learner.offload_activations and not learner.gradient_checkpointing:
        needs = "needs learner.gradient_checkpointing: the inputs of recomputed layers are kept"
        yield "learner.offload_activations", needs
    yield from _hosts(config)
    yield from _context(config)


def _context(config: Config) -> Iterator[tuple[str, str]]:
    """Require what ranks need to compute rows together."""
    learner, key = config.learner, "learner.context_parallel"
    if learner.context_parallel == 1:
        return
    if learner.ranks % learner.context_parallel:
        yield key, f"must divide learner.ranks ({learner.ranks}), is {learner.context_parallel}"
    if not learner.packing:
        yield key, "must be 1: learner.packing=false, and padded rows are not shared"
    if not learner.token_budget:
        yield "learner.token_budget", f"must not be 0: it is not measured with {key} > 1"


def _hosts(config: Config) -> Iterator[tuple[str, str]]:
    """Require ranks for every host of the learner, and a place where they meet."""
    learner = config.learner
    if learner.hosts == 1:
        return
    if learner.ranks % learner.hosts:
        equal = f"equally many ranks, and learner.ranks is {learner.ranks}"
        yield "learner.hosts", f"{learner.hosts} hosts have {equal}"
    if config.launch.kind == "ray" and not config.launch.ray.shared:
        yield "learner.hosts", "with launch.kind=ray needs launch.ray.shared: all see run.dir"
    yield from open_address("learner", learner.address, learner.trusted_network, "ranks")


def teacher(config: Config) -> Iterator[tuple[str, str]]:
    """Require one teacher at most, and an endpoint that can be called."""
    teacher = config.teacher
    if not teacher.url:
        return
    if teacher.path:
        yield "teacher.url", "must be empty: teacher.path is the teacher"
    if config.launch.kind == "serial":
        yield "teacher.url", "needs real time, and launch.kind=serial has a virtual clock"
    yield from endpoint("teacher", teacher)
    if teacher.temperature != 1:
        reason = "log-probs of an endpoint have no other"
        yield "teacher.temperature", f"must be 1: {reason}, is {teacher.temperature:g}"


def groups(config: Config) -> Iterator[tuple[str, str]]:
    """Require groups that are large enough for selection and advantage in an rl stage."""
    selection, advantage, size = config.selection, config.advantage, config.rollout.group_size
    for name, section in (("advantage", advantage), ("selection", selection)):
        if size == 1 and section.facts.compares:
            reason = f"{name}.kind={section.kind} compares members of a group"
            yield "rollout.group_size", f"must be at least 2: {reason}"
    experience = config.experience
    distills = experience.kind != "none" and experience.internalise == "distill"
    if distills and experience.distill_on != "bare":
        guided = guided_members(config)
        if advantage.facts.compares and 1 in (guided, size - guided):
            reason = "distill compares guided members with each other, and so the others"
            yield "rollout.guided_fraction", f"leaves one of {size} members alone: {reason}"
    if 0 < selection.members < min(4, size):
        allowed = "0 or at least 4 (two good and two bad ones)"
        yield "selection.members", f"must be {allowed}, is {selection.members}"


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
