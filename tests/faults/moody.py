"""A bandit whose failures are ordered from outside, by files in a directory."""

import time
from pathlib import Path

from actors.envs.bandit import Bandit
from actors.envs.base import Step
from evolver_async.schema import Task

HANG, HUNG = "hang", "hung"
POISON = 5  # the number of the task whose reset always fails


class Moody(Bandit):
    """Whoever finds the file `hang`, which holds seconds, stands still that long, once.

    It stands still in the actor's own loop, while the sockets' threads go on.
    """

    blocking = False

    def __init__(self, *, directory: str) -> None:
        super().__init__()
        self.directory = Path(directory)

    def reset(self, task: Task, dynamics_seed: int) -> str:
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
