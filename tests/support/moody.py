"""A bandit whose failures are ordered from outside, by files in a directory.

Its actors write down every ACK they are given, so that a test knows what was promised to them.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.envs.bandit import Bandit
from actors.envs.grid.frozen_lake import FrozenLake
from actors.outbox import Outbox
from evolver_async.env import Step
from evolver_async.schema import Task
from evolver_async.wire import messages

HANG, HUNG = "hang", "hung"
ACKED = "acked"  # a line for each acknowledged trajectory: its group and member
POISON = 5  # the number of the task whose reset always fails


class Moody(Bandit):
    """Whoever finds the file `hang`, which holds seconds, stands still that long, once.

    It stands still in the actor's own loop, while the sockets' threads go on.
    """

    isolation = "loop"

    def __init__(self, *, directory: str, reset_s: float = 0.0) -> None:
        super().__init__()
        self.reset_s = reset_s  # without processor time
        self.directory = Path(directory)
        write_acks(self.directory / ACKED)

    async def reset(self, task: Task, dynamics_seed: int) -> str:
        if task.split == "train":
            await asyncio.sleep(self.reset_s)
        if task.split == "train" and task.map_seed == POISON:
            raise RuntimeError("this map is poison")
        return super().reset(task, dynamics_seed)

    def step(self, action: str) -> Step:
        try:
            (self.directory / HANG).rename(self.directory / HUNG)
        except FileNotFoundError:
            return super().step(action)
        time.sleep(float((self.directory / HUNG).read_text()))
        return super().step(action)


@dataclass(kw_only=True, eq=False)
class Lake(FrozenLake):
    """A lake whose actors write down their ACKs, too: it has the scores and goals that AgentEvolver
    needs."""

    directory: str

    def __post_init__(self) -> None:
        super().__post_init__()
        write_acks(Path(self.directory) / ACKED)


def write_acks(path: Path) -> None:
    """Have the outboxes of this process append every ACK to `path`, in one write each."""
    if getattr(Outbox, "writes_acks", False):
        return
    plain, file = Outbox.send, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def send(self: Outbox, trajectory: Any) -> Any:
        task = plain(self, trajectory)

        def write(done: Any) -> None:
            failed = done.cancelled() or done.exception() is not None
            if not failed and isinstance(done.result(), messages.Ack):
                os.write(file, f"{trajectory.group_id} {trajectory.member}\n".encode())

        task.add_done_callback(write)
        return task

    Outbox.send = send
    Outbox.writes_acks = True  # pyright: ignore[reportAttributeAccessIssue]
