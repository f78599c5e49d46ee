"""RAGEN's two-armed bandit: a small certain reward against a rare large one; one turn.

The phoenix always pays `low`; the dragon pays 1 with `high_probability` and is the better arm. The
order in which the arms are named is random. Success is having chosen the dragon, whatever it paid.
"""

import random
from dataclasses import dataclass

from actors.envs.base import Env, Exact
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task

LOW, HIGH = "phoenix", "dragon"
INSTRUCTIONS = "pull the arm that pays more on average ."
PLAIN_INSTRUCTIONS = (
    "You are in front of a slot machine with two arms, phoenix and dragon. One of them always pays"
    " the same small amount; the other pays a large amount, but only now and then. Pull the arm"
    " that pays more on average. You have one pull. The actions are: phoenix, dragon."
)
ARMS = "arms {} {}"


@dataclass(kw_only=True, eq=False)
class Bandit(Env):
    """Two arms, one pull. ValueError names the parameter that is out of range."""

    instructions = INSTRUCTIONS
    plain_instructions = PLAIN_INSTRUCTIONS

    low: float = 0.15
    high_probability: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"low: {self.low} is not in 0..1")
        if not self.low < self.high_probability <= 1:
            raise ValueError(f"high_probability: {self.high_probability} is not in ({self.low}, 1]")

    def reset(self, task: Task, dynamics_seed: int) -> str:
        arms = [LOW, HIGH]
        random.Random(key(task.map_seed, "bandit", task.split)).shuffle(arms)
        self.observation = ARMS.format(*arms)
        self.luck = random.Random(dynamics_seed).random()
        return self.observation

    def step(self, action: str) -> Step:
        arm = action.strip().lower()
        if arm not in (LOW, HIGH):
            return Step(self.observation, 0.0, False, False, Info(valid=False))
        won = float(self.luck < self.high_probability)
        reward = won if arm == HIGH else self.low
        return Step("", reward, True, False, Info(success=arm == HIGH))

    def actions(self) -> list[str]:
        return [LOW, HIGH]

    def solve(self) -> list[str]:
        return [HIGH]

    def exact(self, max_turns: int) -> Exact:
        return Exact(random=0.5, optimal=1.0)
