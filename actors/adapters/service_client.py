"""Client of an environment service of AgentEvolver's protocol, with retries and limits.

    profile, create, step, evaluate, release

Each has a deadline by `time.monotonic()`, which its retries share; a release has limits of its own.
Every call is a POST of `{env_type, task_id, instance_id, messages, params}`, answered by `{success,
data}`. The service keeps an instance until it is released or has idled for too long; a
`ServiceLease` is the right to one. Calls that change nothing are retried. A `step` is sent again
only where the service cannot have carried it out, since an answer that got lost tells nothing about
that; a `create` is sent again under a new name, and what the lost one may have made is released.

The service's answers are not trusted: reading stops at MAX_BYTES, and only the fields of the
protocol are used.
"""

import json
import logging
import math
import threading
import time
import uuid
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import httpx
import msgspec

from evolver_async.config.secrets import mask
from evolver_async.randomness import uniform

PAUSE_S = 0.2  # before the first retry, on average; twice as long before each further one
RELEASE_S = 5.0  # an episode does not wait for longer to give its instance back
KEPT_S = 2.0  # a connection idles for less than the 5 s after which servers like to close it
MAX_BYTES = 4 << 20
EXCERPT = 200  # characters of an error that are shown
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)  # before any request
REFUSED = {429, 503}  # statuses that say that nothing was done
AGAIN = REFUSED | {408, 425, 500, 502, 504}  # statuses that may be gone the next time
GONE = "not found"  # in the answer of a service that knows no such instance

log = logging.getLogger(__name__)
_counts: Counter[str] = Counter()
_counting = threading.Lock()


class ServiceError(Exception):
    """Final failure of a call.

    `kind`: connection, timeout, status, garbage, too_long, refused (by the service itself), or
    expired (there is no such instance any more).
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(mask(text))
        self.kind = kind


class ServiceMessage(msgspec.Struct):
    role: str
    content: str | None = None


class ServiceState(msgspec.Struct):
    """Result of `create` and `step`; `state` may be one message or several."""

    state: list[ServiceMessage] | ServiceMessage
    reward: float = 0.0
    is_terminated: bool = False

    @property
    def messages(self) -> list[ServiceMessage]:
        return self.state if isinstance(self.state, list) else [self.state]


class _Reply(msgspec.Struct):
    success: bool
    data: msgspec.Raw = msgspec.Raw(b"null")


class _RequestFailure(NamedTuple):
    """One failed request. `undone`: the service cannot have carried it out."""

    kind: str
    text: str
    again: bool = True
    undone: bool = False


def drain() -> Counter[str]:
    """Return and reset this process's counts of failed requests, retries and abandoned calls, by
    metric name: `env_service/<call>/<kind>`, `env_service/retries`, `env_service/given_up`."""
    with _counting:
        drained = _counts.copy()
        _counts.clear()
    return drained


def _count(name: str) -> None:
    with _counting:
        _counts[f"env_service/{name}"] += 1


def longest_s(timeout_s: float, retries: int) -> float:
    """Return the seconds of a call whose requests all time out, with the longest pauses."""
    return (retries + 1) * timeout_s + 1.5 * PAUSE_S * (2**retries - 1)


@cache
def service(url: str, timeout_s: float, retries: int) -> "EnvironmentService":
    """Return the service at `url`, one for all episodes of this process."""
    return EnvironmentService(url, timeout_s, retries)


class EnvironmentService:
    """Service at one address; its methods may be called from several threads at once.

    `timeout_s` is for one request with its whole answer, of which a call makes at most `retries` +
    1, all before its deadline.
    """

    def __init__(self, url: str, timeout_s: float, retries: int) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.retries = retries
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every call
        self._client = httpx.Client(
            headers={"accept-encoding": "identity"},
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S),
        )
        self._profiles: dict[tuple[str, str], list[str]] = {}

    def profile(self, env_type: str, split: str, deadline: float) -> list[str]:
        """Return the names of a split's tasks; requested once."""
        place = env_type, split
        if place not in self._profiles:
            body = {"env_type": env_type, "params": {"split": split}}
            names = self._persist("get_env_profile", env_type, body, list[str], deadline)
            self._profiles[place] = names
        return self._profiles[place]

    def _persist(
        self,
        call: str,
        of: str,
        body: dict[str, Any],
        shape: Any,
        deadline: float,
        *,
        safe: bool = True,
    ) -> Any:
        """Return the data of an answer, with retries. `of`: the caller, for messages; `safe`: the
        call may be carried out twice."""
        for attempt in range(self.retries + 1):
            found = self._request(call, body, shape, deadline)
            if not isinstance(found, _RequestFailure):
                return found
            helps = found.again and (safe or found.undone)
            self._again(call, of, found, attempt, helps, deadline)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _again(
        self, call: str, of: str, failure: _RequestFailure, tried: int, helps: bool, deadline: float
    ) -> None:
        """Pause before another attempt; raise ServiceError if there is none."""
        jitter = 0.5 + uniform(zlib.crc32(of.encode()), "pause", tried)
        pause_s = PAUSE_S * 2**tried * jitter
        too_late = time.monotonic() + pause_s >= deadline
        if not helps or tried == self.retries or too_late:
            _count("given_up")
            tries = f"after {tried + 1} attempts, " if tried else ""
            text = f"{self.url}: {call} of {of}: {tries}{failure.kind}: {failure.text}"
            raise ServiceError(failure.kind, text)
        _count("retries")
        time.sleep(pause_s)

    def _request(self, call: str, body: dict[str, Any], shape: Any, deadline: float) -> Any:
        """Return the data of one request's answer or its failure; failures are counted."""
        limit_s = min(self.timeout_s, deadline - time.monotonic())
        if limit_s > 0:
            found = self._send(call, body, shape, limit_s)
        else:
            found = _RequestFailure(kind="timeout", text="earlier requests took all its time")
        if isinstance(found, _RequestFailure):
            _count(f"{call}/{found.kind}")
        return found

    def _send(self, call: str, body: dict[str, Any], shape: Any, limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        received = bytearray()
        try:
            url = f"{self.url}/{call}"
            with self._client.stream("POST", url, json=body, timeout=limit_s) as response:
                for part in response.iter_raw():
                    received += part
                    if len(received) > MAX_BYTES:
                        text = f"an answer of more than {MAX_BYTES} bytes"
                        return _RequestFailure(kind="too_long", text=text, again=False)
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the answer does not end")
        except UNSENT as error:
            return _RequestFailure(kind="connection", text=_said(error), undone=True)
        except httpx.TimeoutException:
            return _RequestFailure(kind="timeout", text=f"no whole answer within {limit_s:g} s")
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            return _RequestFailure(kind="connection", text=_said(error))
        if response.status_code != 200:
            return _bad_status(response.status_code, bytes(received))
        try:
            reply = msgspec.json.decode(received, type=_Reply)
            if not reply.success:
                return _RequestFailure(kind="refused", text=_excerpt(bytes(received)), again=False)
            return msgspec.json.decode(reply.data, type=shape)
        except (ValueError, RecursionError) as error:
            return _RequestFailure(kind="garbage", text=f"an answer in no known form: {error}")


@dataclass(eq=False)
class ServiceLease:
    """Right to one instance, from `create` to `release`. `held`: the instance can exist."""

    service: EnvironmentService
    env_type: str
    task_id: str
    instance_id: str = ""
    held: bool = False

    @property
    def named(self) -> str:
        return f"{self.env_type} {self.task_id} ({self.instance_id})"

    def body(self) -> dict[str, Any]:
        name = {"env_type": self.env_type, "task_id": self.task_id}
        return name | {"instance_id": self.instance_id, "messages": {}, "params": {}}

    def create(self, params: dict[str, Any], deadline: float) -> ServiceState:
        """Create an instance; return its first state. After a failure `release` is still due."""
        host = self.service
        for attempt in range(host.retries + 1):
            self.release(deadline)
            self.instance_id = f"evolver-{uuid.uuid4().hex}"
            made = host._request("create", self.body() | {"params": params}, ServiceState, deadline)
            if isinstance(made, ServiceState):
                self.held = True
                return made
            self.held = not made.undone
            host._again("create", self.named, made, attempt, made.again, deadline)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def step(self, text: str, deadline: float) -> ServiceState:
        """Send the policy's `text` and return the next state; carried out at most once."""
        said = {"role": "assistant", "content": text}
        body = self.body() | {"messages": said}
        return self.service._persist("step", self.named, body, ServiceState, deadline, safe=False)

    def evaluate(self, deadline: float, *, sparse: bool) -> float:
        """Return the score of the instance in its present state."""
        body = self.body() | {"params": {"sparse": sparse}}
        return self.service._persist("evaluate", self.named, body, float, deadline)

    def release(self, deadline: float = math.inf) -> None:
        """Release the instance, if it can exist. A failure is only counted and logged, because the
        service releases an idle instance by itself."""
        if not self.held:
            return
        self.held = False
        for _ in range(2):
            until = min(deadline, time.monotonic() + RELEASE_S)
            found = self.service._request("release", self.body(), Any, until)
            if not isinstance(found, _RequestFailure) or found.kind in ("refused", "expired"):
                return
        log.warning("%s: cannot release %s: %s", self.service.url, self.named, mask(found.text))


def _bad_status(status: int, received: bytes) -> _RequestFailure:
    """Classify an answer with a status other than 200. The service answers 400 for an instance it
    lost, older versions 500."""
    text = f"status {status}: {_excerpt(received)}"
    if status in (400, 404, 500) and "Instance" in text and GONE in text:
        return _RequestFailure(kind="expired", text=text, again=False)
    return _RequestFailure("status", text, again=status in AGAIN, undone=status in REFUSED)


def _excerpt(received: bytes) -> str:
    """Return the end of an error's text, the most telling part of a traceback."""
    try:
        said = json.loads(received)
        text = str(said.get("detail", said)) if isinstance(said, dict) else str(said)
    except (ValueError, RecursionError):
        text = received[: 10 * EXCERPT].decode(errors="replace")
    return repr(mask(text.strip()[-EXCERPT:]))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
