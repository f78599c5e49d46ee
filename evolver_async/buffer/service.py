"""The buffer process: answers every request from the durable state.

Each request is decided here or in `actor_requests` and `learner_requests`, recorded in the
journal and applied; replies leave only after `commit`. No socket and no clock: `wire.server`
calls `handle`, `commit` and `tick` with the time.

Nothing is lost: an ACK, a ticket or a take leaves after its record was synced, and repetitions are
recognised (DUP, the same groups). Nothing deadlocks: see `state.admission`.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evolver_async.buffer import offers
from evolver_async.buffer.actor_requests import ActorRequests
from evolver_async.buffer.arrivals import Arrivals
from evolver_async.buffer.learner_requests import LearnerRequests
from evolver_async.buffer.log.archive import archive_bytes
from evolver_async.buffer.log.capacity import DiskCapacity
from evolver_async.buffer.log.disk import DiskFull
from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.log.store import BufferStore
from evolver_async.buffer.monitor.failures import Failures
from evolver_async.buffer.monitor.first_data import FirstData
from evolver_async.buffer.monitor.peers import Activity
from evolver_async.buffer.monitor.stalls import Stalls
from evolver_async.buffer.monitor.status import StatusReport
from evolver_async.buffer.stages import eval_sets_of, numbers_of, source_of
from evolver_async.buffer.state.leases import Leases
from evolver_async.buffer.state.machine import BufferState
from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint import history
from evolver_async.config import Config
from evolver_async.config.load import load_written, stage_config, to_dict
from evolver_async.metrics import first_reply
from evolver_async.metrics.alerts import alert
from evolver_async.metrics.gauges import ACTORS_PER_S, PERIOD_S, append
from evolver_async.model.tokenizer import tokenizer_hash
from evolver_async.process.garbage import collect_rarely, give_back_memory
from evolver_async.process.package_versions import differences, versions
from evolver_async.process.rendezvous import experience_address, weights_address
from evolver_async.process.setup import INCARNATIONS, RoleArgs
from evolver_async.wire import messages
from evolver_async.wire.envelope import SCHEMA_HASH
from evolver_async.wire.failure_totals import ERROR_CHARS, NAME_CHARS, FailureTotal
from evolver_async.wire.messages import Reply, Request
from evolver_async.wire.router import Postponed
from evolver_async.wire.server import Server

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two searches for stalls


class BufferService:
    """One buffer. Raises JournalError if the journal is damaged, foreign or in use.

    `tokenizer_hash`: the hash that actors must have; None adopts the first one that a HELLO names.
    """

    def __init__(
        self,
        config: Config,
        run_id: str,
        journal_dir: Path,
        welcome: messages.Welcome,
        tokenizer_hash: str | None,
        now: float,
    ) -> None:
        self.welcome = welcome
        self.tokenizer_hash = tokenizer_hash
        buffer = config.buffer
        stages = [stage_config(config, index) for index in range(len(config.stages))]
        state = BufferState(
            run_id,
            config.run.seed,
            [numbers_of(c, s.kind) for c, s in zip(stages, config.stages, strict=True)],
            [source_of(stage) for stage in stages],
        )
        eval_sets = [eval_sets_of(stage) for stage in stages]
        leases = Leases(buffer.lease_s, buffer.stall_s)
        journal = Journal(Path(journal_dir), buffer.segment_bytes, archive_bytes(buffer.archive))
        self.store = BufferStore(state, journal, leases, now)
        self.disk = DiskCapacity(state.replay, journal, buffer.disk_limit_bytes)
        self.activity = Activity(now)
        self.censoring = self.store.censoring
        self.stalls = Stalls(state.replay, leases, self.activity, buffer.warn_s)
        self.failures = Failures(config.launch.max_failures)
        watched = (self.activity, self.censoring, self.stalls, self.failures)
        shares = [stage.tasks.synthetic for stage in stages]
        self._status = StatusReport(state, leases, journal, *watched, buffer.lease_s, shares)
        shared = (self.store, self.disk, self.activity)
        self.actor_requests = ActorRequests(*shared, self._status, stages, eval_sets)
        self.learner_requests = LearnerRequests(*shared, self._status, eval_sets)
        max_rewards = [stage.safety.max_reward for stage in stages]
        self.first_data = FirstData(
            stages, state.replay.at.stage if state.replay.at.next_take else -1
        )
        self.arrivals = Arrivals(*shared, self.failures, max_rewards, self.first_data, self._advise)
        self.run_dir: Path | None = None  # for alerts and gauges
        self._look_due = now

    @classmethod
    def of_run(
        cls,
        config: Config,
        run_dir: Path,
        tokenizer_hash: str | None,
        now: float,
        experience_address: str = "",
        launch: int = 0,
    ) -> "BufferService":
        """Make the buffer of a launch of the run in `run_dir`, with its journal there."""
        welcome = messages.Welcome(
            run_id=run_dir.name,
            config=to_dict(config),
            weights_address=weights_address(config, run_dir),
            experience_address=experience_address,
            launch=launch,
        )
        service = cls(config, run_dir.name, run_dir / "journal", welcome, tokenizer_hash, now)
        service.run_dir = run_dir
        try:
            service.check_end(run_dir / "checkpoints")
        except JournalError:
            service.store.journal.close()
            raise
        return service

    def check_end(self, checkpoints: Path) -> None:
        """Raise JournalError if the newest checkpoint is newer than the journal's end.

        A checkpoint of no lineage is the one with which a fork begins.
        A segment that was cut after a whole commit looks intact, unless a later lineage began.
        """
        for path, _ in checkpoint.resumable(checkpoints)[-1:]:
            found = history.numbers(path)
            if not found:
                return  # damaged: the learner reports it, and resumes from the one before
            self.actor_requests.forked = not found["lineage"]
            if 0 < found["lineage"] < self.store.replay.at.lineage:
                return  # the learner has resumed since then, without it
            take = 0 if found["discard"] else found["take"]
            if gap := self.learner_requests.gap(found["lineage"], take):
                raise JournalError(f"{gap}, but {path} is newer; put an intact copy there")

    def handle(self, peer: str, request: Request, now: float) -> list[Reply]:
        """Answer one request; the replies may be sent after the next `commit`."""
        if isinstance(request, messages.Beat):  # of a thread: the work itself is not heard by it
            if problem := self.activity.beat(peer, request, now):
                return [messages.Reject(reason=problem)]
            known = self.activity.peers[peer]
            if now in (known.moved_at, known.busy_at):
                self.store.leases.work(peer, now)
            return [messages.Ok()]
        self.activity.seen(peer, now)
        self.store.now = now
        if isinstance(request, messages.Lease | messages.Renew) and self._outdated(request):
            launch = f"launch {request.launch}, the run is in launch {self.welcome.launch} now"
            return [messages.Fenced(reason=f"{peer} has joined {launch}: start it again")]
        match request:
            case messages.Push():
                return [self.arrivals.push(peer, request.trajectory, now)]
            case messages.Lease():
                return [self.actor_requests.lease(peer, request, now)]
            case messages.Renew():
                return [self.actor_requests.renew(peer, request, now)]
            case messages.Release():
                return [self.actor_requests.release(peer, request, now)]
            case messages.Offer():
                max_tasks = self.actor_requests.config.questioning.max_tasks
                return [offers.take_in(self.store, max_tasks, request)]
            case messages.Sample():
                return self.learner_requests.sample(peer, request, now)
            case messages.Done():
                return [self.learner_requests.done(peer, request, now)]
            case messages.Resume():
                return [self.learner_requests.resume(peer, request)]
            case messages.Kept():
                reply = self.learner_requests.kept(peer, request, now)
                self.censoring.forget(self.store.replay.at.groups)
                return [reply]
            case messages.Hello():
                return [self._hello(peer, request)]
            case messages.StatusRequest():
                return [messages.StatusReply(status=self.status(now))]
            case messages.Counters():
                if problem := self.activity.store_counters(peer, request.values):
                    return [messages.Reject(reason=problem)]
                if failed := self.failures.take_in(peer, request.failures, now):
                    self.activity.peers[peer].failed = (failed, now)
                    if failed.startswith("engine ") and self.run_dir is not None:
                        alert(self.run_dir, f"death of the engine of {peer}", failed, "ERROR")
                self._record_gauges(peer, request.gauges, now)
                if self.run_dir is not None:
                    first_reply.keep(self.run_dir, request.first_reply)
                return [messages.Ok()]
            case _:
                return [messages.Reject(reason=f"the buffer answers no {request.kind}")]

    def commit(self) -> None:
        """Make all decisions so far durable. Raises Postponed if the disk has no room."""
        try:
            self.store.commit()
        except DiskFull as refusal:
            raise Postponed(str(refusal)) from refusal

    def write(self) -> Callable[[], None] | None:
        """Write all decisions so far; return the call that makes them durable, None if they are.

        It may run in another thread while requests are handled. Raises Postponed as `commit` does.
        """
        try:
            return self.store.write()
        except DiskFull as refusal:
            raise Postponed(str(refusal)) from refusal

    def tick(self, now: float) -> None:
        """End the leases that ran out, log stalls, measure the free disk space."""
        lines = self.store.leases.expire(now)
        for group_id, age_s in self.store.leases.expired:
            held = self.store.replay.at.groups.get(group_id)
            if held is not None and held.kind == "rollout":
                self.censoring.replay(held.task.env, "silence", [age_s])
        if now >= self._look_due:
            self._look_due = now + LOOK_S
            self.activity.forget(now)
            lines += self.stalls.lines(now)
            step_s = self.activity.step_s + self.activity.data_s
            if (found := self.stalls.alert(now, step_s)) and self.run_dir is not None:
                alert(self.run_dir, *found)
        self.store.journal.measure()
        if warning := self.censoring.alarm(now):
            lines.append(warning)
        for line in lines:
            log.warning("%s", line)

    def status(self, now: float) -> dict[str, Any]:
        """Occupancy, ledger, rates and reasons for waiting: see `StatusReport.full`."""
        return self._status.full(now)

    def close(self) -> None:
        """Commit the remaining records if there is room, and close the journal."""
        try:
            self.commit()
        except Postponed as refusal:
            log.warning("%s; data that was not acknowledged is lost", refusal)
        finally:
            self.store.journal.close()

    def _advise(self, title: str, text: str) -> None:
        """Tell people, on the console too, of data that teach nothing."""
        log.warning("%s: %s", title, text)
        if self.run_dir is not None:
            alert(self.run_dir, title, text, console=True)

    def _record_gauges(self, name: str, gauges: dict[str, float], now: float) -> None:
        """Append the gauges of a process, less often the more actors there are."""
        peer = self.activity.peers[name]
        if 0 <= (share := gauges.get("host_cpu_share", -1.0)) <= 1:
            peer.host_cpu_share = share
        if gauges and self.run_dir is not None and now >= peer.gauges_due:
            peer.gauges_due = now + max(PERIOD_S / 2, len(self.activity.actors) / ACTORS_PER_S)
            append(self.run_dir, name, peer.host, gauges)

    def _outdated(self, request: messages.Lease | messages.Renew) -> bool:
        """True if the sender has the settings of another launch, and is not about to leave."""
        leaves = isinstance(request, messages.Lease) and request.credit == 0
        return request.launch != self.welcome.launch and not leaves

    def _hello(self, peer: str, request: messages.Hello) -> Reply:
        if request.schema_hash != SCHEMA_HASH:
            reason = f"schema: {peer} has {request.schema_hash}, the buffer {SCHEMA_HASH}"
            return messages.Reject(reason=reason)
        if request.tokenizer is not None:
            ours = self.tokenizer_hash = self.tokenizer_hash or request.tokenizer
            if request.tokenizer != ours:
                self.activity.depart(peer)
                reason = f"tokenizer: {peer} has {request.tokenizer}, the run {ours}"
                return messages.Reject(reason=reason)
        self.failures.begin(peer)
        differs = differences(request.versions, versions())
        if differs and request.tokenizer is None:  # the first of a process
            error = f"other versions than the buffer, {differs}"[:ERROR_CHARS]
            name = (request.host or peer)[:NAME_CHARS]
            total = FailureTotal(kind="host", name=name, error=error, count=1)
            self.failures.take_in(peer, [total], self.store.now)
        self.activity.peers[peer].host = request.host[:NAME_CHARS]
        if request.role == "actor":
            actor = self.activity.activate(peer)
            self.activity.fold(actor)
            actor.greet()
            # A HELLO means a new process: the leases of an older one of this name end.
            self.store.leases.abandon(peer)
        return self.welcome


def main(args: RoleArgs) -> int:
    """Run role `buffer`: serve the run in `args.run_dir` until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    collect_rarely()
    give_back_memory()
    config = load_written(args.run_dir)
    # leases are measured with the server's clock, which is the monotonic one
    tokenizer = tokenizer_hash(config.policy.path)
    experience = experience_address(config, args.address)
    now, launch = time.monotonic(), args.incarnation // INCARNATIONS
    service = BufferService.of_run(config, args.run_dir, tokenizer, now, experience, launch)
    run_id, lease_s = service.welcome.run_id, config.buffer.lease_s
    server = Server(service, args.address, run_id, keys=args.keys, silent_s=lease_s)
    try:
        server.serve(stop)
    finally:
        server.close()
        service.close()
    return 0
