"""Labels of the turns of one episode, out of a judge's words or of the environment's scores; pure.

A label is +1 (GOOD) or -1 (BAD). What cannot be read gives none at all: they are never guessed.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

GOOD, BAD, UNLABELLED = 1, -1, 0
VERDICT = "Step {} Judgment: {}"  # of a turn, counted from 1
THOUGHT = "</think>"  # what comes before it is not the answer
LINE_CHARS = 80  # a verdict is no longer

_EMPHASIS = r"[ \t*_`]*"
_BEGINS = re.compile(rf"[ \t>#-]*{_EMPHASIS}step +[0-9]+ +judge?ment", re.IGNORECASE)
_VERDICT = re.compile(
    rf"[ \t>#-]*{_EMPHASIS}step +([0-9]{{1,6}}) +judge?ment{_EMPHASIS}:{_EMPHASIS}(GOOD|BAD)"
    rf"{_EMPHASIS}\.?{_EMPHASIS}",
    re.IGNORECASE,
)


class UnreadableLabels(Exception):
    """An answer without proper labels. `reason`: unreadable (none at all, or one that is neither
    GOOD nor BAD) or wrong_count (not one for each turn, in order)."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def parse(answer: str, turns: int) -> list[int]:
    """Exactly one `Step i Judgment: GOOD|BAD` for i = 1..turns, in order, each on its line.

    Other lines are ignored. Raises UnreadableLabels.
    """
    labels: list[int] = []
    for line in answer.rpartition(THOUGHT)[2].splitlines():
        if not _BEGINS.match(line[:LINE_CHARS]):  # of a long one the search would take for ever
            continue
        verdict = _VERDICT.fullmatch(line) if len(line) <= LINE_CHARS else None
        if verdict is None:
            raise UnreadableLabels(
                "unreadable", f"a line that is no judgment: {line[:LINE_CHARS]!r}"
            )
        number = len(labels) + 1
        if int(verdict[1]) != number or number > turns:
            raise UnreadableLabels(
                "wrong_count", f"step {verdict[1]} where {number} of {turns} was due"
            )
        labels.append(GOOD if verdict[2].upper() == "GOOD" else BAD)
    if not labels:
        raise UnreadableLabels("unreadable", "no line is a judgment")
    if len(labels) < turns:
        raise UnreadableLabels("wrong_count", f"{len(labels)} judgments of {turns}")
    return labels


def by_progress(scores: Sequence[float]) -> list[int]:
    """A turn is GOOD if the environment's score after it is higher than before, else BAD.

    scores[K+1]: before the first turn and after each.
    """
    return [GOOD if after > before else BAD for before, after in pairwise(scores)]
