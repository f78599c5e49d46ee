"""The actor's guide: asks for guidance, hands in finished groups.

    advise      text and ids; empty if there is none, or no answer
    contribute  in the background, in order, at most `QUEUE` groups behind

An episode waits at most `timeout_s`. After a question without an answer no other is asked for
`OUTAGE_S`: during an outage episodes are unguided and counted. The texts are untrusted data, which
`quoting.py` quotes. A backend answers: the experience service, or one of the user's
(`own_backend.py`).
"""

import asyncio
import logging
from collections import deque
from typing import Protocol

from msgspec.structs import replace

from actors.experience.state_keys import beginning, state_key
from actors.failure_counts import FailureCounts
from actors.llm.quoting import quoted_lines
from actors.rollout.episode_policy import Advice
from evolver_async.config import ExperienceConfig
from evolver_async.schema import Task
from evolver_async.wire import messages
from evolver_async.wire.client import Client, Rejected
from evolver_async.wire.transcripts import Transcript, Turn

QUERY_CHARS = 20_000
SPLIT = "train"  # the only split whose groups teach
QUEUE = 64  # groups that wait to be sent; more are dropped
OUTAGE_S = 5.0  # pause after a request without an answer
SEND_TIMEOUT_S = 20.0  # until a group that the service does not accept is dropped
# Together with QUERY_CHARS they keep a group below the bytes of a message's header.
GROUP_TURNS = 2_400  # the last turns of each episode are sent, so many in all
GROUP_BYTES = 250_000  # of all observations, actions and texts of a group

log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """A backend gave no answer, or none that can be used; the message says why."""


class Backend(Protocol):
    """Keeper of the experience of finished groups. Its methods raise NoAnswer.

    `name`: that of its failures.
    """

    name: str

    async def retrieve(self, query: str, state: str, timeout_s: float) -> messages.Guidance: ...

    async def contribute(self, group: messages.Contribute) -> None: ...

    async def close(self) -> None: ...


class ServiceBackend:
    """The experience service of the run; owns the client."""

    name = "service"

    def __init__(self, client: Client) -> None:
        self._client = client

    async def retrieve(self, query: str, state: str, timeout_s: float) -> messages.Guidance:
        """RETRIEVE. Raise NoAnswer, and ValueError for a text that cannot be encoded."""
        try:
            asked = messages.Retrieve(query=query, state=state)
            return await self._client.request(asked, timeout_s)
        except (TimeoutError, Rejected) as error:
            raise NoAnswer(str(error)) from error

    async def contribute(self, group: messages.Contribute) -> None:
        """CONTRIBUTE. Raise NoAnswer, also for a group that is too large to pack."""
        try:
            await self._client.request(group, SEND_TIMEOUT_S)
        except (TimeoutError, Rejected, ValueError) as error:
            raise NoAnswer(str(error)) from error

    async def close(self) -> None:
        self._client.close()


class ExperienceGuide:
    """One actor's guide; owns its backend."""

    def __init__(
        self, backend: Backend, config: ExperienceConfig, failures: FailureCounts | None = None
    ) -> None:
        self._backend = backend
        self._failures = failures or FailureCounts()
        self._timeout_s = config.timeout_s
        self._max_chars = config.max_chars
        self._retry_at = 0.0
        self._requests: dict[tuple[str, str], asyncio.Task[Advice | None]] = {}
        self._waiting: deque[messages.Contribute] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._counts = dict.fromkeys(("unguided", "outages", "dropped"), 0)

    async def advise(self, query: str, state: str = "") -> Advice:
        """Return guidance for an episode of the task that `query` describes, or for a turn in
        `state`.

        It is empty if there is none. Concurrent calls with the same question share one request.
        """
        asked = query, state
        request = self._requests.get(asked)
        if request is None:
            request = self._requests[asked] = asyncio.create_task(self._ask(*asked))
            request.add_done_callback(lambda _: self._requests.pop(asked))
        advice = await asyncio.shield(request)
        if advice is None:
            self.count_unguided()
        return advice or Advice()

    def count_unguided(self) -> None:
        """Count an episode that should have been guided and is not."""
        self._counts["unguided"] += 1

    def contribute(
        self, task: Task, query: str, transcripts: list[Transcript], stage: int = 0
    ) -> None:
        """Send the episodes of one group in the background; drop them if the queue is full."""
        if len(self._waiting) >= QUEUE:
            self._counts["dropped"] += 1
            return
        query, episodes = query[:QUERY_CHARS], shortened(transcripts)
        about = {"task_id": task.task_id, "query": query, "split": task.split}
        self._waiting.append(messages.Contribute(**about, stage=stage, episodes=episodes))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name="contributions")

    def counters(self) -> dict[str, float]:
        """Return totals by metric name."""
        return {f"experience/{name}": float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        """Close the connection; groups that were not sent are lost and counted."""
        tasks = [*self._requests.values(), *([] if self._sender is None else [self._sender])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._counts["dropped"] += len(self._waiting)
        await self._backend.close()

    async def _ask(self, query: str, state: str) -> Advice | None:
        """Request guidance; None without an answer."""
        now = asyncio.get_running_loop().time
        if now() < self._retry_at:
            return None
        try:
            asked = query[-QUERY_CHARS:] if state else query[:QUERY_CHARS]
            reply = await self._backend.retrieve(asked, state_key(state), self._timeout_s)
        except ValueError as error:  # a text that cannot be encoded; not an outage
            log.warning("an episode is unguided: %s", error)
            return None
        except NoAnswer as error:
            if now() >= self._retry_at:  # else another episode has counted this outage
                self._counts["outages"] += 1
                self._failures.note("experience", self._backend.name, str(error))
                log.warning("episodes are unguided for %g s: %s", OUTAGE_S, error)
            self._retry_at = now() + OUTAGE_S
            return None
        lines = quoted_lines(reply.texts, self._max_chars)
        if not lines:
            return Advice()
        # what is not shown must get no credit; a rewritten text tells of all entries
        rewritten = len(reply.texts) != len(reply.ids)
        ids = reply.ids if rewritten else [reply.ids[place] for place in lines]
        return Advice(text="\n".join(lines.values()), ids=tuple(ids))

    async def _send(self) -> None:
        while self._waiting:
            try:
                await self._backend.contribute(self._waiting[0])
            except NoAnswer as error:
                self._counts["dropped"] += 1
                self._failures.note("experience", self._backend.name, str(error))
                log.warning("a group of %s is not sent: %s", self._waiting[0].task_id, error)
            self._waiting.popleft()


def shortened(transcripts: list[Transcript]) -> list[Transcript]:
    """Cut the transcripts to the size of a message: see `GROUP_TURNS` and `GROUP_BYTES`.

    Each text gets its fair share, except states, which stay keys: see `state_key`.
    """
    longest = max(1, GROUP_TURNS // max(1, len(transcripts)))
    kept = [replace(one, turns=one.turns[-longest:]) for one in transcripts]
    limit = GROUP_BYTES // max(1, 3 * sum(len(one.turns) for one in kept))

    def cut(turn: Turn) -> Turn:
        texts = (turn.observation, turn.action, turn.text)
        observation, action, text = (beginning(one, limit) for one in texts)
        return Turn(observation=observation, state=state_key(turn.state), action=action, text=text)

    return [replace(one, turns=[cut(turn) for turn in one.turns]) for one in kept]
