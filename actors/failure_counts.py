"""Failures of one process, counted for the buffer: by kind and name, with the last error.

Totals since the start of the process, so that a report that arrives twice changes nothing. The log
is not written here.
"""

import asyncio

from actors.formats.chat import Chat, encodable
from evolver_async.config.secrets import mask
from evolver_async.schema import Trajectory, TurnFlag
from evolver_async.wire.failure_totals import ERROR_CHARS, NAME_CHARS, FailureKind, FailureTotal

EXCERPT = 80  # characters of a turn that are shown
MOST_NAMES = 64  # names that are counted apart; those beyond are not counted


class FailureCounts:
    """Failures of one process. `noted`: set when one occurred, for the loop that reports them."""

    def __init__(self) -> None:
        self.noted = asyncio.Event()
        self._totals: dict[tuple[FailureKind, str], FailureTotal] = {}
        self._traced: set[tuple[str, str]] = set()

    def note(self, kind: FailureKind, name: str, error: str, count: int = 1) -> None:
        """Count a failure of the component with this name."""
        name = mask(name)[:NAME_CHARS]
        before = self._totals.pop((kind, name), None)
        if before is None and len(self._totals) >= MOST_NAMES:
            return
        self._totals[kind, name] = FailureTotal(
            kind=kind,
            name=name,
            error=encodable(mask(error))[:ERROR_CHARS],
            count=count + (before.count if before else 0),
        )
        self.noted.set()

    def traced(self, name: str, cause: BaseException | None) -> BaseException | None:
        """Return `cause` the first time that an error of its type comes from this component: the
        log has the traceback of each kind of failure once."""
        kind = name, type(cause).__name__
        if cause is None or kind in self._traced or len(self._traced) >= MOST_NAMES:
            return None
        self._traced.add(kind)
        return cause

    def totals(self) -> list[FailureTotal]:
        """Return all totals, the newest last."""
        return list(self._totals.values())


def unread(trajectories: list[Trajectory], chat: Chat) -> str:
    """Return a sentence for episodes without a readable turn; "" if a turn could be read."""
    flags = [flag for one in trajectories for flag in one.turn_flags.tolist()]
    if not flags or not all(flag & TurnFlag.FORMAT_ERROR for flag in flags):
        return ""
    last = trajectories[-1].sequences[-1]
    text = chat.text_of(last.tokens[last.turns == last.turns.max()].tolist())
    return f"no turn of {len(trajectories)} episodes could be read, for example {text[:EXCERPT]!r}"
