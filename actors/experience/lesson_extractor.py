"""Extraction of lessons from episodes with a language model, in a thread of its own.

    read     starts on a group's episodes → those that can teach (`experience.vet`) → success,
             failure and comparison lessons → ratings;
             a group that failed throughout is compared with a success in a similar task;
             with `experience.granularity: principle` they are compared with successes in similar
             tasks → principles → ratings
    collect  returns the lessons of finished groups
    purge    drops the lessons of a source that are still being written, renew all of them
    rewrite  the entries found for a task → one text

No caller waits. A failure (no endpoint, no budget, unreadable answers) is counted, and the group
yields no lessons.
"""

import asyncio
import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from actors.experience import lesson_prompts
from actors.experience.pool import Item
from actors.experience.successes import SolvedGroup
from actors.llm.endpoint_client import Endpoint, Unavailable
from actors.llm.json_client import JsonClient, decode_json
from actors.llm.quoting import MARK, plain
from evolver_async.config import ExperienceConfig
from evolver_async.wire import messages
from evolver_async.wire.transcripts import Transcript

T = TypeVar("T")

PENDING = 64  # groups read at a time; more are dropped
LESSONS, COMPARED = 3, 2  # at most, per question
SHOWN = 2  # of a group's successes, and of its failures, in a question
OTHER_TASKS = 3  # whose best success a question about principles shows, at most
LESSON_CHARS = 2_000  # limit of each text of a lesson; the guidance may allow less
MAX_REWRITTEN = 1_024  # rewritten texts in memory
REWRITE_SHARE = 0.75  # of `timeout_s`; after it the entries are returned as they are

log = logging.getLogger(__name__)


class Lesson(msgspec.Struct, forbid_unknown_fields=True):
    """A lesson in an answer of the model."""

    when_to_use: str
    content: str


class Verdict(msgspec.Struct, forbid_unknown_fields=True):
    """Verdict of the model on an episode: see `prompts.VETTING`."""

    on_task: bool
    repeats: bool
    invents: bool

    @property
    def fit(self) -> bool:
        return self.on_task and not self.repeats and not self.invents


class GroupLessons(NamedTuple):
    """Lessons of one group. `number`: of the group among those read."""

    items: list[Item]
    source: str
    trajectories: list[str]
    number: int


class LessonExtractor:
    """Extractor for one caller's thread; requests run in a thread of the extractor."""

    def __init__(self, config: ExperienceConfig, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = JsonClient(endpoint)
        self._least_score = config.least_score
        self._longest = max(1, min(LESSON_CHARS, config.max_chars - len(MARK)))
        self._vets = config.vet
        self._principles = config.granularity == "principle"
        self._rewrites = config.rewrite
        self._rewrite_s = REWRITE_SHARE * config.timeout_s
        self._counts: Counter[str] = Counter()
        self._pending = 0
        self._begun = 0  # groups
        self._purged: dict[str, int] = {}  # by source: the last group begun before its purge
        self._renewed = 0  # the last group begun before the pool was emptied
        self._found: queue.SimpleQueue[GroupLessons] = queue.SimpleQueue()
        self._rewritten: OrderedDict[tuple[str, ...], tuple[Future[list[str]], float]]
        self._rewritten = OrderedDict()
        self._timeout_s = config.timeout_s
        self._waiting: dict[str, float] = {}  # since when, by task, the first first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def read(
        self, source: str, group: messages.Contribute, elsewhere: Sequence[SolvedGroup] = ()
    ) -> None:
        """Start to extract lessons from a group.

        `elsewhere`: solved groups with similar tasks, nearest first, for one that failed
        throughout, or for principles.
        """
        if self._pending >= PENDING:
            self._counts["unread"] += 1
            return
        self._pending += 1
        self._begun += 1
        self._submit(self._read(self._begun, source, group, elsewhere))

    def collect(self) -> list[GroupLessons]:
        """Return the lessons of the groups that have finished since the last call."""
        found = [self._found.get() for _ in range(self._found.qsize())]
        self._pending -= len(found)
        return [group._replace(items=self._unpurged(group)) for group in found]

    def purge(self, source: str) -> None:
        """Drop the lessons still being written from groups of this source, or with its success."""
        self._purged[source] = self._begun

    def renew(self) -> None:
        """Drop all lessons still being written."""
        self._renewed = self._begun

    def _unpurged(self, group: GroupLessons) -> list[Item]:
        if group.number <= self._renewed:
            return []
        gone = {name for name, last in self._purged.items() if group.number <= last}
        return [
            item for item in group.items if not gone & {group.source, *item.teacher.splitlines()}
        ]

    def rewrite(self, query: str, texts: list[str], now: float) -> list[str] | None:
        """Return the texts rewritten as one for this task; None while that is running.

        Return them unchanged if rewriting is off, has failed or takes too long, also where other
        texts have taken the place of those that the task was asked about first.
        """
        if not self._rewrites:
            return texts
        name = (query, *texts)
        if name not in self._rewritten:
            self._rewritten[name] = self._submit(self._rewrite(query, texts)), now
            if len(self._rewritten) > MAX_REWRITTEN:
                self._rewritten.popitem(last=False)
        rewritten, since = self._rewritten[name]
        since = min(since, self._since(query, now))
        done, late = rewritten.done(), now - since >= self._rewrite_s
        if done:
            del self._waiting[query]
            if not rewritten.result():
                del self._rewritten[name]  # the next call tries again
            return rewritten.result() or texts
        return texts if late else None

    def _since(self, query: str, now: float) -> float:
        """Return the time at which the wait for this task began; it ends for all its actors at
        once."""
        for other, since in list(self._waiting.items()):
            if now - since < self._timeout_s:
                break
            del self._waiting[other]  # the actor that began it has its answer, or is gone
        return self._waiting.setdefault(query, now)

    def counters(self) -> dict[str, float]:
        """Return totals by metric name, those of the endpoint included."""
        names = ("unread", "unanswered", "unreadable", "rejected", "unfit")
        counted = {f"experience/{name}": float(self._counts[name]) for name in names}
        return counted | self._endpoint.counters()

    def close(self) -> None:
        """Cancel running requests and end the thread."""

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

    async def _read(
        self,
        number: int,
        source: str,
        group: messages.Contribute,
        elsewhere: Sequence[SolvedGroup],
    ) -> None:
        items: list[Item] = []
        try:
            items = await self._learn(group, elsewhere)
        except Unavailable as error:
            self._counts["unanswered"] += 1
            log.warning("a group of %s yields no lessons: %s", group.task_id, error)
        except Exception:
            log.exception("a group of %s yields no lessons", group.task_id)
        finally:
            trajectories = [episode.trajectory_id for episode in group.episodes]
            self._found.put(GroupLessons(items, source, trajectories, number))

    async def _learn(
        self, group: messages.Contribute, elsewhere: Sequence[SolvedGroup]
    ) -> list[Item]:
        """Extract lessons of the kinds that apply; return those with a sufficient rating."""
        ranked = sorted(group.episodes, key=lambda e: (-e.success, -e.reward, e.trajectory_id))
        solved = [episode for episode in ranked if episode.success]
        failed = [episode for episode in ranked if not episode.success]
        solved, failed = solved[:SHOWN], failed[-SHOWN:]
        if self._vets:
            fit = await self._fit(group.query, [*solved, *failed])
            solved = [episode for episode in solved if episode in fit]
            failed = [episode for episode in failed if episode in fit]
        ranked, others = [*solved, *failed], list[SolvedGroup]()
        shown = ranked if len(ranked) < 2 else [ranked[0], ranked[-1]]
        questions: list[tuple[str, int, Sequence[Transcript]]] = []
        if self._principles:
            others = [one for one in elsewhere if one.query != group.query][:OTHER_TASKS]
            if others and ranked:
                questions.append((lesson_prompts.PRINCIPLE, LESSONS, ranked))
        else:
            if solved:
                questions.append((lesson_prompts.SUCCESS, LESSONS, solved))
            if failed:
                questions.append((lesson_prompts.FAILURE, LESSONS, failed))
            if solved and failed:
                questions.append((lesson_prompts.COMPARISON, COMPARED, [solved[0], failed[-1]]))
            if elsewhere and failed:
                others = [elsewhere[0]]
                shown = [elsewhere[0].episodes[0], failed[-1]]
                questions.append((lesson_prompts.ELSEWHERE, COMPARED, shown))
        tasks = {one.query: one.episodes[0] for one in others} if self._principles else {}
        asked = (self._lessons(text, most, group.query, of, tasks) for text, most, of in questions)
        found = await asyncio.gather(*asked)
        lessons = [lesson for some in found for lesson in some]
        if not lessons:
            return []
        contents = [lesson.content for lesson in lessons]
        question = lesson_prompts.validation(group.query, shown, contents)
        scores = await self._ask(question, lambda answer: parse_scores(answer, len(lessons)))
        teacher = "\n".join(sorted({one.source for one in others}))
        items = [
            Item(lesson.when_to_use, lesson.content, score, teacher=teacher)
            for lesson, score in zip(lessons, scores or [0.0] * len(lessons), strict=True)
            if score >= self._least_score and score > 0
        ]
        self._counts["rejected"] += len(lessons) - len(items)
        return items

    async def _fit(self, query: str, episodes: list[Transcript]) -> list[Transcript]:
        """Return the episodes that can teach; all of them if the answer cannot be read."""
        parse = partial(parse_verdicts, count=len(episodes))
        verdicts = await self._ask(lesson_prompts.vetting(query, episodes), parse)
        if verdicts is None:
            return episodes
        fit = [one for one, verdict in zip(episodes, verdicts, strict=True) if verdict.fit]
        self._counts["unfit"] += len(episodes) - len(fit)
        return fit

    async def _lessons(
        self,
        question: str,
        most: int,
        query: str,
        episodes: Sequence[Transcript],
        others: Mapping[str, Transcript],
    ) -> list[Lesson]:
        prompt = lesson_prompts.lessons(question, most, self._longest, query, episodes, others)
        parse = partial(parse_lessons, most=most, longest=self._longest)
        return await self._ask(prompt, parse) or []

    async def _rewrite(self, query: str, texts: list[str]) -> list[str]:
        prompt = lesson_prompts.rewrite(query, texts, self._longest)
        try:
            return await self._ask(prompt, partial(parse_text, longest=self._longest)) or []
        except Unavailable as error:
            self._counts["unanswered"] += 1
            log.warning("experience is not rewritten: %s", error)
            return []
        except Exception:
            log.exception("experience is not rewritten")
            return []

    async def _ask(self, question: str, parse: Callable[[str], T]) -> T | None:
        answer = await self._client.ask(lesson_prompts.SYSTEM, question, parse)
        self._counts["unreadable"] += answer is None
        return answer


def parse_lessons(answer: str, most: int, longest: int) -> list[Lesson]:
    """Read at most `most` lessons in an answer, with contents of at most `longest` characters.

    Raise ValueError for anything else.
    """
    lessons = decode_json(answer, list[Lesson])
    lessons = [Lesson(plain(lesson.when_to_use), plain(lesson.content)) for lesson in lessons]
    if len(lessons) > most:
        raise ValueError(f"{len(lessons)} lessons instead of at most {most}")
    for lesson in lessons:
        for text, limit in ((lesson.when_to_use, LESSON_CHARS), (lesson.content, longest)):
            if not 0 < len(text) <= limit:
                raise ValueError(f"a text of {len(text)} characters instead of 1 to {limit}")
    return lessons


def parse_verdicts(answer: str, count: int) -> list[Verdict]:
    """Read exactly `count` verdicts. Raise ValueError for anything else."""
    verdicts = decode_json(answer, list[Verdict])
    if len(verdicts) != count:
        raise ValueError(f"{len(verdicts)} verdicts instead of {count}")
    return verdicts


def parse_scores(answer: str, count: int) -> list[float]:
    """Read exactly `count` numbers between 0 and 1. Raise ValueError for anything else."""
    scores = decode_json(answer, list[float])
    if len(scores) != count or not all(0 <= score <= 1 for score in scores):
        raise ValueError(f"{scores[:5]}: not {count} scores between 0 and 1")
    return scores


def parse_text(answer: str, longest: int) -> list[str]:
    """Read a list of one text of at most `longest` characters. Raise ValueError otherwise."""
    (text,) = decode_json(answer, tuple[str])
    if not 0 < len(plain(text)) <= longest:
        raise ValueError(f"a text of {len(plain(text))} characters instead of 1 to {longest}")
    return [plain(text)]
