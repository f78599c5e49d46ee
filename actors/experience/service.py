"""The experience process: answers what helps with a task, learns from every finished group.

    RETRIEVE    → GUIDANCE at once, out of memory
    CONTRIBUTE  → OK: uses and successes of what guided these episodes are noted, and what they
                  teach is added; with an endpoint that happens in a thread of its own
    PURGE       → PURGED

Runs under `transport.Server`, like the buffer: replies leave after `commit`. A contribution that
arrives twice counts once. Only training tasks teach. When this process dies, episodes go unguided
until it is back; the pool is on disk (`store.py`).
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from actors.experience.embed import load_embedder
from actors.experience.extract import diverged
from actors.experience.pool import Pool
from actors.experience.scribe import Scribe, make_scribe
from actors.experience.store import FILE, Store
from actors.failures import FailureCounts
from evolver_async.config import Config, Experience
from evolver_async.config.load import load
from evolver_async.process.addresses import experience_address
from evolver_async.process.setup import RoleArgs, collect_rarely
from evolver_async.protocol import messages
from evolver_async.protocol.messages import Reply, Request
from evolver_async.transport.client import Rejected
from evolver_async.transport.dealer import DealerClient
from evolver_async.transport.server import Server

TELL_S = 2.0  # between two reports of the counters while only questions come
RETRY_S = 0.1  # until who waits for a text that is being reworded asks again
DIRECTORY = "experience"  # of a run
SPLIT = "train"  # of the tasks that teach

log = logging.getLogger(__name__)


class Service:
    """One experience service. `tell` gets what it counts when that has changed."""

    def __init__(
        self,
        pool: Pool,
        config: Experience,
        tell: Callable[[messages.Counters], None],
        scribe: Scribe | None = None,
        failures: FailureCounts | None = None,
    ) -> None:
        self.pool = pool
        self._top_k = config.top_k
        self._similarity = config.similarity
        self._tell = tell
        self._scribe = scribe
        self._failures = failures or FailureCounts()
        self._counts = dict.fromkeys(("contributed", "repeated", "foreign"), 0)
        self._changed = True
        self._told_at = float("-inf")

    @classmethod
    def of_run(
        cls, config: Config, run_dir: Path, tell: Callable[[messages.Counters], None]
    ) -> "Service":
        """The service of the run in `run_dir`, with its pool there."""
        experience, failures = config.experience, FailureCounts()
        scribe = make_scribe(experience, failures) if experience.kind == "llm" else None
        return cls(open_pool(experience, run_dir), experience, tell, scribe, failures)

    def handle(self, peer: str, request: Request, now: float) -> list[Reply]:
        """The replies to one request; they may be sent after the next `commit`."""
        match request:
            case messages.Retrieve():
                return [self._retrieve(request, now)]
            case messages.Contribute():
                self._contribute(peer, request)
                return [messages.Ok()]
            case messages.Purge():
                self._changed = True
                count = self.pool.purge(request.source)
                log.warning("purged %d entries of %s, asked by %s", count, request.source, peer)
                return [messages.Purged(count=count)]
            case messages.StatusRequest():
                return [messages.StatusReply(status={**self.counters()})]
            case _:
                reason = f"the experience service answers no {request.kind}"
                return [messages.Reject(reason=reason)]

    def commit(self) -> None:
        """Makes what was learned durable, and tells the counters if they have changed."""
        if self._changed:
            self._changed = False
            self.pool.commit()
            told = messages.Counters(values=self.counters(), failures=self._failures.totals())
            self._tell(told)

    def tick(self, now: float) -> None:
        """Takes in what the scribe has found; has the counters told from time to time."""
        if self._scribe is not None:
            for found in self._scribe.collect():
                self.pool.add(found.items, found.source, found.trajectories)
                self._changed = True
        if now >= self._told_at + TELL_S:
            self._told_at = now
            self._changed = True

    def counters(self) -> dict[str, float]:
        """Totals and what is the case now, by metric name."""
        counted = {f"experience/{name}": float(count) for name, count in self._counts.items()}
        scribe = {} if self._scribe is None else self._scribe.counters()
        return counted | self.pool.counters() | scribe

    def close(self) -> None:
        if self._scribe is not None:
            self._scribe.close()
        self.pool.close()

    def _retrieve(self, request: messages.Retrieve, now: float) -> Reply:
        entries = self.pool.retrieve(request.query, self._top_k, self._similarity)
        ids, texts = [entry.id for entry in entries], [entry.content for entry in entries]
        if self._scribe is not None and texts:
            rewritten = self._scribe.rewrite(request.query, texts, now)
            if rewritten is None:
                return messages.Retry(seconds=RETRY_S)
            texts = rewritten
        return messages.Guidance(ids=ids, texts=texts)

    def _contribute(self, peer: str, request: messages.Contribute) -> None:
        self._changed = True
        if request.split != SPLIT:
            self._counts["foreign"] += 1
            return
        trajectories = [episode.trajectory_id for episode in request.episodes]
        if not trajectories or not self.pool.take_group("+".join(trajectories)):
            self._counts["repeated"] += 1
            return
        self._counts["contributed"] += 1
        for episode in request.episodes:
            self.pool.feed_back(episode.experience_ids, episode.success)
        if self._scribe is not None:
            self._scribe.read(peer, request)
        else:
            self.pool.add(diverged(request.query, request.episodes), peer, trajectories)


def open_pool(config: Experience, run_dir: Path) -> Pool:
    """The pool of the run in `run_dir`, as it was left."""
    embedder, dedup = load_embedder(config)
    return Pool(
        Store(run_dir / DIRECTORY / FILE),
        embedder,
        dedup=dedup,
        capacity=config.capacity,
        per_source=config.per_source,
        retire_uses=config.retire_uses,
        retire_utility=config.retire_utility,
    )


def purge_files(config: Config, run_dir: Path, source: str) -> int:
    """Purge a source from the pool of a run that is not running; returns how many entries."""
    pool = open_pool(config.experience, run_dir)
    try:
        return pool.purge(source)
    finally:
        pool.close()


def build(config: Config, run_dir: Path, tell: Callable[[messages.Counters], None]) -> Service:
    """The service for any launcher."""
    return Service.of_run(config, run_dir, tell)


class Teller:
    """Sends the newest counters to the buffer, from a thread of its own."""

    def __init__(self, client: DealerClient) -> None:
        self._client = client
        self._newest = messages.Counters(values={})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def tell(self, counters: messages.Counters) -> None:
        self._newest = counters

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * TELL_S)
        self._client.close()

    async def _run(self) -> None:
        told = self._newest
        while not self._stop.is_set():
            newest = self._newest
            if newest is not told:
                with contextlib.suppress(TimeoutError, Rejected):
                    await self._client.request(newest, TELL_S)
                    told = newest
            await asyncio.sleep(0.25)


def main(args: RoleArgs) -> int:
    """Role `experience`: serves the run in `args.run_dir` until SIGTERM; `args.address` is the
    buffer's."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    collect_rarely()
    config = load(args.run_dir / "config.yaml", [])
    run_id = args.run_dir.name
    teller = Teller(DealerClient(args.address, run_id, args.name, args.incarnation, keys=args.keys))
    service = Service.of_run(config, args.run_dir, teller.tell)
    address = experience_address(config, args.address)
    server = Server(service, address, run_id, keys=args.keys)
    log.info("%d entries, at %s", len(service.pool), address)
    try:
        server.serve(stop)
    finally:
        server.close()
        service.close()
        teller.close()
    return 0
