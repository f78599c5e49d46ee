"""Self-Questioning of one actor.

    explore    explore ticket → episodes without a task
    questions  finished explorations → candidates → filters → tasks for the buffer's pool
    grade      episode of a task that the environment cannot check → its reward

An outage of the language model only reduces the number of tasks, and is counted. Data recorded from
environments is untrusted; a language model gets it as JSON strings.
"""

import asyncio
import logging
from collections import Counter

import msgspec

from actors.engines.engine import Engine
from actors.envs.base import EnvironmentFailure
from actors.experience.embed import Embedder, HashEmbedder
from actors.experience.embedders import CountedEmbedder, load_embedder
from actors.experience.guide import ExperienceGuide
from actors.failure_counts import FailureCounts
from actors.llm.endpoint_client import Endpoint, Unavailable
from actors.llm.json_client import JsonClient
from actors.questioning import synthesize
from actors.questioning.action_replay import ReplayedEpisode, replay
from actors.questioning.actions import ActionForm, Surroundings
from actors.questioning.explore import Explorer, exploring, has_goals, unbound
from actors.questioning.filters import KnownTasks, feasible, large
from actors.questioning.grade import Grade, grade
from actors.questioning.lessons import Solved, lesson, longest
from actors.questioning.profile import Profiles, obeys
from actors.questioning.solve import solve_again
from actors.questioning.synthesize import Candidate, Exploration, task_of, too_long
from actors.rollout.environment import IdleEnvironments, TimedEnvironment
from actors.rollout.episode import query_of
from actors.rollout.episode_config import Setting
from actors.rollout.episode_policy import EpisodePolicy
from actors.rollout.finished import Deliver, Finished
from actors.rollout.group import run_group, run_members
from actors.ticket_progress import TicketProgress
from evolver_async.config import Config
from evolver_async.randomness import key
from evolver_async.schema import Task, Ticket
from evolver_async.wire.transcripts import Turn

COUNTED = (
    "candidates",
    "accepted",
    "taught",
    "dropped_known",
    "dropped_large",
    "dropped_infeasible",
)
LLM_COUNTED = (  # only with a language model
    "dropped_empty",
    "dropped_lexical",
    "dropped_semantic",
    "dropped_profile",
    "dropped_unsolved",
    "outages",
    "graded",
    "ungraded",
)
# Of the time for which a ticket may make no progress, less that of a step: the longest question.
QUESTION_SHARE = 0.9

log = logging.getLogger(__name__)


class Questioner:
    """Questioner of one actor. Raise ConfigError for an invalid profile, ValueError for an
    `experience.embedder` without a model."""

    def __init__(
        self,
        config: Config,
        failures: FailureCounts | None = None,
        idle: IdleEnvironments | None = None,
        guide: ExperienceGuide | None = None,
    ) -> None:
        self.config = config.questioning
        self._guide = guide if config.experience.kind == "contrast" else None
        self._failures = failures or FailureCounts()
        self._shared = self._failures, idle or IdleEnvironments(), config.env.isolation
        self._client: JsonClient | None = None
        names = COUNTED
        embedder: Embedder = HashEmbedder()
        if self.config.kind == "llm":
            endpoint = Endpoint(self.config.llm, "questioning", failures)
            limit_s = QUESTION_SHARE * (config.buffer.stall_s - config.env.step_timeout_s)
            self._client, names = JsonClient(endpoint, limit_s), COUNTED + LLM_COUNTED
            self._pause_s = min(self.config.llm.breaker_s, limit_s)
            loaded, _ = load_embedder(config.experience)  # only these tasks have queries
            embedder = CountedEmbedder(loaded, self._failures, "questioning")
        self._timeout_s = config.env.step_timeout_s
        profile = "" if self._client is None else self.config.profile
        self._profiles = Profiles(profile, self._client)
        self._known = KnownTasks(self.config.jaccard, self.config.similarity, embedder)
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
        if self._client is None:
            return await run_group(ticket, setting, engine, progress, deliver)
        client = self._client

        def policy_of(member: int) -> EpisodePolicy:
            async def describe(met: Surroundings) -> str:
                return await self._described(met, member, progress)

            explored = ticket, setting, self._pause_s, progress
            return Explorer(client, describe, self.config, *explored)

        await run_members(ticket, setting, policy_of, progress, deliver)

    async def questions(
        self, ticket: Ticket, finished: list[Finished], progress: TicketProgress
    ) -> list[Task]:
        """Return the new tasks from the finished episodes of an explore ticket."""
        explorations = [
            Exploration(
                member=one.trajectory.member,
                dynamics_seed=key(ticket.dynamics_seed, one.trajectory.member),
                turns=one.transcript.turns,
                instructions=one.instructions,
                ending=one.ending,
                actions=one.acted,
                form=ActionForm(one.tools),
            )
            for one in sorted(finished, key=lambda one: one.trajectory.member)
        ]
        for one in finished:
            self._known.explored(ticket.task, one.trajectory.content)
        refused: list[Turn] = []
        if self._client is None:
            plays = await self._plays(ticket, explorations, progress)
            candidates = synthesize.from_goals(unbound(ticket.task), plays)
            refused = [turn for _, played in plays for turn in played.refused]
        else:
            candidates = await self._from_proposals(ticket, explorations, progress)
        self._counts["candidates"] += len(candidates)
        accepted: list[Solved] = []
        for candidate in candidates:
            if len(accepted) == self.config.per_episode * len(explorations):
                break
            solved = await self._accepted(ticket, candidate, progress)
            if solved is not None:
                self._known.add(solved.task, ticket.task)
                accepted.append(solved)
            await asyncio.sleep(0)  # lets other tickets of this actor run
        self._counts["accepted"] += len(accepted)
        if self._guide is not None:
            self._teach(self._guide, ticket, accepted, refused)
        return [one.task for one in accepted]

    def grades(self, task: Task) -> bool:
        """Return True if the environment cannot check the task, so that `grade` must."""
        return bool(task.query) and task.origin == "synthetic" and not has_goals(task.env)

    async def grade(self, task: Task, turns: list[Turn], ending: str) -> Grade | None:
        """Grade one episode; None if that is not possible, which is counted.

        `ending`: observation after the last action.
        """
        given = None
        if self._client is not None:
            try:
                given = await grade(self._client, task, turns, ending)
            except Unavailable as error:
                self._outage("an episode is not graded", error)
        self._counts["ungraded" if given is None else "graded"] += 1
        return given

    def counters(self) -> dict[str, float]:
        """Return totals by metric name."""
        counted = {f"questioning/{name}": float(count) for name, count in self._counts.items()}
        return counted | ({} if self._client is None else self._client.counters())

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _plays(
        self, ticket: Ticket, explorations: list[Exploration], progress: TicketProgress
    ) -> list[tuple[Exploration, ReplayedEpisode]]:
        """Replay explorations, except those whose environment fails."""
        plays = []
        for one in explorations:
            played = await self._play(ticket, one, one.actions, progress)
            if played is not None:
                plays.append((one, played))
        return plays

    def _teach(
        self, guide: ExperienceGuide, ticket: Ticket, accepted: list[Solved], refused: list[Turn]
    ) -> None:
        """Contribute the accepted tasks with their solutions to the experience.

        Other episodes then learn from what an exploration has found out, also before anybody has
        solved these tasks.
        """
        for number, one in enumerate(longest(accepted)):
            name = f"{ticket.group_id}/{one.member}/{ticket.attempt}/{number}"
            query = query_of(one.task, one.played.first)
            guide.contribute(one.task, query, lesson(name, one.played, refused), ticket.stage)
            self._counts["taught"] += 1

    async def _from_proposals(
        self, ticket: Ticket, explorations: list[Exploration], progress: TicketProgress
    ) -> list[Candidate]:
        """Make candidates with a language model."""
        asked = (self._proposed(ticket, one, progress) for one in explorations if one.turns)
        found = await asyncio.gather(*asked)
        candidates = [candidate for some in found for candidate in some]
        return sorted(candidates, key=lambda one: -one.confidence)

    async def _proposed(
        self, ticket: Ticket, exploration: Exploration, progress: TicketProgress
    ) -> list[Candidate]:
        most, task = self.config.per_episode, unbound(ticket.task)
        first, form = exploration.turns[0].observation, exploration.form
        met = Surroundings(task.env, exploration.instructions, form, first)
        known = self._known.queries(ticket.task)
        described = await self._described(met, exploration.member, progress)
        system, question = synthesize.question(described, exploration, known, most)
        assert self._client is not None
        try:
            with progress.during(exploration.member, "asking for tasks"):
                proposals = await self._client.ask(
                    system, question, lambda answer: synthesize.parse_proposals(answer, most, form)
                )
        except Unavailable as error:
            self._outage("an exploration yields no tasks", error)
            return []
        progress.count += 1
        candidates = []
        for proposal in proposals or []:
            reference, goal = proposal.solution, None
            if has_goals(task.env):
                goal = await self._goal_of(ticket, exploration, reference, progress)
                if goal is None:
                    self._counts["dropped_infeasible"] += 1
                    continue
            made = task_of(task, reference, goal=goal, query=proposal.query)
            candidates.append(exploration.candidate(made, proposal.confidence))
        return candidates

    async def _goal_of(
        self, ticket: Ticket, exploration: Exploration, actions: list[str], progress: TicketProgress
    ) -> dict | None:
        """Return the goal that the actions reach; None if they reach none."""
        played = await self._play(ticket, exploration, actions, progress)
        if played is None or not played.goals or len(played.actions) != len(actions):
            return None
        return played.goals[-1]

    async def _accepted(
        self, ticket: Ticket, candidate: Candidate, progress: TicketProgress
    ) -> Solved | None:
        """Return the task with its solution; None if a filter rejects it.

        With `resolve` its reference is the new solution if that is short enough and feasible.
        """
        config, task = self.config, candidate.task
        checked, replays = has_goals(task.env), (self.config.replays, self.config.replays_kept)

        async def play(task: Task, actions: list[str], dynamics_seed: int) -> ReplayedEpisode:
            where = ticket, candidate.member, task, actions, dynamics_seed
            return await replay(*where, self._timeout_s, progress, *self._shared)

        objection, played = self._known.objection(task, ticket.task), None
        try:
            if objection is None:
                played = await feasible(candidate, play, checked, *replays)
                objection = None if played else "infeasible"
            if objection is None and not await self._obeys(candidate, progress):
                objection = "profile"
            if objection is None and config.resolve and self._client is not None:
                solved = await self._solved(self._client, ticket, candidate, checked, progress)
                if solved is None:
                    objection = "unsolved"
                elif not too_long(solved.reference or [], candidate.form) and not large(solved):
                    again = candidate._replace(task=solved)
                    if replayed := await feasible(again, play, checked, *replays):
                        task, played = solved, replayed
        except EnvironmentFailure as failure:
            self._failed("a candidate", failure)
            objection = "infeasible"
        except Unavailable as error:
            self._outage("a candidate is not solved again", error)
            objection = "unsolved"
        if objection is None and played is not None:
            return Solved(task, candidate.member, played)
        self._counts[f"dropped_{objection}"] += 1
        return None

    async def _described(self, met: Surroundings, member: int, progress: TicketProgress) -> str:
        """Return the description of an environment; the instructions while no profile is made."""
        try:
            with progress.during(member, "asking for a profile"):
                return await self._profiles.describe(met)
        except Unavailable as error:
            self._outage("the environment is not described", error)
            return met.form.with_tools(met.instructions)
        finally:
            progress.count += 1

    async def _obeys(self, candidate: Candidate, progress: TicketProgress) -> bool:
        """Return True for a task that obeys the profile, if it must; False also if that cannot be
        found out."""
        profile = self._profiles.of(candidate.task.env)
        if self._client is None or not (self.config.obeys_profile and profile):
            return True
        try:
            with progress.during(candidate.member, "comparing a task with the profile"):
                return await obeys(self._client, profile, candidate.task)
        except Unavailable as error:
            self._outage("a task is not compared with the profile", error)
            return False
        finally:
            progress.count += 1

    async def _solved(
        self,
        client: JsonClient,
        ticket: Ticket,
        candidate: Candidate,
        checked: bool,
        progress: TicketProgress,
    ) -> Task | None:
        task, seed = candidate.task, candidate.dynamics_seed
        own = msgspec.structs.replace(ticket, task=task)
        most, member = self.config.max_turns, candidate.member
        world_of = own, member, self._timeout_s, progress, *self._shared
        async with TimedEnvironment(*world_of) as world:
            with progress.during(member, "solving again"):
                asked = client, world, progress, task, seed, most, checked, candidate.form
                actions = await solve_again(*asked)
        return None if actions is None else msgspec.structs.replace(task, reference=actions)

    async def _play(
        self, ticket: Ticket, one: Exploration, actions: list[str], progress: TicketProgress
    ) -> ReplayedEpisode | None:
        """Replay actions from where an exploration began; None if the environment fails."""
        place = ticket, one.member, unbound(ticket.task), actions, one.dynamics_seed
        try:
            return await replay(*place, self._timeout_s, progress, *self._shared)
        except EnvironmentFailure as failure:
            self._failed("an exploration", failure)
            return None

    def _failed(self, what: str, failure: EnvironmentFailure) -> None:
        log.warning("%s is dropped: %s", what, failure)
        self._failures.note(failure.kind, failure.name, failure.error)

    def _outage(self, what: str, error: Unavailable) -> None:
        self._counts["outages"] += 1
        log.warning("%s: %s", what, error)


def make_questioner(
    config: Config,
    failures: FailureCounts | None = None,
    idle: IdleEnvironments | None = None,
    guide: ExperienceGuide | None = None,
) -> Questioner | None:
    """Make the configured questioner; None if `questioning.kind` is none."""
    return None if config.questioning.kind == "none" else Questioner(config, failures, idle, guide)
