"""Splits of tasks: training, validation and test, decided by a task's content.

The content is the part of a task that can be learned by heart: the ground of a map, a level's
walls, boxes and targets, a question. Where the player starts is no part of it.
"""

import hashlib
from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
BUCKETS = 8  # of contents; one is for testing, one for validation


def split_of(content: str) -> Split:
    """Return the split of a content: one in eight is `test`, one in eight `validation`."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "little") % BUCKETS
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def checked_split(name: str) -> Split:
    """Return the split of this name; ValueError for an unknown one."""
    for split in SPLITS:
        if name == split:
            return split
    raise ValueError(f"split: {name!r} is none of {', '.join(SPLITS)}")
