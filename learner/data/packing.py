"""Layouts of rows as the input of a forward pass. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from evolver_async.config.shape import DecoderShape
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.prefix_trees import SortedRows, merge
from evolver_async.schema import Array

# Padded on the right, packed into one row, or packed with what rows share at their beginnings
# computed once.
Layout = Literal["padded", "packed", "tree"]


@dataclass(frozen=True)
class Placed:
    """Rows as a forward pass takes them: tokens_BT int64, real_BT bool (False on padding).

    place_A int64: places in the flattened tokens_BT of the rows' tokens, laid end to end.
    """

    tokens_BT: Array
    real_BT: Array
    place_A: Array
    borders: Borders | None


def place(rows: Sequence[Array], device: torch.device, layout: Layout) -> Placed:
    """Place the tokens of rows, at least one, none empty."""
    lengths, tokens_A = [len(row) for row in rows], np.concatenate(rows)
    if layout == "padded":
        real_BT = np.arange(max(lengths)) < np.array(lengths)[:, None]
        tokens_BT = np.zeros(real_BT.shape, np.int64)
        tokens_BT[real_BT] = tokens_A
        return Placed(tokens_BT, real_BT, np.flatnonzero(real_BT), None)
    if layout == "packed":
        place_A, borders = np.arange(len(tokens_A)), Borders.of(lengths, device)
        tokens_1T = tokens_A[None]
    else:
        merged = merge(rows, device)
        place_A, borders = merged.place_A, merged.borders
        tokens_1T = tokens_A[merged.source_T][None]
    return Placed(tokens_1T, np.ones_like(tokens_1T, bool), place_A, borders)


@dataclass(frozen=True)
class RowCost:
    """Price of a row in a forward pass, in units of what layers compute of a token without scores.

    squared: of its tokens, squared, for the scores of attention. action: of an ACTION token, for
    the projection onto the vocabulary.
    """

    squared: float = 0.0
    action: float = 0.0

    @classmethod
    def of(cls, shape: DecoderShape) -> "RowCost":
        """Count the multiplications of a decoder; the mask of attention spares half of them."""
        mlps = 3 * shape.inner * shape.active
        layer = shape.hidden * (2 * shape.queries + 2 * shape.keys + mlps)
        return cls(shape.queries / layer, shape.embedding / (shape.layers * layer))

    def __call__(self, length_R: Array, actions_R: Array) -> Array:
        """Return the prices of rows of so many tokens, of which so many are ACTION tokens."""
        return length_R + self.squared * length_R.astype(np.float64) ** 2 + self.action * actions_R


def deal_rows(
    units: list[list[int]], length_R: Array, cost_R: Array, token_budget: int, count: int
) -> Iterator[list[int]]:
    """Deal units of rows out to parts within the budget, packed, the dearest part first.

    There are as few rounds of `count` parts, which run at the same time, as can hold the rows, and
    the parts cost about the same: each unit, the dearest first, goes to the part that costs least
    so far and has room. One that exceeds the budget alone is a part of its own.
    """
    tokens_U = np.array([length_R[rows].sum() for rows in units], np.int64)
    cost_U = np.array([cost_R[rows].sum() for rows in units])
    rounds = -(-int(tokens_U.sum()) // (token_budget * count))
    while True:
        tokens_P, cost_P = np.zeros((2, rounds * count))
        parts = [list[int]() for _ in tokens_P]
        for unit in np.argsort(-cost_U, kind="stable"):
            room_P = (tokens_P == 0) | (tokens_P + tokens_U[unit] <= token_budget)
            if not room_P.any():
                break
            part = int(np.argmin(np.where(room_P, cost_P, np.inf)))
            parts[part] += units[unit]
            tokens_P[part] += tokens_U[unit]
            cost_P[part] += cost_U[unit]
        else:
            yield from (parts[part] for part in np.argsort(-cost_P, kind="stable") if parts[part])
            return
        rounds += 1


def cut_rows(
    units: list[list[int]], length_R: Array, token_budget: int, layout: Layout
) -> Iterator[list[int]]:
    """Cut units of rows, longest rows first, into parts within the budget, padding included."""
    pending: list[int] = []
    tokens = width = 0
    for rows in sorted(units, key=lambda rows: -length_R[rows].max()):
        more, longest = int(length_R[rows].sum()), int(length_R[rows].max())
        padded = (len(pending) + len(rows)) * max(width, longest)
        if pending and (padded if layout == "padded" else tokens + more) > token_budget:
            yield pending
            pending, tokens, width = [], 0, 0
        pending += rows
        tokens, width = tokens + more, max(width, longest)
    if pending:
        yield pending


def cut_trees(
    units: Sequence[list[int]], rows: dict[int, Array], token_budget: int
) -> Iterator[list[int]]:
    """Cut units of rows into parts whose trees have at most `token_budget` tokens.

    `rows`: the tokens of every row. Units that begin alike come together, as many as fit; one that
    exceeds the budget alone is a part of its own. No units have no parts.
    """
    if not units:
        return
    place = {row: index for index, row in enumerate(rows)}
    order = SortedRows(list(rows.values()))
    places = [np.array([place[row] for row in unit]) for unit in units]
    units_U = np.argsort([order.rank_R[one].min() for one in places], kind="stable")

    def fits(start: int, end: int) -> bool:
        chosen = np.concatenate([places[unit] for unit in units_U[start:end]])
        return order.size(chosen) <= token_budget

    start = 0
    while start < len(units):
        end = (
            len(units) if not start and fits(0, len(units)) else _furthest(fits, start, len(units))
        )
        part = [row for unit in units_U[start:end] for row in units[unit]]
        yield sorted(part, key=lambda row: order.rank_R[place[row]])
        start = end


def _furthest(fits: Callable[[int, int], bool], start: int, count: int) -> int:
    """Return an end so that the units from `start` to it, of `count`, fit; or `start + 1`.

    It doubles their number while they fit, and halves what is left: its cost is that of one part.
    """
    fitting, beyond, step = start + 1, count + 1, 2
    while start + step < beyond:
        if fits(start, start + step):
            fitting, step = start + step, 2 * step
        else:
            beyond = start + step
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if fits(start, middle):
            fitting = middle
        else:
            beyond = middle
    return fitting


def ranges(starts: Array, ends: Array) -> Array:
    """Concatenate the integers of the half-open ranges starts[i]:ends[i]."""
    return np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)])
