"""Labels of one episode's turns from a judge's answer or the environment's scores; pure.

A label is +1 (GOOD) or -1 (BAD). An answer that cannot be parsed gives no labels at all.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

GOOD, BAD, UNLABELLED = 1, -1, 0
VERDICT = "Step {} Judgment: {}"  # of a turn, counted from 1
THOUGHT = "</think>"  # the answer starts after it
LINE_CHARS = 80  # limit of a line with a judgment

_EMPHASIS = r"[ \t*_`]*"
_BEGINS = re.compile(rf"[ \t>#-]*{_EMPHASIS}step +[0-9]+ +judge?ment", re.IGNORECASE)
_VERDICT = re.compile(
    rf"[ \t>#-]*{_EMPHASIS}step +([0-9]{{1,6}}) +judge?ment{_EMPHASIS}[:：]{_EMPHASIS}(GOOD|BAD)"
    rf"{_EMPHASIS}[.。]?{_EMPHASIS}",
    re.IGNORECASE,
)


class UnreadableLabels(Exception):
    """Answer without valid labels.

    `reason`: unreadable (no label, or one that is neither GOOD nor BAD) or wrong_count (not one per
    turn, in order).
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def parse(answer: str, turns: int) -> list[int]:
    """Parse exactly one line `Step i Judgment: GOOD|BAD` for each i = 1..turns, in order.

    Other lines are ignored. Raise UnreadableLabels.
    """
    labels: list[int] = []
    for line in answer.rpartition(THOUGHT)[2].splitlines():
        if not _BEGINS.match(line[:LINE_CHARS]):  # cut, as the search is slow on long lines
            continue
        verdict = _VERDICT.fullmatch(line) if len(line) <= LINE_CHARS else None
        if verdict is None:
            problem = f"the line is not a judgment: {line[:LINE_CHARS]!r}"
            raise UnreadableLabels("unreadable", problem)
        number = len(labels) + 1
        if int(verdict[1]) != number or number > turns:
            problem = f"found step {verdict[1]} instead of {number} of {turns}"
            raise UnreadableLabels("wrong_count", problem)
        labels.append(GOOD if verdict[2].upper() == "GOOD" else BAD)
    if not labels:
        raise UnreadableLabels("unreadable", "no line is a judgment")
    if len(labels) < turns:
        raise UnreadableLabels("wrong_count", f"only {len(labels)} of {turns} judgments")
    return labels


def checked_labels(labels: Sequence[int], turns: int) -> np.ndarray:
    """Return a judge's labels as int8[turns]. Raise ValueError if they are not one per turn."""
    found = np.asarray(labels)
    if found.shape != (turns,) or not np.isin(found, (GOOD, BAD, UNLABELLED)).all():
        raise ValueError(f"{found.tolist()!r:.80} are not {turns} labels of 1, -1 or 0")
    return found.astype(np.int8)


def by_progress(scores: Sequence[float]) -> list[int]:
    """Label a turn GOOD if the environment's score after it is higher than before, else BAD.

    scores[K+1]: before the first turn and after each.
    """
    return [GOOD if after > before else BAD for before, after in pairwise(scores)]
