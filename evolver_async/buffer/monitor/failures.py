"""Failures of agents, environments, endpoints and the policy: totals of the run, and its end.

Pure: time is an argument. Actors count and tell totals since their start; here they are added up by
kind and name, with the last error of each. Everything kept is bounded, whatever is told.
"""

import msgspec

from evolver_async.schema import FailureTotal

MOST_KEPT = 32  # things with failures of their own; the one that failed longest ago goes
MOST_TOLD = 4096  # totals of single processes
PATIENCE_S = 30.0  # an outage that is over within this time ends no run


class FailureEntry(msgspec.Struct):
    """The failures of one thing, told last by `actor` at `at`."""

    total: FailureTotal
    actor: str
    at: float


class Failures:
    """The failures of one run. `most`: lost episodes that end it (0: none does)."""

    def __init__(self, most: int) -> None:
        self.kept: dict[tuple[str, str], FailureEntry] = {}
        self._most = most
        self._told: dict[tuple[str, str, str], int] = {}  # by process, kind and name
        self._counts: dict[str, int] = {}  # by kind
        self._lost = 0  # episodes that came to nothing, in the whole run
        self._in_row = 0  # of these, since a group was finished last
        self._since = 0.0  # when the first of them was lost

    def begin(self, actor: str) -> None:
        """A new process of this name counts anew."""
        self._told = {key: count for key, count in self._told.items() if key[0] != actor}

    def take_in(self, actor: str, totals: list[FailureTotal], now: float) -> None:
        """Add what a process tells; totals that are not above those told before change nothing."""
        for told in totals:
            name = plain(told.name)
            place = (actor, told.kind, name)
            more = told.count - self._told.get(place, 0)
            if more <= 0:
                continue
            self._told.pop(place, None)
            self._told[place] = told.count
            if len(self._told) > MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._counts[told.kind] = self._counts.get(told.kind, 0) + more
            before = self.kept.pop((told.kind, name), None)
            total = FailureTotal(
                kind=told.kind,
                name=name,
                error=plain(told.error),
                count=min(1 << 53, more + (before.total.count if before else 0)),
            )
            self.kept[told.kind, name] = FailureEntry(total, actor, now)
            if len(self.kept) > MOST_KEPT:
                del self.kept[next(iter(self.kept))]

    def lose(self, episodes: int, now: float) -> None:
        """Episodes of a ticket came to nothing."""
        if not self._in_row:
            self._since = now
        self._lost += episodes
        self._in_row += episodes

    def finish(self) -> None:
        """A group was finished: not everything fails."""
        self._in_row = 0

    def verdict(self, playing: int, now: float) -> str:
        """The reason for which the run cannot go on; "" while it can.

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
        """The newest failure in words."""
        if not self.kept:
            return "no process has told an error"
        return str(self.kept[next(reversed(self.kept))].total)

    def totals(self) -> list[FailureTotal]:
        """By kind and name, the newest first."""
        return [kept.total for kept in reversed(self.kept.values())]

    def report(self, now: float) -> list[dict[str, object]]:
        """The same for STATUS: plain values."""
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
        """Totals by metric name, of the kinds that there were."""
        counted = {f"failures/{kind}": float(count) for kind, count in self._counts.items()}
        return counted | ({"failures/episodes": float(self._lost)} if self._lost else {})


def plain(text: str) -> str:
    """Text of unknown origin on one line, with question marks for what is not printable."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in line)
