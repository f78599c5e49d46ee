"""WebShop's reward for a purchase: the share of the goal that fits, scaled by the kind of product.

The formula is that of WebShop (Yao et al. 2022, `get_reward` of its `engine/goal.py`), quirks
included: an option that was chosen counts as a hit where it fits any wanted one, or where its value
stands in the product's text, so that somebody who chooses more options than were wanted can get
more than 1. One thing differs: WebShop finds the nouns of a title with spaCy's large model; here
they are all its words but function words and numbers.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from actors.envs.webshop.catalogue import Goal, Product

CLOSE = 85  # of 100: texts more alike than this are the same
EXACT_OPTIONS = ("size",)
# The first that a text contains, in this order, stands for the whole text.
COLORS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
"""
FUNCTION_WORDS = """
a an and are as at be best by for from great in into is it its more new no not of off on only or our
out over per so than that the this to up us very we with without you your
"""
_COLORS, _FUNCTION_WORDS = tuple(COLORS.split()), frozenset(FUNCTION_WORDS.split())


class Score(NamedTuple):
    """Reward of a purchase and its parts: `kind` scales the share of hits."""

    reward: float
    kind: float  # 0, 0.1, 0.5 or 1
    attributes: int
    options: int
    price: bool


def score(product: Product, goal: Goal, options: Mapping[str, str]) -> Score:
    """Compute the reward for buying `product` with `options` (value by name) for `goal`."""
    kind = kind_score(product, goal)
    attributes = attribute_hits(product, goal.attributes)
    chosen = option_hits(product, goal.options, options)
    price = product.price <= goal.price_upper
    wanted = len(goal.attributes) + len(goal.options) + 1
    return Score((attributes + chosen + price) / wanted * kind, kind, attributes, chosen, price)


def kind_score(product: Product, goal: Goal) -> float:
    """Compare the kinds of product by query, categories and title."""
    wanted = nouns(goal.name)
    shared = set(wanted) & set(nouns(product.name))
    share = len(shared) / len(wanted) if wanted else 0.2  # words told twice count twice below
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    related = len(set(product.categories) & set(goal.categories)) >= 2
    return 1.0 if product.query == goal.query or related or share > 0.2 else 0.5


def attribute_hits(product: Product, wanted: Iterable[str]) -> int:
    """Count the wanted attributes that the product has, in its list or anywhere in its text."""
    return sum(
        any(alike(attribute, goal) > CLOSE for attribute in product.attributes)
        or any(goal in text for text in product.texts)
        for goal in wanted
    )


def option_hits(product: Product, wanted: Iterable[str], options: Mapping[str, str]) -> int:
    """Count the chosen options that fit a wanted one or are named in the product's text."""
    goals = [plain_color(goal) for goal in wanted]
    return sum(
        fits(name, plain_color(value), goals)
        or any(plain_color(value) in text for text in product.texts)
        for name, value in options.items()
    )


def fits(name: str, value: str, wanted: Iterable[str]) -> bool:
    """Return True if an option's value is one of the wanted: sizes exactly, others
    approximately."""
    if name.lower() in EXACT_OPTIONS:
        return value in wanted
    return any(alike(goal, value) > CLOSE for goal in wanted)


def plain_color(text: str) -> str:
    """Return the first known colour that the text contains, or the text itself."""
    return next((color for color in _COLORS if color in text), text)


@lru_cache(maxsize=65536)
def nouns(title: str) -> tuple[str, ...]:
    """Return the words of a title, repetitions included, but function words and numbers."""
    words = re.findall(r"[a-z]{2,}", title.lower())
    return tuple(word for word in words if word not in _FUNCTION_WORDS)


@lru_cache(maxsize=65536)
def alike(one: str, other: str) -> int:
    """Compute thefuzz's `token_set_ratio`, as WebShop does: 0 to 100, 100 if the words of one
    contain the other's."""
    return round(token_set_ratio(one, other, processor=_plain))


def _plain(text: str) -> str:
    """Return words in lower case; Latin-1 letters beyond ASCII are dropped, as in thefuzz."""
    return default_process(re.sub(r"[\x80-\xff]", "", text))
