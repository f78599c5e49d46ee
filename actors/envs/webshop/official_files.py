"""WebShop's own files as a catalogue: `items_shuffle*.json`, `items_ins_v2*.json` and, for human
instructions, `items_human_ins.json`.

Rows that cannot be used are skipped and counted by reason. Of a product that costs from one price
to another, the price is drawn once, keyed by the product.
"""

import logging
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.envs.webshop.catalogue import Catalogue, Product, Wish, shipped
from evolver_async.randomness import key

DEFAULT_PRICE = 100.0  # of a product without one
NO_ATTRIBUTES = ("DUMMY_ATTR",)  # WebShop's; like no attribute that is asked for
LONGEST_ASIN = 10
NEEDED = ("asin", "name", "query", "product_category")
AMOUNT = re.compile(r"[^\d.]")

logger = logging.getLogger(__name__)
_STOCKING = threading.Lock()


class Unusable(ValueError):
    """A row that a shop cannot use; the message is the reason, the same for all of its kind."""


class Files(NamedTuple):
    """Paths of the files; `human` may be empty; `limit`: the first items only, 0: all."""

    items: str
    attributes: str
    human: str = ""
    limit: int = 0


def stocked(files: Files | None) -> Catalogue:
    """Return the catalogue of these files, or the one that ships, with its goals and its index;
    made once, while other threads wait."""
    with _STOCKING:
        shop = shipped() if files is None else _kept(files)
        assert shop.by_asin is not None and shop.goals is not None and shop.index is not None
        return shop


def loaded(files: Files) -> Catalogue:
    """Load the catalogue of these files and log the skipped rows.

    ValueError names a file that is not what it should be.
    """
    rows = _decoded(files.items, "items", list[Any])[: files.limit or None]
    about = _decoded(files.attributes, "attributes", dict[str, Any])
    people = _decoded(files.human, "human", dict[str, Any]) if files.human else None
    skipped: Counter[str] = Counter()
    products: dict[str, Product] = {}
    for row in rows:
        try:
            product = product_of(row, about)
            if product.asin in products:
                raise Unusable("item: asin is known already")
            products[product.asin] = product
        except Unusable as problem:
            skipped[str(problem)] += 1
    wishes = []
    for product in products.values():
        for row in _wish_rows(product.asin, about, people):
            try:
                wishes.append(wish_of(product.asin, row, human=people is not None))
            except Unusable as problem:
                skipped[str(problem)] += 1
    shop = Catalogue(list(products.values()), wishes, skipped)
    said = ", ".join(f"{count} × {reason}" for reason, count in sorted(skipped.items()))
    counts = f"{len(shop.products)} products, {len(shop.goals)} goals"
    logger.info("%s: %s, skipped: %s", files.items, counts, said or "none")
    return shop


_kept = lru_cache(maxsize=2)(loaded)


def product_of(row: Any, about: dict[str, Any]) -> Product:
    """Convert an item to a product with its attributes from `about`. Unusable names a missing
    field."""
    if not isinstance(row, dict):
        raise Unusable("item: no object")
    for field in NEEDED:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise Unusable(f"item: no {field}")
    if row["asin"] == "nan" or len(row["asin"]) > LONGEST_ASIN:
        raise Unusable("item: asin is none")
    told = about.get(row["asin"])
    listed = told.get("attributes") if isinstance(told, dict) else None
    features, description = row.get("small_description"), row.get("full_description")
    return Product(
        asin=row["asin"],
        name=row["name"],
        query=row["query"].lower().strip(),
        category=row["product_category"],
        price=_price(row["asin"], row.get("pricing")),
        attributes=_strings(listed) or NO_ATTRIBUTES,
        options=_options(row.get("customization_options")),
        description=description if isinstance(description, str) else "",
        features=_strings(features if isinstance(features, list) else [features]),
    )


def wish_of(asin: str, row: Any, *, human: bool) -> Wish:
    """Convert an instruction, with its options if it is human. Unusable names a missing field."""
    if not isinstance(row, dict):
        raise Unusable("instruction: no object")
    text = row.get("instruction")
    if not isinstance(text, str) or not text.strip():
        raise Unusable("instruction: no text")
    attributes = _strings(row.get("instruction_attributes"))
    if not attributes:
        raise Unusable("instruction: no attributes")
    if not human:
        return Wish(asin, text, attributes)
    options = row.get("instruction_options")
    values = list(options.values()) if isinstance(options, dict) else options
    return Wish(asin, text.strip("."), attributes, _strings(values))


def _wish_rows(asin: str, about: dict[str, Any], people: dict[str, Any] | None) -> Iterator[Any]:
    """Yield the instructions for this product; most products have none."""
    if people is not None:
        told = people.get(asin, [])
        yield from told if isinstance(told, list) else [told]
    elif isinstance(told := about.get(asin), dict) and told.get("instruction") is not None:
        yield told


def _price(asin: str, pricing: Any) -> float:
    """Parse the price in dollars of a text like `$9.99` or `$9.99 to $12.99`."""
    if not pricing:
        return DEFAULT_PRICE
    if not isinstance(pricing, str):
        raise Unusable("item: pricing is no text")
    try:
        amounts = [float(AMOUNT.sub("", part)) for part in pricing.split("$")[1:]]
    except ValueError:
        raise Unusable("item: pricing has no amount") from None
    if not amounts:
        return DEFAULT_PRICE
    if len(amounts) == 1:
        return amounts[0]
    return random.Random(key(0, "webshop price", asin)).uniform(*amounts[:2])


def _options(customization: Any) -> dict[str, tuple[str, ...]]:
    if not customization:
        return {}
    if not isinstance(customization, dict):
        raise Unusable("item: customization_options is no object")
    found = {}
    for name, contents in customization.items():
        if contents is None:
            continue
        try:
            values = [each["value"].strip().replace("/", " | ").lower() for each in contents]
        except (TypeError, KeyError, AttributeError):
            raise Unusable("item: customization_options without value") from None
        found[name.lower()] = tuple(value for value in values if value)
    return found


def _decoded(path: str, name: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name}: {path}: {error}") from error


def _strings(values: Any) -> tuple[str, ...]:
    """Return the strings of a list, without its other items."""
    return tuple(v for v in values or () if isinstance(v, str)) if isinstance(values, list) else ()
