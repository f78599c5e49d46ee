"""Environment in which the agent finds a number; the reply to a wrong guess is `low` or `high`."""

import random

from evolver_async.env import Info, Step
from evolver_async.schema import Task


class Guess:
    instructions = "find the number . actions are numbers ."

    def __init__(self, *, limit: int = 9) -> None:
        self.limit = limit

    def reset(self, task: Task, dynamics_seed: int) -> str:
        """Begin `task`; its split and map_seed determine the number."""
        self.number = random.Random(f"{task.split}/{task.map_seed}").randint(0, self.limit)
        return f"a number from 0 to {self.limit}"

    def step(self, action: str) -> Step:
        """Return observation, reward, terminated, truncated and info."""
        if not action.isdecimal():
            return Step("say a number", 0.0, False, False, Info(valid=False))
        won = int(action) == self.number
        hint = "low" if int(action) < self.number else "high"
        return Step("found" if won else hint, float(won), won, False, Info(success=won))

    def close(self) -> None:
        pass

    # The first observation is always the same; this tells how many tasks an evaluation has played.
    def content(self) -> str:
        return str(self.number)

    # Optional: these two methods allow `sft` stages.
    def actions(self) -> list[str]:
        return [str(number) for number in range(self.limit + 1)]

    def solve(self) -> list[str]:
        return [str(self.number)]

    # Optional: reward and success of an episode that a limit of the rollout ends.
    def verdict(self) -> tuple[float, bool]:
        return 0.0, False
