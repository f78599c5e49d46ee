"""The sections about rollouts: environment, turns, engine, actors."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Latency:
    """Injected environment latency per step, standing for slow tools."""

    kind: str = "none"  # none, fixed or lognormal
    median_s: float = 0.05
    sigma: float = 1.0  # of the logarithm


@dataclass
class Env:
    """The environment: a registered name or an import path (`my_package.my_env:MyEnv`)."""

    name: str = "frozen_lake"
    params: dict[str, Any] = field(default_factory=dict)  # the environment's own parameters
    prompt: str = "auto"  # wording of instructions: plain, tiny, or auto (by the tokenizer's size)
    latency: Latency = field(default_factory=Latency)
    step_timeout_s: float = 30.0
    episode_timeout_s: float = 600.0


@dataclass
class Rollout:
    """How an episode runs."""

    group_size: int = 8  # G: episodes per task
    max_turns: int = 10
    format: str = "think_answer"  # the turn format: think_answer, tool_call or interleaved
    system_prompt: str = ""  # tells how to reply, after the task's instructions; "" = the format's
    think: bool = False  # whether a turn opens with <think> (tool_call: <reason>)
    actions_per_turn: int = 1
    context: str = "full"  # what a turn sees: full, window (the last turns) or single (now)
    window: int = 3  # turns before the present one that a window holds
    max_tokens: int = 16  # per turn
    temperature: float = 1.0
    format_penalty: float = -0.1  # added to the reward for every turn that cannot be parsed
    truncated_reward: float = 0.0  # added where an episode ends before its environment ends it
    guided_fraction: float = 0.5  # share of a group's members that experience guides
    format_errors: int = 0  # an episode ends with so many of these turns; 0 lets it go on
    agent: str = ""  # import path of an async function that plays episodes by itself
    agent_reward: str = "returned"  # what its episodes earn: returned by it, or judged (judge.llm)


@dataclass
class Engine:
    """What generates tokens."""

    kind: str = "torch"  # torch, or vllm: AsyncLLM in processes of its own (launch.kind local)
    slots: int = 64  # sequences decoded together
    prefill_tokens: int = 4096  # tokens (padding included) of one prefill step
    in_flight: str = (
        "keep"  # new weights during a generation: keep (swap, drop KV, go on) or wait (drain first)
    )
    device: str = "auto"  # auto, cpu or cuda
    threads: int = 1
    tensor_parallel: int = 1  # vllm: GPUs (or CPU processes) that one engine spreads the model over
    memory: float = 0.9  # vllm: share of the GPU's memory that it takes, its KV cache included
    kv_cache_bytes: int = 0  # vllm: size of the KV cache; 0: by memory, on CPU 128 MiB
    eager: bool = True  # vllm: neither compile nor capture graphs: starts sooner
    restarts: int = 3  # vllm: how often an actor starts an engine again that has died


@dataclass
class Actors:
    """The rollout processes."""

    count: int = 2
    groups: int = 8  # groups of rollout.group_size members that one actor works on at a time
    weight_lag: int = 0  # hold weights back by this many versions
    weight_lag_low: int = (
        -1
    )  # >= 0: sample the lag uniformly from [weight_lag_low, weight_lag] at each version
    poll_s: float = 0.02  # how often an actor looks for new weights
    weights_timeout_s: float = (
        30.0  # a ticket whose weights do not arrive in this time is given back
    )
