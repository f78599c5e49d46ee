"""Rules by which actors explore for new tasks. Pure."""

from evolver_async.buffer.state.machine import BufferState
from evolver_async.buffer.tasks.stream import TaskStream
from evolver_async.config import Config


def exploration_due(config: Config, state: BufferState) -> bool:
    """Return True if a group that explores is to be granted in the stage of `config`."""
    questioning, replay, tasks = config.questioning, state.replay, state.tasks
    if (
        questioning.kind == "none"
        or replay.numbers.kind != "rollout"
        or replay.at.head is None
        or tasks.pool_size() >= questioning.max_tasks
        or tasks.untried() >= questioning.max_untried
    ):
        return False
    wanting = config.tasks.synthetic > 0 and not tasks.pool_size()
    due = wanting or tasks.cursor.since_exploration >= questioning.every
    return due and len(replay.live("explore")) < questioning.groups


def explores_first(config: Config, tasks: TaskStream) -> bool:
    """Return False if the newest group explores while others can be played.

    Explorations that find no task would take all the room of the actors.
    """
    begun = "explore" in tasks.cursor.walks
    return config.tasks.synthetic == 1 or not begun or tasks.cursor.since_exploration > 0
