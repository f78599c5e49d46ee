"""RAGEN's two-armed bandit: a small certain reward against a rare large one; one turn.

One arm always pays `low`; the other pays 1 with `high_probability` and is the better one. Their
names are the phoenix and the dragon; exchanged, they mislead a policy that has learned the names.
The order in which the arms are named is random. Success is having chosen the better arm, whatever
it paid.
"""

import random
from dataclasses import dataclass

from actors.envs.base import Env
from evolver_async.env import Exact, Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task

INSTRUCTIONS = "pull the arm that pays more on average ."
PLAIN_INSTRUCTIONS = (
    "You are in front of a slot machine with two arms, {} and {}. One of them always pays"
    " the same small amount; the other pays a large amount, but only now and then. Pull the arm"
    " that pays more on average. You have one pull. The actions are: {}, {}."
)
ARMS = "arms {} {}"


@dataclass(kw_only=True, eq=False)
class Bandit(Env):
    """Two arms, one pull. `low_arm` and `high_arm` are the names of the certain and of the better
    arm. ValueError names the parameter that is out of range.
    """

    instructions = INSTRUCTIONS

    low: float = 0.15
    high_probability: float = 0.25
    low_arm: str = "phoenix"
    high_arm: str = "dragon"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"low: {self.low} is not in 0..1")
        if not self.low < self.high_probability <= 1:
            raise ValueError(f"high_probability: {self.high_probability} is not in ({self.low}, 1]")
        for name, arm in (("low_arm", self.low_arm), ("high_arm", self.high_arm)):
            if not (arm.isalpha() and arm.islower()):
                raise ValueError(f"{name}: {arm!r} is not one word in small letters")
        if self.low_arm == self.high_arm:
            raise ValueError(f"high_arm: {self.high_arm} is the name of both arms")
        # In an order that does not tell which arm is the better one.
        names = sorted((self.low_arm, self.high_arm), reverse=True)
        self.plain_instructions = PLAIN_INSTRUCTIONS.format(*names, *names)

    def reset(self, task: Task, dynamics_seed: int) -> str:
        arms = [self.low_arm, self.high_arm]
        random.Random(key(task.map_seed, "bandit", task.split)).shuffle(arms)
        self.observation = ARMS.format(*arms)
        self.luck = random.Random(dynamics_seed).random()
        return self.observation

    def step(self, action: str) -> Step:
        arm = action.strip().lower()
        if arm not in (self.low_arm, self.high_arm):
            return Step(self.observation, 0.0, False, False, Info(valid=False))
        won = float(self.luck < self.high_probability)
        better = arm == self.high_arm
        return Step("", won if better else self.low, True, False, Info(success=better))

    def actions(self) -> list[str]:
        return [self.low_arm, self.high_arm]

    def solve(self) -> list[str]:
        return [self.high_arm]

    def exact(self, max_turns: int) -> Exact:
        return Exact(random=0.5, optimal=1.0)
