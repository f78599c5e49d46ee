"""Arrivals: trajectories that actors push, checked against what was granted and recorded."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from evolver_async.buffer.log.capacity import DiskCapacity
from evolver_async.buffer.log.store import BufferStore
from evolver_async.buffer.monitor.failures import Failures
from evolver_async.buffer.monitor.first_data import FirstData
from evolver_async.buffer.monitor.peers import Activity
from evolver_async.buffer.state import records
from evolver_async.buffer.state.censoring import Sums
from evolver_async.buffer.state.groups import UNTRAINED, ZERO_SPREAD, HeldGroup
from evolver_async.buffer.state.ledger import Amount
from evolver_async.lineages import ends
from evolver_async.rewards import player_outcomes
from evolver_async.schema import REWARD_ROUNDING, SCRIPTED, Trajectory
from evolver_async.wire import messages
from evolver_async.wire.messages import Reply

RETRY_S = 1.0
LONGEST_S = 1e9  # an episode counts for no more, so that sums stay finite


@dataclass
class Arrivals:
    """Answers PUSH. `max_rewards`: the largest absolute reward that each stage allows; `advise`
    tells people, by a title and a text, that data teach nothing."""

    store: BufferStore
    disk: DiskCapacity
    activity: Activity
    failures: Failures
    max_rewards: list[float]
    first_data: FirstData
    advise: Callable[[str, str], None]

    def push(self, peer: str, trajectory: Trajectory, now: float) -> Reply:
        """Accept a granted member; the first copy counts, later ones are duplicates.

        A conversation of people is a duplicate where it has arrived, in whatever place. One whose
        place another has taken is stale, so its actor delivers it elsewhere.
        """
        store, group_id, member = self.store, trajectory.group_id, trajectory.member
        tokens = trajectory.action_tokens
        held = store.replay.at.groups.get(group_id)
        lives = trajectory.conversation is not msgspec.UNSET
        if trajectory.conversation in store.state.conversations:
            return self._refuse("duplicate", tokens, messages.Dup())
        if held is None or (lives and member in held.arrived):
            return self._refuse("stale", tokens, messages.Stale())
        if member in held.arrived:
            return self._refuse("duplicate", tokens, messages.Dup())
        problem = self._problem(held, trajectory)
        if problem:
            return self._refuse("rejected", tokens, messages.Reject(reason=problem))
        if self.disk.full():
            store.leases.note_arrival(peer, group_id, now)  # its ticket waits, it does not stall
            return messages.Retry(seconds=RETRY_S)
        self.activity.peers[peer].count(tokens, now)
        record = _arrival(trajectory, tokens)
        store.record(record, None if held.kind in UNTRAINED else trajectory)
        store.leases.finish(group_id, member, peer)
        if not held.missing:
            self.failures.finish()
        if held.kind == "rollout":
            seconds = min(trajectory.timing.get("total_s", 0.0), LONGEST_S)
            sums = Sums(1, tokens, record.turns, seconds, int(trajectory.success))
            store.censoring.receive(group_id, held.task.env, sums)
            self._look(held, trajectory)
        if store.replay.too_old(held):
            store.evict([group_id], "stale" if held.state == "ready" else "age")
        elif store.replay.lacks_spread(held):
            store.evict([group_id], ZERO_SPREAD)
            at, limit = store.replay.at, store.replay.numbers.refills
            if text := self.first_data.refill(at.stage, at.zero_spread, limit):
                self.advise("refills", text)
        return messages.Ack()

    def _look(self, held: HeldGroup, trajectory: Trajectory) -> None:
        spread = None if held.missing else held.spread
        if text := self.first_data.arrive(held.stage, trajectory, spread):
            self.advise("nothing to learn", text)

    def _refuse(self, fate: str, tokens: int, reply: Reply) -> Reply:
        self.store.state.ledger.refuse(fate, Amount(trajectories=1, tokens=tokens))
        return reply

    def _problem(self, held: HeldGroup, trajectory: Trajectory) -> str | None:
        """Reason why this is not the member that was granted, None if it is."""
        owner = held.owners.get(trajectory.member)
        if owner is None:
            return f"member: {trajectory.member} is not one of group {held.group_id}"
        # A lower attempt is accepted: its actor was slow, and the episode is as good.
        if trajectory.attempt > owner.attempt:
            return f"attempt: {trajectory.attempt}, the last one granted is {owner.attempt}"
        bound = self.max_rewards[held.stage]
        turns = max(map(abs, trajectory.turn_rewards.tolist()), default=0.0)
        own = max((abs(one.reward) for one in trajectory.players), default=0.0)
        sizes = ("reward", abs(trajectory.reward)), ("turn_rewards", turns), ("players.reward", own)
        for name, size in sizes:
            if size > bound * REWARD_ROUNDING:
                return f"{name}: {size:g}, the largest that safety.max_reward allows is {bound:g}"
        others = ("scripted", "recorded", "logged")
        expected = others if held.kind in SCRIPTED else ("learned",)
        if trajectory.policy not in expected and held.kind != "explore":  # by either policy
            return f"policy: {trajectory.policy} in a {held.kind} group"
        forks = self.store.replay.at.forks
        for sequence in trajectory.sequences:
            for run in sequence.versions:
                if held.pinned is not None and run.weights != held.pinned:
                    return f"versions: {run.weights}, the evaluation is of {held.pinned}"
                if run.weights.lineage not in forks:
                    return f"versions: {run.weights} is of no lineage of this run"
        return None


def own_numbers(trajectory: Trajectory) -> dict[str, float]:
    """Return the reward terms, the outcomes of players and the environment's own numbers, by the
    ends of their metrics."""
    terms = {f"reward/{name}": value for name, value in trajectory.terms.items()}
    terms |= player_outcomes(trajectory)
    return terms | {f"env/{name}": value for name, value in trajectory.metrics.items()}


def _arrival(trajectory: Trajectory, tokens: int) -> records.Arrived:
    """Make the record of a trajectory with so many ACTION tokens."""
    size = 0
    guided = False
    for one in trajectory.sequences:
        size += one.tokens.nbytes + one.roles.nbytes + one.turns.nbytes + one.logprobs.nbytes
        guided = guided or one.guided
    return records.Arrived(
        group_id=trajectory.group_id,
        member=trajectory.member,
        attempt=trajectory.attempt,
        content=trajectory.content,
        tokens=tokens,
        bytes=size,
        reward=trajectory.reward,
        success=trajectory.success,
        guided=guided,
        turns=len(trajectory.turn_rewards),
        sampled=ends(trajectory),
        numbers=own_numbers(trajectory),
        players={one.name: (one.reward, one.success) for one in trajectory.players if one.turns},
        conversation=trajectory.conversation or 0,
    )
