"""Interface of engines.

    loop      produces                      consumes             waits for     unblocked by
    step      tokens, log-probs, versions   requests, weights    a request     `generate`

Every engine passes `tests/support/engine_conformance.py`.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from evolver_async.model.grammar import GrammarState
from evolver_async.schema import WeightId


@dataclass(frozen=True, kw_only=True)
class Request:
    """One turn to generate.

    `tokens` is the whole context. `session` names the episode, whose KV is reused until
    `Engine.release`. The sampled tokens depend only on weights, context and `seed`. Temperature 0
    is greedy. `grammar`: a structural tag of xgrammar that the text obeys, "" for none; what it
    excludes is masked before sampling.
    """

    tokens: list[int]
    max_tokens: int
    temperature: float
    session: str
    seed: int
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    grammar: str = ""


@dataclass(kw_only=True)
class Generation:
    """Sampled tokens, including the stop token or the end of a stop string.

    Per token: its log-prob under the sampled distribution (greedy: at temperature 1) and the
    weights that sampled it. `finish` is "length" at `max_tokens` or when the context is full.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights: list[WeightId] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"


@dataclass(eq=False)
class RunningRequest:
    """Waiting or running request. `draws`: its uniform random numbers, one per token."""

    request: Request
    context: np.ndarray
    limit: int
    completers: frozenset[int]
    draws: list[float]
    grammar: GrammarState | None
    future: asyncio.Future[Generation]
    out: Generation = field(default_factory=Generation)


class Engine(Protocol):
    """Generator of turns for many concurrent sessions on one asyncio loop."""

    @property
    def weights(self) -> WeightId | None:
        """Return the weights that sample new tokens; None before the first update."""
        ...

    @property
    def obeys_grammars(self) -> bool:
        """Return True if a request may have a grammar."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Cancelling the call ends the generation.

        Raise GrammarError for a grammar that cannot be compiled, or that no token can continue.
        """
        ...

    def release(self, session: str) -> None:
        """Allow the eviction of a session's KV; ignore unknown sessions."""

    async def score(self, tokens: list[int]) -> list[float]:
        """Return the log-prob of each token but the first, at temperature 1, computed afresh.

        The weights and kernels are those that sample. Raise FloatingPointError if one is not
        finite, `arrival.EngineLost` if the engine's processes end meanwhile.
        """
        ...

    async def close(self) -> None:
        """End the step loop and cancel running generations."""

    def stats(self) -> dict[str, float]:
        """Return totals since the start: tokens `generated`, `prefilled`, `reused`; `busy_s`.

        `stale`: generated tokens that attended to KV of older weights, with `in_flight` keep_kv.
        An engine in processes of its own adds `pause_s` of updates, `restarts`, `preemptions`, and
        what holds now: requests that are `waiting`, `kv_use` of its cache.
        """
        ...
