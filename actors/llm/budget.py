"""Bounds on the use of whoever answers questions: a budget, and a breaker for times of failure.

Pure: the time is an argument.
"""

import math

from evolver_async.config import Llm


class Budget:
    """How much may be used, and what was; a limit of 0 is none."""

    def __init__(self, llm: Llm) -> None:
        self._limits = {
            "calls": llm.budget_calls,
            "tokens": llm.budget_tokens,
            "seconds": llm.budget_s,
        }
        self.used = dict.fromkeys(self._limits, 0.0)

    def spend(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.used[name] += amount

    def exhausted(self) -> str:
        """What is used up, in words; "" while nothing is."""
        for name, limit in self._limits.items():
            if 0 < limit <= self.used[name]:
                return f"the budget of {limit:g} {name} is used up"
        return ""


class Breaker:
    """Leaves alone for `rest_s` who has failed `failures` times in a row, then tries once."""

    def __init__(self, failures: int, rest_s: float) -> None:
        self._failures = failures
        self._rest_s = rest_s
        self._in_a_row = 0
        self._until = -math.inf
        self._trying = False

    def admits(self, now: float) -> bool:
        """Whether a call may be made; it must be followed by one of the methods below."""
        if self._in_a_row < self._failures:
            return True
        if now < self._until or self._trying:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        self._in_a_row = 0
        self._trying = False

    def failed(self, now: float) -> bool:
        """Whether this makes it a rest."""
        self._in_a_row += 1
        self._trying = False
        if self._in_a_row >= self._failures:
            self._until = now + self._rest_s
        return self._in_a_row >= self._failures

    def undecided(self) -> None:
        """The call told nothing."""
        self._trying = False
