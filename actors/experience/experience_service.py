"""The experience process: returns guidance for a task, learns from finished groups.

    RETRIEVE    → GUIDANCE, from memory
    CONTRIBUTE  → OK: counts uses and successes of the entries that guided these episodes, and adds
                  new entries; with a language model in a thread of its own
    PURGE       → PURGED

Like the buffer it runs under `transport.Server`: replies are sent after `commit`. All RETRIEVEs
that arrive together are answered in `commit`, with one search. A contribution that arrives twice
counts once. Only training tasks contribute. While this process is down, episodes are unguided; the
pool is on disk (`pool_file.py`).
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.experience.contrast import contrast_items, principles
from actors.experience.embed import KEY
from actors.experience.embedders import EmbedFailed, load_embedder
from actors.experience.embedding_endpoint import EmbedderDown
from actors.experience.guide import SPLIT
from actors.experience.lesson_extractor import LessonExtractor
from actors.experience.pool import ExperiencePool
from actors.experience.pool_file import FILE, ExperienceEntry, Store
from actors.experience.successes import SolvedGroup
from actors.failure_counts import FailureCounts
from actors.llm.endpoint_client import Endpoint
from evolver_async.config import Config, ExperienceConfig
from evolver_async.config.load import load_written, stage_as_written
from evolver_async.metrics.alerts import alert
from evolver_async.process.garbage import collect_rarely, give_back_memory
from evolver_async.process.rendezvous import experience_address
from evolver_async.process.setup import RoleArgs
from evolver_async.wire import messages
from evolver_async.wire.client import Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.envelope import SCHEMA_HASH
from evolver_async.wire.messages import Reply, Request
from evolver_async.wire.server import Server
from evolver_async.wire.transcripts import Transcript

REPORT_S = 2.0  # between reports of the counters if nothing else changes
DOWN_S = 10.0  # between attempts to begin with an embedder that is down
RETRY_S = 0.1  # until an actor repeats a request whose text is being rewritten
DIRECTORY = "experience"  # in the run's directory
COUNTED = ("contributed", "repeated", "foreign", "taught", "retrievals", "empty")
EMPTY = 256  # questions in a row that find no lesson of a language model, before that is reported
UNLIKE = "no lesson is like any of the last {} tasks: lower it, or set experience.embedder"

Report = Callable[[messages.Counters], None]

log = logging.getLogger(__name__)


class ExperienceService:
    """Request handler of the experience process. `report` gets the counters when they change.

    `renewing`: stages whose first group empties the pool.
    """

    def __init__(
        self,
        pool: ExperiencePool,
        config: ExperienceConfig,
        report: Report,
        extractor: LessonExtractor | None = None,
        failures: FailureCounts | None = None,
        renewing: Sequence[int] = (),
    ) -> None:
        self.pool = pool
        self._renewing = renewing
        self._principles = config.granularity == "principle"
        self._top_k = config.top_k
        self._similarity = config.similarity
        self._max_chars = config.max_chars
        self._report = report
        self._extractor = extractor
        self._failures = failures or FailureCounts()
        self._asked: list[tuple[messages.Retrieve, float, list[Reply]]] = []
        self._empty = 0  # questions in a row without an entry
        self._counts = dict.fromkeys(COUNTED, 0)
        self._changed = True
        self._reported_at = float("-inf")

    def handle(self, peer: str, request: Request, now: float) -> list[Reply]:
        """Return the replies to one request, to be sent after the next `commit`.

        The reply to a RETRIEVE is added to the returned list by `commit`.
        """
        match request:
            case messages.Retrieve():
                replies: list[Reply] = []
                self._asked.append((request, now, replies))
                return replies
            case messages.Contribute():
                self._contribute(peer, request)
                return [messages.Ok()]
            case messages.Purge():
                self._changed, source = True, request.source
                count = self.pool.purge(source)
                if self._extractor is not None:
                    self._extractor.purge(source)
                log.warning("purged %d entries of %s as requested by %s", count, source, peer)
                return [messages.Purged(count=count)]
            case messages.StatusRequest():
                return [messages.StatusReply(status={**self.counters()})]
            case _:
                kind = type(request).__name__.upper()
                return [messages.Reject(reason=f"the experience service does not support {kind}")]

    def commit(self) -> None:
        """Answer the RETRIEVEs; make changes durable and report the counters if they changed."""
        asked, self._asked = self._asked, []
        queries = [request.query for request, _, _ in asked]
        states = [request.state for request, _, _ in asked]
        try:
            found = self.pool.retrieve_all(queries, self._top_k, self._similarity, states)
            embedded = True
        except EmbedFailed:  # these episodes go unguided
            found, embedded = [[] for _ in asked], False
        for (request, now, replies), entries in zip(asked, found, strict=True):
            replies.append(self._guidance(request, entries, now))
        if self._extractor is not None and embedded and len(self.pool) > 0:
            self._note_empty(found)
        if self._changed:
            self._changed = False
            self.pool.commit()
            failures = self._failures.totals()
            self._report(messages.Counters(values=self.counters(), failures=failures))

    def tick(self, now: float) -> None:
        """Add the extractor's finished lessons; trigger a report of the counters every REPORT_S."""
        if self._extractor is not None:
            for found in self._extractor.collect():
                self.pool.add(found.items, found.source, found.trajectories)
                self._changed = True
        if now >= self._reported_at + REPORT_S:
            self._reported_at = now
            self._changed = True

    def counters(self) -> dict[str, float]:
        """Return totals and current sizes by metric name."""
        counted = {f"experience/{name}": float(count) for name, count in self._counts.items()}
        extractor = {} if self._extractor is None else self._extractor.counters()
        return counted | self.pool.counters() | extractor

    def close(self) -> None:
        if self._extractor is not None:
            self._extractor.close()
        self.pool.close()

    def _guidance(
        self, request: messages.Retrieve, entries: list[ExperienceEntry], now: float
    ) -> Reply:
        ids, texts = [entry.id for entry in entries], [entry.content for entry in entries]
        if self._extractor is not None and texts:
            rewritten = self._extractor.rewrite(request.query, texts, now)
            if rewritten is None:
                return messages.Retry(seconds=RETRY_S)
            texts = rewritten
        self._counts["retrievals"] += 1
        self._counts["empty"] += not ids
        return messages.Guidance(ids=ids, texts=texts)

    def _note_empty(self, found: list[list[ExperienceEntry]]) -> None:
        """Report lessons that are like no task: a model words when to use them as it likes."""
        for entries in found:
            self._empty = 0 if entries else self._empty + 1
            if self._empty == EMPTY:
                key = f"experience.similarity={self._similarity:g}"
                self._failures.note("experience", key, UNLIKE.format(EMPTY))

    def _contribute(self, peer: str, request: messages.Contribute) -> None:
        self._changed = True
        begun = max((one for one in self._renewing if one <= request.stage), default=0)
        if begun > self.pool.store.stage():
            self.pool.renew(begun)
            if self._extractor is not None:
                self._extractor.renew()
        if request.split != SPLIT or request.stage < self.pool.store.stage():
            self._counts["foreign"] += 1
            return
        trajectories = [episode.trajectory_id for episode in request.episodes]
        if not trajectories or not self.pool.take_group("+".join(trajectories)):
            self._counts["repeated"] += 1
            return
        self._counts["contributed"] += 1
        self._feed_back(request.episodes)
        self.pool.successes.remember(peer, request.query, request.episodes)
        solved: list[SolvedGroup] = []
        failed = not any(episode.success for episode in request.episodes)
        if failed or self._principles:
            solved = self.pool.successes.similar(request.query, self._similarity)
            self._counts["taught"] += failed and bool(solved)
        if self._extractor is not None:
            self._extractor.read(peer, request, solved)
            return
        if self._principles:
            items = principles(request.episodes, solved, self._max_chars)
        else:
            items = contrast_items(request.query, request.episodes, solved, self._max_chars)
        self.pool.add(items, peer, trajectories)

    def _feed_back(self, episodes: Sequence[Transcript]) -> None:
        """Tell the pool the outcomes of guided members, and of the unguided ones beside them."""
        guided = [episode for episode in episodes if episode.experience_ids]
        if guided:
            self.pool.compare(one.success for one in episodes if not one.experience_ids)
        for episode in guided:
            self.pool.feed_back(episode.experience_ids, episode.success)


def open_pool(
    config: ExperienceConfig, run_dir: Path, failures: FailureCounts | None = None
) -> ExperiencePool:
    """Open the pool of the run in `run_dir`. Raise what `load_embedder` does, and EmbedFailed."""
    embedder, dedup = load_embedder(config)
    store = Store(run_dir / DIRECTORY / FILE)
    try:
        return ExperiencePool(
            store,
            embedder,
            dedup=dedup,
            capacity=config.capacity,
            per_source=config.per_source,
            retire_uses=config.retire_uses,
            retire_utility=config.retire_utility,
            failures=failures or FailureCounts(),
        )
    except EmbedFailed:
        store.close()
        raise


def purge_files(config: Config, run_dir: Path, source: str) -> int:
    """Purge a source from the pool of a stopped run; return the number of entries."""
    pool = open_pool(config.experience, run_dir)
    try:
        return pool.purge(source)
    finally:
        pool.close()


def build(config: Config, run_dir: Path, report: Report) -> ExperienceService:
    """Make the service of the run in `run_dir`, which contains its pool, for any launcher."""
    experience, failures, extractor = config.experience, FailureCounts(), None
    pool = open_pool(experience, run_dir, failures)
    if experience.kind == "llm":
        endpoint = Endpoint(experience.llm, "experience", failures)
        extractor = LessonExtractor(experience, endpoint)
    if pool.store.damage:
        alert(run_dir, "experience damaged", pool.store.damage, "ERROR", console=True)
    stages = range(len(config.stages))
    renewing = [index for index in stages if stage_as_written(config, index).experience.renew]
    return ExperienceService(pool, experience, report, extractor, failures, renewing)


class CounterReporter:
    """Thread that sends the newest counters to the buffer."""

    def __init__(self, client: DealerClient) -> None:
        self._client = client
        self._newest = messages.Counters(values={})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def report(self, counters: messages.Counters) -> None:
        self._newest = counters

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * REPORT_S)
        self._client.close()

    async def _run(self) -> None:
        sent, greeted = self._newest, False
        while not self._stop.is_set():
            newest = self._newest
            if newest is not sent:
                with contextlib.suppress(TimeoutError, Rejected):
                    if not greeted:  # the failures of a new process count from 0
                        hello = messages.Hello(role="experience", schema_hash=SCHEMA_HASH)
                        await self._client.request(hello, REPORT_S)
                        greeted = True
                    await self._client.request(newest, REPORT_S)
                    sent = newest
            await asyncio.sleep(0.25)


def _built(
    config: Config, run_dir: Path, reporter: CounterReporter, stop: threading.Event
) -> ExperienceService | None:
    """Make the service as soon as its texts can be embedded; None if it is stopped before.

    Until then episodes go unguided. Ending this process instead would use up its restarts, and all
    later episodes would go unguided.
    """
    failures = FailureCounts()
    while not stop.is_set():
        try:
            return build(config, run_dir, reporter.report)
        except (EmbedderDown, EmbedFailed) as error:
            failures.note("experience", KEY, str(error))
            reporter.report(messages.Counters(values={}, failures=failures.totals()))
            log.warning("episodes go unguided until texts can be embedded: %s", error)
            stop.wait(DOWN_S)
    return None


def main(args: RoleArgs) -> int:
    """Run role `experience` for the run in `args.run_dir` until SIGTERM.

    `args.address` is the buffer's address.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = load_written(args.run_dir)
    run_id = args.run_dir.name
    client = DealerClient(args.address, run_id, args.name, args.incarnation, keys=args.keys)
    reporter = CounterReporter(client)
    service = _built(config, args.run_dir, reporter, stop)
    if service is None:
        reporter.close()
        return 0
    collect_rarely()  # now, so that no collection traverses the entries, 0.1 s for 100,000
    give_back_memory()
    address = experience_address(config, args.address)
    server = Server(service, address, run_id, keys=args.keys)
    log.info("%d entries, at %s", len(service.pool), address)
    try:
        server.serve(stop)
    finally:
        server.close()
        service.close()
        reporter.close()
    return 0
