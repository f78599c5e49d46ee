"""Items of the workshop: their names, their splits, and the secret action of each name.

An item has one name for each of its attributes. Names of different attributes are different words,
so that a name alone tells which step it decides.
"""

import itertools
import random
from functools import lru_cache

from evolver_async.randomness import key
from evolver_async.splits import split_of

Item = tuple[str, ...]

# Every name and every action is one token of the tiny preset.
ATTRIBUTES = tuple(
    tuple(names.split())
    for names in (
        "box machine slot arm lake wall hole cell grid map border target",
        "ice dragon phoenix frozen cliff player goal edge reward symbol legend row",
        "small large cheap low high stable safe slippery new near lower best",
        "python code program function text list set output interpreter print lambda sorted",
        "product price page color pack dollars description features option column tool example",
    )
)
ACTIONS = ("push", "pull", "pick", "place", "move", "walk", "search", "run")
MOST_NAMES = len(ATTRIBUTES[0])
LEAST_ITEMS = 64  # fewer would leave a split empty, or a name out of the training split


@lru_cache(maxsize=8)
def items_of(steps: int, names: int) -> dict[str, list[Item]]:
    """Return the items of each split, in an order that belongs to these sizes."""
    items = list(itertools.product(*(attribute[:names] for attribute in ATTRIBUTES[:steps])))
    random.Random(key(0, "workshop", steps, names)).shuffle(items)
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(split_of(" ".join(item)), []).append(item)
    return found


def wanted(secret: int, name: str, actions: int) -> str:
    """Return the action that a step with this name wants, out of the first `actions`."""
    return ACTIONS[key(secret, "workshop", name) % actions]
