"""Alignment of two tokenizations of one text, against a search of all pairs of places."""

from itertools import accumulate

import numpy as np
from collated_groups import collated, make_groups
from hypothesis import given
from hypothesis import strategies as st

from learner.data.aligned import UNKNOWN, Texts, align, chunks

lengths = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@given(lengths, lengths, st.sets(st.integers(0, 11)))
def test_chunks_end_wherever_both_tokenizations_end(ours, theirs, unknown):
    short, long = sorted((ours, theirs), key=sum)
    short = [*short, sum(long) - sum(short)] if sum(long) > sum(short) else short
    mine, other = (list(accumulate(one)) for one in (short, long))
    mine = [
        UNKNOWN if index in unknown and index + 1 < len(mine) else end
        for index, end in enumerate(mine)
    ]
    cuts = [(i + 1, j + 1) for i, x in enumerate(mine) for j, y in enumerate(other) if x == y]
    expected = [
        (slice(a, c), slice(b, d)) for (a, b), (c, d) in zip([(0, 0), *cuts], cuts, strict=False)
    ]
    assert chunks(mine, other) == expected
    assert cuts[-1] == (len(mine), len(other))


def text_of(token: int) -> str:
    return chr(97 + token) * (1 + token % 3)


def ends(tokens: list[int]) -> tuple[list[int], str]:
    text = "".join(map(text_of, tokens))
    return list(accumulate(len(text_of(token)) for token in tokens)), text


def pairs(text: str) -> tuple[list[int], list[int]]:
    """A teacher whose tokens are two characters each."""
    cut = [text[at : at + 2] for at in range(0, len(text), 2)]
    return [ord(one[0]) for one in cut], list(accumulate(map(len, cut)))


def test_the_chunks_of_a_batch_are_action_tokens_alone():
    batch = collated(make_groups(3, 20, 4))
    special = 5
    found = align(batch, Texts(ends, pairs, frozenset({special})))
    assert found.batch is not None
    places, text_C = np.flatnonzero(batch.action), dict[int, str]()
    for index, chunk in enumerate(found.chunk_N.tolist()):
        if chunk >= 0:
            token = int(batch.tokens[places[index]])
            assert token != special
            text_C[chunk] = text_C.get(chunk, "") + text_of(token)
    assert sorted(text_C) == list(range(found.chunks)) and found.chunks > 10
    # the teacher's tokens of a chunk begin with the characters of the same text
    theirs, their_C = found.batch, dict[int, list[int]]()
    their_tokens = theirs.tokens[theirs.action].tolist()
    for token, chunk in zip(their_tokens, found.their_chunk_N.tolist(), strict=True):
        their_C.setdefault(chunk, []).append(token)
    for chunk, text in text_C.items():
        assert their_C[chunk] == [ord(text[at]) for at in range(0, len(text), 2)]
    assert not theirs.action[theirs.row_start_R[:-1]].any(), "first tokens are not predicted"
    assert theirs.whole().tokens == len(found.their_chunk_N) == theirs.action_start_R[-1]


def test_a_row_that_the_teacher_cannot_read_has_no_chunk():
    batch = collated(make_groups(3, 20, 4))
    found = align(batch, Texts(ends, lambda text: None, frozenset()))
    assert found.batch is None and found.chunks == 0 and (found.chunk_N == -1).all()
