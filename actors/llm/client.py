"""Client of one OpenAI-compatible endpoint, with retries, a budget and a circuit breaker.

    complete    messages → the text of the answer, or Unavailable with the reason

Answers are untrusted: reading stops at `max_bytes`, compression is not requested, redirects are not
followed, and only text and token count are decoded. The caller interprets the text.

It does not use OpenAI's SDK. The SDK reads whole bodies, decompresses, follows redirects and
retries past budget and breaker, so each of these would be replaced by the code below; only the URL
and the JSON of a request would go. Also `verifiers` needs a version before 3 of it.
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
from evolver_async.config import ConfigError, LlmConfig
from evolver_async.config.secrets import mask, secret
from evolver_async.protocol.failures import FailureKind
from evolver_async.randomness import uniform

PAUSE_S = 0.5  # mean pause before the first retry; doubles with each retry
LONGEST_PAUSE_S = 30.0  # no retry if the endpoint demands a longer pause
RETRYABLE = {408, 409, 425, 429}  # besides 5xx
REQUEST_ERRORS = {400, 413, 422}  # these do not open the breaker
MAX_TOKENS = 10**9  # a reported usage above it is replaced by an estimate
CHARS_PER_TOKEN = 4  # estimate for answers without usage
EXCERPT_CHARS = 200  # of an error in messages
RETRY_AFTER = re.compile(r"[0-9]{1,6}")

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """Failure to get an answer.

    `reason`: timeout, connection, status, garbage (invalid form), too_long (answer or question),
    breaker or budget.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(mask(text))
        self.reason = reason


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _ChatCompletion(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None


@dataclass(frozen=True, kw_only=True)
class _CallFailure:
    """Failed call. `retryable`: a retry can help; `endpoint_fault`: counts for the breaker."""

    reason: str
    text: str
    retryable: bool = True
    endpoint_fault: bool = True
    pause_s: float = 0.0  # minimum before the next call


class Endpoint:
    """Endpoint of one configuration section, for one asyncio loop.

    `section`: the section's name, with which errors and metrics begin and under which failures are
    counted. Raise ConfigError if its key is missing.
    """

    def __init__(
        self, llm: LlmConfig, section: FailureKind, failures: FailureCounts | None = None
    ) -> None:
        self._llm = llm
        self._section: FailureKind = section
        self._failures = failures or FailureCounts()
        self._budget = Budget(llm)
        self._breaker = Breaker(llm.breaker_failures, llm.breaker_s)
        self._counts: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(llm.concurrency)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every call
        self._client = httpx.AsyncClient(
            headers={"content-type": "application/json", "accept-encoding": "identity"}
            | authorization(llm, section),
            timeout=None,  # `_call` limits the whole call
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
        """Return the answer to a chat, with retries. Raise Unavailable.

        `within_s` limits the total time, including waits and retries.
        """
        request = {
            "model": self._llm.model,
            "messages": messages,
            "max_tokens": max_tokens or self._llm.max_tokens,
            "temperature": temperature,
        }
        body = json.dumps(request).encode()
        deadline = asyncio.get_running_loop().time() + within_s
        try:
            async with asyncio.timeout_at(deadline if within_s < math.inf else None):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable(
                "timeout", f"{self._section}.llm: llm.concurrency other calls are running"
            ) from None
        try:
            return await self._with_retries(body, deadline)
        finally:
            self._slots.release()

    def failed(self, error: str) -> None:
        """Count the failure of a call, or an answer that the caller rejects."""
        self._failures.note(self._section, self._llm.url, error)

    def counters(self) -> dict[str, float]:
        """Return totals by metric name; `seconds` and `tokens` are those of the budget."""
        names = ("failures", "retries", "refused_by_breaker", "refused_by_budget")
        counted = {name: float(self._counts[name]) for name in names}
        return {f"{self._section}/{name}": v for name, v in (self._budget.used | counted).items()}

    async def close(self) -> None:
        await self._client.aclose()

    async def _with_retries(self, body: bytes, deadline: float) -> str:
        """Call until one succeeds, a retry cannot help, or time is up."""
        loop = asyncio.get_running_loop()
        for attempt in range(self._llm.retries + 1):
            outcome = await self._call_within_limits(body, deadline - loop.time())
            if isinstance(outcome, str):
                return outcome
            jitter = 0.5 + uniform(zlib.crc32(body), "pause", attempt)
            pause_s = max(PAUSE_S * 2**attempt * jitter, outcome.pause_s)
            too_late = loop.time() + pause_s >= deadline or pause_s > LONGEST_PAUSE_S
            if attempt == self._llm.retries or not outcome.retryable or too_late:
                raise Unavailable(outcome.reason, f"{self._section}.llm: {outcome.text}")
            self._counts["retries"] += 1
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _call_within_limits(self, body: bytes, limit_s: float) -> str | _CallFailure:
        """Make one call if budget and breaker allow it, and record its outcome in both."""
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
            raise Unavailable(
                "breaker",
                f"{self._section}.llm: the circuit breaker is open after repeated failures",
            )
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
        if not outcome.endpoint_fault:
            self._breaker.undecided()
        elif self._breaker.failed(loop.time()):
            rest_s = self._llm.breaker_s
            why = mask(outcome.text)
            log.warning(
                "%s.llm: the circuit breaker opens for %g s: %s", self._section, rest_s, why
            )
        return outcome

    async def _call(self, body: bytes, limit_s: float) -> str | _CallFailure:
        """Send one request and read its answer."""
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
                        text = f"the answer has more than {self._llm.max_bytes} bytes"
                        return _CallFailure(reason="too_long", text=text, retryable=False)
        except TimeoutError:
            return _CallFailure(reason="timeout", text=f"no complete answer within {limit_s:.1f} s")
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            return _CallFailure(reason="connection", text=text)
        if response.status_code != 200:
            return _status_failure(response, bytes(received))
        return self._text(body, bytes(received))

    def _text(self, body: bytes, received: bytes) -> str | _CallFailure:
        """Decode the text of an answer and spend its tokens."""
        try:
            answer = msgspec.json.decode(received, type=_ChatCompletion)
            text = answer.choices[0].message.content
        except (ValueError, RecursionError, IndexError) as error:
            return _CallFailure(
                reason="garbage", text=f"the answer is not a chat completion: {error}"
            )
        tokens = answer.usage.get("total_tokens") if isinstance(answer.usage, dict) else None
        if not isinstance(tokens, int) or not 0 <= tokens <= MAX_TOKENS:
            tokens = (len(body) + len(received)) // CHARS_PER_TOKEN
        self._budget.spend(tokens=tokens)
        return text


def authorization(llm: LlmConfig, section: str) -> dict[str, str]:
    """Return the header with the key in the variable `key_env`; none if `key_env` is empty.

    Raise ConfigError, which names the configuration's key, never the secret.
    """
    if not llm.key_env:
        return {}
    key = secret(llm.key_env, f"{section}.llm.key_env")
    if not (key.isascii() and key.isprintable() and key.strip()):
        raise ConfigError(f"{section}.llm.key_env: {llm.key_env} holds no valid key")
    return {"authorization": f"Bearer {key}"}


def _status_failure(response: httpx.Response, received: bytes) -> _CallFailure:
    """Convert an answer with a status other than 200."""
    status = response.status_code
    retry_after = RETRY_AFTER.fullmatch(response.headers.get("retry-after", "").strip())
    excerpt = mask(received[: 10 * EXCERPT_CHARS].decode(errors="replace"))[:EXCERPT_CHARS]
    return _CallFailure(
        reason="status",
        text=f"status {status}: {excerpt!r}",
        retryable=status in RETRYABLE or status >= 500,
        endpoint_fault=status not in REQUEST_ERRORS,
        pause_s=float(retry_after[0]) if retry_after else 0.0,
    )
