"""Sequences without their experience, one by one: an oracle for `learner.data.collate`."""

from evolver_async.schema import Role, Sequence


def stripped(sequence: Sequence) -> Sequence:
    """Return the sequence without its EXPERIENCE tokens."""
    keep = sequence.roles != Role.EXPERIENCE
    return Sequence(
        tokens=sequence.tokens[keep],
        roles=sequence.roles[keep],
        turns=sequence.turns[keep],
        logprobs=sequence.logprobs[keep],
        versions=sequence.versions,
    )
