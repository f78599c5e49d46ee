"""The actor's client of the experience service: requests guidance, sends finished groups.

    advise      RETRIEVE → text and ids; empty if the service has none or does not answer
    contribute  CONTRIBUTE in the background, in order, at most `QUEUE` groups behind

An episode waits at most `timeout_s` for the service. After a request without an answer no other is
made for `OUTAGE_S`: during an outage episodes are unguided and counted. The service's texts are
untrusted data, which `quoting.py` quotes.
"""

import asyncio
import logging
from collections import deque

from msgspec.structs import asdict, replace

from actors.failures import FailureCounts
from actors.llm.quoting import quoted_lines
from actors.rollout.policy import Advice
from evolver_async.config import ExperienceConfig
from evolver_async.protocol import messages
from evolver_async.protocol.transcripts import Transcript, Turn
from evolver_async.schema import Task
from evolver_async.transport.client import Client, Rejected

QUERY_CHARS = 20_000
QUEUE = 64  # groups that wait to be sent; more are dropped
OUTAGE_S = 5.0  # pause after a request without an answer
SEND_TIMEOUT_S = 20.0  # until a group that the service does not accept is dropped
GROUP_CHARS = 150_000  # of all texts of a group, which must fit into a message

log = logging.getLogger(__name__)


class ServiceGuide:
    """Connection of one actor to the experience service; owns its client."""

    def __init__(
        self, client: Client, config: ExperienceConfig, failures: FailureCounts | None = None
    ) -> None:
        self._client = client
        self._failures = failures or FailureCounts()
        self._timeout_s = config.timeout_s
        self._max_chars = config.max_chars
        self._retry_at = 0.0
        self._requests: dict[str, asyncio.Task[Advice | None]] = {}
        self._waiting: deque[messages.Contribute] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._counts = dict.fromkeys(("unguided", "outages", "dropped"), 0)

    async def advise(self, query: str) -> Advice:
        """Return guidance for an episode of the task that `query` describes.

        It is empty if there is none. Concurrent calls with the same query share one request.
        """
        request = self._requests.get(query)
        if request is None:
            request = self._requests[query] = asyncio.create_task(self._ask(query))
            request.add_done_callback(lambda _: self._requests.pop(query))
        advice = await asyncio.shield(request)
        if advice is None:
            self.count_unguided()
        return advice or Advice()

    def count_unguided(self) -> None:
        """Count an episode that should have been guided and is not."""
        self._counts["unguided"] += 1

    def contribute(self, task: Task, query: str, transcripts: list[Transcript]) -> None:
        """Send the episodes of one group in the background; drop them if the queue is full."""
        if len(self._waiting) >= QUEUE:
            self._counts["dropped"] += 1
            return
        query, episodes = query[:QUERY_CHARS], shortened(transcripts)
        about = {"task_id": task.task_id, "query": query, "split": task.split}
        self._waiting.append(messages.Contribute(**about, episodes=episodes))
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
        self._client.close()

    async def _ask(self, query: str) -> Advice | None:
        """Request guidance; None if the service does not answer."""
        now = asyncio.get_running_loop().time
        if now() < self._retry_at:
            return None
        question = messages.Retrieve(query=query[:QUERY_CHARS])
        try:
            reply = await self._client.request(question, self._timeout_s)
        except ValueError as error:  # a text that cannot be encoded; not an outage
            log.warning("an episode is unguided: %s", error)
            return None
        except (TimeoutError, Rejected) as error:
            if now() >= self._retry_at:  # else another episode has counted this outage
                self._counts["outages"] += 1
                self._failures.note("experience", "service", str(error))
                log.warning("episodes are unguided for %g s: %s", OUTAGE_S, error)
            self._retry_at = now() + OUTAGE_S
            return None
        lines = quoted_lines(reply.texts, self._max_chars)
        # what is not shown must get no credit; a rewritten text tells of all entries
        ids = reply.ids[: len(lines)] if len(reply.texts) == len(reply.ids) else reply.ids
        text = "\n".join(lines)
        return Advice(text=text, ids=tuple(ids)) if text else Advice()

    async def _send(self) -> None:
        while self._waiting:
            try:
                await self._client.request(self._waiting[0], SEND_TIMEOUT_S)
            except (TimeoutError, Rejected, ValueError) as error:  # the last: too large to pack
                self._counts["dropped"] += 1
                log.warning("a group of %s is not sent: %s", self._waiting[0].task_id, error)
            self._waiting.popleft()


def shortened(transcripts: list[Transcript]) -> list[Transcript]:
    """Cut every text of the transcripts to its fair share of `GROUP_CHARS`."""
    texts = 4 * sum(len(transcript.turns) for transcript in transcripts)
    limit = GROUP_CHARS // max(1, texts)

    def cut(turn: Turn) -> Turn:
        texts = {name: text[:limit] for name, text in asdict(turn).items()}
        return replace(turn, **texts)

    return [replace(one, turns=[cut(turn) for turn in one.turns]) for one in transcripts]
