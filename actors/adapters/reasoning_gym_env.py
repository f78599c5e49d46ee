"""Tasks of reasoning-gym: a question is generated from its number, and its answer is scored.

One action is the whole episode. Splits differ in the seeds that questions are generated from; a
question belongs to the split that its own text hashes into, so that none is in two. An action is
the answer's text. Scorers of some datasets run it as Python, so all scorers run in the sandbox.
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.adapters import required
from actors.adapters.reasoning_gym_scorer import READY
from actors.envs.base import Env
from actors.sandbox.interpreters import KILLED, WAIT_S, SandboxPool, shared
from actors.sandbox.process import GRACE_S, InterpreterConfig, SandboxLimits, SandboxUnavailable
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import split_of

MAX_DRAWS = 200  # of questions, until one belongs to the split
LONGEST_SEED = 1 << 31  # reasoning-gym seeds numpy with some of its numbers
LONGEST_ANSWER = 1 << 16  # in characters, of those that are scored
MEMORY_BYTES = 1 << 30  # address space of a scorer
SCORER = Path(__file__).with_name("reasoning_gym_scorer.py").read_text(encoding="utf-8")
INTERIOR = InterpreterConfig(imports=("reasoning_gym",), packages=True)


@dataclass(kw_only=True, eq=False)
class ReasoningGym(Env):
    """A question of `dataset`, made with its `kwargs`, answered once.

    The reward is the dataset's own score in 0..1, and `success` is a score of at least
    `success_at`. The score is 0 for a text that it cannot read within `wall_s`. `workers`
    interpreters score the answers of a whole process: with many concurrent episodes, about one for
    16 of them. ValueError names the parameter that cannot be.
    """

    isolation = "thread"

    dataset: str = ""
    kwargs: dict[str, Any] | None = None
    success_at: float = 1.0
    instructions: str = ""
    wall_s: float = 5.0
    workers: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.success_at <= 1:
            raise ValueError(f"success_at: {self.success_at} is not in (0, 1]")
        if not 1 <= self.workers <= 64:
            raise ValueError(f"workers: {self.workers} is not in 1..64")
        cpu_s = max(1, round(self.wall_s))
        self.longest_call_s = WAIT_S + self.wall_s + GRACE_S
        self.limits = SandboxLimits(wall_s=self.wall_s, cpu_s=cpu_s, memory_bytes=MEMORY_BYTES)
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
        self.plain_instructions = self.instructions  # the question itself says how to answer
        self.instructions = self.instructions or "answer the question ."

    def probe(self) -> None:
        pool = SandboxPool(self.limits, size=1, interior=INTERIOR)
        self._draw(0)
        try:
            pool.start()
            self._score(pool, "none")
        except SandboxUnavailable as refusal:
            raise ValueError(f"env.name: reasoning_gym needs a sandbox: {refusal}") from None
        except RuntimeError as failure:
            raise ValueError(f"env.params.dataset: {failure}") from None
        finally:
            pool.close()

    def reset(self, task: Task, dynamics_seed: int) -> str:
        for draw in range(MAX_DRAWS):
            seed = key(task.map_seed, "reasoning_gym", self.dataset, task.split, draw)
            question = self._draw(seed % LONGEST_SEED)
            if split_of(question) == task.split:
                return question
        raise ValueError(f"dataset: no question of {self.dataset} belongs to {task.split}")

    def step(self, action: str) -> Step:
        score = self._score(shared(self.limits, self.workers, INTERIOR), action)
        reward = 0.0 if score is None else score
        facts = Info(valid=score is not None, success=reward >= self.success_at)
        return Step("", reward, True, False, facts)

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

    def _draw(self, seed: int) -> str:
        """Make the question of this seed."""
        self.seed = seed
        self.questions = self._made(seed)
        self.entry = self.questions[0]
        return str(self.entry["question"])

    def _score(self, pool: SandboxPool, answer: str) -> float | None:
        """Score an answer in the sandbox; None if the scorer cannot read it, breaks a limit or
        crashes. RuntimeError if it was not run.

        A killed interpreter does not tell whose fault that was, so the answer has a second attempt.
        """
        if len(answer) > LONGEST_ANSWER:
            return None
        entry = repr(_plain(self.entry))
        request = json.dumps([answer, entry, self.dataset, self.seed, self.kwargs or {}])
        for _ in range(2):
            result = pool.run(f"{SCORER}\n\nscore(*json.loads({request!r}))\n")
            _, ready, written = result.stdout.partition(f"{READY}\n")
            if ready or result.status != "killed":
                break
        if not ready and result.stderr != KILLED:  # its limit came before the answer's turn
            reason = result.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(f"an answer to {self.dataset} was not scored: {reason}")
        return json.loads(written.strip().rpartition("\n")[2]) if result.status == "ok" else None

    def _made(self, seed: int) -> Any:
        return self.package.create_dataset(self.dataset, seed=seed, size=1, **(self.kwargs or {}))


def _plain(value: Any) -> Any:
    """Replace numpy's numbers and texts by Python's, which can be written as literals."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple, set) else value
