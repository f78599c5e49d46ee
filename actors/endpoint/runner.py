"""Runner of a ticket's members as the user's own agents; counterpart of `actors/rollout/group.py`.

An agent runs on the actor's event loop: blocking code in it must run in a thread. Or it runs
elsewhere, and asks for episodes: then a member waits for one, and its time begins when it has it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from actors.endpoint.conversation_file import ConversationFile
from actors.endpoint.conversations import Conversations
from actors.endpoint.external import (
    ExternalEpisodes,
    LateReward,
    OpenedEpisode,
    Started,
    start_key,
)
from actors.endpoint.group_judge import GroupJudge
from actors.endpoint.http_server import EndpointServer
from actors.endpoint.outcome import (
    Agent,
    AgentOutcome,
    load_agent,
    outcome_of,
    require_rewards,
)
from actors.endpoint.session import EndpointSession
from actors.endpoint.template import Template
from actors.engines.engine import Engine
from actors.envs.base import EnvironmentFailure
from actors.failure_counts import FailureCounts
from actors.formats.chat import Chat
from actors.llm.endpoint_client import Endpoint
from actors.rollout.environment import own_cancellation
from actors.rollout.episode import HUNG_S, EpisodeLate
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Deliver, Finished, RewardTooLarge
from actors.rollout.group import side_by_side
from actors.ticket_progress import TicketProgress
from evolver_async.config import Config
from evolver_async.config.sections.rollout import EXTERNAL, USERS, EndpointConfig
from evolver_async.extension import RAISED
from evolver_async.randomness import key
from evolver_async.schema import Ticket, TurnFlag

log = logging.getLogger(__name__)

THREADS = 512  # for blocking calls of an actor's agents; asyncio has four more than processors
COUNTED = (
    *("episodes", "calls", "sequences", "merged", "unreadable_calls", "limited"),
    *("exceptions", "late", "no_calls", "no_reward", "unrewarded"),
)


class AgentFailure(EnvironmentFailure):
    """Failure of an agent: an exception, a missed deadline, or a return value without a reward."""

    kind = "agent"


class JudgementMissing(Exception):
    """Missing scores of a group, whose members must be run again."""


class RewardMissing(Exception):
    """Missing reward of an episode, which must be played again."""


class _AgentError(Exception):
    """Cause of an agent's failure. `reason` is the name of its counter."""

    def __init__(self, reason: str, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.reason = reason
        self.cause = cause


class _EpisodeRun(NamedTuple):
    """A finished member. `outcome`: one to come, or None if a judge is to score it."""

    member: int
    session: EndpointSession
    outcome: AgentOutcome | LateReward | None
    total_s: float


@dataclass(eq=False)
class AgentRunner:
    """Agents of one actor. `agent`: None for agents elsewhere; `path` names it in messages;
    `judge`: None if agents return rewards; `reward_wait_s`: how long agents elsewhere may let an
    episode wait for its reward."""

    agent: Agent | None
    path: str
    engine: Engine
    chat: Chat
    judge: GroupJudge | None = None
    failures: FailureCounts = field(default_factory=FailureCounts)
    settings: EndpointConfig = field(default_factory=EndpointConfig)
    reward_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self._template = Template(self.chat)
        self._external = None
        if self.agent is None:
            keys = {start_key(self.settings.key_env).encode(): "agents"}
            self._external = ExternalEpisodes(keys, self.judge is not None, self.reward_wait_s)
        self._server = EndpointServer(self.path, self.failures, self.settings, self._external)
        # members that wait for an agent or for their reward, since when
        self._waiting: dict[object, float] = {}
        self._counts: Counter[str] = Counter()
        self._threads: ThreadPoolExecutor | None = None
        self._sessions: set[EndpointSession] = set()  # of running members
        self._worked_s = 0.0  # of the others

    async def run(
        self, ticket: Ticket, setting: Setting, progress: TicketProgress, deliver: Deliver
    ) -> None:
        """Run a ticket's members concurrently and `deliver` each when it has ended and is scored.

        After all members have ended, raise EnvironmentFailure, else EpisodeLate, if one failed, or
        JudgementMissing. An exception of the engine is raised at once.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "agents")
            # Agents block in asyncio.to_thread. Calls that wait for one of its few threads would
            # count as the time of their agents, until episodes are late.
            asyncio.get_running_loop().set_default_executor(self._threads)
        waiting: list[_EpisodeRun] = []

        async def play(member: int) -> None:
            played = await self._play(ticket, member, setting, progress)
            if played.outcome is None:
                waiting.append(played)
            elif isinstance(played.outcome, LateReward):
                # Until it comes the capacity of the actor, and its weights, are others' to have.
                without = self._finished(played, AgentOutcome(0.0, False))
                deliver(replace(without, rewarded=partial(self._rewarded, played, progress)))
            else:
                deliver(self._finished(played, played.outcome))

        failure = await side_by_side(ticket, setting, progress, play)
        if waiting:
            with progress.during(None, "judging agents"):
                await self._compare(ticket, waiting, deliver)
        if failure is not None:
            raise failure

    def counters(self) -> dict[str, float]:
        """Return totals by metric name."""
        counted = {name: float(self._counts[name]) for name in COUNTED}
        counted |= {name: float(self._server.counts[name]) for name in ("requests", "refused")}
        judged = self.judge.counters() if self.judge is not None else {}
        return {f"agent/{name}": value for name, value in counted.items()} | judged

    def worked_s(self) -> float:
        """Return the seconds of all members between their calls, and before an agent has them: none
        while all wait for the engine."""
        waited_s = sum(
            asyncio.get_running_loop().time() - since for since in self._waiting.values()
        )
        return self._worked_s + waited_s + sum(session.worked_s for session in self._sessions)

    async def close(self) -> None:
        await self._server.close()
        if self.judge is not None:
            await self.judge.close()

    async def _play(
        self, ticket: Ticket, member: int, setting: Setting, progress: TicketProgress
    ) -> _EpisodeRun:
        """Run one member. Raise EnvironmentFailure or EpisodeLate."""
        loop = asyncio.get_running_loop()
        await self._server.listen()
        started = None
        if self._external is not None:
            started = await self._started(self._external, member, progress)
        began = loop.time()
        session = EndpointSession(ticket, member, setting, self.engine, self._template, progress)
        opened = self._server.open(session)
        where = f"task {ticket.task.task_id}, member {member}"
        self._sessions.add(session)
        outcome: AgentOutcome | LateReward | None = (
            None if self.judge is not None else AgentOutcome(0.0, False)
        )
        try:
            with progress.during(member, f"agent {self.path}"):
                progress.run_agents(setting.episode_timeout_s + setting.step_timeout_s)
                async with asyncio.timeout(None) as limit:
                    ending = asyncio.create_task(_end(session, setting, limit))
                    try:
                        outcome = await self._call(ticket, member, session, opened, started)
                    finally:
                        ending.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            self._counts["late"] += 1
            if not session.recorder.turns:
                cause = f"env.episode_timeout_s={setting.episode_timeout_s:g} has passed, "
                cause += f"generation took {session.generate_s:.1f} s of it"
                failure = AgentFailure(self.path, where, "", TimeoutError(cause))
                slow_policy = session.generate_s > setting.episode_timeout_s / 2
                raise (EpisodeLate(failure) if slow_policy else failure) from None
            session.limited = True
        except _AgentError as failed:
            self._counts[failed.reason] += 1
            raise AgentFailure(self.path, where, "", failed.cause) from failed.cause
        finally:
            self._sessions.remove(session)
            self._worked_s += session.worked_s
            self._server.close_session(opened.id)
        self._count(session)
        total_s = loop.time() - began
        return _EpisodeRun(member=member, session=session, outcome=outcome, total_s=total_s)

    def _count(self, session: EndpointSession) -> None:
        """Count an episode that has ended."""
        _, flags = session.arrays()
        self._counts["episodes"] += 1
        self._counts["calls"] += len(flags)
        self._counts["sequences"] += len(session.recorder.sequences())
        self._counts["merged"] += session.recorder.merged
        self._counts["unreadable_calls"] += int((flags & TurnFlag.FORMAT_ERROR).astype(bool).sum())
        self._counts["limited"] += session.limited

    async def _started(
        self, external: ExternalEpisodes, member: int, progress: TicketProgress
    ) -> Started:
        """Wait for an agent elsewhere, for as long as it takes."""
        with self._elsewhere(progress, member, "waiting for an agent to start an episode"):
            return await external.agent()

    async def _rewarded(self, played: _EpisodeRun, progress: TicketProgress) -> Finished:
        """Wait for the reward of an episode. Raise RewardMissing, or AgentFailure for one that the
        buffer would refuse."""
        assert self._external is not None and isinstance(played.outcome, LateReward)
        try:
            with self._elsewhere(progress, played.member, "waiting for its reward"):
                outcome = await self._external.rewarded(played.outcome)
        except TimeoutError:
            self._counts["unrewarded"] += 1
            problem = f"no reward came within rollout.reward_wait_s={self.reward_wait_s:g}"
            group = played.session.ticket.group_id
            log.warning("group %d, member %d: %s", group, played.member, problem)
            self.failures.note("agent", self.path, problem)
            raise RewardMissing(problem) from None
        return self._finished(played, outcome)

    @contextmanager
    def _elsewhere(self, progress: TicketProgress, member: int, what: str) -> Iterator[None]:
        """Wait for what happens elsewhere, which counts as work, for as long as it takes."""
        loop, place = asyncio.get_running_loop(), object()
        self._waiting[place] = loop.time()
        progress.waiting += 1
        try:
            with progress.during(member, what):
                yield
        finally:
            progress.waiting -= 1
            self._worked_s += loop.time() - self._waiting.pop(place)

    async def _call(
        self,
        ticket: Ticket,
        member: int,
        session: EndpointSession,
        opened: OpenedEpisode,
        started: Started | None,
    ) -> AgentOutcome | LateReward | None:
        """Call the agent, or hand the episode to the one that `started` it, and return its outcome,
        which may be to come; None if a judge is to score it.

        An agent that raises after a call was refused at a limit has the reward 0 and is not counted
        as failed. Raise _AgentError, or the exception that the engine raised.
        """
        returned: AgentOutcome | LateReward | float | Mapping[str, float] | None = None
        try:
            seed, task = key(ticket.dynamics_seed, member), ticket.task
            if self._external is not None and started is not None:
                returned = await self._external.play(started, opened, session, task, seed)
            elif self.agent is not None:
                url = opened.base_url
                returned = await self.agent(base_url=url, api_key=opened.key, task=task, seed=seed)
        except (*RAISED, asyncio.CancelledError) as error:
            if own_cancellation(error):
                raise
            if not (session.limited and session.recorder.turns):
                raise _AgentError("exceptions", error) from error
            returned = AgentOutcome(0.0, False)
        finally:
            if session.failure is not None:
                raise session.failure
        if not session.recorder.turns:
            raise _AgentError("no_calls", ValueError("it returned without one answered call"))
        if self.judge is not None:
            return None
        if isinstance(returned, LateReward):
            return returned
        try:
            outcome = outcome_of(returned, session.setting.players)
            require_rewards(outcome, session.recorder.players)
            return outcome
        except ValueError as error:
            raise _AgentError("no_reward", error) from None

    async def _compare(self, ticket: Ticket, waiting: list[_EpisodeRun], deliver: Deliver) -> None:
        """Have a group scored. Raise JudgementMissing."""
        assert self.judge is not None, "only episodes for a judge are compared"
        waiting.sort(key=lambda played: played.member)
        histories = [played.session.recorder.histories() for played in waiting]
        scores = await self.judge.score(ticket.group_id, histories)
        if scores is None:
            raise JudgementMissing("judge.llm gave no scores, the log says why")
        for played, score in zip(waiting, scores, strict=True):
            deliver(self._finished(played, outcome_of(score)))

    def _finished(self, played: _EpisodeRun, outcome: AgentOutcome) -> Finished:
        """Raise AgentFailure for a reward that the buffer would refuse."""
        session = played.session
        try:
            return session.finished(outcome, played.total_s)
        except RewardTooLarge as error:
            self._counts["no_reward"] += 1
            where = f"task {session.ticket.task.task_id}, member {session.member}"
            raise AgentFailure(self.path, where, "", error) from None


async def _end(session: EndpointSession, setting: Setting, limit: asyncio.Timeout) -> None:
    """Refuse calls once the episode's time is over, let those in flight end, and end the agent if
    it has not returned after the time of a step. One without an answered call is ended at once."""
    await asyncio.sleep(setting.episode_timeout_s)
    session.late = True
    await session.answered(HUNG_S)
    grace_s = setting.step_timeout_s if session.recorder.turns else 0.0
    limit.reschedule(asyncio.get_running_loop().time() + grace_s)


def make_agents(
    config: Config,
    engine: Engine,
    chat: Chat,
    failures: FailureCounts | None = None,
    conversations: Path | None = None,
) -> AgentRunner | Conversations | None:
    """Make the runner of the configured agent; None if `rollout.agent` is empty. `conversations`:
    the file of those with people."""
    path, failures = config.rollout.agent, failures or FailureCounts()
    if not path:
        return None
    if path == USERS:
        file = ConversationFile(conversations)
        return Conversations(engine, chat, config.rollout, failures, file)
    for client in ("httpx", "httpx2"):  # at INFO they log every call
        logging.getLogger(client).setLevel(logging.WARNING)
    judge = None
    if config.rollout.agent_reward == "judged":
        endpoint = Endpoint(config.judge.llm, "judge", failures)
        limits = config.judge.timeout_s, config.judge.group_chars
        judge = GroupJudge(endpoint, config.run.seed, *limits)
    agent = None if path == EXTERNAL else load_agent(path)
    late = config.rollout.endpoint, config.rollout.reward_wait_s
    return AgentRunner(agent, path, engine, chat, judge, failures, *late)
