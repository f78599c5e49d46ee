"""Questions that are answered with the help of an interpreter, which runs in the sandbox.

An action is a call (see `actors/formats/tool_calls.py`): of `python` with `code`, whose output is
the next observation, or of `answer` with `text`, which ends the episode. A text that is no JSON
object is an answer too, for turn formats without tools. Where a question has hidden tests, its
answer is a program, and they are run on it.
"""

import random
from dataclasses import dataclass
from typing import Any, Literal

from actors.envs.base import Env
from actors.envs.code.arithmetic import draw_product
from actors.envs.code.problems import Problem, same
from actors.envs.code.programs import draw_program
from actors.formats.tool_calls import (
    ANSWER_TOOL,
    CODE_TOOL,
    ToolInvocation,
    called,
    canonical,
    tool_spec,
    unfenced,
)
from actors.sandbox.interpreters import WAIT_S, SandboxPool, check_confined, shared
from actors.sandbox.process import (
    GRACE_S,
    InterpreterConfig,
    Result,
    SandboxLimits,
)
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import checked_split

INSTRUCTIONS = {
    "arithmetic": "answer the question with a number .",
    "programs": "answer with a python program that defines the function asked for .",
    "given": "answer the question .",
}
PLAIN_INSTRUCTIONS = {
    "arithmetic": "Compute what the question asks for. Your answer is a number.",
    "programs": "Write the Python function that the question asks for. Your answer is a program"
    " that defines it; hidden tests check it.",
    "given": "Answer the question.",
}
RUNS = "Runs a Python program and returns what it prints."
TOOL = tool_spec(CODE_TOOL, RUNS, "code", description="The program.")
NOTHING = "no output"
ERROR = "error: "  # opens every observation of a program or call that failed
CHOICES = 20  # of a random player, so that shares are multiples of 1/20


@dataclass(kw_only=True, eq=False)
class Code(Env):
    """One question. ValueError names the parameter that is out of range.

    `kind`: products modulo 1000, small programming tasks, or `given`: `question` with its `answer`
    or with `tests`, pairs of arguments and result for the function `f`. `wrong` is the reward of a
    wrong answer; a right one gives 1. A random player guesses at once with a share of `guess`, and
    its programs end in an error with a share of `broken`. `packages`: whether installed packages
    can be imported. `workers` interpreters serve a whole process: with many concurrent episodes,
    about one for 16 of them. A program for which none is free in time is not run and counts as a
    tool error; an answer that hidden tests cannot check for this reason is a failure.
    """

    isolation = "thread"

    kind: Literal["arithmetic", "programs", "given"] = "arithmetic"
    question: str = ""
    answer: str = ""
    tests: list[tuple[list[Any], Any]] | None = None
    wrong: float = 0.0
    guess: float = 0.7
    broken: float = 0.4
    shown_chars: int = 400
    wall_s: float = 2.0
    memory_mb: int = 256
    packages: bool = False
    workers: int = 2

    def __post_init__(self) -> None:
        question, answer, tests = self.question, self.answer, self.tests
        if (self.kind == "given") != bool(question):
            raise ValueError(f"question: belongs to kind given, kind is {self.kind}")
        if bool(question) != (bool(answer) != bool(tests)):
            raise ValueError("answer: a given question has either an answer or tests")
        for name in ("guess", "broken"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not in 0..1")
        if not self.wrong < 1:
            allowed = "less than 1, the reward of a right answer"
            raise ValueError(f"wrong: {self.wrong} is not {allowed}")
        if self.shown_chars < 1:
            raise ValueError(f"shown_chars: {self.shown_chars} is not positive")
        if not 1 <= self.workers <= 64:
            raise ValueError(f"workers: {self.workers} is not in 1..64")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb: {self.memory_mb} is less than 64")
        self.instructions = INSTRUCTIONS[self.kind]
        self.plain_instructions = PLAIN_INSTRUCTIONS[self.kind]
        self.given = Problem(question=question, answer=answer, tests=tuple(tests or ()))
        cpu_s, memory_bytes = max(1, round(self.wall_s)), self.memory_mb << 20
        self.limits = SandboxLimits(wall_s=self.wall_s, cpu_s=cpu_s, memory_bytes=memory_bytes)
        self.longest_call_s = WAIT_S + self.wall_s + GRACE_S
        self.interior = InterpreterConfig(packages=self.packages)

    def probe(self) -> None:
        check_confined("env.name: code", self.interior, self.limits)

    def reset(self, task: Task, dynamics_seed: int) -> str:
        if self.kind == "given":
            self.problem = self.given
        else:
            draw = draw_product if self.kind == "arithmetic" else draw_program
            self.problem = draw(checked_split(task.split), task.map_seed)
        self.reference = task.reference
        self.dynamics_seed = dynamics_seed
        self.runs = 0
        self.shown = self.problem.question
        self.outcome: Literal["none", "error", "ok"] = "none"  # of the last program
        return self.shown

    def step(self, action: str) -> Step:
        try:
            call = _call(action)
        except ValueError as error:
            return self._refuse(str(error))
        name = call.name.lower()
        if name not in (CODE_TOOL, ANSWER_TOOL):
            return self._refuse(f"no tool {call.name!r} (known: {CODE_TOOL})")
        wanted = "code" if name == CODE_TOOL else "text"
        text = call.arguments.get(wanted)
        if not isinstance(text, str) or len(call.arguments) != 1:
            return self._refuse(f"{name} takes {wanted!r}, a string, and nothing else")
        if name == CODE_TOOL:
            return self._run(text)
        right = self._right(text)
        return Step("", 1.0 if right else self.wrong, True, False, Info(success=right))

    def tools(self) -> list[dict[str, Any]]:
        return [TOOL]

    def actions(self) -> list[str]:
        """Return the choices of a random player: after an error it does not guess, after an output
        it answers. ValueError for a given question, of which only the answer is known."""
        problem = self.problem
        if not problem.program:
            raise ValueError("kind: a given question has no actions to choose from")
        if self.outcome == "ok":
            return [_answer(problem.solution)]
        guesses = round(CHOICES * self.guess) if self.outcome == "none" else 0
        broken = round((CHOICES - guesses) * self.broken)
        rng = random.Random(key(self.dynamics_seed, "guesses", self.runs))
        chosen = [_answer(wrong) for wrong in rng.choices(problem.wrong, k=guesses)]
        chosen += [_code(code) for code in rng.choices(problem.broken, k=broken)]
        return chosen + [_code(problem.program)] * (CHOICES - guesses - broken)

    def solve(self) -> list[str]:
        """Return the program, or the answer once the program has printed something. A given
        question is solved by its task's reference; ValueError if there is none."""
        problem = self.problem
        if problem.program:
            return [_answer(problem.solution) if self.outcome == "ok" else _code(problem.program)]
        if self.reference is None or self.runs >= len(self.reference):
            raise ValueError("kind: a given question is solved by its task's reference alone")
        return self.reference[self.runs :]

    def state(self) -> str:
        return self.shown

    def snapshot(self) -> tuple[int, str, Literal["none", "error", "ok"]]:
        return self.runs, self.shown, self.outcome

    def restore(self, snapshot: tuple[int, str, Literal["none", "error", "ok"]]) -> None:
        self.runs, self.shown, self.outcome = snapshot

    def _run(self, code: str) -> Step:
        result = self._pool().run(code)
        self.runs += 1
        self.outcome = "ok" if result.status == "ok" else "error"
        self.shown = self._observation(result)
        failed = self.outcome == "error"
        return Step(self.shown, 0.0, False, False, Info(tool_error=failed))

    def _refuse(self, why: str) -> Step:
        """Return the step of an invalid call: nothing is run, and the policy gets the reason."""
        return Step(f"{ERROR}{why}", 0.0, False, False, Info(valid=False, tool_error=True))

    def _observation(self, result: Result) -> str:
        """Format a program's output and failure in at most about `shown_chars` characters."""
        written = result.stdout.strip()
        if len(written) > self.shown_chars:
            written = f"{written[: self.shown_chars]} ..."
        if result.status == "ok":
            return written or NOTHING
        causes = {
            "error": result.stderr.strip().rpartition("\n")[2][-self.shown_chars :],
            "timeout": f"no end within {self.limits.wall_s:g} s",
            "output": f"more than {self.limits.output_bytes} bytes of output",
            "killed": "the program was killed",
            "busy": result.stderr,
        }
        return f"{written}\n{ERROR}{causes[result.status]}".strip()

    def _right(self, answer: str) -> bool:
        if not self.problem.tests:
            return same(answer, self.problem.answer)
        examination = self.problem.examination(unfenced(answer))
        result = self._pool().run(examination)
        if result.status == "busy":
            raise RuntimeError(f"the hidden tests were not run: {result.stderr}; raise workers")
        return self.problem.passed(result.stdout)

    def _pool(self) -> SandboxPool:
        return shared(self.limits, self.workers, self.interior)


def _call(action: str) -> ToolInvocation:
    """Return the call that an action means; ValueError says why there is none."""
    if action.lstrip().startswith("{"):
        return called(action)
    return ToolInvocation(name=ANSWER_TOOL, arguments={"text": action})


def _answer(text: str) -> str:
    return canonical(ANSWER_TOOL, {"text": text})


def _code(text: str) -> str:
    return canonical(CODE_TOOL, {"code": text})
