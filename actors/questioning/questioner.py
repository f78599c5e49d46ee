"""One actor's Self-Questioning.

    explore    explore ticket → episodes without a task
    questions  finished explorations → candidates → filters → tasks for the buffer's pool
    grade      episode of a task that the environment cannot check → its reward

An outage of the language model means fewer tasks and counters, nothing else. All that is recorded
of environments is data of unknown origin; it reaches a language model as JSON strings.
"""

import asyncio
import logging
from collections import Counter

import msgspec

from actors.engines.base import Engine
from actors.envs.base import EnvironmentFailure, env_class
from actors.failures import FailureCounts
from actors.llm.asking import Asker
from actors.llm.client import Endpoint, Unavailable
from actors.progress import TicketProgress
from actors.questioning import synthesize
from actors.questioning.explore import Explorer, exploring, has_goals, unbound
from actors.questioning.filters import Known, feasible
from actors.questioning.grade import Grade, grade
from actors.questioning.profile import described, load_profile
from actors.questioning.replay import Played, replay
from actors.questioning.solve import solve_again
from actors.questioning.synthesize import Candidate, Exploration, task_of
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode import Deliver, Finished
from actors.rollout.episode_config import Setting
from actors.rollout.group import run_group, run_members
from actors.rollout.policy import EpisodePolicy
from evolver_async.config import Config
from evolver_async.protocol.transcripts import Turn
from evolver_async.randomness import key
from evolver_async.schema import Task, Ticket

COUNTED = ("candidates", "accepted", "dropped_known", "dropped_infeasible")
OF_WORDS = (  # counted where a language model takes part
    "dropped_empty",
    "dropped_lexical",
    "dropped_semantic",
    "dropped_unsolved",
    "outages",
    "graded",
    "ungraded",
)

log = logging.getLogger(__name__)


class Questioner:
    """`asker`: where a language model takes part. ConfigError where the profile is none."""

    def __init__(
        self, config: Config, asker: Asker | None, failures: FailureCounts | None = None
    ) -> None:
        self.config = config.questioning
        self._failures = failures or FailureCounts()
        self._asker = asker
        self._timeout_s = config.env.step_timeout_s
        self._profile = ""
        if self.config.profile:
            self._profile = described(load_profile(self.config.profile))
        self._known = Known(self.config.jaccard, self.config.similarity)
        names = COUNTED if asker is None else (*COUNTED, *OF_WORDS)
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    async def explore(
        self,
        ticket: Ticket,
        setting: Setting,
        engine: Engine,
        progress: TicketProgress,
        deliver: Deliver,
    ) -> None:
        """Run an explore ticket's members; see `rollout.run_members`."""
        ticket, setting = exploring(ticket, setting, self.config)
        if self._asker is None:
            return await run_group(ticket, setting, engine, progress, deliver)
        asker, words = self._asker, self._described(ticket.task)
        max_tokens = ticket.sampling.max_tokens

        def policy_of(member: int) -> EpisodePolicy:
            style = setting.format
            return Explorer(asker, words, self.config, setting.chat, style, max_tokens)

        await run_members(ticket, setting, policy_of, progress, deliver)

    async def questions(
        self, ticket: Ticket, finished: list[Finished], progress: TicketProgress
    ) -> list[Task]:
        """The new tasks that the finished episodes of an explore ticket suggest."""
        explorations = [
            Exploration(
                member=one.trajectory.member,
                dynamics_seed=key(ticket.dynamics_seed, one.trajectory.member),
                turns=one.transcript.turns,
                ending=one.ending,
            )
            for one in sorted(finished, key=lambda one: one.trajectory.member)
        ]
        find = self._reached if self._asker is None else self._written
        candidates = await find(ticket, explorations, progress)
        self._counts["candidates"] += len(candidates)
        tasks: list[Task] = []
        for candidate in candidates:
            if len(tasks) == self.config.per_episode * len(explorations):
                break
            task = await self._accepted(ticket, candidate, progress)
            if task is not None:
                self._known.add(task)
                tasks.append(task)
            await asyncio.sleep(0)  # others of this actor are generating
        self._counts["accepted"] += len(tasks)
        return tasks

    def grades(self, task: Task) -> bool:
        """Whether episodes of the task are graded here, as its environment cannot check it."""
        return bool(task.query) and task.origin == "synthetic" and not has_goals(task.env)

    async def grade(self, task: Task, turns: list[Turn], ending: str) -> Grade | None:
        """The grade of one episode; None, which is counted, where there is none to be had.

        `ending`: what its last action led to.
        """
        given = None
        if self._asker is not None:
            try:
                given = await grade(self._asker, task, turns, ending)
            except Unavailable as error:
                self._outage("an episode is not graded", error)
        self._counts["ungraded" if given is None else "graded"] += 1
        return given

    def counters(self) -> dict[str, float]:
        """Totals by metric name."""
        counted = {f"questioning/{name}": float(count) for name, count in self._counts.items()}
        return counted | ({} if self._asker is None else self._asker.counters())

    async def close(self) -> None:
        if self._asker is not None:
            await self._asker.close()

    async def _reached(
        self, ticket: Ticket, explorations: list[Exploration], progress: TicketProgress
    ) -> list[Candidate]:
        """The states that were reached, as goals."""
        task, plays = unbound(ticket.task), []
        for one in explorations:
            played = await self._play(
                ticket, one.member, task, one.actions, one.dynamics_seed, progress
            )
            if played is not None:
                plays.append((one, played))
        return synthesize.from_goals(task, plays)

    async def _written(
        self, ticket: Ticket, explorations: list[Exploration], progress: TicketProgress
    ) -> list[Candidate]:
        """What a language model makes of the explorations."""
        found = await asyncio.gather(
            *(self._proposed(ticket, one, progress) for one in explorations if one.turns)
        )
        candidates = [candidate for some in found for candidate in some]
        return sorted(candidates, key=lambda one: -one.confidence)

    async def _proposed(
        self, ticket: Ticket, exploration: Exploration, progress: TicketProgress
    ) -> list[Candidate]:
        most, task = self.config.per_episode, unbound(ticket.task)
        system, question = synthesize.question(
            self._described(task), exploration, self._known.queries(task), most
        )
        assert self._asker is not None
        try:
            with progress.during(exploration.member, "asking for tasks"):
                proposals = await self._asker.ask(
                    system, question, lambda answer: synthesize.parse_proposals(answer, most)
                )
        except Unavailable as error:
            self._outage("no tasks are made of an exploration", error)
            return []
        progress.count += 1
        candidates = []
        for proposal in proposals or []:
            reference, seed, goal = proposal.action_sequence, exploration.dynamics_seed, None
            if has_goals(task.env):
                goal = await self._goal_of(ticket, exploration, reference, progress)
                if goal is None:
                    self._counts["dropped_infeasible"] += 1
                    continue
            made = task_of(task, reference, goal=goal, query=proposal.query)
            candidates.append(
                Candidate(
                    task=made,
                    confidence=proposal.confidence,
                    member=exploration.member,
                    dynamics_seed=seed,
                )
            )
        return candidates

    async def _goal_of(
        self, ticket: Ticket, exploration: Exploration, actions: list[str], progress: TicketProgress
    ) -> dict | None:
        """The goal that actions lead to, if they lead to one."""
        task, seed = unbound(ticket.task), exploration.dynamics_seed
        played = await self._play(ticket, exploration.member, task, actions, seed, progress)
        if played is None or not played.goals or len(played.actions) != len(actions):
            return None
        return played.goals[-1]

    async def _accepted(
        self, ticket: Ticket, candidate: Candidate, progress: TicketProgress
    ) -> Task | None:
        """The task, if nothing speaks against it; with a verified reference where asked for."""
        config, task = self.config, candidate.task
        checked = has_goals(task.env)

        async def play(task: Task, actions: list[str], dynamics_seed: int) -> Played:
            member, timeout_s = candidate.member, self._timeout_s
            return await replay(ticket, member, task, actions, dynamics_seed, timeout_s, progress)

        objection = self._known.objection(task)
        try:
            if objection is None and not await feasible(
                candidate, play, checked, config.replays, config.replays_kept
            ):
                objection = "infeasible"
            if objection is None and config.resolve and self._asker is not None:
                task = await self._solved(self._asker, ticket, candidate, checked, progress)
                objection = "unsolved" if task is None else None
        except EnvironmentFailure as failure:
            log.warning("no task: %s", failure)
            self._failures.note(failure.kind, failure.name, failure.error)
            objection = "infeasible"
        except Unavailable as error:
            self._outage("a task is not solved again", error)
            objection = "unsolved"
        if objection is None:
            return task
        self._counts[f"dropped_{objection}"] += 1
        return None

    async def _solved(
        self,
        asker: Asker,
        ticket: Ticket,
        candidate: Candidate,
        checked: bool,
        progress: TicketProgress,
    ) -> Task | None:
        task, seed = candidate.task, candidate.dynamics_seed
        own = msgspec.structs.replace(ticket, task=task)
        world = TimedEnvironment(own, candidate.member, self._timeout_s, progress)
        try:
            with progress.during(candidate.member, "solving again"):
                actions = await solve_again(
                    asker, world, progress, task, seed, self.config.max_turns, checked
                )
        except BaseException:
            world.abandon()
            raise
        await world.close()
        return None if actions is None else msgspec.structs.replace(task, reference=actions)

    async def _play(
        self,
        ticket: Ticket,
        member: int,
        task: Task,
        actions: list[str],
        dynamics_seed: int,
        progress: TicketProgress,
    ) -> Played | None:
        """See `replay`; None where the environment fails."""
        try:
            return await replay(
                ticket, member, task, actions, dynamics_seed, self._timeout_s, progress
            )
        except EnvironmentFailure as failure:
            log.warning("nothing is made of an exploration: %s", failure)
            self._failures.note(failure.kind, failure.name, failure.error)
            return None

    def _described(self, task: Task) -> str:
        """The environment in words: its profile, or what its own instructions say."""
        return self._profile or env_class(task.env).instructions

    def _outage(self, what: str, error: Unavailable) -> None:
        self._counts["outages"] += 1
        log.warning("%s: %s", what, error)


def make_questioner(config: Config, failures: FailureCounts | None = None) -> Questioner | None:
    """The questioner that the configuration asks for, if any."""
    match config.questioning.kind:
        case "none":
            return None
        case "llm":
            endpoint = Endpoint(config.questioning.llm, "questioning", failures)
            return Questioner(config, Asker(endpoint), failures)
    return Questioner(config, None, failures)
