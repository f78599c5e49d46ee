"""Reports of the buffer: reasons for waiting, the STATUS reply, the counters."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.monitor.failures import Failures
from evolver_async.buffer.monitor.peers import Activity
from evolver_async.buffer.monitor.stalls import Stalls
from evolver_async.buffer.state.censoring import Censoring
from evolver_async.buffer.state.groups import UNTRAINED, HeldGroup
from evolver_async.buffer.state.leases import Leases
from evolver_async.buffer.state.ledger import CLOSED, REFUSED, Amount
from evolver_async.buffer.state.machine import BufferState
from evolver_async.metrics.activity import SYNC_S
from evolver_async.schema import WeightId

SHOWN = 32  # groups, evaluations and environments
PEERS_SHOWN = 256, 64, 16  # also stalls and quarantined tasks; the newest heard
STATUS_BYTES = (1 << 20) - 4096  # the rest of a header is small
TEXT_CHARS = 500


def ledger_amounts(state: BufferState) -> dict[str, Any]:
    """Amounts by kind: received, held, ended; and counts of refused trajectories."""
    ledger = state.ledger
    amounts = {
        "received": ledger.received,
        "held": state.held(),
        **{
            fate: {kind: fates[fate] for kind, fates in ledger.closed.items() if fate in fates}
            for fate in CLOSED
        },
        "refused": ledger.refused,
    }
    return msgspec.to_builtins(amounts)


@dataclass
class StatusReport:
    """Reports on the parts of the service; changes nothing."""

    state: BufferState
    leases: Leases
    journal: Journal
    activity: Activity
    censoring: Censoring
    stalls: Stalls
    failures: Failures
    lease_s: float
    synthetic: list[float]  # shares of the pool of tasks, by stage

    def __post_init__(self) -> None:
        self._sampled_before = self.state.ledger.sampled_tokens()  # of earlier buffer processes

    def admission(self, held: WeightId | None, now: float) -> str:
        """Reason why no further group fits, and the process that can change it.

        `held`: the newest weights that the asking actor has held.
        """
        replay = self.state.replay
        if replay.numbers.kind == "rollout" and replay.at.head is None:
            return "no learner has announced itself yet"
        lacks = replay.numbers.kind == "rollout" and replay.demanded(held) is None
        if lacks or replay.outstanding() + replay.numbers.reuse <= replay.limit():
            return f"needs newer weights: the head is {replay.at.head}, the actor has held {held}"
        waits_for = self.activity.learner_waits(now)
        first = next(iter(replay.by_state["open"].values()), None)
        if first and len(replay.by_state["ready"]) < replay.numbers.groups_per_step:
            waits_for = self.group(first, now)
        return (
            f"full: {replay.outstanding()} of {replay.limit()} uses outstanding "
            f"({self._occupancy()}); waits for {waits_for}"
        )

    def take(self, now: float) -> str:
        """The groups that the learner's next take lacks, with their actors and since when."""
        replay = self.state.replay
        lacking = f"{self._occupancy()} of {replay.numbers.groups_per_step} needed"
        # no more than the first of each: a waiting learner asks again after every message
        enough = len(replay.by_state["ready"]) >= replay.numbers.groups_per_step
        straggler = next(replay.stragglers(), None) if enough else None
        if straggler:
            return f"{lacking}; waits for the stragglers of {self.group(straggler, now)}"
        opened = replay.by_state["open"].values()
        if first := next((held for held in opened if held.kind not in UNTRAINED), None):
            return f"{lacking}; waits for {self.group(first, now)}"
        if first := next((held for held in opened if held.kind == "explore"), None):
            if self.state.tasks.peek(self.synthetic[replay.at.stage]) is None:
                explored = self._questioning()["explored"]
                return f"{lacking}; waits for a task: {explored:.0f} explorations have found none"
            return f"{lacking}; waits for {self.group(first, now)}"
        if starting := self.activity.starting(now):
            return f"{lacking}; {starting}"
        actors = self.activity.alive(now, self.lease_s)
        refused = ""
        for name in sorted(self.activity.actors, reverse=True):
            if reason := self.activity.peers[name].waits.get("lease", ("", 0.0))[0]:
                refused = f"; {name} was refused: {reason}"
        return f"{lacking}; {actors} actors alive{refused}"

    def refills(self) -> str:
        """Reason why dynamic sampling stops refilling."""
        replay = self.state.replay
        ready = len(replay.by_state["ready"])
        equal = "successes" if replay.numbers.by_success else "rewards"
        return (
            f"selection.max_refills: {replay.at.zero_spread} groups since the last take had equal"
            f" {equal} throughout, and only {ready} of {replay.numbers.groups_per_step} had not:"
            " the tasks are too easy or too hard for this policy"
        )

    def reason_to_stop(self, now: float) -> str:
        """Reason why no data can come any more, "" if some can."""
        playing = self.leases.playing
        if reason := self.failures.reason_to_stop(playing, now):
            return reason
        replay, tasks = self.state.replay, self.state.tasks
        if playing or replay.by_state["open"] or not tasks.exhausted():
            return ""
        reasons = sorted(set(tasks.cursor.quarantined.values()))
        return (
            f"every task is quarantined ({', '.join(reasons)}; see buffer.max_attempts) and no"
            f" group is left: {self.failures.last}"
        )

    def group(self, held: HeldGroup, now: float) -> str:
        """Describe the missing members of a group: their actors, and since when."""
        parts = [
            f"members {sorted(lease.members)} from {lease.peer} for {now - lease.since:.1f} s"
            for lease in self.leases.of_group(held.group_id)
        ]
        vacant = sorted(self.leases.vacant.get(held.group_id, ()))
        if vacant:
            parts.append(f"members {vacant} to be granted again")
        return f"group {held.group_id}: {', '.join(parts)}"[:TEXT_CHARS]

    def full(self, now: float) -> dict[str, object]:
        """The STATUS reply: plain nested values, of fewer processes where all do not fit."""
        status = {}
        for shown in PEERS_SHOWN:
            status = self._showing(shown, now)
            if len(msgspec.msgpack.encode(status)) <= STATUS_BYTES:
                break
        return status

    def _showing(self, shown: int, now: float) -> dict[str, object]:
        replay, at = self.state.replay, self.state.replay.at
        opened = sorted(replay.by_state["open"].values(), key=lambda held: held.group_id)
        heard = reversed(self.activity.peers.items())  # the last heard first
        actors = [name for name, _ in heard if name in self.activity.actors][:shown]
        waiting = [name for name, peer in reversed(self.activity.peers.items()) if peer.waits]
        leases = Counter(lease.peer for lease in self.leases)
        quarantined = self.state.tasks.cursor.quarantined
        return {
            "stalled": [
                {
                    "who": stall.who,
                    "about": stall.about,
                    "what": stall.what[:TEXT_CHARS],
                    "for_s": stall.for_s,
                    "silent": stall.silent,
                }
                for stall in self.stalls.find(now)[:shown]
            ],
            "busy": [
                {"who": one.who, "phase": one.phase, "for_s": one.for_s}
                for one in self.stalls.busy[:shown]
            ],
            "progress": self.progress(now),
            "failures": self.failures.report(now),
            "stage": at.stage,
            "head": str(at.head) if at.head else None,
            "take": at.next_take,
            "kept": at.kept,
            "repeats": dict(at.repeats),
            "outstanding": replay.outstanding(),
            "limit": replay.limit(),
            "groups": {state: len(groups) for state, groups in replay.by_state.items()},
            "ledger": ledger_amounts(self.state) | self._generated(),
            "censoring": self.censoring.report(),
            "actors": {name: self._peer(name, leases[name], now) for name in sorted(actors)},
            "actors_not_shown": len(self.activity.actors) - len(actors),
            "learner": self.activity.learner_waits(now),
            "waiting": {
                name: {
                    request: {"reason": reason, "for_s": now - since}
                    for request, (reason, since) in peer.waits.items()
                }
                for name in sorted(waiting[:shown])
                for peer in [self.activity.peers[name]]
            },
            "open": [self.group(held, now) for held in opened[:SHOWN]],
            "evaluations": [
                f"{e.weights}: {e.arrived} of {e.episodes} episodes, {e.granted} granted{e.by_set}"
                for e in self.state.evaluations.running[:SHOWN]
            ],
            "quarantined": {
                name[:TEXT_CHARS]: quarantined[name] for name in list(quarantined)[-shown:]
            },
            "questioning": self._questioning(),
            "journal": {
                "bytes": self.journal.size,
                "segments": len(self.journal.sizes),
                "disk_free_bytes": self.journal.free,
                "problem": self.journal.problem,
            },
        }

    def members(self) -> tuple[int, int]:
        """Members of the next take that have arrived, and those that it needs."""
        replay = self.state.replay
        numbers, size = replay.numbers, replay.numbers.group_size
        ready = min(numbers.groups_per_step, len(replay.by_state["ready"]))
        opened = (g for g in replay.by_state["open"].values() if g.kind not in UNTRAINED)
        arrived = sorted((len(group.arrived) for group in opened), reverse=True)
        left = numbers.groups_per_step - ready
        return ready * size + sum(arrived[:left]), numbers.groups_per_step * size

    def progress(self, now: float) -> dict[str, object] | None:
        """Progress of the learner's present step, None before it was heard.

        `phase` data: `done` of `needed` members have arrived; else a phase of its computations,
        whose passes are done to `share`. `for_s`: seconds so far of either, `eta_s` the rest of
        them by the pace so far, None without one. `data_s`: of the wait for the step's data.
        `still_s`: since the learner last worked; `longest_s`: of its longest step.
        """
        activity = self.activity
        if activity.learner is None:
            return None
        peer = activity.peers[activity.learner]
        beat = peer.beat
        found: dict[str, object] = {
            "step": self.state.replay.at.next_take + 1,
            "phase": "",
            "share": 0.0,
            "for_s": 0.0,
            "eta_s": None,
            "data_s": activity.data_s,
            "still_s": now - peer.worked_at,
            "longest_s": activity.step_s,
            "done": 0,
            "needed": 0,
            "micro_batches": 0,
            "tokens": 0,
        }
        if "sample" in peer.waits:
            (done, needed), since = self.members(), peer.waits["sample"][1]
            for_s = now - max(since, now if activity.granted is None else activity.granted)
            begun = done - activity.data_from
            found |= {"phase": "data", "done": done, "needed": needed, "for_s": for_s}
            found["share"] = min(1.0, done / needed) if needed else 0.0
            if begun > 0:
                found["eta_s"] = (needed - done) * for_s / begun
        elif beat is not None and now - peer.beat_at <= self.lease_s:
            late_s = now - peer.beat_at
            found |= {"phase": peer.phase, "share": beat.share, "tokens": beat.tokens}
            found["micro_batches"] = beat.micro_batches
            if beat.step_s:
                found |= {"step": beat.step, "for_s": beat.step_s + late_s}
                if beat.share > 0:
                    found["eta_s"] = max(0.0, beat.left_s - late_s)
        return found

    def counters(self, now: float) -> dict[str, float]:
        """The metrics that go to the learner with every reply to DONE.

        `ledger/*`: trajectories, where the name does not say tokens or turns.
        """
        replay, ledger = self.state.replay, self.state.ledger
        kind = replay.numbers.kind
        counters: dict[str, float] = {
            f"buffer/{state}": float(len(replay.by_state[state]))
            for state in ("open", "ready", "taken")
        }
        counters["buffer/bytes"] = float(replay.bytes)
        for outcome, takes in replay.at.repeats.items():
            counters[f"buffer/repeats/{outcome}"] = float(takes)
        counters["buffer/outstanding"] = float(replay.outstanding())
        counters["buffer/quarantined"] = float(len(self.state.tasks.cursor.quarantined))
        counters |= self.state.guidance.counters()
        counters["actors/alive"] = float(self.activity.alive(now, self.lease_s))
        received = ledger.received.get(kind, Amount())
        counters["ledger/received"] = float(received.trajectories)
        turns = (count for kind, count in ledger.turns.items() if kind != "eval")
        counters["ledger/received_turns"] = float(sum(turns))
        for fate in CLOSED:
            counters[f"ledger/{fate}"] = float(ledger.total(kind, fate).trajectories)
        for fate in REFUSED:
            counters[f"ledger/{fate}"] = float(ledger.refused[fate].trajectories)
        for name, tokens in self._generated().items():
            counters[f"ledger/{name}"] = float(tokens)
        if "explore" in ledger.received or self.state.tasks.known:
            values = self._questioning()
            counters |= {f"questioning/{name}": value for name, value in values.items()}
        counters |= self.activity.host_cpu_share(now, self.lease_s)
        if syncs := [*self.journal.sync_s]:
            counters[SYNC_S] = sum(syncs) / len(syncs)
        counters |= self.activity.engine_levels(now, self.lease_s)
        reported = self.activity.counters()  # must not replace the buffer's own
        counters |= self.failures.counters()
        return reported | counters | self.censoring.counters() | self.stalls.counters(now)

    def _questioning(self) -> dict[str, float]:
        """Counts of explorations and of the pool of synthetic tasks, offers and outcomes included.

        `tried`: tasks with a complete group; `useful`: tried tasks that some members of the newest
        group solved and others did not.
        """
        tasks, ledger = self.state.tasks, self.state.ledger
        cursor = tasks.cursor
        tried = [value for name, value in cursor.success.items() if name in tasks.known]
        return {
            "explored": float(ledger.received.get("explore", Amount()).trajectories),
            "explored_turns": float(ledger.turns.get("explore", 0)),
            "pool_size": float(tasks.pool_size()),
            "offered": float(len(cursor.pool) + cursor.duplicates),
            "duplicates": float(cursor.duplicates),
            "tried": float(len(tried)),
            "useful": float(sum(0 < value < 1 for value in tried)),
        }

    def _generated(self) -> dict[str, int]:
        """Tokens that actors sampled since this buffer started, and those never accepted.

        The latter were lost with an actor, refused, or are under way. Actors report with each
        LEASE, so what is accepted may be ahead of it, and then none are.
        """
        generated = self.activity.generated()
        received = self.state.ledger.sampled_tokens() - self._sampled_before
        unacknowledged = max(0, generated - received)
        return {"generated_tokens": generated, "unacknowledged_tokens": unacknowledged}

    def _occupancy(self) -> str:
        by_state = self.state.replay.by_state
        return ", ".join(f"{len(by_state[state])} {state}" for state in ("open", "taken", "ready"))

    def _peer(self, name: str, leases: int, now: float) -> dict[str, object]:
        peer = self.activity.peers[name]
        trajectories, tokens = peer.rates(now)
        error, error_at = peer.failed or ("", now)
        return {
            "state": self._peer_state(name, leases, now),
            "weights": str(peer.weights) if peer.weights else None,
            "trajectories_per_s": trajectories,
            "tokens_per_s": tokens,
            "phase": peer.phase,
            "seen_s_ago": now - max(peer.seen, peer.beat_at),
            "leases": leases,
            "doing": peer.doing[0][:TEXT_CHARS] if peer.doing and leases else "",
            "error": error[:TEXT_CHARS],
            "error_s_ago": now - error_at,
        }

    def _peer_state(self, name: str, leases: int, now: float) -> str:
        """The state of an actor: left, silent, behind, working, waiting or idle.

        silent: neither heard nor at work for longer than a lease lasts. behind: it plays nothing
        since its weights are too old.
        """
        peer = self.activity.peers[name]
        if peer.left:
            return "left"
        if now - peer.worked_at > self.lease_s:
            return "silent"
        if leases:
            return "working"
        if peer.behind_since is not None:
            return "behind"
        return "waiting" if "lease" in peer.waits else "idle"
