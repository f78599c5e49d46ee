"""Offers of actors: synthetic tasks that exploration has found, for the pool of the buffer."""

import msgspec

from evolver_async.buffer.log.store import BufferStore
from evolver_async.buffer.state import records
from evolver_async.buffer.tasks.stream import MAX_BYTES
from evolver_async.wire.messages import Offer, Ok, Reject, Reply


def take_in(store: BufferStore, max_tasks: int, request: Offer) -> Reply:
    """Add the new ones of these tasks to the pool, which holds at most `max_tasks` of the stage.

    Those of an environment that it does not play, as an exploration of the last stage finds them,
    are left out: nothing would bound them.
    """
    for task in request.tasks:
        name = f"tasks: {task.task_id}"
        if task.origin != "synthetic" or task.split != "train":
            return Reject(reason=f"{name} is not a synthetic task of the train split")
        if task.task_id.startswith(f"{task.env}/train/"):
            return Reject(reason=f"{name} is the name of a numbered task")
        if (size := len(msgspec.msgpack.encode(task))) > MAX_BYTES:
            return Reject(reason=f"{name[:100]}: {size} bytes, at most {MAX_BYTES} are allowed")
    tasks = store.state.tasks
    offered = {task.task_id: task for task in request.tasks}
    new = [task for task_id, task in offered.items() if task_id not in tasks.known]
    if request.tasks:
        duplicates = len(request.tasks) - len(new)
        room = max(0, max_tasks - tasks.pool_size())
        playable = [task for task in new if task.env in tasks.source.envs]
        store.record(records.Offered(tasks=playable[:room], duplicates=duplicates))
    return Ok()
