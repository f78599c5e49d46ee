"""Censoring report: a comparison of evicted with trained rollouts in length and difficulty.

Eviction of slow groups biases training towards short episodes, so rollouts are compared by fate:
length in ACTION tokens, turns, seconds, and success as the measure of difficulty; over all and by
environment. Filtered groups are counted apart: selection is a judgement, not censoring.

Members of evicted groups that never arrived have no length; those that were leased at the time
count with the age of their lease, a lower bound of their seconds. So the report understates.
Members that are played again, as they failed or their lease ran out, are lost as well, and count
with the age of their lease.

Pure: time is an argument. A statistic of this buffer process since its start: unlike the ledger it
is not in the journal, and groups that arrived before a restart are missing from it.
"""

from collections.abc import Container

import msgspec

MEASURED = 64  # fewer trajectories on either side do not warn
RATIO, GAP = 1.5, 0.1  # above which the evicted count as longer, as harder
ENVS_SHOWN = 32  # in STATUS
REPEAT_S = 60.0
ALL = "all"  # the environments together


class Sums(msgspec.Struct):
    """Sums over trajectories that arrived, and over members that never did.

    `leased` of the `missing` were leased, for `lease_s` seconds in all.
    """

    trajectories: int = 0
    tokens: int = 0
    turns: int = 0
    seconds: float = 0.0
    successes: int = 0
    missing: int = 0
    leased: int = 0
    lease_s: float = 0.0

    def add(self, other: "Sums", sign: int = 1) -> None:
        self.trajectories += sign * other.trajectories
        self.tokens += sign * other.tokens
        self.turns += sign * other.turns
        self.seconds += sign * other.seconds
        self.successes += sign * other.successes
        self.missing += sign * other.missing
        self.leased += sign * other.leased
        self.lease_s += sign * other.lease_s

    @property
    def members(self) -> int:
        """Arrived and missing members together."""
        return self.trajectories + self.missing

    @property
    def timed(self) -> int:
        return self.trajectories + self.leased

    def means(self) -> dict[str, float]:
        """Means over the measured members; `seconds` includes unfinished leases."""
        means = {}
        if self.trajectories:
            for name in ("tokens", "turns", "successes"):
                means[name] = getattr(self, name) / self.trajectories
        if self.timed:
            means["seconds"] = (self.seconds + self.lease_s) / self.timed
        return means


class GroupChange(msgspec.Struct):
    """End of a group of rollouts; `fate` None: the group is held again.

    `missing` members never arrived; `leased_s`: the ages of their leases.
    """

    group_id: int
    env: str
    fate: str | None
    reason: str
    missing: int
    leased_s: list[float]


class Comparison(msgspec.Struct):
    """Ratios of lost to trained, None if one side is empty; the gap is trained minus lost."""

    evicted_share: float
    replayed_share: float
    length_ratio: float | None
    turns_ratio: float | None
    seconds_ratio: float | None
    success_gap: float | None


class Censoring:
    """Sums of received rollouts, by environment, and of ended ones, by fate and reason."""

    def __init__(self) -> None:
        self.received: dict[str, Sums] = {}  # by environment
        self.closed: dict[tuple[str, str], dict[str, Sums]] = {}  # by fate and reason
        self.replayed: dict[str, dict[str, Sums]] = {}  # by reason and environment
        self._groups: dict[int, Sums] = {}
        self._ends: dict[int, tuple[str, str]] = {}  # of the groups in `closed` that may come back
        self._warned = (-REPEAT_S, 0)  # time, and number of evicted members at that time

    def receive(self, group_id: int, env: str, trajectory: Sums) -> None:
        """Add an arrived member."""
        self.received.setdefault(env, Sums()).add(trajectory)
        self._groups.setdefault(group_id, Sums()).add(trajectory)

    def follow(self, change: GroupChange) -> None:
        """Add a group that ended, or subtract one that is held again."""
        sums = self._groups.setdefault(change.group_id, Sums())
        if change.fate is None:
            if change.group_id in self._ends:
                self._sums(*self._ends.pop(change.group_id), change.env).add(sums, -1)
            return
        sums.missing, sums.leased = change.missing, len(change.leased_s)
        sums.lease_s = sum(change.leased_s)
        self._sums(change.fate, change.reason, change.env).add(sums)
        self._ends[change.group_id] = (change.fate, change.reason)

    def replay(self, env: str, reason: str, leased_s: list[float]) -> None:
        """Add members that are played again, with the ages of their leases."""
        lost = Sums(missing=len(leased_s), leased=len(leased_s), lease_s=sum(leased_s))
        self.replayed.setdefault(reason, {}).setdefault(env, Sums()).add(lost)

    def lost(self, env: str = ALL) -> Sums:
        """Sum the members that were evicted and those that are played again."""
        total = self.total("evicted", env)
        for by_env in self.replayed.values():
            for name, sums in by_env.items():
                if env in (ALL, name):
                    total.add(sums)
        return total

    def forget(self, held: Container[int]) -> None:
        """Forget the groups that are not `held` any more."""
        for group_id in [group_id for group_id in self._groups if group_id not in held]:
            del self._groups[group_id]
            self._ends.pop(group_id, None)

    def total(self, fate: str, env: str = ALL) -> Sums:
        """Sum the members that ended with `fate`, over all reasons."""
        total = Sums()
        for (its_fate, _), by_env in self.closed.items():
            for name, sums in by_env.items():
                if its_fate == fate and env in (ALL, name):
                    total.add(sums)
        return total

    def compare(self, env: str = ALL) -> Comparison:
        trained, evicted = self.total("trained", env), self.total("evicted", env)
        gone = self.lost(env)
        ended = trained.members + self.total("filtered", env).members + gone.members
        kept, lost = trained.means(), gone.means()

        def ratio(name: str) -> float | None:
            return lost[name] / kept[name] if name in lost and kept.get(name) else None

        both = "successes" in kept and "successes" in lost
        return Comparison(
            evicted_share=evicted.members / ended if ended else 0.0,
            replayed_share=(gone.members - evicted.members) / ended if ended else 0.0,
            length_ratio=ratio("tokens"),
            turns_ratio=ratio("turns"),
            seconds_ratio=ratio("seconds"),
            success_gap=kept["successes"] - lost["successes"] if both else None,
        )

    def counters(self) -> dict[str, float]:
        """The comparison as metrics, without values that are None."""
        names = ("evicted_share", "replayed_share", "length_ratio", "seconds_ratio", "success_gap")
        values = {f"censor/{name}": getattr(self.compare(), name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def warning(self) -> str | None:
        """A sentence if evicted rollouts are longer or harder than trained ones, else None."""
        trained, evicted = self.total("trained"), self.lost()
        if trained.trajectories < MEASURED or evicted.timed < MEASURED:
            return None
        compared, kept, lost = self.compare(), trained.means(), evicted.means()
        findings = []
        if (compared.seconds_ratio or 0.0) > RATIO:
            findings.append(
                f"took {lost['seconds']:.1f} s and more (trained: {kept['seconds']:.1f})"
            )
        if evicted.trajectories >= MEASURED:
            if (compared.length_ratio or 0.0) > RATIO:
                findings.append(f"had {lost['tokens']:.0f} tokens (trained: {kept['tokens']:.0f})")
            if (compared.success_gap or 0.0) > GAP:
                findings.append(
                    f"succeeded at {lost['successes']:.2f} (trained: {kept['successes']:.2f})"
                )
        if not findings:
            return None
        return (
            f"lost rollouts are longer or harder than trained ones: the {evicted.members} "
            f"rollouts that were evicted ({compared.evicted_share:.0%}) or failed and were played "
            f"again ({compared.replayed_share:.0%}), of which {evicted.missing} never arrived, "
            f"{', '.join(findings)}; buffer.straggler=wait or a larger buffer.max_staleness keeps "
            "evicted ones, `failures` of the status names what failed"
        )

    def alarm(self, now: float) -> str | None:
        """The warning if it is due: at most once a minute, and only after further evictions."""
        before, count = self._warned
        if now - before < REPEAT_S:
            return None
        members = self.lost().members
        warning = self.warning() if members > count else None
        if warning:
            self._warned = (now, members)
        return warning

    def report(self) -> dict[str, object]:
        """The STATUS section: warning, comparison and table, over all and by environment."""
        rows = (*self.closed.values(), *self.replayed.values())
        envs = sorted(self.received.keys() | {env for row in rows for env in row})
        envs = envs[:ENVS_SHOWN]
        return {
            "warning": self.warning(),
            "comparison": {env: msgspec.to_builtins(self.compare(env)) for env in (ALL, *envs)},
            "table": {env: self._table(env) for env in (ALL, *envs)},
        }

    def _table(self, env: str) -> dict[str, dict[str, float]]:
        rows = {"received": self.received} | {
            f"{fate}: {reason}" if reason else fate: by_env
            for (fate, reason), by_env in sorted(self.closed.items())
        }
        rows |= {f"replayed: {reason}": row for reason, row in sorted(self.replayed.items())}
        table = {}
        for name, by_env in rows.items():
            sums = Sums()
            for its_env, part in by_env.items():
                if env in (ALL, its_env):
                    sums.add(part)
            if sums.members:
                counts = {"trajectories": sums.trajectories, "missing": sums.missing}
                table[name] = counts | {f"{key}_mean": mean for key, mean in sums.means().items()}
        return table

    def _sums(self, fate: str, reason: str, env: str) -> Sums:
        return self.closed.setdefault((fate, reason), {}).setdefault(env, Sums())
