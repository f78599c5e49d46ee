"""Budget and circuit breaker for calls of a language model; pure, with the time as an argument."""

import math
from dataclasses import dataclass

from evolver_async.config import LlmConfig


class Budget:
    """Limits on calls, tokens and seconds, and the amounts used; 0 is no limit."""

    def __init__(self, llm: LlmConfig) -> None:
        calls, tokens = llm.budget_calls, llm.budget_tokens
        self._limits = {"calls": calls, "tokens": tokens, "seconds": llm.budget_s}
        self.used = dict.fromkeys(self._limits, 0.0)

    def spend(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.used[name] += amount

    def exhausted(self) -> str:
        """Describe the limit that is reached; "" if none is."""
        for name, limit in self._limits.items():
            if 0 < limit <= self.used[name]:
                return f"the budget of {limit:g} {name} is used up"
        return ""


@dataclass(eq=False)
class Breaker:
    """Circuit breaker: opens for `rest_s` after `failures` consecutive failures, then allows one
    trial call."""

    failures: int
    rest_s: float
    _consecutive: int = 0
    _open_until: float = -math.inf
    _trial_running: bool = False

    def admits(self, now: float) -> bool:
        """Return True if a call is allowed, after which one of the methods below must follow."""
        if self._consecutive < self.failures:
            return True
        if now < self._open_until or self._trial_running:
            return False
        self._trial_running = True
        return True

    def succeeded(self) -> None:
        self._consecutive = 0
        self._trial_running = False

    def failed(self, now: float) -> bool:
        """Record a failed call; return True if the breaker is now open."""
        self._consecutive += 1
        self._trial_running = False
        if self._consecutive >= self.failures:
            self._open_until = now + self.rest_s
        return self._consecutive >= self.failures

    def undecided(self) -> None:
        """Record a call that says nothing about the endpoint."""
        self._trial_running = False
