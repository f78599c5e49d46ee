"""Batches of skipped steps, whose loss or gradient was not finite, as files for people."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np


def write_bad_step(path: Path, values: Iterable[object], keep: int) -> None:
    """Write the arrays among the fields of `values`; of all files beside it the newest `keep` stay.

    A run of weeks can skip a step now and then.
    """
    path.parent.mkdir(exist_ok=True)
    fields = {name: value for one in values for name, value in vars(one).items()}
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    others = [one for one in path.parent.glob("*.npz") if one != path]  # whatever the clock says
    others.sort(key=lambda one: one.stat().st_mtime_ns, reverse=True)
    for old in others[keep - 1 :]:
        old.unlink()
