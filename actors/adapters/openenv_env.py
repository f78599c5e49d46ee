"""Environments behind an OpenEnv server, called with OpenEnv's own client.

Every episode is a session of its own on the server. Actions and observations of OpenEnv are JSON
objects of the environment's own; here they are text. OpenEnv has one end of an episode, which
counts as its termination, and one seed, which a whole group shares.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.adapters import required
from actors.envs.base import Env, one_line
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task

CUT = " ... (cut)"
NO_OBJECT = "error: an action is a JSON object"
LARGEST_SEED = 1 << 31


@dataclass(kw_only=True, eq=False)
class OpenEnv(Env):
    """A session of the server at `url`.

    An action becomes the field `action_key` of the object that is sent, beside the fields of
    `action`; without a key its text is the object itself, as JSON. `observation_key` is the field
    that is shown; without one all fields are, as JSON. `kwargs` go with every reset, beside
    a `seed` that belongs to task and split. An episode is a success where
    its last reward is at least `success_at`. `timeout_s`: of one message and of connecting, which
    precedes the message of a reset. ValueError names the parameter that cannot be.
    """

    isolation = "thread"

    url: str = ""
    action_key: str = "message"
    action: dict[str, Any] | None = None
    observation_key: str = ""
    kwargs: dict[str, Any] | None = None
    success_at: float = 1.0
    shown_chars: int = 16000
    timeout_s: float = 12.0
    instructions: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url: {self.url!r} is not the address of an OpenEnv server")
        if self.shown_chars < 1:
            raise ValueError(f"shown_chars: {self.shown_chars} is not positive")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: {self.timeout_s} is not positive")
        if self.action and not self.action_key:
            raise ValueError("action: an action without action_key is the whole object")
        self.longest_call_s = 2 * self.timeout_s
        self.package = required("openenv.core.generic_client", "url", "openenv", ">=0.4")
        self.plain_instructions = self.instructions  # the server's first observation says the task
        self.instructions = self.instructions or "act in the environment ."
        self.client: Any = None

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.close()
        times = dict.fromkeys(("connect_timeout_s", "message_timeout_s"), self.timeout_s)
        client = self.package.GenericEnvClient(self.url, mode="simulation", **times)
        self.client = client.sync()
        self._call("connect", self.client.connect)
        seed = key(task.map_seed, "openenv", task.split) % LARGEST_SEED
        given = {"seed": seed} | (self.kwargs or {})
        return self._shown(self._call("reset", self.client.reset, **given).observation)

    def step(self, action: str) -> Step:
        sent = self._sent(action)
        if sent is None:
            return Step(NO_OBJECT, 0.0, False, False, Info(valid=False))
        result = self._call("step", self.client.step, sent)
        reward = float(result.reward or 0.0)
        success = bool(result.done) and reward >= self.success_at
        observation = self._shown(result.observation)
        return Step(observation, reward, bool(result.done), False, Info(success=success))

    def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()

    def _call(self, call: str, function: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Return the result of a call of the client; its failures name the server and the call."""
        try:
            return function(*args, **given)
        except OSError as error:
            kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
            raise kind(f"{self.url}: {call}: {one_line(error)}") from error

    def _sent(self, action: str) -> dict[str, Any] | None:
        """Return the object that is sent for an action; None if the action is not a JSON object."""
        if self.action_key:
            return (self.action or {}) | {self.action_key: action}
        try:
            sent = json.loads(action)
        except (ValueError, RecursionError):
            return None
        return sent if isinstance(sent, dict) else None

    def _shown(self, observation: dict[str, Any]) -> str:
        key, seen = self.observation_key, observation
        if key:
            if key not in observation:
                known = ", ".join(sorted(observation))
                raise KeyError(f"observation_key: {key} is none of: {known}")
            seen = observation[key]
        text = seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
        return text if len(text) <= self.shown_chars else text[: self.shown_chars] + CUT
