"""Expert of WebShop: searches, options and the path to the purchase.

Searches are written in the instruction's words, so that they can be learned from.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from actors.envs.webshop.catalogue import Catalogue, Goal, Product
from actors.envs.webshop.pages import BUY, DETAILS, NEXT, PREVIOUS, PageState, button
from actors.envs.webshop.purchase_reward import fits, plain_color, score

Action = tuple[str, str]  # search or click, and its words


def queries(goal: Goal) -> list[str]:
    """Return the searches that the instruction suggests, from short to long."""
    attributes, options = " ".join(goal.attributes), " ".join(goal.options)
    narrower = f"{attributes} {goal.query}"
    suggested = goal.query, narrower, f"{narrower} {options}", goal.instruction
    return list(dict.fromkeys(plain for query in suggested if (plain := _plain(query))))


def way(shop: Catalogue, goal: Goal, place: PageState, page_size: int) -> list[Action]:
    """Return the actions from `place` to the best product that can be found, its options, and the
    purchase."""
    plan = best_plan(shop, goal, page_size)
    if place.asin:
        product = shop.by_asin[place.asin]
        options = fitting(product, goal)
        left_open = all(name in options for name, _ in place.chosen)
        if left_open and worth(product, goal) >= plan.worth:
            back = [PREVIOUS] if place.page in DETAILS else []
            chosen = dict(place.chosen)
            missing = [value for name, value in options.items() if chosen.get(name) != value]
            return _clicks(*back, *missing, BUY)
    steps = [NEXT] * (plan.page - 1)
    steps += [plan.product.asin, *fitting(plan.product, goal).values(), BUY]
    if place.page == "results" and place.query == plan.query and place.number <= plan.page:
        return _clicks(*steps[place.number - 1 :])
    return [("search", plan.query), *_clicks(*steps)]


class PurchasePlan(NamedTuple):
    """Plan of a purchase: a search, the page of its results, and the product to buy there."""

    query: str
    page: int
    product: Product
    worth: float


@lru_cache(maxsize=8192)
def best_plan(shop: Catalogue, goal: Goal, page_size: int) -> PurchasePlan:
    """Plan the purchase of the most valuable product, on the earliest page that a suggested search
    shows it on. The goal's own product is searched by its number if that is better."""
    found = sorted(
        (
            (place // page_size + 1, query, product)
            for query in queries(goal)
            for place, product in enumerate(shop.search(query))
        ),
        key=lambda each: each[0],
    )
    best, seen = None, set[str]()
    for page, query, product in found:
        if product.asin in seen:
            continue
        seen.add(product.asin)
        plan = PurchasePlan(query, page, product, worth(product, goal))
        if best is None or plan.worth > best.worth:
            best = plan
        if best.worth == 1.0:
            return best
    own = shop.by_asin[goal.asin]
    by_number = PurchasePlan(button(own.asin), 1, own, worth(own, goal))
    return best if best is not None and best.worth >= by_number.worth else by_number


def worth(product: Product, goal: Goal) -> float:
    """Return the reward of buying it with the fitting options; 0 if that would exceed 1."""
    reward = score(product, goal, fitting(product, goal)).reward
    return reward if reward <= 1 else 0.0


def fitting(product: Product, goal: Goal) -> dict[str, str]:
    """Return the value to choose for each option of the product that fits a wanted one; each wanted
    one is used once, so that nothing is chosen beyond the goal."""
    left, found = list(goal.options), {}
    for name, values in product.options.items():
        for value in sorted(values, key=lambda value: value not in left):
            met = next(_met(name, value, left), None)
            if met is not None:
                found[name] = value
                left.remove(met)
                break
    return found


def _met(name: str, value: str, wanted: list[str]) -> Iterator[str]:
    """Yield those of `wanted` that an option's value fits, equal text first."""
    yield from (goal for goal in wanted if goal == value)
    yield from (goal for goal in wanted if fits(name, plain_color(value), [plain_color(goal)]))


def _clicks(*names: str) -> list[Action]:
    return [("click", button(name)) for name in names]


def _plain(query: str) -> str:
    """Return the query without characters that could end an action."""
    return " ".join(re.sub(r"[^\w$.'-]+", " ", query.lower()).split())
