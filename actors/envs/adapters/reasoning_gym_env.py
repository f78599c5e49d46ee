"""Tasks of reasoning-gym: a question is generated from its number, and its answer is scored.

One action is the whole episode. Splits differ in the seeds that questions are generated from; a
question belongs to the split that its own text hashes into, so that none is in two. An action is
the answer's text.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from actors.envs.adapters import required
from actors.envs.base import Env
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import split_of

MAX_DRAWS = 200  # of questions, until one belongs to the split
# What scorers raise that cannot read every text.
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError)
UNREADABLE += (SyntaxError, TypeError, ValueError)
LONGEST_SEED = 1 << 31  # reasoning-gym seeds numpy with some of its numbers


@dataclass(kw_only=True, eq=False)
class ReasoningGym(Env):
    """A question of `dataset`, made with its `kwargs`, answered once.

    The reward is the dataset's own score in 0..1, 0 for a text that it cannot read, and `success`
    is a score of at least `success_at`. ValueError names the parameter that cannot be.
    """

    blocking = True

    dataset: str = ""
    kwargs: dict[str, Any] | None = None
    success_at: float = 1.0
    instructions: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.success_at <= 1:
            raise ValueError(f"success_at: {self.success_at} is not in (0, 1]")
        self.package = required("reasoning_gym", "dataset", "reasoning-gym")
        for own in ("seed", "size"):
            if own in (self.kwargs or {}):
                raise ValueError(f"kwargs: {own} follows from the task")
        if self.dataset not in importlib.import_module("reasoning_gym.factory").DATASETS:
            raise ValueError(f"dataset: reasoning-gym has no {self.dataset!r}")
        try:
            self._made(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"kwargs: {error}") from error
        self.plain_instructions = self.instructions or "Answer the question."
        self.instructions = self.instructions or "answer the question ."

    def reset(self, task: Task, dynamics_seed: int) -> str:
        for draw in range(MAX_DRAWS):
            seed = key(task.map_seed, "reasoning_gym", self.dataset, task.split, draw)
            self.questions = self._made(seed % LONGEST_SEED)
            self.entry = self.questions[0]
            question = str(self.entry["question"])
            if split_of(question) == task.split:
                return question
        raise ValueError(f"dataset: no question of {self.dataset} belongs to {task.split}")

    def step(self, action: str) -> Step:
        try:
            score, valid = float(self.questions.score_answer(action, self.entry)), True
        except UNREADABLE:
            score, valid = 0.0, False
        success = score >= self.success_at
        return Step("", score, True, False, Info(valid=valid, success=success))

    def actions(self) -> list[str]:
        """Return two answers to choose from: the right one and a wrong one."""
        return [self._best(), "none"]

    def solve(self) -> list[str]:
        return [self._best()]

    def _best(self) -> str:
        """Return the dataset's own answer. ValueError if it has none that it accepts."""
        answer = self.entry["answer"]
        if answer is None or self.questions.score_answer(str(answer), self.entry) < self.success_at:
            raise ValueError(f"dataset: {self.dataset} keeps no answer of its own")
        return str(answer)

    def _made(self, seed: int) -> Any:
        return self.package.create_dataset(self.dataset, seed=seed, size=1, **(self.kwargs or {}))
