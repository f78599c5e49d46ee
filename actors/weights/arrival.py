"""Check that an engine computes with the weights it was given: it scores their probe."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from evolver_async.schema import WeightId
from evolver_async.weights.probe import Probe, ScoredProbe, fault

log = logging.getLogger(__name__)


class EngineLost(RuntimeError):
    """End of an engine's processes during a call, which may be the cause."""


class ScoringEngine(Protocol):
    """The part of an engine that the check uses; see `actors.engines.engine.Engine`."""

    @property
    def weights(self) -> WeightId | None: ...

    async def score(self, tokens: list[int]) -> list[float]: ...


@dataclass(eq=False)
class ArrivalCheck:
    """Comparison of an engine with the learner, once a version.

    `dtype`: that of the weights. `noted`: set after a failure, which is to be reported soon.
    """

    engine: ScoringEngine
    dtype: str
    noted: asyncio.Event = field(default_factory=asyncio.Event)
    checked: int = 0
    failed: int = 0
    _stopped: bool = False  # after the engine was lost during a check
    _before: ScoredProbe | None = None
    _differences: float = 0.0

    async def check(self, weights: WeightId, probe: Probe) -> None:
        """Score the probe of adopted weights; log an error if the engine holds others."""
        if self._stopped:
            return
        try:
            logprobs = await self.engine.score(probe.tokens)
        except FloatingPointError as error:  # broken weights, of which every generation tells
            log.error("weights %s: %s", weights, error)
            return
        except EngineLost as error:  # perhaps by this, so it would be lost with every version
            self._stopped = True
            log.error("weights %s: %s; their arrival is no longer checked", weights, error)
            return
        if self.engine.weights != weights:
            return  # restarted meanwhile with other weights
        scored = ScoredProbe(probe, logprobs)
        reason = fault(scored, self._before, self.dtype)
        self._before = scored
        self.checked += 1
        self._differences += scored.difference()
        if reason:
            self.failed += 1
            self.noted.set()
            log.error(
                "weights %s did not arrive in the engine, which goes on with others: %s",
                *(weights, reason),
            )

    def counters(self) -> dict[str, float]:
        """Return the counts, by metric name, once there is one."""
        if not self.checked:
            return {}
        counts = {
            "weights/checked": self.checked,
            "weights/not_arrived": self.failed,
            "weights/differences": self._differences,
        }
        return {name: float(count) for name, count in counts.items()}
