"""Episodes of agents elsewhere, which start and finish them by HTTP.

POST /episodes/start        waits for a member of a ticket; returns its task, base URL, API key
POST /episodes/<id>/finish  {"reward": 1.0, "success": true, "metrics": {"name": 2}}, of which a
                            reward is enough (that of each player by name, where there are
                            several); or {"error": "why it has none"}; or {} if the reward comes
                            later, where `rollout.reward_wait_s` allows it
POST /episodes/<id>/reward  the same with a reward, after a finish without one

They need the key of `rollout.endpoint.key_env`. An episode's own key does not open them: the
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


class LateReward(NamedTuple):
    """The outcome to come of an episode that was finished without a reward."""

    episode: str
    session: EndpointSession
    outcome: asyncio.Future[AgentOutcome]


class _Running(NamedTuple):
    session: EndpointSession
    outcome: asyncio.Future[AgentOutcome | LateReward | None]


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End of an episode, as a call tells it: `reward` or `error`."""

    reward: float | dict[str, float] | None = None
    success: bool | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    error: str = ""


@dataclass(eq=False)
class ExternalEpisodes:
    """Episodes of one actor. `keys`: that of the run; `judged`: a judge sets their rewards;
    `reward_wait_s`: how long an episode that was finished without a reward waits for it, 0 if none
    may be."""

    keys: Mapping[bytes, str]
    judged: bool
    reward_wait_s: float = 0.0
    _starting: dict[Started, None] = field(default_factory=dict)  # oldest first
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _running: dict[str, _Running] = field(default_factory=dict)
    _ended: dict[str, End | None] = field(default_factory=dict)  # None: not by its agent
    _unrewarded: dict[str, LateReward] = field(default_factory=dict)
    _rewarded: dict[str, End | None] = field(default_factory=dict)  # None: too late

    async def answer(self, method: str, path: str, body: bytes, holder: str) -> bytes:
        """Answer a call. Raise RequestRefused."""
        episode, _, rest = path.partition("/")
        if (method, path) == ("POST", "start"):
            return await self.start()
        if (method, rest) == ("POST", "finish"):
            return self.finish(episode, body)
        if (method, rest) == ("POST", "reward"):
            return self.reward(episode, body)
        raise RequestRefused(f"{method} episodes/{path} is not supported", "not_found", 404)

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
    ) -> AgentOutcome | LateReward | None:
        """Hand an episode to the agent that `started` it; return the outcome once it is finished,
        one that is to come if it has no reward yet, None if a judge is to score it.

        Raise ExternalFailure."""
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
            _remember(self._ended, opened.id, None)

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
            if end.reward is not None:
                running.outcome.set_result(outcome_of_end(end, running.session))
            elif self.judged:
                running.outcome.set_result(None)
            else:
                outcome = asyncio.get_running_loop().create_future()
                self._unrewarded[episode] = LateReward(episode, running.session, outcome)
                running.outcome.set_result(self._unrewarded[episode])
            self._ended[episode] = end
        return msgspec.json.encode({"episode": episode})

    def reward(self, episode: str, body: bytes) -> bytes:
        """Reward an episode that was finished without a reward; to repeat the call changes nothing.
        Raise RequestRefused."""
        end = self._read(body, late=True)
        if (awaited := self._unrewarded.get(episode)) is not None and not awaited.outcome.done():
            awaited.outcome.set_result(outcome_of_end(end, awaited.session))
            _remember(self._rewarded, episode, end)
        elif awaited is not None or episode in self._rewarded:
            known = self._rewarded.get(episode)
            if known is None:
                raise RequestRefused("the reward came too late", "reward_late", 410)
            if known != end:
                raise RequestRefused("the episode was rewarded otherwise", "rewarded", 409)
        elif episode in self._running or episode in self._ended:
            raise RequestRefused("the episode waits for no reward", "no_reward_awaited", 409)
        else:
            raise RequestRefused("there is no such episode", "no_episode", 404)
        return msgspec.json.encode({"episode": episode})

    async def rewarded(self, late: LateReward) -> AgentOutcome:
        """Wait for a late reward. Raise TimeoutError if it does not come in time."""
        try:
            async with asyncio.timeout(self.reward_wait_s):
                return await late.outcome
        finally:
            del self._unrewarded[late.episode]
            _remember(self._rewarded, late.episode, None)

    def _read(self, body: bytes, *, late: bool = False) -> End:
        """Read how an episode ends; `late`: what a call sends that brings its reward alone."""
        try:
            end = msgspec.json.decode(body or b"{}", type=End)
            if end.reward is not None and self.judged and not end.error:
                raise ValueError("reward: rollout.agent_reward is judged")
            if late and end.error:
                raise ValueError("error: the episode has been finished without one")
            awaited = self.reward_wait_s > 0 and not late
            if not (end.error or self.judged or awaited or end.reward is not None):
                raise ValueError("reward: is missing")
        except ValueError as error:  # msgspec's errors are some
            raise RequestRefused(str(error)[:500]) from None
        return end


def _remember(ends: dict[str, End | None], episode: str, end: End | None) -> None:
    """Note the end of an episode unless it is known; forget the oldest ones."""
    ends.setdefault(episode, end)
    while len(ends) > MOST_ENDED:
        del ends[next(iter(ends))]


def outcome_of_end(end: End, session: EndpointSession) -> AgentOutcome:
    """Return the outcome of an episode that has a reward. Raise RequestRefused."""
    assert end.reward is not None, "its callers look"
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
