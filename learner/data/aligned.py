"""Rows in the tokens of a teacher with another tokenizer, aligned with ours by their text. Pure.

A chunk is the shortest text at whose both ends a token ends in either tokenization. It counts if
all of our tokens in it are ACTION tokens, none of them special: the teacher reads the markers of
our chat template as plain text, so it cannot tell when a turn of that template ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from evolver_async.schema import Array
from learner.data.batch import Batch

UNKNOWN = -1  # end of a token within a character, which the next tokens complete


@dataclass(frozen=True)
class Texts:
    """Both tokenizers as functions.

    ends: characters up to the end of each of our tokens (`UNKNOWN`), with the text; theirs: the
    teacher's tokens of a text and their ends, None if they are not exactly this text; special: our
    special tokens.
    """

    ends: Callable[[list[int]], tuple[list[int], str]]
    theirs: Callable[[str], tuple[list[int], list[int]] | None]
    special: frozenset[int]


@dataclass(frozen=True)
class Aligned:
    """The batch in the teacher's tokens, those of chunks as its ACTION tokens; None without any.

    chunk_N int64: the chunk of each of our ACTION tokens, -1 without one; their_chunk_N: of each of
    the teacher's. `chunks`: their number.
    """

    batch: Batch | None
    chunk_N: Array
    their_chunk_N: Array
    chunks: int


def chunks(ours: list[int], theirs: list[int]) -> list[tuple[slice, slice]]:
    """Cut the tokens of one text, in both tokenizations, behind every end that they share."""
    place = {end: index + 1 for index, end in enumerate(theirs) if end != UNKNOWN}
    shared = {end: index + 1 for index, end in enumerate(ours) if end in place}
    cuts = [(0, 0), *((index, place[end]) for end, index in shared.items())]
    return [
        (slice(cuts[i][0], cuts[i + 1][0]), slice(cuts[i][1], cuts[i + 1][1]))
        for i in range(len(cuts) - 1)
    ]


def align(batch: Batch, texts: Texts) -> Aligned:
    """Tokenize the rows of a batch again and number the chunks that count, row by row."""
    chunk_T = np.full(len(batch.tokens), -1)
    rows: list[int] = []
    tokens: list[Array] = []
    found: list[Array] = []
    count = 0
    special = np.isin(batch.tokens, list(texts.special))
    counts_T = batch.action & ~special
    for row in range(len(batch.row_start_R) - 1):
        start, end = batch.row_start_R[row : row + 2].tolist()
        ours, text = texts.ends(batch.tokens[start:end].tolist())
        if (made := texts.theirs(text)) is None:
            continue
        their_tokens, theirs = made
        chunk_L = np.full(len(their_tokens), -1)
        for mine, other in chunks(ours, theirs):
            inside = slice(start + mine.start, start + mine.stop)
            if other.start and counts_T[inside].all():  # a first token is not predicted
                chunk_T[inside] = chunk_L[other] = count
                count += 1
        if (chunk_L >= 0).any():
            rows.append(row)
            tokens.append(np.array(their_tokens, np.int32))
            found.append(chunk_L)
    chunk_N = chunk_T[batch.action]
    if not rows:
        return Aligned(None, chunk_N, np.zeros(0, np.int64), 0)
    chunk_A = np.concatenate(found)
    counts_R = [int((one >= 0).sum()) for one in found]
    trajectory_N = np.repeat(batch.trajectory_R[rows], counts_R)
    none_N = np.zeros(len(trajectory_N))
    their = replace(
        batch,
        tokens=np.concatenate(tokens),
        action=chunk_A >= 0,
        row_start_R=np.cumsum([0, *map(len, tokens)]),
        action_start_R=np.cumsum([0, *counts_R]),
        trajectory_R=batch.trajectory_R[rows],
        mu_N=none_N.astype(np.float32),
        lag_N=none_N.astype(np.int64),
        abandoned_N=none_N.astype(bool),
        swapped_N=none_N.astype(bool),
        turn_N=none_N.astype(np.int64),
        trajectory_N=trajectory_N,
        length_P=np.bincount(trajectory_N, minlength=len(batch.length_P)),
        mask_N=None,
        allowed_MW=None,
        sampled=None,
        taught=None,
        whole_groups=False,
    )
    return Aligned(their, chunk_N, chunk_A[chunk_A >= 0], count)
