"""Requests of actors for tickets, which are granted, renewed and released.

Order of tickets: evaluation episodes, then missing members of groups that were granted before, then
exploration that is due, then new groups as far as admission has room. The
latter two take turns while the pool has no task but others can be played.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from evolver_async.buffer.actor_weights import ActorWeights
from evolver_async.buffer.exploration import exploration_due, explores_first
from evolver_async.buffer.log.capacity import DiskCapacity
from evolver_async.buffer.log.store import BufferStore
from evolver_async.buffer.monitor.peers import Activity
from evolver_async.buffer.monitor.status import StatusReport
from evolver_async.buffer.state import records
from evolver_async.buffer.state.evaluations import DECIDING, SetEpisode
from evolver_async.buffer.tasks.stream import Queued
from evolver_async.buffer.tasks.task_source import EvalSet, held_out_task
from evolver_async.buffer.tickets import REPLY_BYTES, encoded_bytes, guided_members, ticket_of
from evolver_async.config import Config
from evolver_async.schema import Kind, Task, Ticket, WeightId
from evolver_async.wire.messages import (
    LOSING,
    Fenced,
    Lease,
    Ok,
    Reject,
    Release,
    Renew,
    Reply,
    Tickets,
    Wait,
)


def share(room: int, asking: int) -> int:
    """Return the most new groups that one actor gets at a time while `asking` actors wait."""
    return -(-room // asking)


@dataclass
class ActorRequests:
    """Answers LEASE, RENEW and RELEASE. `stages`: the configuration of every stage;
    `eval_sets`: the sets of every stage by name; `forked`: the run begins with a checkpoint of
    another one, in a stage that only its learner's first RESUME tells."""

    store: BufferStore
    disk: DiskCapacity
    activity: Activity
    status: StatusReport
    stages: list[Config]
    eval_sets: list[dict[str, EvalSet]]
    forked: bool = False

    def __post_init__(self) -> None:
        self.weights = ActorWeights(self.store, self.activity)

    @property
    def config(self) -> Config:
        return self.stages[self.store.replay.at.stage]

    def lease(self, peer: str, request: Lease, now: float) -> Reply:
        """Grant tickets with at most `credit` members.

        New groups are shared with the other waiting actors. The rest comes with the next LEASE, as
        do tickets that do not fit into the reply. Tickets that the actor does not know become
        vacant. Without credit the actor leaves, and all its tickets become vacant.
        """
        if request.credit < 0 or request.generated < 0:
            return Reject(reason=f"credit, generated: {request.credit}, {request.generated}")
        self.activity.peers[peer].report(request.generated)
        if request.credit == 0:
            self.store.leases.abandon(peer)
            self.activity.depart(peer)
            return Ok()
        if request.groups is not None:
            self.store.leases.keep(peer, set(request.groups))
        self.weights.note(peer, request, now)
        room = request.credit
        held = self.weights.held(peer)
        fresh = self.store.replay.room(held) if room >= self.store.replay.numbers.group_size else 0
        if fresh and not self._obstacle():
            asking = {peer, *self.activity.asking(now, self.config.buffer.lease_s)}
            fresh = share(fresh, len(asking))
        tickets, size = [], 0
        # Tickets carry their tasks, which can be large. A reply beyond the limit of a message would
        # end the actor, and its successor would get the same one.
        while room > 0 and size < REPLY_BYTES:
            ticket = self._evaluate(peer) or self._reissue(peer, room, split=not tickets)
            # Explorations and other groups take turns while the pool is empty: explorations that
            # find no task would take all the room of the actors.
            if ticket is None and explores_first(self.config, self.store.state.tasks):
                ticket = self._explore(peer, room)
            if ticket is None and fresh > 0:
                ticket = self._new(peer, room)
                fresh -= 1
            if not (ticket := ticket or self._explore(peer, room)):
                break
            self.store.leases.grant(peer, ticket.group_id, ticket.attempt, ticket.members, now)
            tickets.append(ticket)
            room -= len(ticket.members)
            size += encoded_bytes(ticket)
        if tickets:
            if self.activity.granted is None:
                self.activity.granted = now
            self.activity.served(peer, "lease")
            return Tickets(tickets=tickets)
        if not self.store.replay.room(held):
            reason = self.status.admission(held, now)
        else:
            size = self.store.replay.numbers.group_size
            reason = self._obstacle() or f"a group has {size} members, the credit is {room}"
        self.activity.waits(peer, "lease", reason, now)
        return Wait(reason=reason)

    def renew(self, peer: str, request: Renew, now: float) -> Reply:
        self.weights.note(peer, request, now)
        if request.still_s:
            slowest = max(request.still_s, key=request.still_s.__getitem__)
            self.activity.peers[peer].doing = (request.doing.get(slowest, ""), now)
        self.store.leases.note(peer, request.doing, request.still_s, now)
        lost = self.store.leases.renew(peer, request.progress, now)
        if lost:
            return Fenced(reason=f"groups {lost} are not leased to {peer} any more", groups=lost)
        return Ok()

    def release(self, peer: str, request: Release, now: float) -> Reply:
        """Take members back.

        A task whose environment keeps failing is quarantined in the end; an evaluation whose
        weights are gone is evicted.
        """
        lease = self.store.leases.held(peer, request.group_id)
        given = self.store.leases.release(peer, request.group_id, request.members)
        held = self.store.replay.at.groups.get(request.group_id)
        if request.reason in LOSING:
            self.status.failures.lose(len(given), now)
        if held is None or not given:
            return Ok()
        if lease is not None and request.reason in LOSING and held.kind == "rollout":
            seconds = [now - lease.since] * len(given)
            self.store.censoring.replay(held.task.env, request.reason, seconds)
        gone = request.reason == "weights" and held.pinned is not None
        if gone or request.reason == "environment":
            self.store.record(records.Failed(group_id=held.group_id, members=given))
            failures = held.failures
            if held.pinned is None:
                failures = self.store.state.tasks.cursor.failures[held.task.task_id]
            if failures >= self.config.buffer.max_attempts:
                if held.pinned is None:
                    task_id = held.task.task_id
                    self.store.record(records.Quarantined(task_id=task_id, reason=request.reason))
                self.store.evict([held.group_id], request.reason)
        return Ok()

    def _evaluate(self, peer: str) -> Ticket | None:
        found = self.store.state.evaluations.next()
        if found is None:
            return None
        evaluation, running = found
        if not self.weights.seen_by(peer, evaluation.weights):
            return None
        if running.name == DECIDING:
            source = self.store.state.sources[evaluation.stage]
            task = held_out_task(source, running.granted)
            return self._grant(peer, task, "eval", [0], evaluation.weights)
        chosen = self.eval_sets[evaluation.stage].get(running.name)
        if chosen is None:  # removed by a resume, which is about to abandon the evaluation
            return None
        number, sample = divmod(running.granted, running.k)
        episode = SetEpisode(running.name, number, chosen.temperature)
        guided = [sample] if chosen.guided else []
        place = chosen.task(number), "eval", [sample], evaluation.weights
        return self._grant(peer, *place, episode=episode, guided=guided)

    def _reissue(self, peer: str, room: int, split: bool) -> Ticket | None:
        """Grant missing members again, unless the disk has no room for what they would bring.

        `split`: grant some members of a group that has more than `room`. After a resume with
        smaller groups no actor has room for all of them.
        """
        if self.disk.full():
            return None
        for group_id, vacant in self.store.leases.vacant.items():
            # an actor has at most one ticket of a group
            if self.store.leases.held(peer, group_id) is not None:
                continue
            if len(vacant) > room and not split:
                continue
            held, members = self.store.replay.at.groups[group_id], sorted(vacant)[:room]
            weights = held.pinned or self.weights.demanded(peer, held.kind)
            if self.weights.allow(peer, held, weights):
                again = records.Reissued(
                    group_id=group_id, members=members, actor=peer, weights=weights
                )
                self.store.record(again)
                return self._ticket(group_id, members)
        return None

    def _explore(self, peer: str, room: int) -> Ticket | None:
        """Grant a group that explores for new tasks. It is not trained, so admission ignores it."""
        size = self.store.replay.numbers.group_size
        due = exploration_due(self.config, self.store.state)
        if size > room or not due or self.disk.obstacle():
            return None
        if self.weights.demanded(peer, "explore") is None:
            return None
        task = self.store.state.tasks.next_exploration()
        if task is None:
            return None
        return self._grant(peer, task, "explore", list(range(size)), None)

    def _queued(self) -> Queued | None:
        """The task of the next new group. Demonstrations use only the given tasks."""
        rollout = self.store.replay.numbers.kind == "rollout"
        return self.store.state.tasks.peek(self.config.tasks.synthetic if rollout else 0.0)

    def _new(self, peer: str, room: int) -> Ticket | None:
        numbers = self.store.replay.numbers
        held = self.weights.held(peer)
        if numbers.group_size > room or not self.store.replay.room(held) or self._obstacle():
            return None
        queued = self._queued()
        assert queued is not None, "no obstacle, so there is a task"
        task, kind = queued.task, numbers.kind
        if task.origin == "recorded":  # also beside rollouts
            kind = "demo"
        wait = kind == "rollout" and (numbers.wait or queued.wait)
        source = self.store.state.sources[self.store.replay.at.stage]
        members = list(range(source.members(task, numbers.group_size)))
        guided = [] if task.origin == "recorded" else self._guided(kind, queued.guided)
        return self._grant(peer, task, kind, members, None, wait, guided=guided)

    def _guided(self, kind: Kind, repeat: bool) -> list[int]:
        """Return the members of the next new group that experience guides.

        `repeat`: its task is met again because a group of it failed throughout.
        """
        config, rollout = self.config, self.config.rollout
        if config.experience.kind == "none" or kind == "branch":
            return []
        rule = rollout.guided if kind == "rollout" else "fixed"
        if not self.store.state.guidance.applies(rule, repeat):
            return []
        group_id = self.store.replay.at.next_group
        return guided_members(
            config.run.seed, group_id, rollout.group_size, rollout.guided_fraction
        )

    def _obstacle(self) -> str | None:
        """The obstacle to new groups apart from admission, None if there is none.

        Ready groups and bytes are one only while a whole take is ready: so the learner can always
        make room.
        """
        obstacle = self.disk.obstacle()
        if obstacle:
            return obstacle
        if self.forked and not self.store.replay.at.lineage:
            return "the learner has not told yet in which stage this fork begins"
        buffer, replay = self.config.buffer, self.store.replay
        ready, step = len(replay.by_state["ready"]), replay.numbers.groups_per_step
        if replay.numbers.kind == "rollout" and 0 < buffer.max_ready * step <= ready:
            return (
                f"{ready} groups are ready: buffer.max_ready={buffer.max_ready:g} steps of {step}"
            )
        if ready >= step:
            size = replay.bytes
            if size >= buffer.limit_bytes:
                return f"groups hold {size} bytes of buffer.limit_bytes={buffer.limit_bytes}"
        if self._queued() is None:
            if self.config.tasks.synthetic == 1 and not self.store.state.tasks.pool_size():
                return "no synthetic task yet: exploration is to find some"
            return "every task is quarantined"
        return None

    def _grant(
        self,
        peer: str,
        task: Task,
        kind: Kind,
        members: list[int],
        pinned: WeightId | None,
        wait: bool = False,
        episode: SetEpisode | None = None,
        guided: list[int] | None = None,
    ) -> Ticket:
        granted = records.Granted(
            group_id=self.store.replay.at.next_group,
            task=task,
            kind=kind,
            members=members,
            actor=peer,
            wait=wait,
            pinned=pinned,
            episode=episode,
            guided=guided or [],
            weights=pinned or self.weights.demanded(peer, kind),
        )
        self.store.record(granted)
        return self._ticket(granted.group_id, members)

    def _ticket(self, group_id: int, members: list[int]) -> Ticket:
        held = self.store.replay.at.groups[group_id]
        weights = held.owners[members[0]].weights
        ticket = ticket_of(self.stages[held.stage], held, members, weights)
        task = self.store.state.sources[held.stage].filled(held.task, len(held.members))
        return ticket if task is held.task else replace(ticket, task=task)
