"""Fault 31: whatever actors, a learner and crashes do, in any order, the buffer keeps its word.

Hypothesis plays; the service is the real one on a real journal. The oracle is a few dictionaries:
which members were acknowledged with what content, who may work on what, which takes the present
lineage consists of, how the versions descend from each other. It predicts every reply, and exactly
which groups the buffer holds. Wherever play ends, actors and a learner that do what they should
get on from there, through the rest of the run.

    HYPOTHESIS_PROFILE=nightly make faults ARGS=-kmachine     at least 10,000 steps
"""

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from buffer_world import World, config, synthetic, trajectory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from invariants import check_journal

from evolver_async.buffer.log import segment
from evolver_async.buffer.state.admission import KINDS
from evolver_async.buffer.state.leases import COUNTED_S
from evolver_async.config import QuestioningConfig
from evolver_async.schema import Ticket, Trajectory, WeightId
from evolver_async.wire import messages

PEERS = ("actor-0", "actor-1")
LEASE_S, MAX_ATTEMPTS = 10.0, 2
EXPLORING, POOL = 2, 6  # explorations at a time, tasks of the pool
MEMBERS, GROUPS = 2, 2  # of a group, of a take
STAGES, ROUNDS, TAKES = 2, 8, 3  # at most so many rounds for so many takes of every stage
UNFINISHED = b"".join(segment.commit(segment.record(b"head", b"body", 0)))
NIGHTLY_STEPS = 10_000
peers = st.sampled_from(PEERS)
Version = tuple[int, int]  # lineage, step


@dataclass
class Entry:
    """One group as the oracle knows it. `heads`: the head when each member was granted last."""

    kind: str
    stage: int
    heads: dict[int, Version]
    owners: dict[int, str]
    rewards: dict[int, float] = field(default_factory=dict)  # of the acknowledged copies
    sampled: dict[int, Version] = field(default_factory=dict)
    uses: set[int] = field(default_factory=set)  # takes of this lineage
    evicted: bool = False


@dataclass
class Take:
    """`head`: when its groups were chosen; `version`: what was made of them last."""

    lineage: int
    stage: int
    groups: list[int]
    head: Version | None
    reported: bool = False
    version: int | None = None


class Machine(RuleBasedStateMachine):
    """What actors (`lease`, `push`, …), learner (`sample`, `done`, …) and fate (`crash`) do."""

    steps = 0  # rules that were run, by all machines together

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="machine-", dir="/dev/shm"))
        self.rewards = itertools.count(1)
        self.progress = itertools.count(1)
        self.tickets: list[tuple[str, Ticket]] = []
        self.groups: dict[int, Entry] = {}
        self.failures: dict[str, int] = {}  # by task, since one of its groups was whole
        self.leases: dict[tuple[int, int], tuple[str, float]] = {}  # peer and deadline
        self.delivered: set[int] = set()  # groups of which actor-0, who alone pushes, sent all
        self.weights: dict[str, WeightId] = {}  # that an actor has received
        self.pool: set[str] = set()
        self.quarantined: set[str] = set()
        self.takes: dict[int, Take] = {}
        self.undone: dict[int, Take] = {}  # by a resume: to be repeated
        self.parents: dict[int, tuple[int, int]] = {}  # of a lineage: parent and step of the fork
        self.checkpoints = [(0, 0, 0, 0)]  # lineage, take, version, stage
        self.lineage = self.version = self.next_take = self.kept = self.stage = self.floor = 0

    @initialize(
        reuse=st.integers(1, 2),
        staleness=st.integers(1, 2),
        lag=st.integers(0, 2),
        straggler=st.sampled_from(("evict", "wait")),
        sampler=st.sampled_from(("fifo", "freshest", "prioritized")),
    )
    def begin(self, reuse: int, staleness: int, lag: int, straggler: str, sampler: str) -> None:
        self.reuse, self.staleness = reuse, staleness
        self.weight_lag = min(lag, staleness + 1 - reuse)
        self.config = config(
            stages=["rl"] * STAGES,
            weight_lag=self.weight_lag,
            group_size=MEMBERS,
            groups_per_step=GROUPS,
            reuse=reuse,
            max_staleness=staleness,
            straggler=straggler,
            sampler=sampler,
            lease_s=LEASE_S,
            stall_s=1e9,
            archive="all",
            max_attempts=MAX_ATTEMPTS,
            synthetic=0.5,
            questioning=QuestioningConfig(kind="goals", every=2, groups=EXPLORING, max_tasks=POOL),
        )
        self.world = World(self.directory, self.config, segment_bytes=2048)
        self.resume(0, False)
        self.checkpoints = self.checkpoints[-1:]  # nobody begins anew once something is trained
        Machine.steps -= 1

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for stage in range(self.stage, STAGES):
                self.get_on(stage)
            self.world.store.journal.close()
            acked = [(g, m) for g, entry in self.groups.items() for m in entry.rewards]
            check_journal(self.directory, self.config, "run", acked)
        shutil.rmtree(self.directory)

    # ---- actors

    @rule(peer=peers, credit=st.sampled_from((0.5, 1, 1.5, 2, 3)), newest=st.booleans())
    def lease(self, peer: str, credit: float, newest: bool) -> None:
        """An actor that has perhaps not received the newest weights that it can play with yet."""
        seen = newest or peer not in self.weights
        if seen:
            self.weights[peer] = self.adopted()
        weights, began = self.weights[peer], min(self.floor, self.version)
        if seen and self.weight_lag:  # a ticket tells it to load those that the stage began with
            weights = max(weights, WeightId(lineage=self.lineage, step=began))
        late = self.version - weights.step if weights.lineage == self.lineage else 0
        late = max(late, self.weight_lag)
        held, visible = self.weights[peer], self.head() if seen else self.weights[peer]
        for ticket in self.world.lease(credit, peer, held, visible):
            assert ticket.weights is not None and ticket.weights <= weights
            assert ticket.weights.step >= began, "older weights are not of this stage"
            assert ticket.weights.lineage == self.lineage
            self.tickets.append((peer, ticket))
            members = dict.fromkeys(ticket.members, (self.lineage, self.version))
            owners = dict.fromkeys(ticket.members, peer)
            if ticket.attempt == 0:
                assert ticket.group_id not in self.groups
                entry = Entry(ticket.kind, self.stage, members, owners)
                self.groups[ticket.group_id] = entry
                limit = (self.staleness + 1 - late) * GROUPS
                assert ticket.kind == "explore" or self.world.replay.outstanding() <= limit
                held = [entry for g, entry in self.groups.items() if self.held(g)]
                assert sum(entry.kind == "explore" for entry in held) <= EXPLORING
                origin, task_id = ticket.task.origin, ticket.task.task_id
                assert (origin == "synthetic") == (task_id in self.pool)
                assert ticket.kind == "rollout" or origin == "original"
            entry = self.groups[ticket.group_id]
            entry.heads |= members
            entry.owners |= owners
            assert self.held(ticket.group_id) and not set(ticket.members) & entry.rewards.keys()
            for member in ticket.members:
                place = (ticket.group_id, member)
                assert place not in self.leases, f"{place} is leased to {self.leases[place]}"
                self.leases[place] = (peer, self.world.now + LEASE_S)
            self.delivered -= {ticket.group_id} if peer == "actor-0" else set()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), newest=st.booleans())
    def push(self, data: st.DataObject, newest: bool) -> None:
        """Any member of any ticket there ever was, so also copies and what zombies have."""
        ticket, member, weights = self.draw(data, newest)
        self.expect(ticket, member, weights, next(self.rewards))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def push_group(self, data: st.DataObject) -> None:
        ticket, _, weights = self.draw(data, False)
        for member in ticket.members:
            self.expect(ticket, member, weights, next(self.rewards))

    @rule(peer=peers)
    def tell_of_weights(self, peer: str) -> None:
        """A RENEW without tickets, as beside a parked LEASE, renews nothing and ends nothing."""
        assert isinstance(self.world.one(peer, messages.Renew(progress={})), messages.Ok)

    @rule(peer=peers)
    def renew(self, peer: str) -> None:
        groups = {ticket.group_id for owner, ticket in self.tickets if owner == peer}
        mine = {g for (g, _), (owner, _) in self.leases.items() if owner == peer}
        count = next(self.progress)
        request = messages.Renew(progress=dict.fromkeys(sorted(groups), count))
        reply = self.world.one(peer, request)
        fenced = set(reply.groups) if isinstance(reply, messages.Fenced) else set()
        assert fenced == groups - mine - (self.delivered if peer == "actor-0" else set())
        for place, (owner, _) in self.leases.items():
            if owner == peer:
                self.leases[place] = (peer, self.world.now + LEASE_S)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), reason=st.sampled_from(("drain", "environment")))
    def release(self, data: st.DataObject, reason: str) -> None:
        peer, ticket = data.draw(st.sampled_from(self.tickets[-6:]))
        request = messages.Release(group_id=ticket.group_id, members=ticket.members, reason=reason)
        assert isinstance(self.world.one(peer, request), messages.Ok)
        places = [(ticket.group_id, member) for member in ticket.members]
        given = [place for place in places if self.leases.get(place, ("", 0.0))[0] == peer]
        for place in given:
            del self.leases[place]
        if given and reason == "environment":
            task_id = ticket.task.task_id
            self.failures[task_id] = self.failures.get(task_id, 0) + 1
            if self.failures[task_id] >= MAX_ATTEMPTS:
                self.quarantined.add(task_id)
                self.evict(ticket.group_id)

    @rule(peer=peers, numbers=st.lists(st.integers(0, 2 * POOL), max_size=3))
    def offer(self, peer: str, numbers: list[int]) -> None:
        """The pool takes in what it does not have, as far as it has room."""
        found = {task.task_id: task for task in map(synthetic, numbers)}
        room = POOL - sum(task_id not in self.quarantined for task_id in self.pool)
        new = [task_id for task_id in found if task_id not in self.pool][: max(0, room)]
        self.world.one(peer, messages.Offer(tasks=list(found.values())))
        self.pool |= set(new)

    @rule(peer=peers)
    def leave(self, peer: str) -> None:
        self.world.one(peer, messages.Lease(credit=0))
        self.leases = {p: lease for p, lease in self.leases.items() if lease[0] != peer}
        self.delivered -= self.delivered if peer == "actor-0" else set()

    # ---- the learner

    @rule(again=st.booleans(), onward=st.sampled_from((False, False, True)))
    def sample(self, again: bool, onward: bool) -> None:
        """The next take, perhaps of the next stage, or, once more, the last one, unless the learner
        is done with it."""
        last = self.next_take - 1
        take = last if again and last in self.takes and last >= self.kept else self.next_take
        known = self.takes.get(take)
        if known is not None and known.lineage != self.lineage:
            return  # nobody asks for a take of his ancestors
        stage = self.stage if known is None else known.stage
        if known is None and not self.unreported(take - 1):
            stage = max(stage, int(onward))
            self.enter(stage)
        repeated = self.repeated(take) if known is None else None
        found = self.world.sample(take, self.lineage, stage)
        groups = [group.group_id for group in found]
        for group in found:
            entry = self.groups[group.group_id]
            content = {one.member: one.reward for one in group.trajectories}
            assert content == entry.rewards and len(content) == MEMBERS, "what was acknowledged"
        if repeated is not None:
            assert groups == repeated.groups, f"take {take} is repeated"
            self.takes[take] = repeated
            for group_id in groups:
                self.groups[group_id].uses.add(take)
            self.next_take += 1
        elif known is not None:
            assert groups == known.groups
        elif groups:
            assert not self.unreported(take - 1)
            assert len(set(groups)) == GROUPS
            for group_id in groups:
                assert self.held(group_id) and self.lag(group_id) <= self.staleness
                assert self.groups[group_id].stage == stage
                self.groups[group_id].uses.add(take)
                assert len(self.groups[group_id].uses) <= self.reuse
            self.takes[take] = Take(self.lineage, stage, groups, (self.lineage, self.version))
            self.next_take += 1

    @precondition(lambda self: self.taken() is not None)
    @rule(skipped=st.booleans(), filtered=st.integers(0, GROUPS), twice=st.booleans())
    def done(self, skipped: bool, filtered: int, twice: bool) -> None:
        taken = self.takes[self.next_take - 1]
        version = self.version + (not skipped)
        for _ in range(1 + twice):
            self.world.done(
                self.next_take - 1,
                taken.groups[filtered:],
                version,
                lineage=self.lineage,
                filtered={"spread": taken.groups[:filtered]} if filtered else {},
                skipped=skipped,
            )
        taken.reported = True
        if taken.version not in (None, version):
            for later in self.undone.values():
                later.head = later.version = None
        taken.version = version
        self.version = version
        self.checkpoints.append((self.lineage, self.next_take, version, taken.stage))
        self.sweep()

    @rule(back=st.integers(0, 3), discard=st.booleans())
    def resume(self, back: int, discard: bool) -> None:
        """A new learner begins from one of the newest checkpoints that are kept."""
        lineage, take, version, stage = self.checkpoints[-1 - min(back, len(self.checkpoints) - 1)]
        old = self.lineage
        request = messages.Resume(
            lineage=lineage, take=take, version=version, stage=stage, discard=discard
        )
        # another process than before: from the same one it would be the same request sent again
        reply = self.world.one(f"learner-{next(self.progress)}", request)
        assert isinstance(reply, messages.Resumed) and reply.lineage == old + 1
        self.lineage = reply.lineage
        fenced = self.world.one("zombie", messages.Sample(lineage=old, take=take, stage=stage))
        assert isinstance(fenced, messages.Fenced)
        self.parents[self.lineage] = (lineage, version)
        self.version, self.next_take = version, take
        self.floor = min(self.floor, version)
        for task_id in self.quarantined:
            self.failures.pop(task_id, None)
        self.quarantined = set()
        for number in [number for number in self.takes if number >= take]:
            self.undone[number] = self.takes.pop(number)
            self.undone[number].reported = False
            for group_id in self.undone[number].groups:
                entry = self.groups[group_id]
                entry.uses.discard(number)
                entry.evicted = False
        if discard:
            for taken in self.undone.values():
                for group_id in taken.groups:
                    self.evict(group_id)
            self.undone = {}
        for taken in self.takes.values():
            taken.reported = True
        self.checkpoints = [c for c in self.checkpoints if c[1] <= take]
        self.checkpoints.append((self.lineage, take, version, stage))
        self.enter(stage)
        self.sweep()

    @rule(back=st.integers(0, 3))
    def keep(self, back: int) -> None:
        take = self.checkpoints[-1 - min(back, len(self.checkpoints) - 1)][1]
        self.world.one("learner", messages.Kept(take=take))
        self.kept = max(self.kept, take)
        self.checkpoints = [c for c in self.checkpoints if c[1] >= self.kept]

    # ---- fate

    @rule(seconds=st.sampled_from((1.0, LEASE_S / 2, LEASE_S)))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        self.leases = {p: x for p, x in self.leases.items() if x[1] > self.world.now}

    @rule(seconds=st.sampled_from((2.0, 3 * LEASE_S)))
    def stand_still(self, seconds: float) -> None:
        """All but a second of it does not count, and no lease lasts longer than from now on."""
        self.world.stand_still(seconds)
        most, still = self.world.now + LEASE_S, seconds - COUNTED_S
        leases = {p: (peer, min(x + still, most)) for p, (peer, x) in self.leases.items()}
        self.leases = {p: x for p, x in leases.items() if x[1] > self.world.now}

    @rule(torn=st.integers(0, len(UNFINISHED) - 1))
    def crash(self, torn: int) -> None:
        """kill -9, perhaps in the middle of a write. Every lease begins anew."""
        self.world.store.journal.close()
        newest = max(self.directory.glob("*.log"))
        with open(newest, "ab") as file:
            file.write(UNFINISHED[:torn])
        self.reopen()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def crash_before_commit(self, data: st.DataObject) -> None:
        """What was handled and not committed was never answered: it can be sent again."""
        ticket, member, weights = self.draw(data, False)
        made = self.made(ticket, member, weights, next(self.rewards))
        self.world.service.handle("actor-0", messages.Push(trajectory=made), self.world.now)
        self.world.service.handle("actor-1", messages.Lease(credit=2), self.world.now)
        self.world.store.journal.close()
        self.reopen()

    @invariant()
    def holds_exactly_what_it_should(self) -> None:
        """Looked at after every rule, and once after `begin`."""
        if hasattr(self, "world"):
            Machine.steps += 1
            replay, pool = self.world.replay, self.world.store.state.tasks.cursor.pool
            live = {held.group_id for kind in KINDS for held in replay.live(kind)}
            assert {task.task_id for task in pool} == self.pool and len(pool) == len(self.pool)
            assert live == {group_id for group_id in self.groups if self.held(group_id)}

    # ---- what play must not have made impossible

    def get_on(self, stage: int) -> None:
        """Actors that finish what they are given, and a learner, come through a stage."""
        wanted = self.next_take + TAKES
        for _ in range(ROUNDS):
            if self.unreported(self.next_take - 1):
                self.train(self.takes[self.next_take - 1].groups)
            for peer in PEERS:
                held = self.adopted()
                for ticket in self.world.lease(2 * GROUPS, peer, held, self.head()):
                    assert ticket.weights is not None
                    assert ticket.weights.step >= self.floor, "older weights are not of this stage"
                    weights = max(held, ticket.weights)
                    for member in ticket.members:
                        made = self.made(ticket, member, weights, next(self.rewards))
                        self.world.one(peer, messages.Push(trajectory=made))
            self.enter(stage)
            if found := self.world.sample(self.next_take, self.lineage, stage):
                self.next_take += 1
                self.train([group.group_id for group in found])
            self.world.pass_time(LEASE_S)
        assert self.next_take >= wanted, f"stage {stage}: the learner waits for take {wanted - 1}"

    def train(self, groups: list[int]) -> None:
        self.version += 1
        self.world.done(self.next_take - 1, groups, self.version, lineage=self.lineage)
        self.takes.clear()

    # ---- the oracle

    def draw(self, data: st.DataObject, newest: bool) -> tuple[Ticket, int, WeightId]:
        """A ticket, most often a late one, a member of it, and allowed weights."""
        _, ticket = data.draw(st.sampled_from(self.tickets[-8:]))
        assert ticket.weights is not None
        weights = self.head() if newest else ticket.weights
        return ticket, data.draw(st.sampled_from(ticket.members)), weights

    def made(self, ticket: Ticket, member: int, weights: WeightId, reward: int) -> Trajectory:
        made = trajectory(ticket, member, weights=weights, reward=float(reward))
        made.turn_rewards = np.full(1, reward, np.float32)
        return made

    def expect(self, ticket: Ticket, member: int, weights: WeightId, reward: int) -> None:
        group_id = ticket.group_id
        entry = self.groups[group_id]
        made = self.made(ticket, member, weights, reward)
        reply = self.world.one("actor-0", messages.Push(trajectory=made))
        if self.held(group_id) and member not in entry.rewards:
            assert isinstance(reply, messages.Ack), reply
            entry.rewards[member] = float(reward)
            entry.sampled[member] = (weights.lineage, weights.step)
            owner, _ = self.leases.pop((group_id, member), ("", 0.0))
            left = {peer for (group, _), (peer, _) in self.leases.items() if group == group_id}
            if owner == "actor-0" and owner not in left:
                self.delivered.add(group_id)
            if entry.rewards.keys() == entry.heads.keys():
                self.failures.pop(ticket.task.task_id, None)
            if not entry.uses - self.reported() and self.too_old(group_id):
                self.evict(group_id)
        elif self.held(group_id):
            assert isinstance(reply, messages.Dup), reply
        elif member in entry.rewards:  # it may still be known, as its takes may come back
            assert isinstance(reply, messages.Dup | messages.Stale), reply
        else:
            assert isinstance(reply, messages.Stale), reply

    def reopen(self) -> None:
        self.world.open()
        self.delivered = set()
        self.leases = {
            (group_id, member): (owner, self.world.now + LEASE_S)
            for group_id, entry in self.groups.items()
            if self.held(group_id)
            for member, owner in entry.owners.items()
            if member not in entry.rewards
        }

    def repeated(self, take: int) -> Take | None:
        """The take that the buffer hands out again, if it does. As the fork is no news, its groups
        are as old as the first time; else none that was undone is repeated."""
        if take not in self.undone or self.unreported(take - 1):
            return None
        taken = self.undone.pop(take)
        head = taken.head or (self.lineage, self.version)
        late = any(self.lag(group_id, head) > self.staleness for group_id in taken.groups)
        if late or taken.stage != self.stage:
            self.undone = {}
            self.leave_other_stages()
            self.sweep()
            return None
        taken.lineage, taken.head = self.lineage, head
        return taken

    def head(self) -> WeightId:
        return WeightId(lineage=self.lineage, step=self.version)

    def adopted(self) -> WeightId:
        """The newest weights that an actor with a lag adopts by itself."""
        oldest = self.parents[self.lineage][1]
        return WeightId(lineage=self.lineage, step=max(oldest, self.version - self.weight_lag))

    def enter(self, stage: int) -> None:
        if stage != self.stage:
            self.stage, self.floor = stage, self.version
        self.leave_other_stages()

    def leave_other_stages(self) -> None:
        for group_id, entry in self.groups.items():
            taken = entry.uses - self.reported() or self.promised(group_id)
            if entry.stage != self.stage and self.held(group_id) and not taken:
                self.evict(group_id)

    def unreported(self, take: int) -> bool:
        """Whether the learner still owes the outcome of a take."""
        taken = self.takes.get(take)
        return taken is not None and not taken.reported and taken.lineage == self.lineage

    def reported(self) -> set[int]:
        return {number for number, taken in self.takes.items() if taken.reported}

    def taken(self) -> Take | None:
        """The take that is to be reported."""
        take = self.takes.get(self.next_take - 1)
        return None if take is None or take.reported or take.lineage != self.lineage else take

    def held(self, group_id: int) -> bool:
        entry = self.groups[group_id]
        if entry.kind == "explore":
            return not entry.evicted and entry.rewards.keys() != entry.heads.keys()
        return not entry.evicted and len(entry.uses & self.reported()) < self.reuse

    def evict(self, group_id: int) -> None:
        self.groups[group_id].evicted = True
        self.leases = {place: x for place, x in self.leases.items() if place[0] != group_id}

    def sweep(self) -> None:
        """What is too old ends, unless the learner has it."""
        for group_id, entry in self.groups.items():
            taken = entry.uses - self.reported() or self.promised(group_id)
            if self.held(group_id) and not taken and self.too_old(group_id):
                self.evict(group_id)

    def too_old(self, group_id: int) -> bool:
        return self.groups[group_id].kind == "rollout" and self.lag(group_id) > self.staleness

    def promised(self, group_id: int) -> bool:
        return any(group_id in taken.groups for taken in self.undone.values())

    def lag(self, group_id: int, head: Version | None = None) -> int:
        entry = self.groups[group_id]
        ways = [entry.sampled.get(member, entry.heads[member]) for member in entry.heads]
        return max(self.distance(version, head) for version in ways)

    def distance(self, version: Version, head: Version | None) -> int:
        """Versions on the way from `version` to the head in the tree of all versions."""
        ours, theirs = self.ancestors(head or (self.lineage, self.version)), self.ancestors(version)
        return len(set(ours) ^ set(theirs))

    def ancestors(self, version: Version) -> list[Version]:
        lineage, step = version
        path = []
        while step > 0:
            while lineage in self.parents and step <= self.parents[lineage][1]:
                lineage = self.parents[lineage][0]
            path.append((lineage, step))
            step -= 1
        return path


@pytest.fixture(scope="module", autouse=True)
def steps_are_counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Says how many rules were run; a nightly run that was short is no nightly run."""
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nthe state machine ran {Machine.steps} steps")
    if settings.get_current_profile_name() == "nightly":
        assert Machine.steps >= NIGHTLY_STEPS


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=50)
