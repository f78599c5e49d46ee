"""Layouts of rows as the input of a forward pass. Pure."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from evolver_async.model.borders import LEAST_SAVED, Borders, common_prefix, in_order, merge
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


def by_beginning(units: list[list[int]], row: Callable[[int], Array]) -> list[list[int]]:
    """Sort units of rows, and the rows of each: those that begin alike become neighbours."""
    rows = [index for unit in units for index in unit]
    order = in_order([row(index) for index in rows])
    rank = {rows[index]: place for place, index in enumerate(order)}
    units = [sorted(unit, key=rank.__getitem__) for unit in units]
    return sorted(units, key=lambda unit: rank[unit[0]])


def shared(rows: Sequence[Array]) -> int:
    """Estimate how many tokens of rows a tree saves: those in common with the row before.

    Less what it repeats because sharing would not pay.
    """
    pairs = itertools.pairwise(rows)
    return sum(max(0, common_prefix(*pair) - LEAST_SAVED) for pair in pairs)
