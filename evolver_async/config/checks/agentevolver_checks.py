"""Checks of experience, judge, questioning and reflection, and of agents that play episodes."""

import re
from collections.abc import Iterator

from evolver_async.config.checks.address_checks import endpoint, socket_address
from evolver_async.config.effective.inert import guided_members
from evolver_async.config.sections import Config
from evolver_async.config.sections.agentevolver import LLM_SECTIONS
from evolver_async.config.sections.reward import SUCCESS_RULES
from evolver_async.config.sections.rollout import EXTERNAL, USERS, EndpointConfig


def agent(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse settings that an agent of `rollout.agent`, which plays whole episodes, ignores."""
    judged = config.rollout.agent_reward == "judged"
    if not config.rollout.agent:
        if judged:
            yield "rollout.agent_reward", "must be returned: rollout.agent is not set"
        if config.rollout.players:
            yield "rollout.players", "must be empty: rollout.agent, which names them, is not set"
        return
    yield from _players(config)
    if config.rollout.agent in (EXTERNAL, USERS):
        yield from _elsewhere(config.rollout.agent, config.rollout.endpoint)
    if config.rollout.agent == USERS:
        yield from _users(config)
    if config.launch.kind == "serial":
        yield "rollout.agent", "needs real time, and launch.kind=serial has a virtual clock"
    for key, value, required, reason in (
        ("rollout.format", config.rollout.format, "auto", "writes its own turns"),
        ("rollout.extract", config.rollout.extract, "", "writes its own turns"),
        ("rollout.context", config.rollout.context, "full", "writes its own prompts"),
        ("rollout.system_prompt", config.rollout.system_prompt, "", "writes its own prompts"),
        ("env.prompt", config.env.prompt, "auto", "writes its own prompts"),
        ("env.tools.mcp", config.env.tools.mcp, "", "brings its own tools"),
        ("experience.kind", config.experience.kind, "none", "writes its own prompts"),
        ("questioning.kind", config.questioning.kind, "none", "plays without an environment"),
    ):
        if value != required:
            yield key, f"must be {required or 'empty'}: rollout.agent {reason}, is {value}"
    if config.judge.kind == "rule":
        yield "judge.kind", "rule needs an environment's scores: rollout.agent plays without one"


def _players(config: Config) -> Iterator[tuple[str, str]]:
    """Require several different players, and settings that look at each by itself."""
    names = config.rollout.players
    if not names:
        return
    if len(names) < 2 or len(set(names)) < len(names):
        yield "rollout.players", f"must be empty, or several different names: is {names}"
    if config.reward.terms:
        yield "reward.terms", "must be empty: each of rollout.players has a reward of its own"
    if config.advantage.baseline == "shared" and config.selection.facts.refills:
        looks = f"selection.kind={config.selection.kind} looks at the rewards of each player"
        yield "advantage.baseline", f"must be player: {looks}"


def _elsewhere(agent: str, endpoint: EndpointConfig) -> Iterator[tuple[str, str]]:
    """Require a key and a port of agents that start episodes themselves, and of users."""
    if not endpoint.key_env:
        yield (
            "rollout.endpoint.key_env",
            f"must name an environment variable: rollout.agent={agent} gives tasks to, and takes"
            f" rewards from, who has its key, at {endpoint.bind}",
        )
    if not endpoint.port:
        yield "rollout.endpoint.port", f"must be set: rollout.agent={agent} is called there"


def _users(config: Config) -> Iterator[tuple[str, str]]:
    """Require what conversations of people can give."""
    rollout = config.rollout
    if not rollout.reward_wait_s:
        yield "rollout.reward_wait_s", "must be set: conversations are rated after they end"
    if rollout.agent_reward == "judged":
        yield "rollout.agent_reward", "must be returned: rollout.agent=users is rated by people"
    if rollout.players:
        yield "rollout.players", "must be empty: a conversation of rollout.agent=users has one"
    if rollout.group_size > 1 and max(config.actors.count, config.actors.max) > 1:
        reason = "a group's conversations begin alike, and another actor does not know how"
        yield "actors.count", f"must be 1 with rollout.group_size={rollout.group_size}: {reason}"
    if config.eval.episodes:
        yield "eval.episodes", "must be 0: nobody plays held-out tasks for rollout.agent=users"
    for index, pattern in enumerate(rollout.serve.redact):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"rollout.serve.redact[{index}]", f"is no regular expression: {error}"


def guidance(config: Config) -> Iterator[tuple[str, str]]:
    """Require unguided members where a rule compares them with guided ones."""
    rollout, share = config.rollout, config.rollout.guided_fraction
    if guided_members(config) == rollout.group_size and rollout.guided == "adaptive":
        reason = "rollout.guided=adaptive compares them with guided ones"
        yield "rollout.guided_fraction", f"must leave members unguided: {reason}, is {share}"
    experience = config.experience
    if experience.kind == "none" or not guided_members(config):
        return
    if experience.injection == "step" and config.rollout.format == "native":
        reason = "the template writes the messages of rollout.format=native"
        yield "experience.injection", f"must be episode: {reason}"
    if experience.by_reference and config.learner.ranks > 1:
        reason = "a reference that learner.ranks share cannot teach"
        yield "experience.distill_teacher", f"must be policy: {reason}"
    withheld = experience.internalise == "distill" and experience.distill_on == "bare"
    if withheld and rollout.guided != "fixed":
        reason = "experience.distill_on=bare shows none to the members that it guides"
        yield "rollout.guided", f"must be fixed: {reason}, is {rollout.guided}"


def reward(config: Config) -> Iterator[tuple[str, str]]:
    """Require terms with different labels, and a rule of success that is one of them."""
    labels = [term.called for term in config.reward.terms]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            yield f"reward.terms[{index}].label", f"two terms are named {label}: set another"
        if label in SUCCESS_RULES and config.reward.terms[index].name != label:
            yield f"reward.terms[{index}].label", f"{label} is a rule of reward.success"
    success = config.reward.success
    if success not in (*SUCCESS_RULES, *labels):
        known = ", ".join((*SUCCESS_RULES, *labels))
        yield "reward.success", f"must be one of {known}, is {success!r}"


def mechanisms(config: Config) -> Iterator[tuple[str, str]]:
    """Require the models and timeouts that the mechanisms need."""
    judged = config.rollout.agent_reward == "judged"
    for name in LLM_SECTIONS:
        section = getattr(config, name)
        if section.kind != "llm" and not (judged and name == "judge"):
            continue
        if config.launch.kind == "serial":
            key = "reward.terms" if name == "reward" else f"{name}.kind"
            yield key, "llm needs real time, and launch.kind=serial has a virtual clock"
        yield from endpoint(f"{name}.llm", section.llm)
    stall = config.buffer.stall_s
    for name, waits in (
        ("judge", judged or config.judge.audited),
        ("reflection", config.reflection.kind == "llm"),
        ("reward", bool(config.reward.terms)),
    ):
        if waits and getattr(config, name).timeout_s >= stall:
            yield (
                f"{name}.timeout_s",
                f"must be less than buffer.stall_s ({stall:g}): a group makes no progress while it"
                " waits for the answer",
            )
    questioning, experience = config.questioning, config.experience
    if questioning.replays_kept > (most := questioning.replays):
        yield "questioning.replays_kept", f"must be at most questioning.replays ({most})"
    judge = config.judge
    longest = config.policy.max_length
    if judge.kind == "self" and judge.max_tokens >= longest:
        reason = f"must leave room for a question in policy.max_length ({longest})"
        yield "judge.max_tokens", f"{reason}, is {judge.max_tokens}"
    if experience.embedder == "endpoint" and (experience.kind, questioning.kind) != (
        "none",
        "none",
    ):
        if config.launch.kind == "serial":
            problem = "endpoint needs real time, and launch.kind=serial has a virtual clock"
            yield "experience.embedder", problem
        yield from endpoint("experience.embedding", experience.embedding)
    yield from socket_address("experience.address", experience.address, config.security.keys)
    remote = config.buffer.address.startswith("tcp://")
    if experience.pooled and remote and not experience.address:
        yield "experience.address", "must be set, because buffer.address is a tcp:// address"
