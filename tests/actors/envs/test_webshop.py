"""The shop: its reward against a re-statement, its search against BM25, its pages, its files."""

import functools
import importlib.resources
import itertools
import json
import logging
import math
import random
import re
import tomllib
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from budget import examples
from demonstrations import demonstrated
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import setting, ticket
from thefuzz import fuzz

from actors.envs.base import EnvError, Located, Rewindable, Scored, Solvable, Tooled, make_env
from actors.envs.webshop import make
from actors.envs.webshop.catalogue import (
    PRICE_LIMITS,
    SHIPPED,
    UNBOUNDED,
    Catalogue,
    Goal,
    Product,
    combinations,
    price_limit,
    shipped,
)
from actors.envs.webshop.expert import best_plan, fitting, queries
from actors.envs.webshop.official_files import Files, loaded, stocked
from actors.envs.webshop.pages import BACK, BUY, NEXT, PREVIOUS
from actors.envs.webshop.purchase_reward import COLORS, alike, kind_score, nouns, option_hits, score
from actors.envs.webshop.search import FullTextIndex, words_of
from actors.envs.webshop.webshop_env import ToolShop, WebShop
from actors.formats.tool_calls import ToolCall, canonical
from evolver_async.schema import Task, TurnFlag


def task(number: int = 0, split: str = "train", **params: Any) -> Task:
    return Task(
        task_id=f"webshop/{split}/{number}",
        env="webshop",
        split=split,
        map_seed=number,
        params=params,
    )


def opened(number: int = 0, split: str = "train", **params: Any) -> WebShop:
    env = WebShop(**params)
    env.reset(task(number, split), 0)
    return env


def product(**fields: Any) -> Product:
    usual: dict[str, Any] = {
        "asin": "P1",
        "name": "",
        "query": "query",
        "category": "a › b › c",
        "price": 35.0,
        "attributes": (),
        "options": {},
        "description": "",
        "features": (),
    }
    return Product(**(usual | fields))


def goal(**fields: Any) -> Goal:
    usual: dict[str, Any] = {
        "asin": "P1",
        "name": "",
        "query": "query",
        "categories": ("a", "b", "c"),
        "instruction": "find it",
        "attributes": (),
        "options": (),
        "price_upper": 40.0,
    }
    return Goal(**(usual | fields))


# The reward


def restated(product: Product, goal: Goal, options: dict[str, str]) -> float:
    """WebShop's reward, written down again from its definition, with the library that it uses."""
    said = [product.name.lower(), " ".join(product.features).lower(), product.description.lower()]

    def color(text: str) -> str:
        for known in COLORS.split():
            if text.find(known) >= 0:
                return known
        return text

    hits = 0
    for wanted in goal.attributes:
        hit = False
        for has in product.attributes:
            hit = hit or fuzz.token_set_ratio(has, wanted) > 85
        for text in said:
            hit = hit or wanted in text
        hits += int(hit)
    for name, value in options.items():
        hit = False
        for wanted in goal.options:
            if name.lower() == "size":
                hit = hit or color(value) == color(wanted)
            else:
                hit = hit or fuzz.token_set_ratio(color(wanted), color(value)) > 85
        for text in said:
            hit = hit or color(value) in text
        hits += int(hit)
    if product.price <= goal.price_upper:
        hits += 1

    wanted_words, words = nouns(goal.name), nouns(product.name)
    title = 0.2
    if wanted_words:
        title = sum(word in words for word in {*wanted_words}) / len(wanted_words)
    categories = {part.strip() for part in product.category.split("›")}
    kind = 1.0
    alike_by_query = product.query == goal.query
    alike_by_category = len(categories.intersection(goal.categories)) >= 2
    if not alike_by_query and not alike_by_category and not title > 0.2:
        kind = 0.5
    if title < 0.1:
        kind = 0.1
    if title == 0:
        kind = 0.0
    return kind * hits / (len(goal.attributes) + len(goal.options) + 1)


def test_the_reward_is_webshops_for_purchases_in_the_catalogue() -> None:
    shop, rng = shipped(), random.Random(1)
    seen = Counter[float]()
    for _ in range(3000):
        wanted = rng.choice(shop.goals)
        bought = rng.choice(shop.products) if rng.random() < 0.5 else shop.by_asin[wanted.asin]
        options = {
            name: rng.choice(values)
            for name, values in bought.options.items()
            if rng.random() < 0.8
        }
        reward = score(bought, wanted, options).reward
        assert reward == pytest.approx(restated(bought, wanted, options), abs=1e-12)
        seen[round(reward, 2)] += 1
    assert len(seen) > 8 and seen[1.0] and seen[0.0]


WORDS = ["red", "dark red", "tea tree", "Tea Tree oil", "size", "small", "x-small", "x", "a b", ""]
texts = st.lists(st.sampled_from(WORDS), max_size=3).map(" ".join)
some = st.lists(texts, max_size=3).map(tuple)


@given(
    st.builds(product, name=texts, description=texts, features=some, attributes=some, query=texts),
    st.builds(goal, name=texts, attributes=some, options=some, query=texts),
    st.dictionaries(st.sampled_from(["size", "Size", "color"]), texts),
)
@settings(max_examples=examples(400))
def test_the_reward_is_webshops_for_any_texts(
    bought: Product, wanted: Goal, options: dict[str, str]
) -> None:
    reward = score(bought, wanted, options).reward
    assert reward == pytest.approx(restated(bought, wanted, options), abs=1e-12)


def test_the_reward_agrees_with_webshops_own_examples() -> None:
    """The numbers of `tests/web-agent-site/engine/test_goal.py`."""
    name = "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White"
    oils = ("tea tree", "essential oils", "natural ingredients")
    options = {"color": "grey", "size": "XL"}
    wanted = goal(name=name, attributes=oils, options=("grey", "XL"))
    exact = product(name=name, attributes=("tea tree", "essential oil", "natural ingredients"))
    assert score(exact, wanted, options).reward == 1
    said = product(
        name=name,
        features=("This shampoo has essential oils and smells like lemons",),
        description="Best shampoo on the market, made with natural ingredients",
    )
    assert score(said, wanted, options) == (5 / 6, 1.0, 2, 2, True)
    more = goal(name=name, attributes=oils, options=("grey", "XL", "pack of 12"))
    assert score(said, more, options).reward == pytest.approx(5 / 7)
    cord = (
        "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
    )
    lead = "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo"
    other = product(name=f"{lead} Home Theater System", query="other", category="a › d › e")
    assert kind_score(other, goal(name=cord)) == 0.5


@pytest.mark.parametrize(
    ("name", "query", "category", "kind"),
    [
        ("green tea leaves", "tea", "x › y › z", 1.0),  # the same query
        ("tea", "pot", "a › b › x", 1.0),  # two categories
        ("tea leaves", "pot", "a › x › y", 1.0),  # enough of the title
        ("tea kettle", "pot", "a › x › y", 0.5),  # a sixth of it, and nothing else
        ("kettle", "tea", "a › b › c", 0.0),  # nothing of the title: all else counts for nothing
    ],
)
def test_the_kind_of_product_scales_the_reward(
    name: str, query: str, category: str, kind: float
) -> None:
    wanted = goal(name="tea leaves oolong loose mountain harvest", query="tea")
    assert kind_score(product(name=name, query=query, category=category), wanted) == kind


def test_a_title_with_little_in_common_is_a_tenth() -> None:
    letters = [f"{letter}{letter}" for letter in "abcdefghijk"]
    wanted = goal(name=" ".join(letters))
    assert kind_score(product(name="aa"), wanted) == 0.1  # one in eleven
    assert kind_score(product(name="aa bb"), wanted) == 1.0
    assert kind_score(product(name="aa"), goal(name="of the")) == 1.0  # no nouns: 0.2, same query


def test_the_title_share_counts_the_repeated_words_of_the_wanted_title() -> None:
    """One of four distinct words is more than a fifth, one of all five is not."""
    apart = product(name="tea", query="pot", category="x › y › z")
    assert kind_score(apart, goal(name="tea tin tin oolong loose", query="other")) == 0.5
    assert kind_score(apart, goal(name=" ".join(["tea", *["tin"] * 10]), query="other")) == 0.1
    assert kind_score(apart, goal(name="tea tea tea tea", query="other")) == 1.0


def test_sizes_fit_exactly_and_other_options_roughly() -> None:
    assert option_hits(product(), ["x-large"], {"size": "large"}) == 0
    assert option_hits(product(), ["x-large"], {"fit": "large"}) == 1
    assert option_hits(product(), ["dark red"], {"color": "dark white"}) == 1  # both are dark
    assert option_hits(product(description="in large"), ["small"], {"size": "large"}) == 1


def test_texts_are_the_same_from_86_of_100_on() -> None:
    near, far = ("aaaaaab", "aaaaaac"), (f"{'a' * 17}bbb", f"{'a' * 17}ccc")
    assert (alike(*near), alike(*far)) == (86, 85)
    assert option_hits(product(), near[:1], {"color": near[1]}) == 1
    assert option_hits(product(), far[:1], {"color": far[1]}) == 0
    wanted = goal(name="tea", attributes=(near[0], far[0]))
    assert score(product(name="tea", attributes=(near[1], far[1])), wanted, {}).attributes == 1


def test_options_that_nobody_wanted_can_bring_more_than_one_and_that_is_no_success() -> None:
    bought = product(name="large tea", options={"size": ("large",), "color": ("red",)})
    wanted = goal(name="large tea", attributes=("tea",), options=("red",))
    assert score(bought, wanted, {"size": "large", "color": "red"}).reward == pytest.approx(4 / 3)
    shop = Catalogue([bought], [])
    shop.goals = [wanted]
    env = opened()
    env.shop, env.wanted = shop, wanted
    assert env.solve()[-2:] == ["click[red]", "click[buy now]"]
    for action in ("search[tea]", "click[p1]", "click[red]", "click[large]"):
        assert env.step(action).info.valid
    step = env.step("click[buy now]")
    assert (step.reward, step.terminated, step.info.success) == (4 / 3, True, False)


# What is a letter hangs on a library's tables where Unicode added it lately.
SETTLED = st.text(
    st.characters().filter(lambda one: unicodedata.ucd_3_2_0.category(one) != "Cn"), max_size=30
)


@given(SETTLED, SETTLED)
@settings(max_examples=examples(500))
def test_likeness_is_thefuzzs_for_any_text(one: str, other: str) -> None:
    assert alike(one, other) == fuzz.token_set_ratio(one, other)


def test_likeness_is_thefuzzs_for_what_a_shop_says() -> None:
    rng = random.Random(2)
    words = [word for product in shipped().products for word in product.indexed.split()]
    for _ in range(4000):
        one, other = (" ".join(rng.sample(words, rng.randint(1, 5))) for _ in range(2))
        if rng.random() < 0.5:
            other = f"{other} {one[rng.randint(0, len(one) - 1) :]}"
        assert alike(one, other) == fuzz.token_set_ratio(one, other)


# The catalogue


def test_the_catalogue_is_what_its_generator_makes() -> None:
    assert importlib.resources.files("actors.envs.webshop").joinpath(SHIPPED).read_bytes() == (
        make.text()
    )


def test_the_catalogue_travels_with_the_package() -> None:
    project = tomllib.loads(
        (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert project["tool"]["setuptools"]["package-data"]["actors.envs.webshop"] == [SHIPPED]


def test_the_catalogue_has_a_thousand_products_with_attributes_options_and_prices() -> None:
    products = shipped().products
    assert len(products) >= 1000 == len({each.asin for each in products[:1000]})
    assert all(each.attributes and each.options and each.price > 0 for each in products)
    assert not shipped().skipped


def test_every_goal_is_reached_by_its_own_product_with_its_options() -> None:
    shop, seen = shipped(), set[tuple[str, tuple[str, ...]]]()
    for wanted in shop.goals:
        own = shop.by_asin[wanted.asin]
        options = dict(zip(sorted(own.options), wanted.options, strict=True))
        assert score(own, wanted, options).reward == 1.0
        assert (wanted.asin, wanted.options) not in seen
        seen.add((wanted.asin, wanted.options))
        assert all(f"{name}: {value}" in wanted.instruction for name, value in options.items())
        assert f"lower than {wanted.price_upper:.2f} dollars" in wanted.instruction
    assert len(seen) == sum(len(list(combinations(each))) for each in shop.products)


def test_goals_are_shuffled_and_split_as_in_webshop() -> None:
    shop = shipped()
    split = functools.partial(shop.split, test=500, validation=1000)
    assert (split("test"), split("validation")) == (range(500), range(500, 1500))
    assert split("train") == range(1500, len(shop.goals)) and len(split("train")) > 5000
    listed = [goal for wish in shop.wishes for goal in shop._goals_of(wish)]
    random.Random(233).shuffle(listed)
    assert listed == shop.goals


def test_numbers_go_round_in_their_split() -> None:
    goals = shipped().goals
    assert opened(3, "test").wanted is opened(503, "test").wanted is goals[3]
    assert opened(0, "validation").wanted is goals[500]
    assert opened(0, "train").wanted is goals[1500]
    assert opened(1, "train", test_goals=7, validation_goals=2).wanted is goals[10]
    with pytest.raises(ValueError, match="split: 'dev' is none of"):
        opened(0, "dev")
    with pytest.raises(ValueError, match=r"test_goals: .* leave none for train"):
        opened(0, "train", test_goals=100_000)


@given(st.floats(0.01, 2000))
def test_a_limit_is_one_of_the_four_tens_above_the_price(price: float) -> None:
    limit, said = price_limit(product(price=price), "find")
    above = [each for each in PRICE_LIMITS if each > price]
    if len(above) < 2:
        assert (limit, said) == (UNBOUNDED, "")
    else:
        assert limit in above[1:4] and f"{limit:.2f}" in said


# Search


def bm25(texts: list[list[str]], words: list[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    """The formula of FTS5, which ranks what is in more than half of the texts by almost nothing."""
    mean = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(texts)
    for word in words:
        within = sum(word in text for text in texts)
        weight = max(math.log((len(texts) - within + 0.5) / (within + 0.5)), 1e-6)
        for number, text in enumerate(texts):
            count = text.count(word)
            length = 1 - b + b * len(text) / mean
            scores[number] += weight * count * (k1 + 1) / (count + k1 * length)
    return scores


def test_search_ranks_by_bm25() -> None:
    rng = random.Random(3)
    vocabulary = ["zork", "quux", "blip", "frob", "mux", "gnat", "plim", "tok"]
    texts = [rng.choices(vocabulary, k=rng.randint(1, 12)) for _ in range(200)]
    index = FullTextIndex(" ".join(text) for text in texts)
    for _ in range(50):
        words = rng.sample(vocabulary, rng.randint(1, 3))
        scores = bm25(texts, words)
        found = index.search(" ".join(words), 50)
        best = sorted((number for number in range(200) if scores[number]), key=lambda n: -scores[n])
        assert [scores[n] for n in found] == pytest.approx([scores[n] for n in best[:50]])
        assert len(set(found)) == len(found)


def test_search_stems_ignores_case_and_stop_words_and_keeps_ties_in_order() -> None:
    index = FullTextIndex(
        ["Running shoes", "the runner", "a shoe for runs", "red shoe", "red shoe"]
    )
    assert set(index.search("RUN", 9)) == {0, 2}
    assert index.search("red", 9) == [3, 4] and index.search("red", 1) == [3]
    assert index.search("the red", 9) == [3, 4]
    assert index.search("the", 9) == [1]  # there is nothing else to search for
    assert words_of("Red red SHOES of the red") == ["red", "shoes"]


@given(st.text())
def test_any_text_is_a_query(query: str) -> None:
    assert set(FullTextIndex(["one", "two"]).search(query, 5)) <= {0, 1}


@pytest.mark.parametrize(
    "query",
    ['"', 'red"', "red AND", "NEAR(red, 2)", "red*", "text:red", "-red", "^red", "red\0", "\ud800"],
)
def test_a_query_is_words_and_no_syntax(query: str) -> None:
    assert FullTextIndex(["red"]).search(query, 5) == ([0] if "red" in query else [])


def test_a_text_that_cannot_be_stored_is_stored_without_what_cannot() -> None:
    assert FullTextIndex(["red\ud800 shoe"]).search("shoe", 5) == [0]


# Pages


def shown(observation: str) -> list[str]:
    return re.findall(r"\[([^\[\]]+)\]", observation)


def test_every_page_leads_where_it_says() -> None:
    env = opened(page_size=3)
    assert env.state() == "search"

    def go(action: str, state: str) -> str:
        step = env.step(action)
        assert step.info.valid and not step.terminated and step.reward == 0.0
        assert env.state() == state
        return step.observation

    pages = math.ceil(min(50, len(env.shop.search("running shoes"))) / 3)
    first = go("search[running shoes]", "results 'running shoes' page 1")
    assert PREVIOUS not in shown(first) and f"page 1 of {pages}" in first
    second = go(f"click[{NEXT}]", "results 'running shoes' page 2")
    go("click[< Prev]", "results 'running shoes' page 1")
    assert go("click[Next >]", "results 'running shoes' page 2") == second
    # A page names its buttons as a click does, letter by letter: small models copy them.
    assert [f"click[{name}]" for name in shown(second)] == env.actions()
    asin = shown(second)[0].upper()
    item = env.shop.by_asin[asin]
    said = go(f"click[{asin.lower()}]", f"item {asin}")
    assert item.name in said and f"${item.price:.2f}" in said
    (name, (value, other, *_)), *_ = item.options.items()
    assert f"chosen {value}" in go(f"CLICK[{value.upper()}]", f"item {asin} {name}={value}")
    changed = f"{asin} {name}={other}"
    go(f"click[{other}]", f"item {changed}")
    assert item.description in go("click[description]", f"description {changed}")
    go(f"click[{PREVIOUS}]", f"item {changed}")
    features = go("click[Features]", f"features {changed}")
    assert all(each in features for each in item.features)
    assert not env.step("click[features]").info.valid
    go(f"click[{PREVIOUS}]", f"item {changed}")
    go(f"click[{PREVIOUS}]", "results 'running shoes' page 2")
    go(f"click[{asin}]", f"item {asin}")  # what was chosen is forgotten
    go(f"click[{BACK}]", "search")
    go("search[TEA  leaves]", "results 'tea leaves' page 1")
    assert "nothing" in go("search[xyzzy]", "results 'xyzzy' page 1")  # from any page
    go(f"click[{BACK}]", "search")


def test_at_most_fifty_are_found_and_their_last_page_leads_back_only() -> None:
    env = opened(page_size=25, max_chars=5000)
    first = shown(env.step("search[black white red]").observation)
    assert first[25:] == [NEXT, BACK]
    last = shown(env.step(f"click[{NEXT}]").observation)
    assert last[25:] == [PREVIOUS, BACK] and len({*first[:25], *last[:25]}) == 50


@pytest.mark.parametrize(
    "action",
    ["", "buy now", "click[]", "click[buy now]", "search[]", "search[ ]", "search", "click[P99999]",
     "look[shoes]", "click[next >]", "click[< prev]", "search[a", '{"name": "search"}', "a]"],
)  # fmt: skip
def test_what_does_not_exist_changes_nothing(action: str) -> None:
    env = opened()
    before = env.snapshot()
    step = env.step(action)
    assert not step.info.valid and not step.info.tool_error
    assert (step.reward, step.terminated, step.truncated) == (0.0, False, False)
    assert env.snapshot() == before and "search page" in step.observation


def test_buying_ends_the_episode_with_the_reward_of_what_was_bought() -> None:
    env = opened(5)
    wanted = env.wanted
    other = next(each for each in env.shop.products if each.query != wanted.query)
    env.step(f"search[{other.asin}]")
    env.step(f"click[{other.asin}]")
    expected = score(other, wanted, {}).reward
    assert env.score() == expected < 1
    step = env.step(f"click[{BUY}]")
    assert step == ("", expected, True, False, step.info) and not step.info.success


def walk(env: WebShop, rng: random.Random, steps: int) -> None:
    """At random over whatever exists, but for buying."""
    for _ in range(steps):
        open_to = [action for action in env.actions() if action != f"click[{BUY}]"]
        assert env.step(rng.choice(open_to)).info.valid


@pytest.mark.parametrize("page_size", [1, 3, 10])
def test_what_is_shown_in_brackets_is_exactly_what_can_be_clicked(page_size: int) -> None:
    env, rng = opened(page_size=page_size), random.Random(4)
    for _ in range(300):
        walk(env, rng, 1)
        if env.place.page == "search":
            continue
        observation = env._observe()
        assert {f"click[{name.lower()}]" for name in shown(observation)} == set(env.actions())


@given(
    st.integers(0, 50),
    st.integers(300, 800),
    st.sampled_from(["every", "first"]),
    st.sampled_from([WebShop, ToolShop]),
)
@settings(max_examples=examples(60))
def test_an_observation_is_never_longer_than_it_may_be(
    number: int, most: int, show: Any, shop: type[WebShop]
) -> None:
    env = shop(max_chars=most, show=show)
    first = env.reset(task(number), 0)
    assert len(first) <= most and "instruction: " in first
    rng = random.Random(number)
    for _ in range(25):
        observation = env.step(rng.choice([*env.actions(), "nonsense"])).observation
        if env.place.page == "done":
            return
        assert len(observation) <= most
        assert ("instruction: " in observation) == (show == "every")
        fixed = {name for name in shown(observation) if not name[:1].isdigit()}
        assert env.place.page == "search" or BACK in fixed


# The expert


@pytest.mark.parametrize("page_size", [1, 10])
def test_the_expert_succeeds_from_wherever_one_is(page_size: int) -> None:
    rng = random.Random(5)
    for number in range(60):
        env = opened(number, "test", page_size=page_size)
        walk(env, rng, rng.randint(0, 8))
        here = env.snapshot()
        plan = env.solve()
        for action in plan:
            step = env.step(action)
            assert step.info.valid
        assert step.terminated and step.info.success and step.reward == 1.0
        env.restore(here)
        again = []
        while not (again and again[-1] == f"click[{BUY}]"):
            again.append(env.solve()[0])
            env.step(again[-1])
        assert again == plan  # step by step the same


def test_the_expert_searches_in_the_instructions_words() -> None:
    shop = shipped()
    pages = []
    for wanted in shop.goals[:200]:
        plan = best_plan(shop, wanted, 10)
        pages.append(plan.page)
        assert plan.query in queries(wanted)
        said = set(words_of(wanted.instruction))
        assert set(words_of(plan.query)) <= said
        assert plan.product in shop.search(plan.query)[(plan.page - 1) * 10 : plan.page * 10]
    assert max(pages) <= 5 and pages.count(1) > 180


def test_the_expert_finds_by_number_what_no_words_find() -> None:
    crowd = [product(asin=f"C{n}", name="tea", query="tea") for n in range(60)]
    hidden = product(asin="X1", name="steel kettle", query="tea", attributes=("robust",))
    wanted = goal(asin="X1", name="kettle", query="tea", attributes=("robust",), instruction="tea")
    shop = Catalogue([*crowd, hidden], [])
    assert best_plan(shop, wanted, 10)[:3] == ("x1", 1, hidden)
    assert shop.search("x1") == (hidden,)


def test_the_expert_takes_no_option_twice_for_one_wish() -> None:
    bought = product(options={"color": ("red", "blue"), "frame": ("red", "oak"), "size": ("9",)})
    assert fitting(bought, goal(options=("red",))) == {"color": "red"}
    assert fitting(bought, goal(options=("oak", "red"))) == {"color": "red", "frame": "oak"}
    assert fitting(bought, goal(options=())) == {}


def test_the_shop_offers_what_stages_and_mechanisms_ask_for() -> None:
    env = make_env("webshop", {})
    for protocol in (Solvable, Located, Rewindable, Scored):
        assert isinstance(env, protocol)


def test_calls_of_tools_are_the_same_actions() -> None:
    text, calls = opened(7), ToolShop()
    first = calls.reset(task(7), 0)
    assert isinstance(calls, Tooled) and not isinstance(text, Tooled)
    for action, call in zip(text.solve(), calls.solve(), strict=True):
        verb, words = action.removesuffix("]").split("[", 1)
        assert call == canonical(verb, {"words" if verb == "search" else "button": words})
        assert text.step(action) == calls.step(call)
    assert calls.reset(task(7), 0) == first == opened(7)._observe(instruction=True)
    specs = {spec["name"]: spec["parameters"]["required"] for spec in calls.tools()}
    assert specs == {"search": ["words"], "click": ["button"]}


@pytest.mark.parametrize(
    "call",
    ['{"name": "search"}', '{"name": "click", "arguments": {"words": "x"}}', "{", "[1]", "",
     '{"name": "buy", "arguments": {}}', '{"name": "search", "arguments": {"words": 3}}',
     '{"name": "search", "arguments": []}', '{"name": "answer", "arguments": {"text": "x"}}',
     '{"name": "click", "arguments": {"button": "next"}}', "search[tea]"],
)  # fmt: skip
def test_a_call_that_fails_is_told_so_and_changes_nothing(call: str) -> None:
    env = ToolShop(max_chars=300)
    first = env.reset(task(), 0)
    step = env.step(call)
    assert not step.info.valid and step.info.tool_error and not step.terminated
    assert step.observation == env.refusal + first and len(step.observation) <= 300


def test_a_scripted_group_calls_the_tools_with_success() -> None:
    style = ToolCall(think=False, actions_per_turn=1)
    group = ticket(
        {"page_size": 3, "max_chars": 400}, members=2, env="webshop_tools", max_tokens=200
    )
    for trajectory in demonstrated(group, setting(max_turns=12, format=style), 1.0):
        assert trajectory.success and trajectory.reward == 1.0
        assert set(trajectory.turn_flags.tolist()) == {TurnFlag.TOOL_CALL}


def test_threads_that_ask_at_once_get_one_catalogue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asins = [f"B{n:09d}" for n in range(500)]
    found = files(tmp_path, [item(asin) for asin in asins], about(*asins))
    with ThreadPoolExecutor(8) as pool, caplog.at_level(logging.INFO):
        shops = list(pool.map(stocked, [found] * 32))
        assert all(shop is shops[0] for shop in shops)
        assert len(caplog.records) == 1  # it was read once
        results = list(pool.map(shops[0].search, [f"tea {n}" for n in range(64)]))
    assert all(result == tuple(shops[0].products[:50]) for result in results)


def test_a_scripted_group_shops_with_success() -> None:
    params = {"max_chars": 400, "page_size": 3, "show": "first"}
    group = ticket(params, members=2, env="webshop", max_tokens=200)
    for trajectory in demonstrated(group, setting(max_turns=12), 1.0):
        assert trajectory.success and trajectory.reward == 1.0 and not trajectory.turn_flags.any()


# WebShop's own files


def item(asin: str, **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "asin": asin,
        "name": f"Brand tea {asin}",
        "query": " Herbal Tea ",
        "category": "grocery",
        "product_category": "Grocery › Tea › Herbal",
        "full_description": "a calming tea",
        "small_description": ["no caffeine", "in bags"],
        "pricing": "$9.99",
        "images": ["http://example.com/1.jpg"],
        "customization_options": {
            "Flavor": [{"is_selected": False, "value": " Mint/Lemon ", "image": None}],
            "Size": [{"value": "Pack of 2"}, {"value": "Pack of 4"}],
            "Empty": None,
        },
        "product_information": {"weight": "1 pound"},
    }
    return usual | fields


def about(*asins: str) -> dict[str, Any]:
    return {
        asin: {
            "attributes": ["caffeine free", "herbal"],
            "instruction": "Find me herbal tea",
            "instruction_attributes": ["herbal"],
        }
        for asin in asins
    }


def files(folder: Path, items: Any, attributes: Any, human: Any = None, limit: int = 0) -> Files:
    for name, content in (("items", items), ("ins", attributes), ("human", human)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    paths = [str(folder / f"{name}.json") for name in ("items", "ins", "human")]
    return Files(paths[0], paths[1], paths[2] if human is not None else "", limit)


def test_webshops_files_become_a_catalogue(tmp_path: Path) -> None:
    plain = item("B000000001")
    ranged = item("B000000002", pricing="$1,010.00 to $1,020.50", customization_options="")
    free = item("B000000003", pricing="", small_description="one line", customization_options={})
    found = files(tmp_path, [plain, ranged, free], about("B000000001", "B000000002"))
    shop = loaded(found)
    assert shop.by_asin["B000000001"] == Product(
        asin="B000000001",
        name="Brand tea B000000001",
        query="herbal tea",
        category="Grocery › Tea › Herbal",
        price=9.99,
        attributes=("caffeine free", "herbal"),
        options={"flavor": ("mint | lemon",), "size": ("pack of 2", "pack of 4")},
        description="a calming tea",
        features=("no caffeine", "in bags"),
    )
    assert 1010 <= shop.by_asin["B000000002"].price <= 1020.5
    assert shop.by_asin["B000000003"].price == 100.0
    assert shop.by_asin["B000000003"].attributes == ("DUMMY_ATTR",)
    assert shop.by_asin["B000000003"].features == ("one line",)
    assert not shop.skipped
    texts = sorted(each.instruction for each in shop.goals)
    assert len(texts) == 3  # two sizes of the one, the other without options
    assert texts[0] == "Find me herbal tea"  # above 990 dollars no limit is named
    price = r", and price lower than [234]0\.00 dollars"
    assert re.fullmatch(
        rf"Find me herbal tea with flavor: mint \| lemon, and size: pack of 2{price}", texts[1]
    )


def test_what_people_wrote_replaces_what_was_made(tmp_path: Path) -> None:
    asked = {
        "instruction": "i need tea in mint, a pack of two.",
        "instruction_attributes": ["herbal"],
        "instruction_options": ["mint lemon", "pack of 2"],
        "worker_id": "w",
    }
    vague = {"instruction": "tea.", "instruction_attributes": [], "instruction_options": []}
    human = {"B000000001": [asked, vague], "B000000009": [asked]}
    shop = loaded(files(tmp_path, [item("B000000001")], about("B000000001"), human))
    (wanted,) = shop.goals
    assert wanted.options == ("mint lemon", "pack of 2") and wanted.attributes == ("herbal",)
    assert wanted.instruction.startswith("i need tea in mint, a pack of two, and price lower than ")
    assert shop.skipped == {"instruction: no attributes": 1}
    assert fitting(shop.products[0], wanted) == {"flavor": "mint | lemon", "size": "pack of 2"}


def test_rows_that_cannot_be_used_are_counted_by_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nameless = item("B000000002")
    del nameless["name"]
    valueless = {"size": [{"name": "x"}]}
    rows = [
        item("B000000001"),
        item("B000000001"),
        nameless,
        item("B000000003", query=None),
        item("B000000004", product_category=" "),
        item("nan"),
        item("B0000000051234"),
        item("B000000006", pricing="$free"),
        item("B000000007", pricing=[9.99]),
        item("B000000008", customization_options=valueless),
        item("B000000009", customization_options=["size"]),
        "B000000010",
        item("B000000011"),
        item("B000000012"),
        item("B000000013"),
    ]
    told: dict[str, Any] = about("B000000001", "B000000011", "B000000012")
    told["B000000011"]["instruction_attributes"] = []
    told["B000000012"]["instruction"] = ""
    told["B000000013"] = {"attributes": ["herbal"], "instruction": None}  # nobody asks for it
    with caplog.at_level(logging.INFO):
        shop = loaded(files(tmp_path, rows, told))
    assert list(shop.by_asin) == [f"B0000000{n}" for n in ("01", "11", "12", "13")]
    assert {each.asin for each in shop.goals} == {"B000000001"}
    assert shop.skipped == {
        "item: asin is known already": 1,
        "item: no name": 1,
        "item: no query": 1,
        "item: no product_category": 1,
        "item: asin is none": 2,
        "item: pricing has no amount": 1,
        "item: pricing is no text": 1,
        "item: customization_options without value": 1,
        "item: customization_options is no object": 1,
        "item: no object": 1,
        "instruction: no attributes": 1,
        "instruction: no text": 1,
    }
    assert (
        "4 products, 2 goals, skipped: " in caplog.text and "2 × item: asin is none" in caplog.text
    )


def test_one_shops_in_webshops_files(tmp_path: Path) -> None:
    asins = [f"B00000000{n}" for n in range(6)]
    found = files(tmp_path, [item(asin) for asin in asins], about(*asins), limit=4)
    params = {"items": found.items, "attributes": found.attributes, "limit": 4}
    env = make_env("webshop", {**params, "test_goals": 3, "validation_goals": 1})
    assert isinstance(env, WebShop)
    for split, number in itertools.product(("test", "train"), range(4)):
        env.reset(task(number, split), 0)
        for action in env.solve():
            step = env.step(action)
        assert step.info.success
    assert len(env.shop.products) == 4 and len(env.shop.goals) == 8


def test_a_long_item_leaves_room_for_its_buttons(tmp_path: Path) -> None:
    sizes = [{"value": f"size {n}"} for n in range(500)]
    long = item(
        "B000000001",
        name="tea " * 500,
        full_description="word " * 5000,
        customization_options={"size": sizes},
    )
    found = files(tmp_path, [long], about("B000000001"))
    params = {
        "items": found.items,
        "attributes": found.attributes,
        "test_goals": 1,
        "validation_goals": 1,
    }
    env = opened(**params, max_chars=300)
    for action in ("search[tea]", "click[b000000001]", "click[description]", f"click[{PREVIOUS}]"):
        step = env.step(action)
        assert step.info.valid and len(step.observation) == 300 and BACK in shown(step.observation)
    assert env.step("click[size 499]").info.valid  # what is not shown is there all the same


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"page_size": 0}, r"env.params.page_size: 0 is not in 1\.\.50"),
        ({"max_chars": 10}, "env.params.max_chars: 10 is less than 300"),
        ({"test_goals": 0}, "env.params.test_goals"),
        ({"validation_goals": -1}, "env.params.validation_goals"),
        ({"limit": -1}, "env.params.limit"),
        ({"limit": 5}, "env.params.limit: needs items"),
        ({"human": "x"}, "env.params.human: needs items"),
        ({"items": "x"}, "env.params.attributes: items and attributes are needed both"),
        ({"attributes": "x"}, "env.params.items: items and attributes are needed both"),
        ({"items": "/no/items", "attributes": "/no"}, "items: there is no file /no/items"),
        ({"show": "never"}, "env.params.show"),
        ({"pages": 3}, "env.params.pages: webshop has no such parameter"),
    ],
)
def test_parameters_that_cannot_be_are_named(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(EnvError, match=problem):
        make_env("webshop", params)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff", b"[" * 100_000])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text("{}")
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"items: {bad}: ")):
        loaded(Files(str(bad), str(good)))
