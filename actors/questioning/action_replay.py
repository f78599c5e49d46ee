"""Replay of actions in a fresh instance of an environment."""

from typing import Any, NamedTuple

import msgspec

from actors.envs.base import Goals
from actors.failure_counts import FailureCounts
from actors.rollout.environment import IdleEnvironments, TimedEnvironment
from actors.ticket_progress import TicketProgress
from evolver_async.env import Step
from evolver_async.schema import Task, Ticket
from evolver_async.wire.transcripts import Turn


class ReplayedEpisode(NamedTuple):
    """Replay of a sequence of actions.

    `actions`: the valid ones. Per action, `steps` and `goals` hold its step and the task parameters
    that make the reached state the goal (None if it cannot be one). `turns`: actions with what
    preceded them, the valid ones; `refused`: the invalid ones.
    """

    first: str
    actions: list[str]
    steps: list[Step]
    goals: list[dict[str, Any] | None]
    turns: list[Turn]
    refused: list[Turn]

    @property
    def success(self) -> bool:
        return bool(self.steps) and self.steps[-1].info.success


async def replay(
    ticket: Ticket,
    member: int,
    task: Task,
    actions: list[str],
    dynamics_seed: int,
    timeout_s: float,
    progress: TicketProgress,
    failures: FailureCounts | None = None,
    idle: IdleEnvironments | None = None,
    isolation: str = "auto",
) -> ReplayedEpisode:
    """Replay `actions` from the initial state of `task` until the episode ends.

    `ticket` and `member` identify the caller. Raise EnvironmentFailure if the environment raises or
    times out.
    """
    played, steps, goals, turns, refused = [], [], [], [], []
    own = msgspec.structs.replace(ticket, task=task)
    shared = failures, idle, isolation
    async with TimedEnvironment(own, member, timeout_s, progress, *shared) as world:
        await world.open()
        seen = first = (await world.reset(task, dynamics_seed)).text
        for action in actions:
            turn = Turn(observation=seen, state=await world.state(seen), action=action)
            step = await world.step(action, doing="replay")
            progress.count += 1
            seen = step.observation
            if not step.info.valid:
                refused.append(turn)
                continue
            turns.append(turn)
            played.append(action)
            steps.append(step)
            env = world.env
            goals.append(await world.goal(env.goal) if isinstance(env, Goals) else None)
            if step.terminated or step.truncated:
                break
    return ReplayedEpisode(first, played, steps, goals, turns, refused)
