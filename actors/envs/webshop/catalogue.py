"""Products of a shop, goals of its customers, and the goals' splits.

A catalogue ships with the package (`products.jsonl`, made by `make.py`); `load.py` reads WebShop's
own files. How goals come about and are ordered and split is WebShop's way.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from typing import NamedTuple

import msgspec

from actors.envs.webshop.search import FullTextIndex
from evolver_async.randomness import key
from evolver_async.splits import Split

SHIPPED = "products.jsonl"
UNBOUNDED = 1_000_000.0  # the price where a goal names none
PRICE_LIMITS = tuple(10.0 * tens for tens in range(1, 100))
SHUFFLE_SEED = 233  # WebShop's
MOST_RESULTS = 50
LETTERS = re.compile("[A-Za-z]+")


class Product(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One article. `options`: the values to choose from, by name."""

    asin: str
    name: str
    query: str  # what one would search to find its like
    category: str  # from the widest to the narrowest, between ›
    price: float
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    description: str
    features: tuple[str, ...]

    @property
    def categories(self) -> list[str]:
        return [part.strip() for part in self.category.split("›")]

    @property
    def texts(self) -> tuple[str, str, str]:
        """Name, features and description in lower case."""
        features = " ".join(self.features)
        return self.name.lower(), features.lower(), self.description.lower()

    @property
    def indexed(self) -> str:
        """Text of the product in the search index."""
        options = ", and ".join(f"{name}: {', '.join(of)}" for name, of in self.options.items())
        feature = self.features[0] if self.features else ""
        return " ".join((self.asin, self.name, self.description, feature, options))


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An instruction to buy a product. `options` None: a goal for every combination of options."""

    asin: str
    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None = None


class CatalogueEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the catalogue that ships."""

    product: Product
    wish: Wish


class Goal(NamedTuple):
    """Goal of a customer: a product like `asin` with attributes, options and a price limit."""

    asin: str
    name: str
    query: str
    categories: tuple[str, ...]
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


@dataclass(eq=False)  # hashed by identity, so that what was found in it can be remembered
class Catalogue:
    """Stock of a shop. `skipped`: unusable rows, counted by reason."""

    products: list[Product]
    wishes: list[Wish]
    skipped: Counter[str] = field(default_factory=Counter)

    @cached_property
    def by_asin(self) -> dict[str, Product]:
        return {product.asin: product for product in self.products}

    @cached_property
    def goals(self) -> list[Goal]:
        """All goals in WebShop's shuffled order."""
        found = [goal for wish in self.wishes for goal in self._goals_of(wish)]
        random.Random(SHUFFLE_SEED).shuffle(found)
        return found

    def split(self, name: Split, test: int, validation: int) -> range:
        """Return the numbers of a split's goals; WebShop has 500 for `test`, 1,000 for
        `validation`."""
        rest = test + validation
        start, end = {"test": (0, test), "validation": (test, rest), "train": (rest, None)}[name]
        return range(len(self.goals))[start:end]

    def words(self, most: int) -> list[str]:
        """Return the words of letters in names, options and instructions, the most frequent."""
        found = Counter[str]()
        for one in self.products:
            options = [text for name, values in one.options.items() for text in (name, *values)]
            found.update(LETTERS.findall(" ".join([one.name, one.query, *options])))
        for wish in self.wishes:
            found.update(LETTERS.findall(wish.text))
        return [word for word, _ in found.most_common(most)]

    def search(self, query: str) -> tuple[Product, ...]:
        """Return the products found, best first."""
        return _search(self, query)

    @cached_property
    def index(self) -> FullTextIndex:
        return FullTextIndex(product.indexed for product in self.products)

    def _goals_of(self, wish: Wish) -> Iterator[Goal]:
        product = self.by_asin[wish.asin]
        limit, limit_text = price_limit(product, wish.text)
        categories = tuple(product.categories)
        for options in combinations(product) if wish.options is None else [None]:
            said = "" if options is None else option_text(options)
            yield Goal(
                asin=product.asin,
                name=product.name,
                query=product.query,
                categories=categories,
                instruction=f"{wish.text}{said}{limit_text}",
                attributes=wish.attributes,
                options=tuple(options.values()) if options is not None else wish.options or (),
                price_upper=limit,
            )


@lru_cache(maxsize=8192)
def _search(shop: Catalogue, query: str) -> tuple[Product, ...]:
    return tuple(shop.products[number] for number in shop.index.search(query, MOST_RESULTS))


def combinations(product: Product) -> Iterator[dict[str, str]]:
    """Yield every choice of one value for each option, by the options' sorted names."""
    names = sorted(product.options)
    values = itertools.product(*(product.options[name] for name in names))
    for combination in values:
        yield dict(zip(names, combination, strict=True))


def option_text(options: dict[str, str]) -> str:
    named = ", and ".join(f"{name}: {value}" for name, value in options.items())
    return f" with {named}" if named else ""


def price_limit(product: Product, instruction: str) -> tuple[float, str]:
    """Draw a price above the product's, and its wording in an instruction; keyed by the two."""
    above = [limit for limit in PRICE_LIMITS if limit > product.price][:4]
    if len(above) < 2:
        return UNBOUNDED, ""
    rng = random.Random(key(0, "webshop limit", product.asin, instruction))
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


@lru_cache(maxsize=1)
def shipped() -> Catalogue:
    """Return the catalogue of this package."""
    lines = resources.files("actors.envs.webshop").joinpath(SHIPPED).read_bytes().splitlines()
    listed = [msgspec.json.decode(line, type=CatalogueEntry) for line in lines]
    return Catalogue([entry.product for entry in listed], [entry.wish for entry in listed])
