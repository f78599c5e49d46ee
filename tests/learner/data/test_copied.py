"""Copies from the experience, found in tokens by a decoder of one character each."""

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from evolver_async.schema import Role, Sequence, Trajectory, VersionRun, WeightId
from learner.data.collate import copies

P, E, A, SEEN = Role.PROMPT, Role.EXPERIENCE, Role.ACTION, Role.OBSERVATION
WEIGHTS = WeightId(lineage=1, step=0)


def trajectory(*contexts: list[tuple[Role, str]]) -> Trajectory:
    """One sequence for each context, one token for each character."""
    return Trajectory(
        content=0,
        group_id=0,
        member=0,
        attempt=0,
        actor="a",
        incarnation=0,
        sequences=[sequence(context) for context in contexts],
        reward=0.0,
        success=False,
        terminated=True,
        truncated=False,
        turn_rewards=np.zeros(1, np.float32),
        turn_flags=np.zeros(1, np.uint8),
        labels=np.zeros(1, np.int8),
        label_source="",
        experience_ids=[],
        policy="learned",
        timing={},
    )


def sequence(runs: list[tuple[Role, str]]) -> Sequence:
    roles = np.array([role for role, text in runs for _ in text], np.uint8)
    action = int((roles == Role.ACTION).sum())
    return Sequence(
        tokens=np.array([ord(one) for _, text in runs for one in text], np.int32),
        roles=roles,
        turns=np.where(roles == Role.ACTION, 0, -1).astype(np.int16),
        logprobs=np.zeros(len(roles), np.float32),
        versions=[VersionRun(weights=WEIGHTS, tokens=action)] if action else [],
    )


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("runs", "copied"),
    [
        ([(E, "code XK42"), (P, "door?"), (A, "say XK42")], True),
        ([(E, "code XK42"), (P, "door?"), (A, "say XK4")], False),
        ([(E, "code XK42"), (P, "XK42 is it"), (A, "say XK42")], False),
        ([(P, "door?"), (E, "code XK42"), (SEEN, "a sign: XK42"), (A, "XK42")], False),
        # an environment that repeats the answer gives nothing away before it
        ([(E, "code XK42"), (A, "XK42"), (SEEN, "XK42 is right")], True),
        ([(P, "door?"), (A, "XK42"), (E, "code XK42"), (A, "left")], False),
        ([(P, "XK42"), (A, "XK42")], False),
        # a passage is of one run: two actions do not make one
        ([(E, "code XK42"), (A, "XK"), (SEEN, "."), (A, "42")], False),
    ],
)
def test_what_only_the_experience_held_is_a_copy(runs, copied):
    assert copies(trajectory(runs), decode, 4) == copied


def test_one_context_with_a_copy_is_enough_and_others_give_nothing_away():
    known, bare = [(E, "XK42"), (P, "?"), (A, "XK42")], [(P, "XK42"), (A, "ok")]
    assert copies(trajectory(bare, known), decode, 4)
    assert not copies(trajectory(bare, [(E, "XK42"), (A, "left")]), decode, 4)


texts = st.text("ab ", max_size=6)
runs = st.lists(st.tuples(st.sampled_from([P, E, A, SEEN]), texts), min_size=1, max_size=6)


@settings(max_examples=examples(200))
@given(runs, st.integers(1, 4))
def test_copies_match_a_search_of_every_passage(runs, least):
    merged = [(P, "z")]
    for role, text in runs:
        if text:
            last, before = merged[-1]
            merged[-1:] = [(last, before + text)] if last == role else [merged[-1], (role, text)]
    expected = False
    for i, (role, text) in enumerate(merged):
        for start in range(len(text) - least + 1) if role == A else ():
            passage = text[start : start + least]
            shown = any(passage in one for kind, one in merged[:i] if kind == E)
            known = any(passage in one for kind, one in merged[:i] if kind in (P, SEEN))
            expected |= shown and not known and passage.strip() == passage
    assert copies(trajectory(merged), decode, least) == expected
