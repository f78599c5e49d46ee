"""Failures of agents, environments, endpoints and the policy: totals, and the run's limit.

Pure: time is an argument. Actors report totals since their start; they are added up here by kind
and name, with the last error of each. All memory is bounded, whatever is reported.
"""

import msgspec

from evolver_async.terminal import plain
from evolver_async.wire.failure_totals import FailureTotal

MOST_KEPT = 32  # kinds and names; the one that failed longest ago is dropped
# Totals of single processes. A living one's must not be forgotten: it would count once more.
MOST_REPORTED = 1 << 16
PATIENCE_S = 30.0  # an outage that is over within this time ends no run


class FailureEntry(msgspec.Struct):
    """Failures of one kind and name, reported last by `actor` at time `at`."""

    total: FailureTotal
    actor: str
    at: float


class Failures:
    """The failures of one run. `most`: lost episodes that end it (0: none does)."""

    def __init__(self, most: int) -> None:
        self.kept: dict[tuple[str, str], FailureEntry] = {}
        self._most = most
        self._reported: dict[tuple[str, str, str], int] = {}  # by process, kind and name
        self._counts: dict[str, int] = {}  # by kind
        self._lost = 0  # failed episodes of the whole run
        self._in_row = 0  # failed episodes since a group was last finished
        self._since = 0.0  # time of the first of them

    def begin(self, actor: str) -> None:
        """Reset the totals of this name: a new process counts from 0."""
        self._reported = {key: count for key, count in self._reported.items() if key[0] != actor}

    def take_in(self, actor: str, totals: list[FailureTotal], now: float) -> str:
        """Add the increase of a process's totals over those it reported before.

        Return the last failure among those that increased, "" if none did.
        """
        last = ""
        for total in totals:
            name = plain(total.name)
            source = (actor, total.kind, name)
            before = self._reported.pop(source, 0)
            self._reported[source] = max(before, total.count)
            if len(self._reported) > MOST_REPORTED:  # the one that was reported longest ago goes
                del self._reported[next(iter(self._reported))]
            more = total.count - before
            if more <= 0:
                continue
            self._counts[total.kind] = self._counts.get(total.kind, 0) + more
            last = f"{total.kind.replace('_', ' ')} {name}: {plain(total.error)}"
            entry = self.kept.pop((total.kind, name), None)
            summed = FailureTotal(
                kind=total.kind,
                name=name,
                error=plain(total.error),
                count=min(1 << 53, more + (entry.total.count if entry else 0)),
            )
            self.kept[total.kind, name] = FailureEntry(summed, actor, now)
            if len(self.kept) > MOST_KEPT:
                del self.kept[next(iter(self.kept))]
        return last

    def lose(self, episodes: int, now: float) -> None:
        """Count failed episodes of a ticket."""
        if not self._in_row:
            self._since = now
        self._lost += episodes
        self._in_row += episodes

    def finish(self) -> None:
        """Reset the failures in a row: a group was finished."""
        self._in_row = 0

    def reason_to_stop(self, playing: int, now: float) -> str:
        """Reason why the run cannot go on, "" if it can.

        Each of the `playing` episodes may fail once beyond `most`: where many begin together, many
        can fail before the first group could be finished.
        """
        patient = now - self._since < PATIENCE_S
        if not self._most or self._in_row < self._most + playing or patient:
            return ""
        return (
            f"launch.max_failures: {self._in_row:,} episodes failed in {now - self._since:.0f} s"
            f" and no group was finished in between: {self.last}"
        )

    @property
    def last(self) -> str:
        """The newest failure in words; one of the policy, which loses no episode, only alone."""
        newest = list(reversed(self.kept.values()))
        if not newest:
            return "no process has reported an error"
        return str(next((one for one in newest if one.total.kind != "policy"), newest[0]).total)

    def totals(self) -> list[FailureTotal]:
        """Totals by kind and name, the newest first."""
        return [kept.total for kept in reversed(self.kept.values())]

    def report(self, now: float) -> list[dict[str, object]]:
        """Totals for STATUS as plain values."""
        return [
            {
                "kind": kept.total.kind,
                "name": kept.total.name,
                "count": kept.total.count,
                "error": kept.total.error,
                "actor": kept.actor,
                "seconds_ago": now - kept.at,
            }
            for kept in reversed(self.kept.values())
        ]

    def counters(self) -> dict[str, float]:
        """Totals by metric name, of the kinds that occurred."""
        counted = {f"failures/{kind}": float(count) for kind, count in self._counts.items()}
        return counted | ({"failures/episodes": float(self._lost)} if self._lost else {})
