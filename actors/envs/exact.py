"""Exact values of the random and of the optimal policy, averaged over tasks."""

import asyncio
import statistics
from collections.abc import Iterable, Sequence

from actors.envs.base import EnvError, Measurable, make_env, one_line, settled
from actors.envs.return_checks import checked_exact
from evolver_async.env import Exact
from evolver_async.extension import RAISED
from evolver_async.schema import Task


def exact(tasks: Sequence[Task], max_turns: int) -> Exact | None:
    """Average the exact values of `tasks`; None if an environment cannot compute them.

    EnvError if it can and fails.
    """
    values = []
    for task in tasks:
        env = make_env(task.env, task.params)
        if not isinstance(env, Measurable):
            return None
        try:
            values.append(asyncio.run(_measured(env, task, max_turns)))
        except RAISED as error:
            problem = f"cannot measure {task.task_id}: {one_line(error)}"
            raise EnvError(f"env.name: {task.env!r} {problem}") from error
    return Exact(
        random=statistics.fmean(value.random for value in values),
        optimal=statistics.fmean(value.optimal for value in values),
        random_return=_mean(value.random_return for value in values),
        optimal_return=_mean(value.optimal_return for value in values),
    )


async def _measured(env: Measurable, task: Task, max_turns: int) -> Exact:
    await settled(env.reset(task, 0))
    value = checked_exact(env.exact(max_turns))
    await settled(env.close())
    return value


def _mean(values: Iterable[float | None]) -> float | None:
    """Average the values; None if one is missing."""
    known = list(values)
    present = [value for value in known if value is not None]
    return statistics.fmean(present) if len(present) == len(known) else None
