"""Draws lessons from episodes with a language model, in a thread of its own.

    read     a group's episodes → success, failure and comparison lessons → each rated
    collect  what has become of the groups read so far
    rewrite  the entries found for a task → one text

Nobody waits for it: what it cannot do (endpoint gone, budget spent, answers that cannot be read)
is counted, and nothing is learned from that group.
"""

import asyncio
import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from actors.experience import prompts
from actors.experience.pool import Item
from actors.failures import FailureCounts
from actors.llm.client import Endpoint, Unavailable
from actors.llm.quoting import plain
from evolver_async.config import Experience
from evolver_async.protocol import messages
from evolver_async.protocol.transcripts import Transcript

T = TypeVar("T")

PENDING = 64  # groups read at a time; more are dropped
LESSONS, COMPARED = 3, 2  # of one question, at most
LESSON_CHARS = 2_000  # of each of its texts; a longer one is none
ATTEMPTS = 2  # at an answer that can be read
KEPT = 1_024  # reworded texts
PATIENCE = 0.75  # of `timeout_s`: then the entries are given as they are

log = logging.getLogger(__name__)


class Lesson(msgspec.Struct, forbid_unknown_fields=True):
    """What the model is asked for."""

    when_to_use: str
    content: str


@dataclass(frozen=True)
class Found:
    """What a group taught."""

    items: list[Item]
    source: str
    trajectories: list[str]


class Scribe:
    """Used by one thread; everything that waits happens in another."""

    def __init__(self, config: Experience, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._least_score = config.least_score
        self._rewrites = config.rewrite
        self._patience_s = PATIENCE * config.timeout_s
        self._counts: Counter[str] = Counter()
        self._pending = 0
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._reworded: OrderedDict[tuple[str, ...], tuple[Future[list[str]], float]]
        self._reworded = OrderedDict()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def read(self, source: str, group: messages.Contribute) -> None:
        """Begin to learn from a group."""
        if self._pending >= PENDING:
            self._counts["unread"] += 1
            return
        self._pending += 1
        self._submit(self._read(source, group))

    def collect(self) -> list[Found]:
        """What was found since the last call."""
        found = [self._found.get() for _ in range(self._found.qsize())]
        self._pending -= len(found)
        return found

    def rewrite(self, query: str, texts: list[str], now: float) -> list[str] | None:
        """The texts as one for this task, None while that is being written. As they are where
        nobody wants that, where it fails, or takes too long."""
        if not self._rewrites:
            return texts
        name = (query, *texts)
        if name not in self._reworded:
            self._reworded[name] = self._submit(self._rewrite(query, texts)), now
            if len(self._reworded) > KEPT:
                self._reworded.popitem(last=False)
        reworded, since = self._reworded[name]
        if reworded.done():
            if not reworded.result():
                del self._reworded[name]  # to be tried again
            return reworded.result() or texts
        return texts if now - since >= self._patience_s else None

    def counters(self) -> dict[str, float]:
        """Totals by metric name, those of the endpoint among them."""
        names = ("unread", "unanswered", "unreadable", "rejected")
        counted = {f"experience/{name}": float(self._counts[name]) for name in names}
        return counted | self._endpoint.counters()

    def close(self) -> None:
        """What is not learned by now never will be."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._endpoint.close()

        self._submit(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _read(self, source: str, group: messages.Contribute) -> None:
        items: list[Item] = []
        try:
            items = await self._learn(group)
        except Unavailable as error:
            self._counts["unanswered"] += 1
            log.warning("nothing is learned from %s: %s", group.task_id, error)
        except Exception:
            log.exception("nothing is learned from %s", group.task_id)
        finally:
            trajectories = [episode.trajectory_id for episode in group.episodes]
            self._found.put(Found(items, source, trajectories))

    async def _learn(self, group: messages.Contribute) -> list[Item]:
        """Lessons of all three kinds that apply, as far as they were rated well."""
        ranked = sorted(group.episodes, key=lambda e: (-e.success, -e.reward, e.trajectory_id))
        solved = [episode for episode in ranked if episode.success]
        failed = [episode for episode in ranked if not episode.success]
        asked: list[tuple[str, int, Sequence[Transcript]]] = []
        if solved:
            asked.append((prompts.SUCCESS, LESSONS, solved[:2]))
        if failed:
            asked.append((prompts.FAILURE, LESSONS, failed[-2:]))
        if solved and failed:
            asked.append((prompts.COMPARISON, COMPARED, [solved[0], failed[-1]]))
        found = await asyncio.gather(
            *(self._lessons(question, most, group.query, of) for question, most, of in asked)
        )
        lessons = [lesson for some in found for lesson in some]
        if not lessons:
            return []
        shown = [ranked[0]] if len(ranked) == 1 else [ranked[0], ranked[-1]]
        contents = [lesson.content for lesson in lessons]
        question = prompts.validation(group.query, shown, contents)
        scores = await self._ask(question, lambda answer: parse_scores(answer, len(lessons)))
        items = [
            Item(lesson.when_to_use, lesson.content, score)
            for lesson, score in zip(lessons, scores or [0.0] * len(lessons), strict=True)
            if score >= self._least_score and score > 0
        ]
        self._counts["rejected"] += len(lessons) - len(items)
        return items

    async def _lessons(
        self, question: str, most: int, query: str, episodes: Sequence[Transcript]
    ) -> list[Lesson]:
        prompt = prompts.lessons(question, most, query, episodes)
        return await self._ask(prompt, lambda answer: parse_lessons(answer, most)) or []

    async def _rewrite(self, query: str, texts: list[str]) -> list[str]:
        try:
            return await self._ask(prompts.rewrite(query, texts), parse_text) or []
        except Unavailable as error:
            self._counts["unanswered"] += 1
            log.warning("experience is given as it is: %s", error)
            return []

    async def _ask(self, question: str, parse: Callable[[str], T]) -> T | None:
        """What `parse` makes of an answer; None where it raises ValueError at each."""
        chat = [
            {"role": "system", "content": prompts.SYSTEM},
            {"role": "user", "content": question},
        ]
        for _ in range(ATTEMPTS):
            answer = await self._endpoint.complete(chat)
            try:
                return parse(answer)
            except ValueError as error:
                said = f"an answer that cannot be read: {error}"
                self._endpoint.failed(said)
                log.info("%s", said)
        self._counts["unreadable"] += 1
        return None


def make_scribe(config: Experience, failures: FailureCounts) -> Scribe:
    """The scribe that asks the configured endpoint, whose failures are counted there."""
    return Scribe(config, Endpoint(config.llm, "experience", failures))


def parse_lessons(answer: str, most: int) -> list[Lesson]:
    """The lessons in an answer. ValueError where there is anything but a list of at most `most`,
    or one is empty or too long."""
    lessons = _json(answer, list[Lesson])
    lessons = [Lesson(plain(lesson.when_to_use), plain(lesson.content)) for lesson in lessons]
    if len(lessons) > most:
        raise ValueError(f"{len(lessons)} lessons, asked for {most}")
    for lesson in lessons:
        for text in (lesson.when_to_use, lesson.content):
            if not 0 < len(text) <= LESSON_CHARS:
                raise ValueError(f"a text of {len(text)} characters")
    return lessons


def parse_scores(answer: str, count: int) -> list[float]:
    """Exactly `count` numbers between 0 and 1, else ValueError."""
    scores = _json(answer, list[float])
    if len(scores) != count or not all(0 <= score <= 1 for score in scores):
        raise ValueError(f"{len(scores)} scores {scores[:5]}, asked for {count} between 0 and 1")
    return scores


def parse_text(answer: str) -> list[str]:
    """A list of one text, else ValueError."""
    (text,) = _json(answer, tuple[str])
    if not plain(text):
        raise ValueError("an empty text")
    return [plain(text)]


def _json(answer: str, kind: Any) -> Any:
    """The JSON that an answer is, perhaps within a fence, as a `kind`; else ValueError."""
    text = answer.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json")
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None
