"""The actor's side of the experience service: asks for guidance, hands in finished groups.

    advise      RETRIEVE → text and ids; nothing where the service has none or is not there
    contribute  CONTRIBUTE in the background, in order, at most `QUEUE` groups behind

Nobody waits for the service longer than `timeout_s`, and after a silence nobody asks at all for
`OUTAGE_S`: an outage means unguided episodes and a counter. What the service says is data of
unknown origin and is quoted (`quoting.py`).
"""

import asyncio
import logging
from collections import deque

from actors.failures import FailureCounts
from actors.llm.quoting import quoted
from actors.rollout.policy import Advice
from evolver_async.config import Experience
from evolver_async.protocol import messages
from evolver_async.protocol.transcripts import Transcript, Turn
from evolver_async.schema import Task
from evolver_async.transport.client import Client, Rejected

QUERY_CHARS = 20_000
QUEUE = 64  # groups that wait to be handed in; more are dropped
OUTAGE_S = 5.0  # without a question, after one without an answer
HAND_IN_S = 20.0  # until a group that the service does not take is dropped
GROUP_CHARS = 150_000  # of all texts of a group, so that a message can carry them

log = logging.getLogger(__name__)


class ServiceGuide:
    """One actor's connection to the experience service; closes its client. Times are the loop's."""

    def __init__(
        self,
        client: Client,
        *,
        timeout_s: float,
        max_chars: int,
        failures: FailureCounts | None = None,
    ) -> None:
        self._client = client
        self._failures = failures or FailureCounts()
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        self._asked_again_at = 0.0
        self._asking: dict[str, asyncio.Task[Advice | None]] = {}
        self._waiting: deque[messages.Contribute] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._counts = dict.fromkeys(("unguided", "outages", "dropped"), 0)

    async def advise(self, query: str) -> Advice:
        """Guidance for an episode of the task that `query` describes; empty without delay where
        there is none. The members of a group, who begin together, ask once."""
        asking = self._asking.get(query)
        if asking is None:
            asking = self._asking[query] = asyncio.create_task(self._ask(query))
            asking.add_done_callback(lambda _: self._asking.pop(query))
        advice = await asyncio.shield(asking)
        self._counts["unguided"] += advice is None
        return advice or Advice()

    def contribute(self, task: Task, query: str, transcripts: list[Transcript]) -> None:
        """Hand in the episodes of one group, in the background; a group too many is dropped."""
        if len(self._waiting) >= QUEUE:
            self._counts["dropped"] += 1
            return
        self._waiting.append(
            messages.Contribute(
                task_id=task.task_id,
                query=query[:QUERY_CHARS],
                split=task.split,
                episodes=shortened(transcripts),
            )
        )
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name="contributions")

    def counters(self) -> dict[str, float]:
        """Totals by metric name."""
        return {f"experience/{name}": float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        """Let go of the connection; what was not handed in by then is lost, and counted."""
        tasks = [*self._asking.values(), *([] if self._sender is None else [self._sender])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._counts["dropped"] += len(self._waiting)
        self._client.close()

    async def _ask(self, query: str) -> Advice | None:
        """What the service says; None where it says nothing."""
        now = asyncio.get_running_loop().time
        if now() < self._asked_again_at:
            return None
        question = messages.Retrieve(query=query[:QUERY_CHARS])
        try:
            reply = await self._client.request(question, self._timeout_s)
        except ValueError as error:  # text that no message can carry; others' can be
            log.warning("no experience for a task: %s", error)
            return None
        except (TimeoutError, Rejected) as error:
            if now() >= self._asked_again_at:  # else another episode has seen the same outage
                self._counts["outages"] += 1
                self._failures.note("experience", "service", str(error))
                log.warning("no experience for %g s: %s", OUTAGE_S, error)
            self._asked_again_at = now() + OUTAGE_S
            return None
        text = quoted(reply.texts, self._max_chars)
        return Advice(text=text, ids=tuple(reply.ids)) if text else Advice()

    async def _send(self) -> None:
        while self._waiting:
            try:
                await self._client.request(self._waiting[0], HAND_IN_S)
            except (TimeoutError, Rejected, ValueError) as error:  # the last: too large to pack
                self._counts["dropped"] += 1
                log.warning("episodes of %s are dropped: %s", self._waiting[0].task_id, error)
            self._waiting.popleft()


def make_guide(
    config: Experience, client: Client, failures: FailureCounts | None = None
) -> ServiceGuide:
    """The guide that speaks through `client`, which is connected to the experience service."""
    return ServiceGuide(
        client, timeout_s=config.timeout_s, max_chars=config.max_chars, failures=failures
    )


def shortened(transcripts: list[Transcript]) -> list[Transcript]:
    """The transcripts with every text cut to its fair share of `GROUP_CHARS`."""
    texts = 4 * sum(len(transcript.turns) for transcript in transcripts)
    most = GROUP_CHARS // max(1, texts)
    return [
        Transcript(
            trajectory_id=transcript.trajectory_id,
            reward=transcript.reward,
            success=transcript.success,
            experience_ids=transcript.experience_ids,
            turns=[
                Turn(
                    observation=turn.observation[:most],
                    state=turn.state[:most],
                    action=turn.action[:most],
                    text=turn.text[:most],
                )
                for turn in transcript.turns
            ],
        )
        for transcript in transcripts
    ]
