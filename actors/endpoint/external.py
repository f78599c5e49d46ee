"""Episodes of agents elsewhere, which start and finish them by HTTP.

POST /episodes/start        waits for a member of a ticket; returns its task, base URL, API key
POST /episodes/<id>/finish  {"reward": 1.0, "success": true, "metrics": {"name": 2}}, of which a
                            reward is enough (that of each player by name, where there are
                            several); or {"error": "why it has none"}

Both need the key of `rollout.endpoint.key_env`. An episode's own key does not open them: the
program that the policy drives has that one, and must not set its own reward.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from actors.endpoint.outcome import AgentOutcome, outcome_of, require_rewards
from actors.endpoint.request import POLICY, RequestRefused
from actors.endpoint.session import EndpointSession
from evolver_async.config import ConfigError
from evolver_async.config.secrets import secret
from evolver_async.schema import Task

KEY = "rollout.endpoint.key_env"
LEAST_KEY_CHARS = 16
START_WAIT_S = 20.0  # of a call that starts an episode; then the agent calls again
MOST_ENDED = 10_000  # episodes whose end is remembered, for calls that repeat one

Started = asyncio.Future[bytes]  # the answer to a call that starts an episode


class ExternalFailure(Exception):
    """Failure of an agent elsewhere, in its own words."""


class OpenedEpisode(NamedTuple):
    """An episode that can be called. `key`: the API key of its base URL."""

    id: str
    base_url: str
    key: str


class _Running(NamedTuple):
    session: EndpointSession
    outcome: asyncio.Future[AgentOutcome | None]


class _End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reward: float | dict[str, float] | None = None
    success: bool | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    error: str = ""


@dataclass(eq=False)
class ExternalEpisodes:
    """Episodes of one actor. `judged`: a judge sets their rewards."""

    judged: bool
    _starting: dict[Started, None] = field(default_factory=dict)  # oldest first
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _running: dict[str, _Running] = field(default_factory=dict)
    _ended: dict[str, _End | None] = field(default_factory=dict)  # None: not by its agent

    async def agent(self) -> Started:
        """Wait for a call that starts an episode."""
        async with self._arrived:
            while True:
                await self._arrived.wait_for(lambda: self._starting)
                started = next(iter(self._starting))
                del self._starting[started]
                if not started.done():  # else it has just hung up
                    return started

    async def start(self) -> bytes:
        """Return an episode, encoded. Raise RequestRefused if no member waits for an agent."""
        started: Started = asyncio.get_running_loop().create_future()
        self._starting[started] = None
        try:
            async with self._arrived:
                self._arrived.notify()
            async with asyncio.timeout(START_WAIT_S):
                return await started
        except TimeoutError:
            text = "no episode waits for an agent: call again"
            raise RequestRefused(text, "no_episode_yet", 503) from None
        finally:
            self._starting.pop(started, None)

    async def play(
        self,
        started: Started,
        opened: OpenedEpisode,
        session: EndpointSession,
        task: Task,
        seed: int,
    ) -> AgentOutcome | None:
        """Hand an episode to the agent that `started` it; return the outcome once it is finished,
        None if a judge is to score it. Raise ExternalFailure."""
        players = session.setting.players
        given = {
            "episode": opened.id,
            "base_url": opened.base_url,
            "api_key": opened.key,
            "model": players[0] if players else POLICY,
            "players": players,
            "task": task,
            "seed": seed,
        }
        started.set_result(msgspec.json.encode(given))
        outcome = asyncio.get_running_loop().create_future()
        self._running[opened.id] = _Running(session, outcome)
        try:
            return await outcome
        finally:
            del self._running[opened.id]
            self._ended.setdefault(opened.id, None)
            while len(self._ended) > MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def finish(self, episode: str, body: bytes) -> bytes:
        """End an episode; to repeat the call changes nothing. Raise RequestRefused."""
        end = self._read(body)
        if episode in self._ended:
            known = self._ended[episode]
            if known is None:
                raise RequestRefused("the episode was over before", "episode_over", 410)
            if known != end:
                raise RequestRefused("the episode was finished otherwise", "finished", 409)
        elif (running := self._running.get(episode)) is None:
            raise RequestRefused("there is no such episode", "no_episode", 404)
        elif running.outcome.done():  # its deadline passes at this moment
            raise RequestRefused("the episode was over before", "episode_over", 410)
        elif end.error:
            running.outcome.set_exception(ExternalFailure(end.error[:500]))
            self._ended[episode] = end
        elif not running.session.recorder.turns:
            raise RequestRefused("no call of the episode was answered", "no_calls", 409)
        else:
            running.outcome.set_result(self._outcome(end, running.session))
            self._ended[episode] = end
        return msgspec.json.encode({"episode": episode})

    def _read(self, body: bytes) -> _End:
        try:
            end = msgspec.json.decode(body or b"{}", type=_End)
            if end.reward is not None and self.judged and not end.error:
                raise ValueError("reward: rollout.agent_reward is judged")
            if not (end.error or self.judged or end.reward is not None):
                raise ValueError("reward: is missing")
        except ValueError as error:  # msgspec's errors are some
            raise RequestRefused(str(error)[:500]) from None
        return end

    def _outcome(self, end: _End, session: EndpointSession) -> AgentOutcome | None:
        """Return the outcome of an episode, None if a judge scores it. Raise RequestRefused."""
        if end.reward is None:
            return None
        try:
            players = session.setting.players
            outcome = outcome_of(end.reward, players)
            success = outcome.success if end.success is None else end.success
            outcome = outcome_of(AgentOutcome(outcome.reward, success, end.metrics), players)
            require_rewards(outcome, session.recorder.players)
        except ValueError as error:
            raise RequestRefused(str(error)[:500]) from None
        return outcome


def start_key(key_env: str) -> str:
    """Return the key of the programs that start and finish episodes. Raise ConfigError, which names
    the configuration's key, never the secret."""
    key = secret(key_env, KEY)
    if len(key) < LEAST_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        form = f"at least {LEAST_KEY_CHARS} printable characters without blanks"
        raise ConfigError(f"{KEY}: {key_env} must hold {form}")
    return key
