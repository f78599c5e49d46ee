"""Who labels the turns of a finished episode, and what becomes of the answer.

    label    an episode → +1 (GOOD) or -1 (BAD) for each of its turns, or no labels and the reason

Whatever goes wrong (endpoint gone, budget spent, answers that cannot be read) is counted and leaves
the episode unlabelled: labels are never invented, and nothing is raised into the rollout.
"""

import asyncio
import hashlib
import logging
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol

from actors.engines.base import Engine
from actors.failures import FailureCounts
from actors.formats.chat import Chat
from actors.judge.labels import UNLABELLED, UnreadableLabels, by_progress, parse
from actors.judge.prompt import SYSTEM, again, question
from actors.llm.client import Endpoint, Unavailable
from actors.llm.self_client import PolicyClient
from evolver_async.config import Config
from evolver_async.config import Judge as JudgeConfig
from evolver_async.schema import Turn

ATTEMPTS = 2  # at an answer that can be read
QUEUEING = 0.5  # of `timeout_s`, at most: who is asked late would only be asked in vain
# Why there are no labels. `unscored`: the environment tells no progress; `busy`: too many episodes
# wait; `error`: ours; the others are those of UnreadableLabels and Unavailable.
REASONS = (
    *("unscored", "unreadable", "wrong_count", "busy", "error"),
    *("timeout", "connection", "status", "garbage", "too_long", "breaker", "budget"),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JudgedEpisode:
    """A finished episode of K turns, for the judge.

    `query`: its task in words; turns[K]: what was seen and done; scores[K+1]: the environment's
    before the first turn and after each. `rule` needs only the scores, the others all but them.
    """

    query: str
    turns: list[Turn]
    reward: float
    success: bool
    scores: list[float]


Labels = tuple[list[int], str]


class Judge(Protocol):
    """Labels episodes, many at a time, on one asyncio loop."""

    async def label(self, episode: JudgedEpisode) -> Labels:
        """One label a turn (+1 GOOD, -1 BAD) and their source ("rule", "self", "llm").

        Where there are none the source is "", and so are the labels, or all 0.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Totals by metric name."""
        ...

    @property
    def generated(self) -> int:
        """Tokens that the actor's own engine has sampled for this."""
        ...

    async def close(self) -> None: ...


class Tally:
    """What became of the episodes, by metric name; every reason has one, also while it is 0."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def labelled(self) -> None:
        self._counts["labelled"] += 1

    def unlabelled(self, reason: str) -> None:
        self._counts["unlabelled"] += 1
        self._counts[f"unlabelled_{reason}"] += 1

    def count(self, name: str) -> None:
        self._counts[name] += 1

    def counters(self, *names: str) -> dict[str, float]:
        named = ("labelled", "unlabelled", *(f"unlabelled_{reason}" for reason in REASONS), *names)
        return {f"judge/{name}": float(self._counts[name]) for name in named}


class RuleJudge:
    """Judges by the environment's score: a turn that raises it is GOOD, any other BAD."""

    generated = 0

    def __init__(self) -> None:
        self._tally = Tally()

    async def label(self, episode: JudgedEpisode) -> Labels:
        scores, turns = episode.scores, len(episode.turns)
        known = len(scores) > 1 and all(map(math.isfinite, scores))
        if not known or (turns and len(scores) != turns + 1):
            self._tally.unlabelled("unscored")
            return [UNLABELLED] * turns, ""
        self._tally.labelled()
        return by_progress(scores), "rule"

    def counters(self) -> dict[str, float]:
        return self._tally.counters()

    async def close(self) -> None:
        pass


class ModelJudge:
    """Judges by asking a language model about the whole episode.

    `asked` answers at most as many at a time as `config` allows its endpoint. Judgments are kept
    by content (and, of the policy itself, by weights), and one that is being made is waited for.
    """

    def __init__(
        self,
        config: JudgeConfig,
        asked: Endpoint | PolicyClient,
        failures: FailureCounts | None = None,
    ) -> None:
        self._asked = asked
        self._failures = failures or FailureCounts()
        self._own = asked if isinstance(asked, PolicyClient) else None
        self._source = config.kind
        self._name = "the policy itself" if self._own else config.llm.url
        self._max_chars = config.max_chars
        self._timeout_s = config.timeout_s
        self._slots = asyncio.Semaphore(config.llm.concurrency)
        self._kept: OrderedDict[str, list[int]] = OrderedDict()
        self._most_kept = config.cache
        self._running: dict[str, asyncio.Future[list[int] | str]] = {}
        self._tally = Tally()

    @property
    def generated(self) -> int:
        return self._own.generated if self._own else 0

    async def label(self, episode: JudgedEpisode) -> Labels:
        turns = len(episode.turns)
        if not turns:
            return [], ""
        outcome = await self._shared(episode)
        if isinstance(outcome, str):
            self._tally.unlabelled(outcome)
            return [UNLABELLED] * turns, ""
        self._tally.labelled()
        return list(outcome), self._source

    def counters(self) -> dict[str, float]:
        return self._tally.counters("cached", "asked_again") | self._asked.counters()

    async def close(self) -> None:
        await self._asked.close()

    async def _shared(self, episode: JudgedEpisode) -> list[int] | str:
        """The labels or the reason why not; asked for once, however often the same is wanted."""
        wanted = question(
            episode.query, episode.turns, episode.success, episode.reward, self._max_chars
        )
        text = f"{self._own.weights if self._own else ''}\n{wanted}"
        name = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        while name not in self._kept and name in self._running:
            running = self._running[name]
            await asyncio.wait([running])
            if not running.cancelled():
                self._tally.count("cached")
                return running.result()
        if name in self._kept:
            self._kept.move_to_end(name)
            self._tally.count("cached")
            return self._kept[name]
        future = self._running[name] = asyncio.get_running_loop().create_future()
        try:
            outcome = await self._judge(wanted, len(episode.turns))
            future.set_result(outcome)
        finally:
            del self._running[name]
            future.cancel()  # where nothing was set: another one who wants it begins anew
        if not isinstance(outcome, str):
            self._kept[name] = outcome
            if len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)
        return outcome

    async def _judge(self, wanted: str, turns: int) -> list[int] | str:
        """The labels, or the reason why there are none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout(QUEUEING * self._timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            self._failed("too many episodes wait to be judged")
            return "busy"
        try:
            return await self._ask(wanted, turns, deadline)
        except Unavailable as error:
            log.info("an episode stays unlabelled: %s", error)
            if self._own:  # an endpoint counts its failed calls itself
                self._failed(str(error))
            return error.reason
        except Exception:
            log.exception("an episode stays unlabelled")
            return "error"
        finally:
            self._slots.release()

    async def _ask(self, wanted: str, turns: int, deadline: float) -> list[int] | str:
        loop = asyncio.get_running_loop()
        asked, reason = wanted, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._tally.count("asked_again")
                asked = again(wanted, turns)
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
            answer = await self._asked.complete(chat, within_s=deadline - loop.time())
            try:
                return parse(answer, turns)
            except UnreadableLabels as error:
                log.info("an answer that cannot be read: %s", error)
                self._failed(f"an answer that cannot be read: {error}")
                reason = error.reason
        return reason

    def _failed(self, error: str) -> None:
        self._failures.note("judge", self._name, error)


def make_judge(
    config: Config, engine: Engine, chat: Chat, failures: FailureCounts | None = None
) -> Judge | None:
    """The configured judge, None where there is none. Raises ConfigError for a missing key."""
    match config.judge.kind:
        case "none":
            return None
        case "rule":
            return RuleJudge()
        case "self":
            return ModelJudge(config.judge, PolicyClient(config, engine, chat), failures)
        case _:
            endpoint = Endpoint(config.judge.llm, "judge", failures)
            return ModelJudge(config.judge, endpoint, failures)
