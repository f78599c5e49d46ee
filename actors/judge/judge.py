"""Judges that label the turns of a finished episode.

    label    an episode → +1 (GOOD) or -1 (BAD) for each of its turns, or no labels and the reason

A failure (no endpoint, no budget, unreadable answers) is counted and leaves the episode unlabelled.
Labels are never guessed, and no exception reaches the rollout.
"""

import asyncio
import hashlib
import logging
import math
from collections import Counter, OrderedDict
from typing import NamedTuple

from actors.failure_counts import FailureCounts
from actors.judge.labels import UNLABELLED, UnreadableLabels, by_progress, parse
from actors.judge.prompt import SYSTEM, again, question
from actors.llm.endpoint_client import Endpoint, Unavailable
from actors.llm.self_client import PolicyClient
from evolver_async.config import JudgeConfig
from evolver_async.wire.transcripts import Turn

ATTEMPTS = 2  # until an answer can be parsed
QUEUE_SHARE = 0.5  # of `timeout_s`; a question sent later would have too little time
# Reasons without labels. `unscored`: no scores from the environment; `busy`: too many episodes
# wait; `error`: a bug here; the others are those of UnreadableLabels and Unavailable.
REASONS = (
    *("unscored", "unreadable", "wrong_count", "busy", "error"),
    *("timeout", "connection", "status", "garbage", "no_text", "too_long", "breaker", "budget"),
)

log = logging.getLogger(__name__)


class JudgedEpisode(NamedTuple):
    """Finished episode of K turns, for judges.

    `query`: its task; turns[K]: observations and actions; scores[K+1]: the environment's scores
    before the first turn and after each, empty if it has none. The rule uses only the scores, a
    model all other fields; if only a model judges, most episodes come without scores.
    """

    query: str
    turns: list[Turn]
    reward: float
    success: bool
    scores: list[float]


Labels = tuple[list[int], str]


class Judge:
    """Judge of concurrent episodes on one asyncio loop. It counts labelled and unlabelled ones;
    every reason is reported, also while it is 0."""

    reported: tuple[str, ...] = ()  # further counts

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def generated(self) -> int:
        """Return the number of tokens that the actor's engine has sampled for judging."""
        return 0

    async def label(self, episode: JudgedEpisode) -> Labels:
        """Return one label per turn (+1 GOOD, -1 BAD) and their source ("rule", "self", "llm").

        Without labels the source is "", and the labels are empty or all 0.
        """
        raise NotImplementedError

    def counters(self) -> dict[str, float]:
        """Return totals by metric name."""
        reasons = (f"unlabelled_{reason}" for reason in REASONS)
        names = ("labelled", "unlabelled", *reasons, *self.reported)
        return {f"judge/{name}": float(self._counts[name]) for name in names}

    async def close(self) -> None:
        pass

    def _unlabelled(self, episode: JudgedEpisode, reason: str) -> Labels:
        self._counts.update(("unlabelled", f"unlabelled_{reason}"))
        return [UNLABELLED] * len(episode.turns), ""


class RuleJudge(Judge):
    """Judge by the environment's score: a turn that raises it is GOOD, any other BAD."""

    async def label(self, episode: JudgedEpisode) -> Labels:
        scores, turns = episode.scores, len(episode.turns)
        known = len(scores) > 1 and all(map(math.isfinite, scores))
        if not known or (turns and len(scores) != turns + 1):
            return self._unlabelled(episode, "unscored")
        self._counts["labelled"] += 1
        return by_progress(scores), "rule"


class ModelJudge(Judge):
    """Judge that asks a language model about the whole episode.

    `client` gets at most `llm.concurrency` questions at a time. Judgments are cached by content
    (and by weights, if the policy itself judges); equal questions share one running call.
    """

    reported = ("cached", "asked_again")

    def __init__(
        self,
        config: JudgeConfig,
        client: Endpoint | PolicyClient,
        failures: FailureCounts | None = None,
    ) -> None:
        super().__init__()
        self._client = client
        self._failures = failures or FailureCounts()
        self._policy = client if isinstance(client, PolicyClient) else None
        self._source = config.kind
        self._name = "the policy itself" if self._policy else config.llm.url
        self._max_chars = config.max_chars
        self._timeout_s = config.timeout_s
        self._slots = asyncio.Semaphore(config.llm.concurrency)
        self._cached: OrderedDict[str, list[int]] = OrderedDict()
        self._cache_size = config.cache
        self._running: dict[str, asyncio.Future[list[int] | str]] = {}

    @property
    def generated(self) -> int:
        return self._policy.generated if self._policy else 0

    async def label(self, episode: JudgedEpisode) -> Labels:
        if not episode.turns:
            return [], ""
        outcome = await self._shared(episode)
        if isinstance(outcome, str):
            return self._unlabelled(episode, outcome)
        self._counts["labelled"] += 1
        return list(outcome), self._source

    def counters(self) -> dict[str, float]:
        return super().counters() | self._client.counters()

    async def close(self) -> None:
        await self._client.close()

    async def _shared(self, episode: JudgedEpisode) -> list[int] | str:
        """Return labels or the reason without them; equal concurrent questions share one call."""
        shown = episode.query, episode.turns, episode.success, episode.reward
        prompt = question(*shown, self._max_chars)
        text = f"{self._policy.weights if self._policy else ''}\n{prompt}"
        name = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        while name not in self._cached and name in self._running:
            running = self._running[name]
            await asyncio.wait([running])
            if not running.cancelled():
                self._counts["cached"] += 1
                return running.result()
        if name in self._cached:
            self._cached.move_to_end(name)
            self._counts["cached"] += 1
            return self._cached[name]
        future = self._running[name] = asyncio.get_running_loop().create_future()
        try:
            outcome = await self._judge(prompt, len(episode.turns))
            future.set_result(outcome)
        finally:
            del self._running[name]
            future.cancel()  # if no result was set, another waiting episode asks again
        if not isinstance(outcome, str):
            self._cached[name] = outcome
            if len(self._cached) > self._cache_size:
                self._cached.popitem(last=False)
        return outcome

    async def _judge(self, prompt: str, turns: int) -> list[int] | str:
        """Return the labels, or the reason without them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout(QUEUE_SHARE * self._timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            self._failed("too many episodes are waiting for the judge")
            return "busy"
        try:
            return await self._ask(prompt, turns, deadline)
        except Unavailable as error:
            log.info("an episode stays unlabelled: %s", error)
            if self._policy:  # an Endpoint counts its failed calls itself
                self._failed(str(error))
            return error.reason
        except Exception:
            log.exception("an episode stays unlabelled")
            return "error"
        finally:
            self._slots.release()

    async def _ask(self, first: str, turns: int, deadline: float) -> list[int] | str:
        loop = asyncio.get_running_loop()
        prompt, reason = first, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._counts["asked_again"] += 1
                prompt = again(first, turns)
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
            answer = await self._client.complete(chat, within_s=deadline - loop.time())
            try:
                return parse(answer, turns)
            except UnreadableLabels as error:
                log.info("the answer cannot be parsed: %s", error)
                self._failed(f"the answer cannot be parsed: {error}")
                reason = error.reason
        return reason

    def _failed(self, error: str) -> None:
        self._failures.note("judge", self._name, error)
