"""Term `code`: the tests of a row, run on the program in the reply, in the sandbox.

The column holds programs that raise if a test fails (a text, or a list such as MBPP's `test_list`),
or pairs of arguments and result for the function `function`.
"""

import functools
import re
import secrets
from dataclasses import dataclass
from typing import Any

from actors.envs.code.problems import Problem
from actors.rewards.facts import EpisodeFacts, Unscorable
from actors.sandbox.interpreters import SandboxPool, check_confined, shared
from actors.sandbox.process import InterpreterConfig, SandboxLimits, SandboxUnavailable

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ProgramTests:
    """Tests in the column `tests`. `setup`: a column with a program that runs first, if any."""

    tests: str = "tests"
    setup: str = ""
    function: str = "f"
    wall_s: float = 4.0
    memory_mb: int = 256
    packages: bool = False
    workers: int = 2

    def pool(self) -> SandboxPool:
        """Return the process's interpreters. Raises ValueError for impossible limits."""
        limits = SandboxLimits(
            wall_s=self.wall_s, cpu_s=max(1, round(self.wall_s)), memory_bytes=self.memory_mb << 20
        )
        return shared(limits, self.workers, InterpreterConfig(packages=self.packages))

    def passed(self, facts: EpisodeFacts) -> float | None:
        """Return 1 if all tests pass, else 0; None if the row has none. Raises Unscorable."""
        row = facts.task.row
        if not (tests := row.get(self.tests)):
            return None
        program = _program(facts.reply)
        if self.setup and row.get(self.setup):
            program = f"{row[self.setup]}\n{program}"
        if isinstance(tests, list) and not all(isinstance(one, str) for one in tests):
            problem = Problem(question="", tests=_pairs(tests), function=self.function)
            return float(problem.passed(self._run(problem.examination(program))))
        lines = tests if isinstance(tests, str) else "\n".join(tests)
        # a program that exits early does not come to the last line
        end = secrets.token_hex(16)
        output = self._run(f"{program}\n\n{lines}\nprint()\nprint({end!r})\n")
        return float(output.rstrip("\n").rpartition("\n")[2] == end)

    def _run(self, source: str) -> str:
        try:
            result = self.pool().run(source)
        except SandboxUnavailable as refusal:
            raise Unscorable(f"needs a sandbox: {refusal}") from None
        if result.status == "busy":
            raise Unscorable(f"{result.stderr}: raise params.workers")
        return result.stdout if result.status == "ok" else ""


@functools.cache  # one sandbox for all tasks
def probe(packages: bool) -> None:
    """Raise ValueError if programs cannot be confined on this machine."""
    check_confined("reward.terms: code", InterpreterConfig(packages=packages))


def _program(reply: str) -> str:
    """Return the last fenced block of a reply, all of it without one."""
    blocks = FENCED.findall(reply)
    return blocks[-1] if blocks else reply


def _pairs(tests: list[Any]) -> tuple[tuple[list[Any], Any], ...]:
    if not all(isinstance(one, list | tuple) and len(one) == 2 for one in tests):
        raise Unscorable("needs tests that are programs, or pairs of arguments and result")
    return tuple((list(arguments), result) for arguments, result in tests)
