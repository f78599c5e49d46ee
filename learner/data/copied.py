"""Detection of passages that an action copies from the experience in its context.

A password or a map that changes with the task is of no use in the weights: a policy that trains
without the experience would memorise it. All is derived from the tokens of a trajectory.
"""

from collections.abc import Callable, Iterator

import numpy as np

from evolver_async.schema import Role, Sequence, Trajectory

Decode = Callable[[list[int]], str]


def copies(trajectory: Trajectory, decode: Decode, least: int) -> bool:
    """Return True if some action repeats `least` characters known from the experience alone."""
    return any(_copies(sequence, decode, least) for sequence in trajectory.sequences)


def _copies(sequence: Sequence, decode: Decode, least: int) -> bool:
    """Compare every passage of `least` characters; its runs of one role are decoded apart.

    A passage counts if an experience before the action holds it and no prompt or observation
    before the action does.
    """
    if not sequence.guided:
        return False
    runs = list(_runs(sequence, decode))
    experience = {
        one for role, text in runs if role == Role.EXPERIENCE for one in _passages(text, least)
    }
    shown: set[str] = set()
    elsewhere: set[str] = set()
    for role, text in runs:
        found = experience.intersection(_passages(text, least))
        if role == Role.EXPERIENCE:
            shown |= found
        elif role == Role.ACTION and found & shown - elsewhere:
            return True
        elif role in (Role.PROMPT, Role.OBSERVATION):
            elsewhere |= found
    return False


def _runs(sequence: Sequence, decode: Decode) -> Iterator[tuple[Role, str]]:
    """Yield the role and the text of every run of tokens of one role."""
    starts = np.flatnonzero(np.diff(sequence.roles, prepend=255)).tolist()
    for start, end in zip(starts, [*starts[1:], len(sequence)], strict=True):
        yield Role(int(sequence.roles[start])), decode(sequence.tokens[start:end].tolist())


def _passages(text: str, length: int) -> Iterator[str]:
    """Yield the substrings of `length` characters that neither begin nor end with a space."""
    parts = (text[start : start + length] for start in range(len(text) - length + 1))
    return (part for part in parts if not (part[0].isspace() or part[-1].isspace()))
