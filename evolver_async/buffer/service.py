"""The buffer process: answers every request of the wire out of the durable state.

Each request is decided here or in `actor_requests` and `learner_requests`, recorded in the
journal and applied; replies leave only after `commit`. No socket and no clock: `transport.Server`
calls `handle`, `commit` and `tick` with the time.

Why it cannot lose: an ACK, a ticket, a take leaves after its record was synced; what is sent again
is recognised (DUP, the same groups). Why it cannot stand still: see `replay`.
"""

import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

from evolver_async.buffer.actor_requests import ActorRequests, numbers_of, source_of
from evolver_async.buffer.learner_requests import LearnerRequests
from evolver_async.buffer.log.capacity import DiskCapacity
from evolver_async.buffer.log.journal import DiskFull, Journal, JournalError, archive_bytes
from evolver_async.buffer.log.store import BufferStore
from evolver_async.buffer.monitor.failures import Failures
from evolver_async.buffer.monitor.peers import Activity
from evolver_async.buffer.monitor.stalls import Stalls
from evolver_async.buffer.monitor.status import StatusReport
from evolver_async.buffer.state import records
from evolver_async.buffer.state.censoring import Sums
from evolver_async.buffer.state.groups import UNTRAINED, ZERO_SPREAD, HeldGroup
from evolver_async.buffer.state.leases import Leases
from evolver_async.buffer.state.ledger import Amount
from evolver_async.buffer.state.machine import BufferState
from evolver_async.checkpoint import directory as checkpoint
from evolver_async.checkpoint import history
from evolver_async.config import Config
from evolver_async.config.load import load, stage_config, to_dict
from evolver_async.model.tokenizer import tokenizer_hash
from evolver_async.process.addresses import experience_address, weights_address
from evolver_async.process.setup import RoleArgs, collect_rarely
from evolver_async.protocol import messages
from evolver_async.protocol.envelope import SCHEMA_HASH
from evolver_async.protocol.messages import Reply, Request
from evolver_async.schema import SCRIPTED, Trajectory
from evolver_async.transport.delivery import Postponed
from evolver_async.transport.sockets import Server

log = logging.getLogger(__name__)

RETRY_S = 1.0
LONGEST_S = 1e9  # an episode counts for no more, so that sums stay finite
LOOK_S = 1.0  # between two looks at who makes no progress


class BufferService:
    """One buffer. Raises JournalError when the journal is damaged, foreign or in use.

    `tokenizer_hash`: what actors must have; None adopts the first one that is named.
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
        leases = Leases(buffer.lease_s, buffer.stall_s)
        archived = archive_bytes(buffer.archive)
        journal = Journal(Path(journal_dir), buffer.segment_bytes, archived)
        self.store = BufferStore(state, journal, leases, now)
        self.disk = DiskCapacity(state.replay, journal, buffer.disk_limit_bytes)
        self.activity = Activity(now)
        self.censoring = self.store.censoring
        self.stalls = Stalls(state.replay, leases, self.activity, buffer.warn_s)
        self.failures = Failures(config.launch.max_failures)
        self._status = StatusReport(
            state,
            leases,
            journal,
            self.activity,
            self.censoring,
            self.stalls,
            self.failures,
            buffer.lease_s,
        )
        self.actor_requests = ActorRequests(
            self.store, self.disk, self.activity, self._status, stages
        )
        self.learner_requests = LearnerRequests(
            self.store, self.disk, self.activity, self._status, len(stages)
        )
        self._look_due = now
        self._max_rewards = [stage.safety.max_reward for stage in stages]

    @classmethod
    def of_run(
        cls,
        config: Config,
        run_dir: Path,
        tokenizer_hash: str | None,
        now: float,
        experience_address: str = "",
    ) -> "BufferService":
        """The buffer of the run in `run_dir`, with its journal there."""
        welcome = messages.Welcome(
            run_id=run_dir.name,
            config=to_dict(config),
            weights_address=weights_address(config, run_dir),
            experience_address=experience_address,
        )
        service = cls(config, run_dir.name, run_dir / "journal", welcome, tokenizer_hash, now)
        try:
            service.check_end(run_dir / "checkpoints")
        except JournalError:
            service.store.journal.close()
            raise
        return service

    def check_end(self, checkpoints: Path) -> None:
        """JournalError where the newest checkpoint is newer than the journal's end.

        A segment that was cut after a whole commit looks intact.
        """
        for path, _ in checkpoint.resumable(checkpoints)[-1:]:
            found = history.numbers(path)
            if not found:
                return  # damaged: the learner says so, and goes back to the one before
            gap = self.learner_requests.gap(
                found["lineage"], 0 if found["discard"] else found["take"]
            )
            if gap:
                raise JournalError(f"{gap}, but {path} is newer; put an intact copy there")

    def handle(self, peer: str, request: Request, now: float) -> list[Reply]:
        """The replies to one request; they may be sent after the next `commit`."""
        self.activity.seen(peer, now)
        self.store.now = now
        match request:
            case messages.Push():
                return [self._push(peer, request.trajectory, now)]
            case messages.Lease():
                self.activity.peers[peer].report(request.generated)
                return [self.actor_requests.lease(peer, request, now)]
            case messages.Renew():
                return [self.actor_requests.renew(peer, request, now)]
            case messages.Release():
                return [self.actor_requests.release(peer, request, now)]
            case messages.Offer():
                return [self.actor_requests.offer(request)]
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
                if problem := self.activity.tell(peer, request.values):
                    return [messages.Reject(reason=problem)]
                self.failures.take_in(peer, request.failures, now)
                return [messages.Ok()]
            case _:
                return [messages.Reject(reason=f"the buffer answers no {request.kind}")]

    def commit(self) -> None:
        """Makes everything decided so far durable. Postponed where the disk has no room for it."""
        try:
            self.store.commit()
        except DiskFull as refusal:
            raise Postponed(str(refusal)) from refusal

    def tick(self, now: float) -> None:
        """Lets leases run out; looks how much disk is left."""
        for line in (*self.store.leases.expire(now), *self._stalled(now)):
            log.warning("%s", line)
        self.store.journal.measure()
        warning = self.censoring.alarm(now)
        if warning:
            log.warning("%s", warning)

    def _stalled(self, now: float) -> list[str]:
        """Looks once a second who makes no progress, and forgets who has gone."""
        if now < self._look_due:
            return []
        self._look_due = now + LOOK_S
        self.activity.forget(now)
        return self.stalls.lines(now)

    def status(self, now: float) -> dict[str, Any]:
        """Occupancy, ledger, rates, who waits for what: see `status.Status.full`."""
        return self._status.full(now)

    def close(self) -> None:
        """Commits what is left, where there is room for it, and closes the journal."""
        try:
            self.commit()
        except Postponed as refusal:
            log.warning("%s; what was not acknowledged is lost", refusal)
        finally:
            self.store.journal.close()

    def _hello(self, peer: str, request: messages.Hello) -> Reply:
        if request.schema_hash != SCHEMA_HASH:
            return messages.Reject(
                reason=f"schema: {peer} has {request.schema_hash}, the buffer {SCHEMA_HASH}"
            )
        if request.tokenizer is not None:
            self.tokenizer_hash = self.tokenizer_hash or request.tokenizer
            if request.tokenizer != self.tokenizer_hash:
                return messages.Reject(
                    reason=f"tokenizer: {peer} has {request.tokenizer}, "
                    f"the run {self.tokenizer_hash}"
                )
        self.failures.begin(peer)
        if request.role == "actor":
            actor = self.activity.works(peer)
            self.activity.fold(actor)
            actor.greet()
            # A first word means a new process: whatever an older one of this name held, it lost.
            self.store.leases.abandon(peer)
        return self.welcome

    def _push(self, peer: str, trajectory: Trajectory, now: float) -> Reply:
        """Takes in a granted member; the first copy wins."""
        store, group_id, member = self.store, trajectory.group_id, trajectory.member
        tokens = trajectory.action_tokens
        amount = Amount(trajectories=1, tokens=tokens)
        held = store.replay.at.groups.get(group_id)
        if held is None:
            store.state.ledger.refuse("stale", amount)
            return messages.Stale()
        if member in held.arrived:
            store.state.ledger.refuse("duplicate", amount)
            return messages.Dup()
        problem = self._problem(held, trajectory)
        if problem:
            store.state.ledger.refuse("rejected", amount)
            return messages.Reject(reason=problem)
        if self.disk.full():
            return messages.Retry(seconds=RETRY_S)
        self.activity.peers[peer].count(tokens, now)
        record = records.Arrived(
            group_id=group_id,
            member=member,
            attempt=trajectory.attempt,
            tokens=tokens,
            bytes=sum(_bytes(sequence) for sequence in trajectory.sequences),
            reward=trajectory.reward,
            success=trajectory.success,
            turns=len(trajectory.turn_rewards),
            oldest=trajectory.oldest,
        )
        store.record(record, None if held.kind in UNTRAINED else trajectory)
        store.leases.finish(group_id, member)
        if not held.missing:
            self.failures.finish()
        if held.kind == "rollout":
            self.censoring.receive(
                group_id,
                held.task.env,
                Sums(
                    trajectories=1,
                    tokens=tokens,
                    turns=record.turns,
                    seconds=min(trajectory.timing.get("total_s", 0.0), LONGEST_S),
                    successes=int(trajectory.success),
                ),
            )
        if store.replay.too_old(held):
            store.evict([group_id], "stale" if held.state == "ready" else "age")
        elif store.replay.lacks_spread(held):
            store.evict([group_id], ZERO_SPREAD)
        return messages.Ack()

    def _problem(self, held: HeldGroup, trajectory: Trajectory) -> str | None:
        """Why this cannot be the member that was granted."""
        owner = held.owners.get(trajectory.member)
        if owner is None:
            return f"member: {trajectory.member} is not one of group {held.group_id}"
        if trajectory.attempt > owner.attempt:
            return f"attempt: {trajectory.attempt}, the last one granted is {owner.attempt}"
        bound = self._max_rewards[held.stage]
        turns = max(map(abs, trajectory.turn_rewards.tolist()), default=0.0)
        for name, size in (("reward", abs(trajectory.reward)), ("turn_rewards", turns)):
            if size > bound:
                return f"{name}: {size:g}, the largest that safety.max_reward allows is {bound:g}"
        expected = "scripted" if held.kind in SCRIPTED else "learned"
        if trajectory.policy != expected and held.kind != "explore":  # whoever explores
            return f"policy: {trajectory.policy} in a {held.kind} group"
        sampled = {run.weights for sequence in trajectory.sequences for run in sequence.versions}
        if held.pinned is not None and sampled - {held.pinned}:
            return f"versions: {max(sampled)}, the evaluation is of {held.pinned}"
        forks = self.store.replay.at.forks
        foreign = [weights for weights in sampled if weights.lineage not in forks]
        if foreign:
            return f"versions: {foreign[0]} is of no lineage of this run"
        return None


def _bytes(sequence: Any) -> int:
    arrays = (sequence.tokens, sequence.roles, sequence.turns, sequence.logprobs)
    return sum(array.nbytes for array in arrays)


def main(args: RoleArgs) -> int:
    """Role `buffer`: serves the run in `args.run_dir` until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    collect_rarely()
    config = load(args.run_dir / "config.yaml", [])
    # leases are measured with the server's clock, which is the monotonic one
    tokenizer = tokenizer_hash(config.policy.path)
    experience = experience_address(config, args.address)
    service = BufferService.of_run(config, args.run_dir, tokenizer, time.monotonic(), experience)
    server = Server(
        service,
        args.address,
        service.welcome.run_id,
        keys=args.keys,
        silent_s=config.buffer.lease_s,
    )
    try:
        server.serve(stop)
    finally:
        server.close()
        service.close()
    return 0
