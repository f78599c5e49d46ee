"""One OpenAI-compatible endpoint, asked with patience and within bounds.

    complete    messages → the text of the answer, or Unavailable with the reason

What comes from there is of unknown origin: an answer is read as it arrives and left at `max_bytes`,
compression is not asked for, and of its JSON only the text and the token count are looked at. What
the text means, and whether it is any good, is the caller's matter.
"""

import asyncio
import json
import logging
import math
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from actors.failures import FailureCounts
from actors.llm.budget import Breaker, Budget
from evolver_async.config import ConfigError, Llm
from evolver_async.config.secrets import mask, secret
from evolver_async.schema import FailureKind, uniform

PAUSE_S = 0.5  # before the first retry, on average; twice as long before each further one
LONGEST_PAUSE_S = 30.0  # an endpoint that wants to be left alone for longer is not asked again
AGAIN = {408, 409, 425, 429}  # statuses that may be gone the next time, besides 5xx
OURS = {400, 413, 422}  # statuses that say nothing about other requests
MOST_TOKENS = 10**9  # a usage that says more is not believed
CHARS_PER_TOKEN = 4  # where an answer does not say its usage
EXCERPT = 200  # characters of an error that are shown
RETRY_AFTER = re.compile(r"[0-9]{1,6}")

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """There is no answer.

    `reason`: timeout, connection, status, garbage (an answer in no known form), too_long (answer or
    question), breaker or budget.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(mask(text))
        self.reason = reason


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """One call that failed. `again`: it may be retried; `theirs`: the endpoint is to blame."""

    reason: str
    text: str
    again: bool = True
    theirs: bool = True
    pause_s: float = 0.0  # at least, before the next call


class Endpoint:
    """The endpoint of one configuration section, for one asyncio loop.

    `section` is the section's name: errors begin with it, and so do its metrics; its failures are
    counted under it. Raises ConfigError where its key is missing.
    """

    def __init__(
        self, llm: Llm, section: FailureKind, failures: FailureCounts | None = None
    ) -> None:
        self._llm = llm
        self._section: FailureKind = section
        self._failures = failures or FailureCounts()
        self._budget = Budget(llm)
        self._breaker = Breaker(llm.breaker_failures, llm.breaker_s)
        self._counts: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(llm.concurrency)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every call
        self._client = httpx.AsyncClient(
            headers={"content-type": "application/json", "accept-encoding": "identity"}
            | authorization(llm, section),
            timeout=None,  # `_call` has one for the whole of it
            limits=httpx.Limits(max_connections=llm.concurrency),
        )

    async def complete(
        self,
        messages: list[dict[str, str]],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        within_s: float = math.inf,
    ) -> str:
        """The answer to a chat, retried where that may help. `within_s`: all retries and waiting
        included. Raises Unavailable."""
        asked = {
            "model": self._llm.model,
            "messages": messages,
            "max_tokens": max_tokens or self._llm.max_tokens,
            "temperature": temperature,
        }
        body = json.dumps(asked).encode()
        deadline = asyncio.get_running_loop().time() + within_s
        try:
            async with asyncio.timeout_at(deadline if within_s < math.inf else None):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable("timeout", f"{self._section}.llm: busy with other calls") from None
        try:
            return await self._persist(body, deadline)
        finally:
            self._slots.release()

    def failed(self, error: str) -> None:
        """Count a failure: of a call, or of an answer that is no use to who asked."""
        self._failures.note(self._section, self._llm.url, error)

    def counters(self) -> dict[str, float]:
        """Totals by metric name; `seconds` and `tokens` are what the budget counts."""
        names = ("failures", "retries", "refused_by_breaker", "refused_by_budget")
        counted = {name: float(self._counts[name]) for name in names}
        return {f"{self._section}/{name}": v for name, v in (self._budget.used | counted).items()}

    async def close(self) -> None:
        await self._client.aclose()

    async def _persist(self, body: bytes, deadline: float) -> str:
        """Calls until one succeeds, it is no use, or it is too late."""
        loop = asyncio.get_running_loop()
        for attempt in range(self._llm.retries + 1):
            outcome = await self._admitted(body, deadline - loop.time())
            if isinstance(outcome, str):
                return outcome
            jitter = 0.5 + uniform(zlib.crc32(body), "pause", attempt)
            pause_s = max(PAUSE_S * 2**attempt * jitter, outcome.pause_s)
            too_late = loop.time() + pause_s >= deadline or pause_s > LONGEST_PAUSE_S
            if attempt == self._llm.retries or not outcome.again or too_late:
                raise Unavailable(outcome.reason, f"{self._section}.llm: {outcome.text}")
            self._counts["retries"] += 1
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _admitted(self, body: bytes, limit_s: float) -> str | _Failure:
        """One call, if budget and breaker have nothing against it; tells them how it went."""
        loop = asyncio.get_running_loop()
        exhausted = self._budget.exhausted()
        if exhausted:
            if not self._counts["refused_by_budget"]:
                log.warning("%s.llm: %s", self._section, exhausted)
            self._counts["refused_by_budget"] += 1
            self.failed(exhausted)
            raise Unavailable("budget", f"{self._section}.llm: {exhausted}")
        if not self._breaker.admits(loop.time()):
            self._counts["refused_by_breaker"] += 1
            raise Unavailable("breaker", f"{self._section}.llm: failed too often, is left alone")
        began = loop.time()
        self._budget.spend(calls=1)
        try:
            outcome = await self._call(body, min(limit_s, self._llm.timeout_s))
        except BaseException:
            self._breaker.undecided()
            raise
        finally:
            self._budget.spend(seconds=loop.time() - began)
        if isinstance(outcome, str):
            self._breaker.succeeded()
            return outcome
        self._counts["failures"] += 1
        self.failed(outcome.text)
        if not outcome.theirs:
            self._breaker.undecided()
        elif self._breaker.failed(loop.time()):
            rest_s = self._llm.breaker_s
            why = mask(outcome.text)
            log.warning("%s.llm is left alone for %g s: %s", self._section, rest_s, why)
        return outcome

    async def _call(self, body: bytes, limit_s: float) -> str | _Failure:
        """One request and its whole answer."""
        url = self._llm.url.rstrip("/") + "/chat/completions"
        received = bytearray()
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream("POST", url, content=body) as response,
            ):
                async for part in response.aiter_raw():
                    received += part
                    if len(received) > self._llm.max_bytes:
                        self._budget.spend(tokens=len(received) // CHARS_PER_TOKEN)
                        text = f"an answer of more than {self._llm.max_bytes} bytes"
                        return _Failure(reason="too_long", text=text, again=False)
        except TimeoutError:
            return _Failure(reason="timeout", text=f"no whole answer within {limit_s:.1f} s")
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            return _Failure(reason="connection", text=text)
        if response.status_code != 200:
            return _refused(response, bytes(received))
        return self._text(body, bytes(received))

    def _text(self, body: bytes, received: bytes) -> str | _Failure:
        """The text of an answer."""
        try:
            answer = msgspec.json.decode(received, type=_Answer)
            text = answer.choices[0].message.content
        except (ValueError, RecursionError, IndexError) as error:
            return _Failure(reason="garbage", text=f"an answer in no known form: {error}")
        said = answer.usage.get("total_tokens") if isinstance(answer.usage, dict) else None
        if not isinstance(said, int) or not 0 <= said <= MOST_TOKENS:
            said = (len(body) + len(received)) // CHARS_PER_TOKEN
        self._budget.spend(tokens=said)
        return text


def authorization(llm: Llm, section: str) -> dict[str, str]:
    """The header that shows the key of `key_env`; none where there is no such variable's name.

    Raises ConfigError, which names the key of the configuration, never the secret.
    """
    if not llm.key_env:
        return {}
    key = secret(llm.key_env, f"{section}.llm.key_env")
    if not (key.isascii() and key.isprintable() and key.strip()):
        raise ConfigError(f"{section}.llm.key_env: {llm.key_env} holds no key")
    return {"authorization": f"Bearer {key}"}


def _refused(response: httpx.Response, received: bytes) -> _Failure:
    """An answer with a status that is not 200."""
    status = response.status_code
    wanted = RETRY_AFTER.fullmatch(response.headers.get("retry-after", "").strip())
    said = mask(received[: 10 * EXCERPT].decode(errors="replace"))[:EXCERPT]
    return _Failure(
        reason="status",
        text=f"status {status}: {said!r}",
        again=status in AGAIN or status >= 500,
        theirs=status not in OURS,
        pause_s=float(wanted[0]) if wanted else 0.0,
    )
