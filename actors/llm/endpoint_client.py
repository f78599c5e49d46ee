"""Client of one OpenAI-compatible endpoint, with retries, a budget and a circuit breaker.

    complete    messages → the text of the answer, or Unavailable with the reason

Answers are untrusted: reading stops at `max_bytes`, compression is not requested, redirects are not
followed, and only text and token count are decoded. The caller interprets the text.

It does not use OpenAI's SDK. The SDK reads whole bodies, decompresses, follows redirects and
retries past budget and breaker, so each of these would be replaced by the code below; only the URL
and the JSON of a request would go. Also `verifiers` needs a version before 3 of it.
"""

import asyncio
import logging
import math
import re
import zlib
from collections import Counter
from typing import Any

import httpx
import msgspec

from actors.failure_counts import FailureCounts
from actors.llm.budget import Breaker, Budget
from actors.llm.parameters import Parameters
from evolver_async.config import ConfigError, LlmConfig
from evolver_async.config.secrets import mask, secret
from evolver_async.randomness import uniform
from evolver_async.wire.failure_totals import FailureKind

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

    `reason`: timeout, connection, status, garbage (invalid form), no_text (an answer without any),
    too_long (answer or question), breaker or budget. Of a failed call: `retryable`: a retry can
    help; `endpoint_fault`: counts for the breaker; `pause_s`: minimum before the next call.
    """

    def __init__(
        self,
        reason: str,
        text: str,
        *,
        retryable: bool = True,
        endpoint_fault: bool = True,
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(mask(text))
        self.reason, self.retryable = reason, retryable
        self.endpoint_fault, self.pause_s = endpoint_fault, pause_s


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: Any = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None


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
        self._parameters = Parameters()
        self._slots = asyncio.Semaphore(llm.concurrency)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every call
        self._client = httpx.AsyncClient(
            headers={"content-type": "application/json", "accept-encoding": "identity"}
            | authorization(llm.key_env, f"{section}.llm.key_env"),
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

        `within_s` limits the total time, including waits and retries. At most half of it is waited
        for a free slot: a call cut short for having waited would count as the endpoint's failure.
        """
        most = max_tokens or self._llm.max_tokens
        deadline = asyncio.get_running_loop().time() + within_s
        try:
            async with asyncio.timeout(within_s / 2 if within_s < math.inf else None):
                await self._slots.acquire()
        except TimeoutError:
            raise self._unavailable("timeout", "llm.concurrency other calls are running") from None
        try:
            while True:
                given = self._parameters
                body = given.body(self._llm.model, messages, most, temperature)
                try:
                    return await self._with_retries(body, deadline)
                except Unavailable as failure:
                    if given.after(str(failure)) == given:
                        raise
                    self._change(self._parameters.after(str(failure)))
        finally:
            self._slots.release()

    def _change(self, parameters: Parameters) -> None:
        if parameters != self._parameters:
            self._parameters = parameters
            log.warning("%s.llm: from now on with %s", self._section, parameters)

    def _unavailable(self, reason: str, text: object) -> Unavailable:
        return Unavailable(reason, f"{self._section}.llm: {text}")

    def failed(self, error: str) -> None:
        """Count the failure of a call, or an answer that the caller rejects."""
        self._failures.note(self._section, self._llm.url, error)

    def counters(self) -> dict[str, float]:
        """Return totals by metric name; `seconds` and `tokens` are those of the budget."""
        names = ("failures", "retries", "cut", "refused_by_breaker", "refused_by_budget")
        counted = {name: float(self._counts[name]) for name in names}
        return {f"{self._section}/{name}": v for name, v in (self._budget.used | counted).items()}

    async def close(self) -> None:
        await self._client.aclose()

    async def _with_retries(self, body: bytes, deadline: float) -> str:
        """Call until one succeeds, a retry cannot help, or time is up."""
        loop = asyncio.get_running_loop()
        for attempt in range(self._llm.retries + 1):
            self._admit(loop.time())
            try:
                return await self._call_within_limits(body, deadline - loop.time())
            except Unavailable as failure:
                pause_s = pause_before_retry(body, attempt, failure)
                too_late = loop.time() + pause_s >= deadline or pause_s > LONGEST_PAUSE_S
                if attempt == self._llm.retries or not failure.retryable or too_late:
                    raise self._unavailable(failure.reason, failure) from None
            self._counts["retries"] += 1
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _admit(self, now: float) -> None:
        """Raise Unavailable unless budget and breaker allow a call."""
        if exhausted := self._budget.exhausted():
            if not self._counts["refused_by_budget"]:
                log.warning("%s.llm: %s", self._section, exhausted)
            self._counts["refused_by_budget"] += 1
            self.failed(exhausted)
            raise self._unavailable("budget", exhausted)
        if not self._breaker.admits(now):
            self._counts["refused_by_breaker"] += 1
            text = "the circuit breaker is open after repeated failures"
            raise self._unavailable("breaker", text)

    async def _call_within_limits(self, body: bytes, limit_s: float) -> str:
        """Make one call that was admitted; record its outcome in budget and breaker."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._budget.spend(calls=1)
        try:
            text = await self._call(body, min(limit_s, self._llm.timeout_s))
        except Unavailable as failure:
            self._counts["failures"] += 1
            self.failed(str(failure))
            if not failure.endpoint_fault:
                self._breaker.undecided()
            elif self._breaker.failed(loop.time()):
                warning = "%s.llm: the circuit breaker opens for %g s: %s"
                log.warning(warning, self._section, self._llm.breaker_s, failure)
            raise
        except BaseException:
            self._breaker.undecided()
            raise
        finally:
            self._budget.spend(seconds=loop.time() - began)
        self._breaker.succeeded()
        return text

    async def _call(self, body: bytes, limit_s: float) -> str:
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
                        raise Unavailable("too_long", text, retryable=False)
        except TimeoutError:
            raise Unavailable("timeout", f"no complete answer within {limit_s:.1f} s") from None
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            raise Unavailable("connection", f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise status_failure(response, bytes(received))
        return self._text(body, bytes(received))

    def _text(self, body: bytes, received: bytes) -> str:
        """Decode the text of an answer and spend its tokens."""
        try:
            answer = msgspec.json.decode(received, type=_ChatCompletion)
            choice = answer.choices[0]
        except (ValueError, RecursionError, IndexError) as error:
            problem = f"the answer is not a chat completion: {error}"
            raise Unavailable("garbage", problem) from error
        tokens = answer.usage.get("total_tokens") if isinstance(answer.usage, dict) else None
        if not isinstance(tokens, int) or not 0 <= tokens <= MAX_TOKENS:
            tokens = (len(body) + len(received)) // CHARS_PER_TOKEN
        self._budget.spend(tokens=tokens)
        text, cut = choice.message.content, choice.finish_reason == "length"
        advice = f"raise {self._section}.llm.max_tokens ({self._llm.max_tokens})"
        if text is None or (cut and not text):
            problem = f"the answer has no text, finish_reason {choice.finish_reason!r:.40}"
            problem = f"{problem}: {advice}" if cut else problem
            # A model that reasons can use up max_tokens before it writes any text. Asked again it
            # would do the same at full price, and the endpoint is not at fault.
            raise Unavailable("no_text", problem, retryable=False, endpoint_fault=False)
        if cut:
            if not self._counts["cut"]:
                log.warning("%s.llm: an answer is cut at its limit: %s", self._section, advice)
            self._counts["cut"] += 1
        return text


def authorization(key_env: str, named: str) -> dict[str, str]:
    """Return the header with the key in the variable `key_env`; none if `key_env` is empty.

    Raise ConfigError, which names the configuration's key `named`, never the secret.
    """
    if not key_env:
        return {}
    key = secret(key_env, named)
    if not (key.isascii() and key.isprintable() and key.strip()):
        raise ConfigError(f"{named}: {key_env} holds no valid key")
    return {"authorization": f"Bearer {key}"}


def pause_before_retry(body: bytes, attempt: int, failure: Unavailable) -> float:
    """Return the seconds to wait after the failure of an attempt, the first of which is 0; they are
    drawn from the content of the call, so a rerun waits alike."""
    jitter = 0.5 + uniform(zlib.crc32(body), "pause", attempt)
    return max(PAUSE_S * 2**attempt * jitter, failure.pause_s)


def status_failure(response: httpx.Response, received: bytes) -> Unavailable:
    """Convert an answer with a status other than 200."""
    status = response.status_code
    retry_after = RETRY_AFTER.fullmatch(response.headers.get("retry-after", "").strip())
    excerpt = mask(received[: 10 * EXCERPT_CHARS].decode(errors="replace"))[:EXCERPT_CHARS]
    return Unavailable(
        *("status", f"status {status}: {excerpt!r}"),
        retryable=status in RETRYABLE or status >= 500,
        endpoint_fault=status not in REQUEST_ERRORS,
        pause_s=float(retry_after[0]) if retry_after else 0.0,
    )
