"""What an actor expects of an engine, whatever runs underneath.

    loop      produces                      consumes             waits for     unblocked by
    step      tokens, log-probs, versions   requests, weights    a request     `generate`

Every engine passes `tests/support/engine_conformance.py`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from evolver_async.schema import WeightId

if TYPE_CHECKING:  # a configuration is checked without loading torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Request:
    """One turn to generate.

    `tokens` is the whole context so far. `session` names the episode: KV of its earlier turns is
    reused, until `Engine.release`. `seed` keys the draws, so that the sampled tokens depend on
    nothing but weights, context and seed. Temperature 0 is greedy.
    """

    tokens: list[int]
    max_tokens: int
    temperature: float
    session: str
    seed: int
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Generation:
    """What was sampled, the stop token or the text that completed a stop string included.

    Per token: its log-prob under the distribution it was drawn from (greedy: temperature 1) and the
    weights that sampled it. `finish` is "length" at `max_tokens` or when the context is full.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights: list[WeightId] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"


class Engine(Protocol):
    """Generates for many sessions at once on one asyncio loop."""

    @property
    def weights(self) -> WeightId | None:
        """Those that new tokens are sampled with, None before the first update."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Cancelling the call ends the generation."""
        ...

    def release(self, session: str) -> None:
        """The episode is over: its KV may go. Unknown sessions are ignored."""
        ...

    async def update(self, weights: WeightId, tensors: "dict[str, Tensor]") -> None:
        """Swap the weights, all or, with an error, none; no KV of the old ones is used afterwards.

        In flight `keep`: running generations go on with the new weights on their whole context;
        `wait`: they finish first, while new ones are held back.
        """
        ...

    async def close(self) -> None:
        """End the step loop; what still runs is cancelled."""
        ...

    def stats(self) -> dict[str, float]:
        """Totals since the start: tokens `generated`, `prefilled`, `reused`; `busy_s`."""
        ...
