"""Sections about rollouts: environment, turns, engine, actors."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from evolver_async.config.values.rules import (
    IMPORT_PATH,
    Count,
    Fraction,
    Open,
    Pattern,
    Positive,
    PositiveFraction,
    Range,
    Scope,
    Signed,
    Variable,
)

Device = Annotated[str, Pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu or cuda")]
PlayerName = Annotated[str, Pattern(r"[A-Za-z][\w-]{0,31}", "a short word")]
Turns = Annotated[int, Range(ge=1, le=32767)]  # turns are numbered in 16 bits
HOST = r"[A-Za-z0-9_.:-]+"
Host = Annotated[str, Pattern(HOST, "a host's name or address")]
EXTERNAL, USERS = "external", "users"  # the values of `rollout.agent` that are no path
Extract = Annotated[
    str,
    Pattern(
        rf"|last_number|boxed|<[A-Za-z][\w-]*>|{IMPORT_PATH}",
        "empty, last_number, boxed, a tag such as <answer>, or package.module:function",
    ),
]


@dataclass
class LatencyConfig:
    """Artificial latency of each environment step, as a model of slow tools."""

    kind: Literal["none", "fixed", "lognormal"] = "none"
    median_s: float = 0.05
    sigma: float = 1.0  # of the logarithm


@dataclass
class ToolsConfig:
    """Tools of an MCP server, called beside the environment's own."""

    # http(s) URL of the server, or a command that speaks MCP over its standard input and output,
    # which each actor starts once; "": none
    mcp: str = ""
    key_env: Variable = ""  # environment variable with the bearer token of a URL


@dataclass
class EnvConfig:
    """The environment: a registered name or an import path (`my_package.my_env:MyEnv`)."""

    name: Annotated[str, Scope.REPLAY] = "frozen_lake"
    # the environment's own parameters
    params: Annotated[dict[str, Any], Scope.REPLAY] = field(default_factory=dict)
    # wording of instructions; auto: plain for a tokenizer of normal size, else tiny
    prompt: Literal["auto", "tiny", "plain"] = "auto"
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    # where its calls are made: on the actor's event loop, each episode's in a thread of its own, or
    # in processes; auto: as its class says, else threads for code of your own
    isolation: Literal["auto", "loop", "thread", "process"] = "auto"
    # of an actor, for environments in processes; episodes beyond share them
    processes: Annotated[Count, Scope.RUN] = 2
    # a call of the environment that has not returned by then fails its episode, which is played
    # again
    step_timeout_s: Positive = 30.0
    # an episode that has lasted so long ends as truncated after its present turn; an agent may make
    # no further call, and is ended if it has not returned env.step_timeout_s later
    episode_timeout_s: Positive = 600.0


@dataclass
class EndpointConfig:
    """Addresses and key of the HTTP endpoint that agents call."""

    # interface of an actor's endpoint: its address; 0.0.0.0 for all, and for containers that of
    # their bridge
    bind: Host = "127.0.0.1"
    # an actor has the first free port from this one on; 0: any
    port: Annotated[int, Range(ge=0, le=65535)] = 0
    # host by which agents reach it, in their base URL; "": the address of bind, for all interfaces
    # the name of the actor's host
    public_host: Annotated[str, Pattern(f"({HOST})?", "a host's name or address")] = ""
    # rollout.agent=external: environment variable with the key of those who start and finish
    # episodes; users: with the operator's, which sees and rates all conversations
    key_env: Variable = ""


@dataclass
class ServeConfig:
    """People who use the policy while it trains (rollout.agent=users)."""

    # environment variable with their keys, as NAME=KEY separated by blanks; "": the operator alone
    users_env: Variable = ""
    calls_per_minute: Count = 60  # of one user
    # conversations that an actor remembers at most; a new one takes the place of the oldest
    conversations: Count = 10_000
    # regular expressions; what they match in messages that the policy did not write is replaced by
    # [redacted] before it reads them
    redact: list[str] = field(default_factory=list)


@dataclass
class RolloutConfig:
    """The course of an episode."""

    group_size: Count = 8  # G: episodes per task
    max_turns: Turns = 10
    # the turn format; auto: the one that the environment is made for (native instead of tool_call
    # where the model's template calls tools itself), else chat for a model of normal size, and
    # think_answer for a tiny one or where its tags are asked for (think, actions_per_turn)
    format: Annotated[
        str, Open("auto", "chat", "think_answer", "tool_call", "native", "interleaved")
    ] = "auto"
    # chat: the part of the model's message that is the action: all of it (empty), its last number,
    # the content of its last \boxed{} or of its last <tag>, or what a function returns
    extract: Extract = ""
    think: bool = False  # a turn opens with <think> (tool_call: <reason>)
    # variables of the model's chat template, such as enable_thinking: false, in every prompt; the
    # chat_template_kwargs of an agent's call come before them
    template: Annotated[dict[str, Any], Scope.RUN] = field(default_factory=dict)
    actions_per_turn: Count = 1
    # context of a turn: all turns, the last turns or the present one alone
    context: Literal["full", "window", "single"] = "full"
    window: Count = 3  # window: turns before the present one
    max_tokens: Count = 16  # per turn
    # tokens of one observation or tool result; of a longer one the policy reads the beginning, the
    # end, and how much is left out between them; 0: no limit
    max_observation_tokens: Annotated[int, Range(ge=64, also=0)] = 0
    # training needs the log-probs of the sampled tokens, so it cannot be 0
    temperature: Annotated[Positive, Scope.DATA] = 1.0
    # added to the reward for every turn that cannot be parsed or has an action that does not exist
    format_penalty: Signed = -0.1
    truncated_reward: Signed = 0.0  # added unless the environment terminates the episode
    guided_fraction: Fraction = 0.5  # share of a group's members that experience guides
    # rollout groups with guided members: all (fixed), a repeat of each group that failed throughout
    # (failed), or all while the guided members gain and one in ten otherwise (adaptive)
    guided: Annotated[Literal["fixed", "failed", "adaptive"], Scope.REPLAY] = "fixed"
    format_errors: int = 0  # turns that cannot be parsed after which an episode ends; 0: never
    system_prompt: str = ""  # how to reply, after the task's instructions; "": the format's text
    # import path of an async function that plays whole episodes; external: agents elsewhere start
    # and finish them by HTTP; users: conversations of people who use the policy meanwhile
    agent: Annotated[str, Scope.RUN] = ""
    # reward of the agent's episodes: its return value, or the verdict of judge.llm
    agent_reward: Annotated[Literal["returned", "judged"], Scope.RUN] = "returned"
    # external, users: an episode may end without a reward, which then has so many seconds to come;
    # without one the episode is counted, not trained; 0: external agents finish with the reward
    reward_wait_s: Annotated[float, Scope.RUN] = 0.0
    # names of the players of an agent's episodes, which share the policy: a call names its player
    # as its `model`, and each has turns, a reward and a baseline of its own; []: there is one
    players: list[PlayerName] = field(default_factory=list)
    endpoint: Annotated[EndpointConfig, Scope.RUN] = field(default_factory=EndpointConfig)
    serve: Annotated[ServeConfig, Scope.RUN] = field(default_factory=ServeConfig)


@dataclass
class EngineConfig:
    """The generation engine of an actor."""

    kind: Literal["torch", "vllm"] = "torch"  # vllm: AsyncLLM in its own processes
    slots: Count = 64  # sequences decoded together
    prefill_tokens: Count = 4096  # tokens (padding included) of one prefill step
    # new weights during a generation: swap and compute its KV again (keep), swap and go on with the
    # KV of the older weights (keep_kv), or let it end first (wait)
    in_flight: Literal["keep", "keep_kv", "wait"] = "keep"
    device: Device = "auto"
    threads: Count = 1
    tensor_parallel: Count = 1  # vllm: GPUs (or CPU processes) that share one engine's model
    memory: PositiveFraction = 0.9  # vllm: share of the GPU's memory, KV cache included
    # vllm: size of the KV cache of each worker; 0: by memory, on CPU at least 128 MiB, one context,
    # and engine.slots contexts of at most 512 tokens
    kv_cache_bytes: int = 0
    # vllm: no compilation and no graph capture, for a faster start; auto: on CPUs only
    eager: Literal["auto", "always", "never"] = "auto"
    # vllm: merge adapters into whole weights in the actor, instead of serving them unmerged
    merge_lora: bool = False
    restarts: int = 3  # vllm: restarts of a dead engine by its actor
    # vllm: further arguments of its engine (EngineArgs), by name
    options: dict[str, Any] = field(default_factory=dict)
    # vllm: accept options under which log-probs or seeds are not exact, as quantization
    inexact: bool = False


@dataclass
class ActorsConfig:
    """The rollout processes."""

    count: Count = 2
    # the launcher keeps their number within min and max (0: count), so that the learner waits for
    # groups a share `target` of its time; it decides every scale_s seconds
    min: int = 0
    max: int = 0
    target: PositiveFraction = 0.1
    scale_s: Positive = 30.0
    # groups that one actor plays at a time, of the run's rollout.group_size or a stage's larger one
    groups: Count = 8
    weight_lag: int = 0  # versions by which an actor holds new weights back
    # >= 0: the lag is uniform in [weight_lag_low, weight_lag], drawn at each version
    weight_lag_low: Annotated[int, Range(ge=-1)] = -1
    poll_s: Positive = 0.02  # interval at which an actor looks for new weights
    weights_timeout_s: Positive = 30.0  # wait for a ticket's weights before it is given back

    def bounds(self) -> tuple[int, int]:
        """Return the least and the largest number of actors."""
        return self.min or self.count, self.max or self.count

    @property
    def adjustable(self) -> bool:
        """True if the bounds leave the launcher a choice of their number."""
        low, high = self.bounds()
        return low != high
