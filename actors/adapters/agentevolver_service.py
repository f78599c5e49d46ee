"""Environments behind an HTTP service of AgentEvolver's protocol, such as AppWorld or BFCL.

A task's number picks one of the names that the service lists for its split. The service's system
message becomes the instructions, its other messages the first observation. The last user message
states the service's own task and is left out if a synthetic task has its own query. As in
AgentEvolver the reward is what `evaluate` says at the end; a step's own reward counts only where
asked.
"""

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

from actors.adapters.service_client import (
    EnvironmentService,
    ServiceError,
    ServiceLease,
    ServiceMessage,
    longest_s,
    service,
)
from actors.envs.base import Env
from actors.formats.tool_calls import ANSWER_TOOL, CODE_TOOL, called, tool_spec
from evolver_async.env import Info, Step
from evolver_async.schema import Task

CUT = " ... (cut)"
RUNS = "Runs Python code in the environment and returns what it prints."
TOOL = tool_spec(CODE_TOOL, RUNS, "code", description="The code.")


@dataclass(kw_only=True, eq=False)
class AgentEvolver(Env):
    """One instance of the environment `env_type` at the service `url`; actions are sent as text.

    `splits` names our splits as the service does; without it there are `train` and `test`. `name`
    is one task of the service's instead of a numbered one. `rewards`: at the end by `evaluate`
    (with `sparse` 0 or 1), or step by step. `max_moves` ends an episode and evaluates it.
    `shown_chars` bounds an observation. `timeout_s` limits one request, `retries` the requests that
    repeat it. ValueError names the parameter that cannot be.
    """

    isolation = "thread"

    url: str = ""
    env_type: str = ""
    splits: dict[str, str] | None = None
    name: str = ""
    kwargs: dict[str, Any] | None = None
    rewards: Literal["evaluate", "steps"] = "evaluate"
    sparse: bool = False
    max_moves: int = 30
    shown_chars: int = 16000
    timeout_s: float = 8.0
    retries: int = 2

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} is not the address of an environment service")
        if not self.env_type.replace("_", "").isalnum():
            raise ValueError(f"env_type: {self.env_type!r} is not the name of an environment")
        for key in ("max_moves", "shown_chars"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: {getattr(self, key)} is not positive")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s: {self.timeout_s} is not positive")
        if not 0 <= self.retries <= 10:
            raise ValueError(f"retries: {self.retries} is not in 0..10")
        self.longest_call_s = longest_s(self.timeout_s, self.retries)
        self.names = self.splits or {"train": "train", "test": "test"}
        self.lease: ServiceLease | None = None
        self.instructions = f"act in {self.env_type} ."
        self.plain_instructions = ""  # until the service's own system message

    def probe(self) -> None:
        try:
            for split in () if self.name else dict.fromkeys(("train", "test", *self.names)):
                self._names(self._service(), split, self._deadline())
        except ServiceError as error:
            raise ValueError(f"env.params.url: {error}") from None
        except ValueError as error:
            raise ValueError(f"env.params.{error}") from None

    def reset(self, task: Task, dynamics_seed: int) -> str:
        deadline = self._deadline()
        self.close()
        host = self._service()
        kwargs, own_query = self.kwargs or {}, task.origin == "synthetic" and bool(task.query)
        params = kwargs | {"is_open_query": True} if own_query else kwargs
        self.begun = self._name_of(host, task, deadline)
        self.lease = ServiceLease(host, self.env_type, self.begun)
        state = self.lease.create(params, deadline)
        self.moves = 0
        said = [m.content for m in state.messages if m.role == "system" and m.content]
        if said:
            self.instructions = self.plain_instructions = "\n".join(said)
        first = [m for m in state.messages if m.role != "system"]
        if own_query and (asked := [at for at, m in enumerate(first) if m.role == "user"]):
            del first[asked[-1]]
        return self._shown(first)

    def step(self, action: str) -> Step:
        text = self._text(action)
        if text is None:
            failed = Info(valid=False, tool_error=True)
            return Step("error: no such tool", 0.0, False, False, failed)
        assert self.lease is not None, "step before reset"
        deadline = self._deadline()
        state = self.lease.step(text, deadline)
        self.moves += 1
        truncated = self.moves >= self.max_moves and not state.is_terminated
        reward = _finite(state.reward) if self.rewards == "steps" else 0.0
        success = self.rewards == "steps" and state.is_terminated and reward >= 1
        if self.rewards == "evaluate" and (state.is_terminated or truncated):
            reward, success = self._evaluation(deadline)
        shown = self._shown(state.messages)
        return Step(shown, reward, state.is_terminated, truncated, Info(success=success))

    def content(self) -> str:
        return self.begun

    def verdict(self) -> tuple[float, bool]:
        if self.rewards == "steps":
            return 0.0, False
        return self._evaluation(self._deadline())

    def close(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def _service(self) -> EnvironmentService:
        return service(self.url, self.timeout_s, self.retries)

    def _deadline(self) -> float:
        """Return the time at which a call that begins now must end."""
        return time.monotonic() + self.longest_call_s

    def _evaluation(self, deadline: float) -> tuple[float, bool]:
        """Return reward and success by the service's `evaluate`."""
        assert self.lease is not None, "verdict before reset"
        reward = _finite(self.lease.evaluate(deadline, sparse=self.sparse))
        return reward, reward >= 1

    def _name_of(self, host: EnvironmentService, task: Task, deadline: float) -> str:
        """Return the service's name of a task."""
        if self.name:
            return self.name
        names = self._names(host, task.split, deadline)
        return names[task.map_seed % len(names)]

    def _names(self, host: EnvironmentService, split: str, deadline: float) -> list[str]:
        """Return the service's names of all tasks of one of our splits."""
        if split not in self.names:
            raise ValueError(f"splits: no name for the split {split!r}")
        names = host.profile(self.env_type, self.names[split], deadline)
        if not names:
            raise ValueError(f"splits: {self.env_type} has no tasks in {self.names[split]!r}")
        return names

    def _shown(self, messages: list[ServiceMessage]) -> str:
        """Return the text of messages that the policy reads."""
        text = "\n".join(m.content or "" for m in messages)
        return text if len(text) <= self.shown_chars else text[: self.shown_chars] + CUT

    def _text(self, action: str) -> str | None:
        """Return the text that is sent for an action; None for an unknown tool."""
        return action


class AgentEvolverCode(AgentEvolver):
    """Environment whose actions are Python code, as AppWorld's: a call of `python` is sent as a
    fenced block, an answer as text. Its parameters are the same."""

    turn_format = "tool_call"

    def tools(self) -> list[dict[str, Any]]:
        return [TOOL]

    def _text(self, action: str) -> str | None:
        call = called(action)
        if call.name == ANSWER_TOOL:
            return str(call.arguments.get("text", ""))
        code = call.arguments.get("code")
        if call.name != CODE_TOOL or not isinstance(code, str):
            return None
        return f"```python\n{code}\n```"


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"a reward of {reward}")
    return reward
