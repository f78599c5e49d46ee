"""Generator of the catalogue that ships: `python -m actors.envs.webshop.make` writes
`products.jsonl`.

Everything is drawn by the products' numbers, so the same file comes out every time.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.envs.webshop.catalogue import SHIPPED, CatalogueEntry, Product, Wish
from evolver_async.randomness import key

PER_KIND = 42
ATTRIBUTES = 5  # of a product
WANTED = 2  # of them in an instruction
IN_TITLE = 2  # of them
CENTS = (0.0, 0.49, 0.95, 0.99)
BRANDS = (
    "Norvik", "Alder", "Brightway", "Casmo", "Dunloe", "Elmfield", "Fennick", "Grovely", "Halden",
    "Inkwell", "Juno", "Kestrel", "Larkin", "Maplo", "Nimbus", "Orchard", "Pellow", "Quill",
    "Rowan", "Solent", "Tarn", "Umber", "Vantage", "Wexley",
)  # fmt: skip
OPTIONS = {
    "color": "black,white,red,blue,green,grey,navy,pink,purple,yellow,brown,teal",
    "size": "x-small,small,medium,large,x-large,xx-large",
    "shoe size": "6,7,8,9,10,11,12",
    "bed size": "twin,full,queen,king",
    "flavor": "vanilla,cocoa,honey,ginger,apple,cherry,coconut,hazelnut",
    "scent": "lavender,rose,citrus,cedar,mint,jasmine,unscented",
    "pack": "pack of 1,pack of 2,pack of 4,pack of 6,pack of 12",
    "length": "3 feet,6 feet,10 feet,15 feet",
    "capacity": "12 ounce,16 ounce,20 ounce,32 ounce,40 ounce",
}  # values by name, between commas
# Attributes by department, between commas; each of its kinds of product draws from all of them.
WEAR = (
    "lightweight,breathable,machine wash,quick drying,long sleeve,slim fit,"
    "stretch fabric,organic cotton,hand wash,water resistant,elastic waist,soft lining"
)
SHOES = (
    "memory foam,non slip,arch support,rubber sole,lace up,wide fit,shock absorbing,"
    "breathable mesh,lightweight,water resistant,reflective,steel toe"
)
HOME = (
    "easy clean,space saving,solid wood,easy assembly,eco friendly,stain resistant,"
    "handmade,energy efficient,heavy duty,machine wash,fade resistant,dust proof"
)
KITCHEN = (
    "dishwasher safe,leak proof,stainless steel,double wall,bpa free,non stick,"
    "microwave safe,easy clean,heat resistant,stackable,wide mouth,vacuum insulated"
)
BEAUTY = (
    "cruelty free,fragrance free,sulfate free,tea tree,natural ingredients,long lasting,"
    "paraben free,sensitive skin,oil free,fast absorbing,dermatologist tested,argan oil"
)
FOOD = (
    "gluten free,sugar free,non gmo,low sodium,dairy free,high protein,plant based,"
    "low calorie,kosher certified,individually wrapped,fair trade,keto friendly"
)
TECH = (
    "fast charging,noise cancelling,high speed,gold plated,wireless,water resistant,"
    "long battery,plug and play,hands free,high definition,shock proof,ultra slim"
)


class Kind(NamedTuple):
    """A kind of product and what varies within it."""

    noun: str
    category: str
    attributes: str
    options: tuple[str, ...]
    dollars: tuple[int, int]


KINDS = (
    Kind("t-shirt", "Clothing › Tops", WEAR, ("color", "size"), (9, 30)),
    Kind("hoodie", "Clothing › Tops", WEAR, ("color", "size"), (20, 60)),
    Kind("jeans", "Clothing › Trousers", WEAR, ("color", "size"), (25, 80)),
    Kind("rain jacket", "Clothing › Outerwear", WEAR, ("color", "size"), (35, 140)),
    Kind("running shoes", "Clothing › Shoes", SHOES, ("color", "shoe size"), (35, 130)),
    Kind("hiking boots", "Clothing › Shoes", SHOES, ("color", "shoe size"), (50, 180)),
    Kind("sandals", "Clothing › Shoes", SHOES, ("color", "shoe size"), (12, 60)),
    Kind("bed sheets", "Home › Bedding", HOME, ("color", "bed size"), (18, 90)),
    Kind("mattress pad", "Home › Bedding", HOME, ("bed size",), (30, 150)),
    Kind("bookcase", "Home › Furniture", HOME, ("color",), (40, 220)),
    Kind("desk lamp", "Home › Lighting", HOME, ("color",), (15, 70)),
    Kind("curtains", "Home › Windows", HOME, ("color", "length"), (14, 80)),
    Kind("candle", "Home › Decor", HOME, ("scent", "pack"), (6, 40)),
    Kind("water bottle", "Kitchen › Drinkware", KITCHEN, ("color", "capacity"), (9, 45)),
    Kind("coffee mug", "Kitchen › Drinkware", KITCHEN, ("color", "capacity"), (6, 30)),
    Kind("food container", "Kitchen › Storage", KITCHEN, ("pack", "capacity"), (8, 50)),
    Kind("shampoo", "Beauty › Hair", BEAUTY, ("scent", "pack"), (5, 35)),
    Kind("face cream", "Beauty › Skin", BEAUTY, ("scent", "pack"), (8, 60)),
    Kind("lip balm", "Beauty › Skin", BEAUTY, ("flavor", "pack"), (3, 18)),
    Kind("snack bars", "Grocery › Snacks", FOOD, ("flavor", "pack"), (5, 40)),
    Kind("protein powder", "Grocery › Nutrition", FOOD, ("flavor",), (18, 80)),
    Kind("herbal tea", "Grocery › Drinks", FOOD, ("flavor", "pack"), (4, 30)),
    Kind("headphones", "Electronics › Audio", TECH, ("color",), (20, 200)),
    Kind("usb cable", "Electronics › Cables", TECH, ("color", "length"), (5, 30)),
    Kind("phone case", "Electronics › Phones", TECH, ("color", "pack"), (7, 40)),
)


def entries() -> Iterator[CatalogueEntry]:
    """Yield the whole catalogue."""
    numbers = itertools.count(1)
    for _, kind in itertools.product(range(PER_KIND), KINDS):
        yield entry(kind, next(numbers))


def entry(kind: Kind, number: int) -> CatalogueEntry:
    """Draw a product and the wish for it; only some of its attributes are in its title."""
    rng = random.Random(key(0, "webshop catalogue", number))
    brand = rng.choice(BRANDS)
    attributes = rng.sample(kind.attributes.split(","), ATTRIBUTES)
    titled, hidden = attributes[:IN_TITLE], attributes[IN_TITLE:]
    wanted = rng.sample(attributes, WANTED)
    asin = f"P{number}"
    product = Product(
        asin=asin,
        name=f"{brand} {titled[0]} {kind.noun}, {titled[1]}",
        query=kind.noun,
        category=f"{kind.category} › {kind.noun}",
        price=rng.randint(*kind.dollars) + rng.choice(CENTS),
        attributes=tuple(sorted(attributes)),
        options={name.split()[-1]: _values(name, rng) for name in kind.options},
        description=f"{kind.noun} by {brand}, {hidden[0]}",
        features=tuple(f"{attribute} {kind.noun}" for attribute in hidden[1:]),
    )
    text = f"find me {wanted[0]}, {wanted[1]} {kind.noun}"
    return CatalogueEntry(product, Wish(asin=asin, text=text, attributes=tuple(wanted)))


def _values(name: str, rng: random.Random) -> tuple[str, ...]:
    """Draw some of an option's values, in their usual order."""
    known = OPTIONS[name].split(",")
    kept = rng.sample(range(len(known)), rng.randint(2, min(4, len(known))))
    return tuple(known[index] for index in sorted(kept))


def text() -> bytes:
    """Return the file's content."""
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries())


if __name__ == "__main__":
    Path(__file__).with_name(SHIPPED).write_bytes(text())
