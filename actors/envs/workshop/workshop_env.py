"""Workshop environment: items made step by step, by hidden rules that are the same in all tasks.

Each step wants one action, and the name that the item has there determines it. A policy can find it
only by a success, which is rare by chance. Items are held out, names are not: all that a new item
needs can be known from others.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from actors.envs.base import Env
from actors.envs.workshop.items import (
    ACTIONS,
    ATTRIBUTES,
    LEAST_ITEMS,
    MOST_NAMES,
    items_of,
    wanted,
)
from actors.formats.tool_calls import called, canonical, tool_spec
from evolver_async.env import Exact, Info, Step
from evolver_async.schema import Task

GOAL = "make the item : each name has its right action ."
FATAL, UNTOLD = " a wrong action is the end .", " the result is at the end ."
PLAIN_GOAL = (
    "You are making an item in a workshop. It takes one step for each of the item's names, in their"
    " order, and each step tells you the name that it is about. Each name needs one particular"
    " action, the same in every item with that name, which you have to know or to find out."
)
PLAIN_FATAL = " A wrong action ruins the item and ends the episode."
PLAIN_UNTOLD = " A wrong action ruins the item, but only the end of the last step tells you so."
PLAIN_ACTIONS = " The actions are: {}."
DONE = "done"  # observation and state of a free episode after the last step
TOOL, ARGUMENT = "work", "action"


class Progress(NamedTuple):
    """Steps made so far, `right` and `wrong` ones."""

    right: int = 0
    wrong: int = 0


@dataclass(kw_only=True, eq=False)
class Workshop(Env):
    """Workshop environment. An item has `steps` names, each out of `names`; each name wants one of
    `choices` actions, drawn by `secret`. `fatal`: a wrong action ends the episode; otherwise there
    is no feedback before the last step.

    `until` makes the first steps of an item the task, 0 all of them. `free` is an episode without
    end: a wrong action changes nothing and is not valid, and `until` has no effect.

    ValueError names the parameter that is out of range.
    """

    refusal = ""  # precedes the observation after an action that does not exist

    steps: int = 3
    names: int = 8
    choices: int = 4
    secret: int = 0
    fatal: bool = True
    until: int = 0
    free: bool = False

    def __post_init__(self) -> None:
        ranges = {
            "steps": (2, len(ATTRIBUTES)),
            "names": (2, MOST_NAMES),
            "choices": (2, len(ACTIONS)),
            "until": (0, self.steps),
        }
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}: {getattr(self, name)} is not in {least}..{most}")
        if self.names**self.steps < LEAST_ITEMS:
            few = f"{self.names} names in {self.steps} steps give {self.names**self.steps} items"
            raise ValueError(f"names: {few}, fewer than {LEAST_ITEMS}")
        known = ACTIONS[: self.choices]
        goal, plain = (FATAL, PLAIN_FATAL) if self.fatal else (UNTOLD, PLAIN_UNTOLD)
        self.instructions = GOAL + goal + self._listed(f" actions {' '.join(known)} .")
        self.plain_instructions = (
            PLAIN_GOAL + plain + self._listed(PLAIN_ACTIONS.format(", ".join(known)))
        )

    def reset(self, task: Task, dynamics_seed: int) -> str:
        items = items_of(self.steps, self.names)
        if task.split not in items:
            raise ValueError(f"split: {task.split!r} is none of {', '.join(sorted(items))}")
        item = items[task.split][task.map_seed % len(items[task.split])]
        self.item = item if self.free or not self.until else item[: self.until]
        self.made = Progress()
        return f"item {' '.join(self.item)}\n{self._observe()}"

    def step(self, action: str) -> Step:
        tried = self._parsed(action)
        if tried not in ACTIONS[: self.choices]:
            failed = Info(valid=False, tool_error=bool(self.refusal))
            return Step(self.refusal + self._observe(), 0.0, False, False, failed)
        right = self.state() != DONE and tried == self._wanted(self.state())
        if self.free:
            self.made = self.made._replace(right=self.made.right + right)
            return Step(self._observe(), 0.0, False, False, Info(valid=right))
        self.made = Progress(self.made.right + right, self.made.wrong + (not right))
        success = self.made.right == len(self.item)
        if success or self.state() == DONE or (self.fatal and not right):
            return Step("", float(success), True, False, Info(success=success))
        return Step(self._observe(), 0.0, False, False, Info())

    def actions(self) -> list[str]:
        return [self._written(action) for action in ACTIONS[: self.choices]]

    def solve(self) -> list[str]:
        """Return the right actions of the steps left. ValueError: no goal."""
        if self.free:
            raise ValueError("free: without a goal there is nothing to solve")
        return [self._written(self._wanted(name)) for name in self.item[sum(self.made) :]]

    def state(self) -> str:
        """Return the name that determines the next action."""
        number = sum(self.made)
        return self.item[number] if number < len(self.item) else DONE

    def snapshot(self) -> Progress:
        return self.made

    def restore(self, snapshot: Progress) -> None:
        self.made = snapshot

    def score(self) -> float:
        """Return the right steps so far minus the wrong ones."""
        return float(self.made.right - self.made.wrong)

    def goal(self) -> dict[str, Any] | None:
        if not self.made.right or self.made.wrong:
            return None
        return {"free": False, "until": self.made.right}

    def exact(self, max_turns: int) -> Exact:
        """Compute the chance that every step is right; a free episode has no success."""
        if self.free or max_turns < len(self.item):
            return Exact(0.0, 0.0)
        return Exact(self.choices ** -len(self.item), 1.0)

    def _observe(self) -> str:
        name = self.state()
        return name if name == DONE else f"step {sum(self.made) + 1} {name}"

    def _wanted(self, name: str) -> str:
        return wanted(self.secret, name, self.choices)

    def _listed(self, text: str) -> str:
        """Return the part of the instructions that lists the actions."""
        return text

    def _written(self, action: str) -> str:
        return action

    def _parsed(self, action: str) -> str:
        """Return the name of the action tried; empty for what cannot be read."""
        return action.strip().lower()


class ToolWorkshop(Workshop):
    """Workshop with calls of the tool `work` as actions."""

    turn_format = "tool_call"
    refusal = "error: no such action\n"

    def tools(self) -> list[dict[str, Any]]:
        does = "carry out the next step with one of the actions"
        return [tool_spec(TOOL, does, ARGUMENT, enum=list(ACTIONS[: self.choices]))]

    def _listed(self, text: str) -> str:
        return ""

    def _written(self, action: str) -> str:
        return canonical(TOOL, {ARGUMENT: action})

    def _parsed(self, action: str) -> str:
        try:
            call = called(action)
        except ValueError:
            return ""
        tried = call.arguments.get(ARGUMENT) if call.name == TOOL else None
        return tried.strip().lower() if isinstance(tried, str) else ""
