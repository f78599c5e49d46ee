"""A judge of one's own: its failures leave an episode unlabelled and are counted."""

import asyncio
import logging

from actors.envs.base import one_line
from actors.failures import FailureCounts
from actors.judge.judge import Judge, JudgedEpisode, Labels
from actors.judge.labels import checked_labels
from actors.rollout.environment import own_cancellation

log = logging.getLogger(__name__)


class OwnJudge(Judge):
    """A user's judge, limited to `timeout_s` for each episode; None: without a limit."""

    def __init__(self, judge: Judge, timeout_s: float | None, failures: FailureCounts) -> None:
        super().__init__()
        self._judge = judge
        self._timeout_s = timeout_s
        self._failures = failures

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
            self._counts["labelled"] += 1
            return checked, str(source)
        except (Exception, asyncio.CancelledError) as error:
            if own_cancellation(error):
                raise
            late = f"judge.timeout_s={self._timeout_s} has passed"
            said = late if limit.expired() else one_line(error)
            log.warning("an episode stays unlabelled: %s", said)
            self._failures.note("judge", "judge.kind", said)
            self._counts["unlabelled"] += 1
            return [], ""

    def counters(self) -> dict[str, float]:
        """Return the judge's totals, with the labelled and unlabelled episodes as counted here."""
        known = ("labelled", "unlabelled")
        return self._judge.counters() | {f"judge/{one}": float(self._counts[one]) for one in known}

    async def close(self) -> None:
        await self._judge.close()
