"""A judge of one's own: its failures leave an episode unlabelled and are counted."""

import asyncio
import logging

from actors.envs.base import one_line
from actors.envs.return_checks import finite, text
from actors.failure_counts import FailureCounts
from actors.judge.judge import Judge, JudgedEpisode, Labels
from actors.judge.labels import checked_labels
from actors.rollout.environment import own_cancellation
from evolver_async.extension import RAISED

SOURCE_BYTES = 100  # of the source of labels, which goes into the header of a message

log = logging.getLogger(__name__)


class OwnJudge(Judge):
    """A user's judge, limited to `timeout_s` for each episode; None: without a limit."""

    def __init__(self, judge: Judge, timeout_s: float | None, failures: FailureCounts) -> None:
        super().__init__()
        self._judge = judge
        self._timeout_s = timeout_s
        self._failures = failures
        self._miscounted = False

    @property
    def generated(self) -> int:
        return self._judge.generated

    async def label(self, episode: JudgedEpisode) -> Labels:
        """Return the judge's labels; none if it fails, is late or gives other than one per turn."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                labels, source = await self._judge.label(episode)
            if not source:
                self._counts["unlabelled"] += 1
                return [], ""
            checked = checked_labels(labels, len(episode.turns)).tolist()
            named = _checked_source(source)
            self._counts["labelled"] += 1
            return checked, named
        except (*RAISED, asyncio.CancelledError) as error:
            if own_cancellation(error):
                raise
            late = f"judge.timeout_s={self._timeout_s} has passed"
            said = late if limit.expired() else one_line(error)
            log.warning("an episode stays unlabelled: %s", said)
            self._failures.note("judge", "judge.kind", said)
            self._counts["unlabelled"] += 1
            return [], ""

    def counters(self) -> dict[str, float]:
        """Return the judge's totals, with the labelled and unlabelled episodes as counted here.

        Unusable totals are a failure of the judge, which is noted once, and are left out.
        """
        try:
            totals = _checked_totals(self._judge.counters())
        except RAISED as error:  # a user's code, which can raise anything
            totals = {}
            if not self._miscounted:
                log.warning("judge.kind: the counters cannot be used: %s", one_line(error))
                self._failures.note("judge", "judge.kind", f"counters: {one_line(error)}")
            self._miscounted = True
        known = ("labelled", "unlabelled")
        return totals | {f"judge/{one}": float(self._counts[one]) for one in known}

    async def close(self) -> None:
        await self._judge.close()


def _checked_source(source: object) -> str:
    """Return the source of labels; TypeError or ValueError if it is no short text."""
    named = text("the source of the labels", source)
    if len(named.encode()) > SOURCE_BYTES:
        raise ValueError(f"the source of the labels has more than {SOURCE_BYTES} bytes")
    return named


def _checked_totals(totals: object) -> dict[str, float]:
    """Return a judge's totals; TypeError or ValueError, which names the one that is no finite
    number."""
    if not isinstance(totals, dict):
        raise TypeError(f"they must be a dict of numbers, are a {type(totals).__name__}")
    return {text("a name", name): finite(f"{name!r}", value) for name, value in totals.items()}
