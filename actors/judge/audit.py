"""Audit of a judge: how often it is right where the right label is known, and what it prefers.

Right labels are known of turns that changed the environment's score, and of the idle turns of a
probe (`probes.py`). The totals below travel to the learner, which turns them into rates and alarms
(docs/metrics.md). Probes are asked beside the episodes, as one of them, and never trained.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from actors.judge.judge import Judge, JudgedEpisode, Labels
from actors.judge.labels import BAD, GOOD, UNLABELLED
from actors.judge.probes import idled, idled_scores, praised

# `known`: turns with a known label that the judge has labelled; `praised`: turns of praised copies,
# GOOD with and without the praise; `longer`, `shorter`: labelled turns than the median of their
# episode. A judge of one's own can leave single turns unlabelled.
TOTALS = (
    *("probes", "probes_unlabelled", "known", "known_right"),
    *("praised", "praised_good", "unpraised_good"),
    *("longer", "longer_good", "shorter", "shorter_good"),
)

log = logging.getLogger(__name__)


class AuditedJudge(Judge):
    """Judge that is also asked about probes: `share` of them for each labelled episode."""

    def __init__(self, judge: Judge, share: float) -> None:
        super().__init__()
        self._judge = judge
        self._share = share
        self._credit = 0.0  # probes that may be asked
        self._made = 0
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def generated(self) -> int:
        return self._judge.generated

    async def label(self, episode: JudgedEpisode) -> Labels:
        """Return the judge's labels; a probe may be asked in the background."""
        labels, source = await self._judge.label(episode)
        if source and episode.turns and len(labels) == len(episode.turns):
            self._compare_scores(episode.scores, labels)
            self._compare_lengths([len(turn.said) for turn in episode.turns], labels)
            self._credit += self._share
            if self._credit > 1 - 1e-9:
                self._credit -= 1.0
                self._begin(episode, list(labels))
        return labels, source

    def counters(self) -> dict[str, float]:
        """Return the judge's totals and those of the audit."""
        totals = {f"judge/{name}": float(self._counts[name]) for name in TOTALS}
        return self._judge.counters() | totals

    async def settle(self) -> None:
        """Wait for the probes that are being asked."""
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await self.settle()
        await self._judge.close()

    def _begin(self, episode: JudgedEpisode, labels: list[int]) -> None:
        """Ask a probe made of the episode, by turns an idled and a praised one."""
        number, praises = divmod(self._made, 2)
        turns, places = ([], []) if praises else idled(episode.turns, number)
        if places:
            scores = idled_scores(episode.scores, places) if episode.scores else []
            asking = self._ask_idled(episode._replace(turns=turns, scores=scores), places)
        else:
            asking = self._ask_praised(episode, labels, number)
        self._made += 1
        task = asyncio.create_task(asking, name="probe")
        self._asking.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a probe of the judge failed", exc_info=error)

    async def _ask_idled(self, probe: JudgedEpisode, places: Sequence[int]) -> None:
        labels = await self._asked(probe)
        if labels is not None:
            self._compare([labels[place] for place in places], [BAD] * len(places))

    async def _ask_praised(
        self, episode: JudgedEpisode, labels: Sequence[int], number: int
    ) -> None:
        probed = await self._asked(episode._replace(turns=praised(episode.turns, number)))
        if probed is not None:
            self._counts["praised"] += len(probed)
            self._counts["praised_good"] += probed.count(GOOD)
            self._counts["unpraised_good"] += labels.count(GOOD)

    async def _asked(self, probe: JudgedEpisode) -> list[int] | None:
        """Return the judge's labels of a probe, None without any."""
        self._counts["probes"] += 1
        labels, source = await self._judge.label(probe)
        if source and len(labels) == len(probe.turns):
            return labels
        self._counts["probes_unlabelled"] += 1
        return None

    def _compare_scores(self, scores: Sequence[float], labels: Sequence[int]) -> None:
        """Count turns that raised the score as GOOD and those that lowered it as BAD."""
        if len(scores) != len(labels) + 1 or not all(map(math.isfinite, scores)):
            return
        steps = [after - before for before, after in pairwise(scores)]
        self._compare(
            [label for label, step in zip(labels, steps, strict=True) if step],
            [GOOD if step > 0 else BAD for step in steps if step],
        )

    def _compare(self, labels: Sequence[int], right: Sequence[int]) -> None:
        """Count labels, and those that are right."""
        for label, known in zip(labels, right, strict=True):
            if label != UNLABELLED:
                self._counts["known"] += 1
                self._counts["known_right"] += label == known

    def _compare_lengths(self, lengths: Sequence[int], labels: Sequence[int]) -> None:
        """Count GOOD among the turns with more and with less text than the episode's median."""
        middle = median(lengths) if lengths else 0.0
        for length, label in zip(lengths, labels, strict=True):
            if length != middle and label != UNLABELLED:
                half = "longer" if length > middle else "shorter"
                self._counts[half] += 1
                self._counts[f"{half}_good"] += label == GOOD
