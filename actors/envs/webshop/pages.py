"""Pages of the shop: their buttons, links and text.

A place says all there is to say about where a customer stands; nothing else changes in an episode.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from actors.envs.webshop.catalogue import Catalogue, Product

BACK, PREVIOUS, NEXT, BUY = "back to search", "prev", "next", "buy now"
DETAILS = ("description", "features")
MORE = " …"
LONGEST_QUERY = 80  # as a page of results shows it


@dataclass(frozen=True)
class PageState:
    """Complete state of a customer: `page` and what it shows, results `number` (from 1) of `query`,
    or the product `asin` with the options chosen so far."""

    page: Literal["search", "results", "item", "description", "features", "done"] = "search"
    query: str = ""
    number: int = 1
    asin: str = ""
    chosen: tuple[tuple[str, str], ...] = ()  # name and value, in the order of the first choice

    def __str__(self) -> str:
        """Return a short key, the same for equal states."""
        words = [self.page]
        if self.page == "results":
            words += [repr(self.query), "page", str(self.number)]
        elif self.asin:
            words += [self.asin, *(f"{name}={value}" for name, value in self.chosen)]
        return " ".join(words)


START = PageState()


def button(text: str) -> str:
    """Return the name that clicks a bracketed text: without `<` and `>`, which an answer between
    tags cannot contain; so WebShop's own `< prev` and `next >` are names as well."""
    return " ".join(re.sub("[<>]", " ", text).lower().split())


def buttons(shop: Catalogue, place: PageState, page_size: int) -> dict[str, PageState]:
    """Return the target of each button of a page by its name, in the order shown."""
    return _links(shop, place, page_size) | _fixed(shop, place, page_size)


def text(shop: Catalogue, place: PageState, page_size: int, most: int) -> str:
    """Return the text of a page in at most `most` characters; its fixed buttons take precedence."""
    foot = " ".join(f"[{name}]" for name in _fixed(shop, place, page_size))
    body = shortened("\n".join(_lines(shop, place, page_size)), most - len(foot) - 1)
    return f"{body}\n{foot}" if foot else body


def shortened(text: str, most: int) -> str:
    """Cut a text that is longer than `most` characters."""
    return text if len(text) <= most else text[: max(most - len(MORE), 0)] + MORE


def _links(shop: Catalogue, place: PageState, page_size: int) -> dict[str, PageState]:
    """Return a page's own buttons: products, or the values of options, the last of the same
    name."""
    if place.page == "results":
        return {
            button(product.asin): replace(place, page="item", asin=product.asin)
            for product in _listed(shop, place, page_size)
        }
    if place.page == "item":
        chosen = dict(place.chosen)
        return {
            button(value): replace(place, chosen=tuple((chosen | {name: value}).items()))
            for name, values in shop.by_asin[place.asin].options.items()
            for value in values
        }
    return {}


def _fixed(shop: Catalogue, place: PageState, page_size: int) -> dict[str, PageState]:
    """Return the buttons that every page of its kind has."""
    if place.page == "results":
        found = {}
        if place.number > 1:
            found[PREVIOUS] = replace(place, number=place.number - 1)
        if place.number * page_size < len(shop.search(place.query)):
            found[NEXT] = replace(place, number=place.number + 1)
        return found | {BACK: START}
    if place.page == "item":
        details: dict[str, PageState] = {page: replace(place, page=page) for page in DETAILS}
        left = PageState("results", place.query, place.number)
        return details | {BUY: replace(place, page="done"), PREVIOUS: left, BACK: START}
    if place.page in DETAILS:
        return {PREVIOUS: replace(place, page="item"), BACK: START}
    return {}


def _lines(shop: Catalogue, place: PageState, page_size: int) -> list[str]:
    if place.page == "results":
        pages = -(-len(shop.search(place.query)) // page_size)
        number = f"page {place.number} of {pages}" if pages else "nothing"
        head = f"results for {shortened(place.query, LONGEST_QUERY)}: {number}"
        listed = _listed(shop, place, page_size)
        return [head, *(f"[{button(item.asin)}] {item.name} ${item.price:.2f}" for item in listed)]
    if place.page == "search":
        return ["search page"]
    product = shop.by_asin[place.asin]
    if place.page == "description":
        return [product.description or "no description"]
    if place.page == "features":
        return list(product.features) or ["no features"]
    return [
        f"{product.asin} {product.name}",
        f"price ${product.price:.2f}",
        *_choices(place, product),
    ]


def _choices(place: PageState, product: Product) -> Iterator[str]:
    """Yield a line for each option: its values, and the one chosen."""
    chosen = dict(place.chosen)
    for name, values in product.options.items():
        mark = f" chosen {chosen[name]}" if name in chosen else ""
        yield f"{name}: {' '.join(f'[{value}]' for value in values)}{mark}"


def _listed(shop: Catalogue, place: PageState, page_size: int) -> tuple[Product, ...]:
    """Return the products that a page of results shows."""
    first = (place.number - 1) * page_size
    return shop.search(place.query)[first : first + page_size]
