"""Settings that all episodes of a stage share, and what `auto` stands for in some of them."""

import math
import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from actors.envs.base import env_class
from actors.envs.tool_server import ToolServer, tool_server
from actors.failure_counts import FailureCounts
from actors.formats.chat import Chat
from actors.formats.native import Native
from actors.formats.turns import TurnFormat, turn_format
from actors.llm.quoting import MAX_CHARS
from actors.rollout.environment import IdleEnvironments
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import stage_as_written
from evolver_async.files import parsed
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.randomness import key, uniform
from evolver_async.schema import Ticket

PLAIN_VOCABULARY = 10_000  # tokens of a tokenizer from which on `env.prompt: auto` means `plain`


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that all episodes of a stage share. `max_length` bounds the tokens of one
    context."""

    chat: Chat
    format: TurnFormat
    actor: str
    incarnation: int
    seed: int
    max_turns: int
    max_length: int
    format_penalty: float
    max_observation_tokens: int = 0  # of one observation; 0: no limit
    format_errors: int  # turns that cannot be parsed after which an episode ends; 0: never
    isolation: str = "auto"  # of environments
    server: ToolServer | None = None  # of tools beside the environment's own
    step_timeout_s: float
    episode_timeout_s: float
    latency: str  # of every step: none, fixed or lognormal
    latency_median_s: float
    latency_sigma: float
    wording: Literal["tiny", "plain"] = "tiny"  # of the instructions in the system message
    system_prompt: str = ""  # replaces the turn format's instructions
    context: str = "full"  # what a turn sees: full, window or single
    window: int = 1  # turns that a turn sees before it, where context is window
    truncated_reward: float = 0.0  # added where an episode ends without its environment's end
    recorded: bool = False  # whether episodes are kept in words as well
    stepwise: bool = False  # every turn is guided by itself
    withholds: bool = False  # guided members of training sample without their experience
    hints: int = 5  # entries that guide a scripted episode at most
    hint_chars: int = MAX_CHARS  # of all of them
    max_reward: float = math.inf  # of either sign; the buffer refuses a larger one
    players: tuple[str, ...] = ()  # of an agent's episodes; (): there is one
    scored: float = 0.0  # share of episodes in which the environment's score is read every turn
    format_name: str = "think_answer"  # of the turn format in the configuration
    failures: FailureCounts = field(default_factory=FailureCounts)
    idle: IdleEnvironments = field(default_factory=IdleEnvironments)


def setting_of(
    config: Config,
    chat: Chat,
    name: str,
    incarnation: int,
    failures: FailureCounts | None = None,
    idle: IdleEnvironments | None = None,
) -> Setting:
    """Return the settings of a stage's episodes. `idle`: shared by the stages of an actor."""
    rollout, env = config.rollout, config.env
    return Setting(
        chat=chat,
        format=format_of(config, chat),
        format_name=format_name(config),
        actor=name,
        incarnation=incarnation,
        seed=config.run.seed,
        max_turns=rollout.max_turns,
        max_length=config.policy.max_length,
        format_penalty=rollout.format_penalty,
        max_observation_tokens=rollout.max_observation_tokens,
        format_errors=rollout.format_errors,
        isolation=env.isolation,
        server=tool_server(env.tools.mcp, env.tools.key_env) if env.tools.mcp else None,
        step_timeout_s=env.step_timeout_s,
        episode_timeout_s=env.episode_timeout_s,
        latency=env.latency.kind,
        latency_median_s=env.latency.median_s,
        latency_sigma=env.latency.sigma,
        wording=wording_of(env.prompt, chat.vocabulary),
        system_prompt=rollout.system_prompt,
        context=rollout.context,
        window=rollout.window,
        truncated_reward=rollout.truncated_reward,
        max_reward=config.safety.max_reward,
        players=tuple(rollout.players),
        recorded=config.experience.kind != "none"
        or config.judge.audited
        or bool(config.reward.terms)
        or config.questioning.kind == "llm",
        stepwise=config.experience.injection == "step",
        withholds=config.experience.internalise == "distill"
        and config.experience.distill_on == "bare",
        hints=config.experience.top_k,
        hint_chars=config.experience.max_chars,
        scored=_scored_share(config),
        failures=failures or FailureCounts(),
        idle=idle or IdleEnvironments(env.processes),
    )


def format_of(config: Config, chat: Chat | None = None) -> TurnFormat:
    """Make the turn format of a stage. `chat`: None where only the shape of turns is asked for.

    Raises ValueError, which names the key, for a format that cannot be.
    """
    rollout = config.rollout
    return turn_format(
        format_name(config),
        think=rollout.think,
        actions_per_turn=rollout.actions_per_turn,
        extract=rollout.extract,
        chat=chat,
    )


def format_name(config: Config) -> str:
    """Return `rollout.format`, `auto` resolved: the format that the environment names as its
    `turn_format` (with `env.tools` it is `tool_call`), where that is `tool_call` and the policy's
    template calls tools itself `native`, else `think_answer` for a tiny tokenizer (that of the
    preset, or of a policy that began as it) and where `think` or `actions_per_turn` ask for its
    tags, else `chat`.

    Raises ValueError for an environment that cannot be imported, and for a mixture of environments
    made for different formats.
    """
    rollout = config.rollout
    if rollout.format != "auto":
        return rollout.format
    if rollout.agent:
        return "think_answer"  # which it does not use: it writes its own turns
    names = {part.env for part in config.tasks.mixture} or {config.env.name}
    made_for = {getattr(env_class(name), "turn_format", "") for name in names}
    if config.env.tools.mcp:
        made_for = {"tool_call"}
    if len(made_for) > 1:
        differ = ", ".join(sorted(one or "none" for one in made_for))
        raise ConfigError(
            f"rollout.format: auto cannot choose, as the environments of tasks.mixture are made for"
            f" different formats ({differ}): name one"
        )
    tagged = rollout.think or rollout.actions_per_turn > 1 or _is_tiny(config.policy.path)
    kind = made_for.pop() or ("think_answer" if tagged else "chat")
    if kind == "tool_call" and not tagged and calls_tools(config.policy.path):
        return "native"
    return kind


def with_formats(config: Config) -> Config:
    """Return the configuration of a run with `auto` resolved, in every stage. Raises ValueError as
    `format_name` does."""
    if config.rollout.agent:
        return config
    stages = []
    named = replace(config, rollout=replace(config.rollout, format=format_name(config)))
    for index, stage in enumerate(config.stages):
        own = format_name(stage_as_written(config, index))
        given = stage.override.get("rollout", {})
        if own != named.rollout.format or "format" in given:
            override = stage.override | {"rollout": given | {"format": own}}
            stage = replace(stage, override=override)
        stages.append(stage)
    return replace(named, stages=stages)


@lru_cache
def calls_tools(path: str) -> bool:
    """Return True if the chat template in a model's directory lists tools, and writes calls in a
    known syntax."""
    try:
        return Native(Chat(load_tokenizer(path))).syntax is not None
    except (OSError, ValueError):  # other checks name it
        return False


def _is_tiny(path: str) -> bool:
    """Return True for a policy whose tokenizer is as small as the preset's."""
    if not path:
        return True
    try:
        shape = parsed((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is not there, or not yet: other checks name it
        return False
    size = shape.get("text_config", shape).get("vocab_size", PLAIN_VOCABULARY)
    return size < PLAIN_VOCABULARY


def _scored_share(config: Config) -> float:
    """Return the share of episodes whose scores are read: all if the rule or a judge of one's own
    may use them, else the share in which a model judge is compared with them."""
    judge = config.judge
    if judge.kind not in ("none", "self", "llm"):
        return 1.0
    return 0.0 if judge.kind == "none" else judge.probes


def wording_of(prompt: str, vocabulary: int) -> Literal["tiny", "plain"]:
    """Resolve `env.prompt` for a tokenizer of `vocabulary` tokens."""
    if prompt == "auto":
        return "plain" if vocabulary >= PLAIN_VOCABULARY else "tiny"
    return "plain" if prompt == "plain" else "tiny"


def step_latency_s(setting: Setting, ticket: Ticket, member: int, step: int) -> float:
    """Draw the injected latency of a step; the draw belongs to the step."""
    if setting.latency == "none":
        return 0.0
    if setting.latency == "fixed":
        return setting.latency_median_s
    parts = ("latency", ticket.group_id, member, ticket.attempt, step)
    rng = random.Random(key(setting.seed, *parts))
    return setting.latency_median_s * rng.lognormvariate(0.0, setting.latency_sigma)


def reads_scores(setting: Setting, ticket: Ticket, member: int) -> bool:
    """Return True for the drawn share of episodes whose scores are read."""
    if not setting.scored:
        return False
    parts = ("scored", ticket.group_id, member, ticket.attempt)
    return uniform(setting.seed, *parts) < setting.scored
