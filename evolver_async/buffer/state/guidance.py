"""Guidance of rollout groups: the gain of guided members, and the rule by which it stops.

Pure and event-sourced: `granted` and `completed` follow from journal records, and the members that
a grant guides are part of its record. Which entries guide an episode is decided elsewhere.
"""

import math
from typing import Literal

import msgspec

from evolver_async.buffer.state.groups import HeldGroup

WINDOW = 200  # newest groups with guided and unguided members, from which the gain is estimated
LEAST = 30  # such groups before guidance can stop
Z = 1.645  # normal quantile of the one-sided 95 % confidence bound
PROBE_EVERY = 10  # while guidance has stopped, one group of so many is guided

GuidanceRule = Literal["fixed", "failed", "adaptive"]  # of `rollout.guided`


class GuidanceRecord(msgspec.Struct):
    """Record of the guidance of the stage's rollout groups.

    `gains`: success of guided minus success of unguided members in the newest groups that had
    both. `groups`: rollout groups granted; `guided`: those with members to guide; `wasted`: guided
    ones granted while the mean gain was at most 0, also before the rule can tell; `withheld`:
    unguided ones since the newest guided one.
    """

    gains: list[float] = []
    groups: int = 0
    guided: int = 0
    wasted: int = 0
    withheld: int = 0

    def granted(self, guided: bool) -> None:
        """Count a grant of a rollout group."""
        self.groups += 1
        self.guided += guided
        self.wasted += guided and bool(self.gains) and self.gain() <= 0
        self.withheld = 0 if guided else self.withheld + 1

    def completed(self, held: HeldGroup) -> None:
        """Add the gain of a complete group, if it has guided and unguided members."""
        by_kind: dict[bool, list[bool]] = {True: [], False: []}
        for member in held.arrived.values():
            by_kind[member.guided].append(member.success)
        guided, unguided = by_kind[True], by_kind[False]
        if guided and unguided:
            gain = sum(guided) / len(guided) - sum(unguided) / len(unguided)
            self.gains = [*self.gains, gain][-WINDOW:]

    def gain(self) -> float:
        """Return the mean gain of the window, 0 if it is empty."""
        return math.fsum(self.gains) / max(1, len(self.gains))

    def upper(self) -> float:
        """Return the upper confidence bound of the gain, inf with fewer than `LEAST` groups."""
        count, mean = len(self.gains), self.gain()
        if count < LEAST:
            return math.inf
        variance = math.fsum((gain - mean) ** 2 for gain in self.gains) / (count - 1)
        return mean + Z * math.sqrt(variance / count)

    def pays(self) -> bool:
        """Return False if the gain's upper confidence bound is at most 0."""
        return self.upper() > 0

    def applies(self, rule: GuidanceRule, repeat: bool) -> bool:
        """Return True if the next rollout group is to be guided.

        `repeat`: its task is met again because a group of it failed throughout.
        """
        if rule == "failed":
            return repeat
        probe = self.withheld >= PROBE_EVERY - 1
        return rule == "fixed" or probe or self.pays()

    def counters(self) -> dict[str, float]:
        """Return the metrics by name; none before the first guided group."""
        if not self.guided:
            return {}
        counters = {
            "guidance/groups": self.guided / self.groups,
            "guidance/wasted": self.wasted / self.guided,
        }
        if self.gains:
            counters["guidance/gain"] = self.gain()
        if len(self.gains) >= LEAST:
            counters["guidance/upper"] = self.upper()
        return counters
