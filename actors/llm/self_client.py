"""Client of the policy's own engine, with the interface of `Endpoint.complete`."""

import asyncio
import logging
import math

from actors.engines.engine import Engine, Request
from actors.formats.chat import Chat
from actors.llm.budget import Budget
from actors.llm.endpoint_client import Unavailable
from evolver_async.config import Config
from evolver_async.randomness import key
from evolver_async.schema import WeightId

log = logging.getLogger(__name__)


class PolicyClient:
    """Client that samples greedily in sessions of its own. `generated`: tokens sampled so far."""

    def __init__(self, config: Config, engine: Engine, chat: Chat) -> None:
        self._engine = engine
        self._chat = chat
        self._seed = config.run.seed
        self._max_length = config.policy.max_length
        self._max_tokens = config.judge.max_tokens
        self._budget = Budget(config.judge.llm)
        self._refused = 0
        self._calls = 0
        self.generated = 0

    @property
    def weights(self) -> WeightId | None:
        """Return the weights that answer."""
        return self._engine.weights

    async def complete(self, messages: list[dict[str, str]], *, within_s: float = math.inf) -> str:
        """Return the answer to one system and one user message.

        Raise Unavailable, also if the context has no room for `judge.max_tokens` more.
        """
        exhausted = self._budget.exhausted()
        if exhausted:
            if not self._refused:
                log.warning("judge.llm: %s", exhausted)
            self._refused += 1
            raise Unavailable("budget", exhausted)
        system, user = (message["content"] for message in messages)
        tokens = self._chat.first(system, user, "")
        if len(tokens) + self._max_tokens > self._max_length:
            text = f"{len(tokens)} tokens and judge.max_tokens={self._max_tokens} exceed"
            raise Unavailable("too_long", f"{text} policy.max_length={self._max_length}")
        self._calls += 1
        session = f"judge/{self._calls}"
        request = Request(
            tokens=tokens,
            max_tokens=self._max_tokens,
            temperature=0.0,
            session=session,
            seed=key(self._seed, session),
            stop_tokens=self._chat.stop_tokens,
        )
        loop = asyncio.get_running_loop()
        began, sampled = loop.time(), 0
        try:
            async with asyncio.timeout(within_s if within_s < math.inf else None):
                generation = await self._engine.generate(request)
            sampled = len(generation.tokens)
            return self._chat.text_of(generation.tokens)
        except TimeoutError:
            raise Unavailable("timeout", f"no complete answer within {within_s:.1f} s") from None
        finally:
            self._engine.release(session)
            self.generated += sampled
            self._budget.spend(calls=1, tokens=len(tokens) + sampled, seconds=loop.time() - began)

    def counters(self) -> dict[str, float]:
        """Return totals by metric name."""
        counted = self._budget.used | {"refused_by_budget": float(self._refused)}
        return {f"judge/{name}": value for name, value in counted.items()}

    async def close(self) -> None:
        """Do nothing: the worker owns the engine."""
