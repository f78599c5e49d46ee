"""WebShop environment: search, click from page to page, buy; buying ends the episode with its
reward.

WebShop's rules: any page takes a search, a click needs its button, an action that does not exist
changes nothing. Success is a reward of exactly 1.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actors.envs.base import Env
from actors.envs.webshop import pages
from actors.envs.webshop.catalogue import MOST_RESULTS, Catalogue, Goal
from actors.envs.webshop.expert import Action, queries, way
from actors.envs.webshop.official_files import Files, stocked
from actors.envs.webshop.pages import PageState
from actors.envs.webshop.purchase_reward import score
from actors.formats.tool_calls import called, canonical, tool_spec
from evolver_async.env import Info, Step
from evolver_async.schema import Task
from evolver_async.splits import checked_split

GOAL = "buy what the instruction asks for ; a page shows each button as [button] ."
PLAIN_GOAL = (
    "You are shopping on a website. Find and buy the product that best matches the instruction: its"
    " kind, its attributes, its options and its price all count. Every page shows its buttons in"
    " square brackets, as in [buy now]. Search for products, open one by clicking its number, click"
    " the options that are asked for, and click [buy now] to finish."
)
PLAIN_ACTIONS = (
    " The actions are: search[words], to search for products, and click[button], to click a button"
    " of the page."
)
ACTION = re.compile(r"(search|click)\[(.*)\]", re.IGNORECASE | re.DOTALL)
TOOLS = {  # by name: the argument and what it does
    "search": ("words", "search for products"),
    "click": ("button", "click a button of the page"),
}
LEAST_CHARS = 300
MOST_WORDS = 1000  # that the tiny preset learns of a shop


@dataclass(kw_only=True, eq=False)
class WebShop(Env):
    """WebShop environment. `page_size`: results on a page; `max_chars`: of an observation; `show`:
    the observations that contain the instruction; `test_goals`, `validation_goals`: sizes of these
    splits of the shuffled goals, before those for training.

    `items` and `attributes` name WebShop's own files, in place of the catalogue that ships; `human`
    its human instructions, in place of made ones; of the items only the first `limit` (0: all).
    They are read when the first episode begins, once a process.

    ValueError names the parameter that is out of range, or the file.
    """

    isolation = "thread"  # large catalogues take minutes to read, and their searches a while
    instructions = f"{GOAL} actions search[words] click[button] ."
    plain_instructions = PLAIN_GOAL + PLAIN_ACTIONS
    refusal = ""  # text before the page if an action does not exist

    page_size: int = 10
    max_chars: int = 2000
    show: Literal["every", "first"] = "every"
    test_goals: int = 500
    validation_goals: int = 1000
    items: str = ""
    attributes: str = ""
    human: str = ""
    limit: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= MOST_RESULTS:
            raise ValueError(f"page_size: {self.page_size} is not in 1..{MOST_RESULTS}")
        least = {"max_chars": LEAST_CHARS, "test_goals": 1, "validation_goals": 0, "limit": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: {getattr(self, name)} is less than {bound}")
        if bool(self.items) != bool(self.attributes):
            missing = "attributes" if self.items else "items"
            raise ValueError(f"{missing}: items and attributes are needed both, or neither")
        if (self.human or self.limit) and not self.items:
            raise ValueError(f"{'human' if self.human else 'limit'}: needs items")
        for name in ("items", "attributes", "human"):
            if (path := getattr(self, name)) and not Path(path).is_file():
                raise ValueError(f"{name}: there is no file {path}")
        files = Files(self.items, self.attributes, self.human, self.limit)
        self.files = files if self.items else None

    def reset(self, task: Task, dynamics_seed: int) -> str:
        split = checked_split(task.split)
        self.shop: Catalogue = stocked(self.files)
        numbers = self.shop.split(split, self.test_goals, self.validation_goals)
        if not numbers:
            known = len(self.shop.goals)
            raise ValueError(f"test_goals: {known} goals leave none for {task.split}")
        self.wanted: Goal = self.shop.goals[numbers[task.map_seed % len(numbers)]]
        self.place = pages.START
        return self._observe(instruction=True)

    def step(self, action: str) -> Step:
        verb, words = self._parsed(action)
        place = PageState("results", words) if verb == "search" and words else None
        if verb == "click":
            place = self._buttons().get(words)
        if place is None:
            failed = Info(valid=False, tool_error=bool(self.refusal))
            return Step(self._observe(self.refusal), 0.0, False, False, failed)
        self.place = place
        if place.page == "done":
            reward = self.score()
            return Step("", reward, True, False, Info(success=reward == 1.0))
        return Step(self._observe(), 0.0, False, False, Info())

    def vocabulary(self) -> list[str]:
        return stocked(self.files).words(MOST_WORDS)

    def actions(self) -> list[str]:
        """Return every button; on the search page, the searches that the instruction suggests."""
        if self.place.page == "search":
            return [self._written(("search", query)) for query in queries(self.wanted)]
        return [self._written(("click", name)) for name in self._buttons()]

    def solve(self) -> list[str]:
        found = way(self.shop, self.wanted, self.place, self.page_size)
        return [self._written(action) for action in found]

    def score(self) -> float:
        """Return the reward for buying now; 0 if no product is shown."""
        if not self.place.asin:
            return 0.0
        product = self.shop.by_asin[self.place.asin]
        return score(product, self.wanted, dict(self.place.chosen)).reward

    def state(self) -> str:
        return str(self.place)

    def snapshot(self) -> PageState:
        return self.place

    def restore(self, snapshot: PageState) -> None:
        self.place = snapshot

    def _buttons(self) -> dict[str, PageState]:
        return pages.buttons(self.shop, self.place, self.page_size)

    def _observe(self, head: str = "", instruction: bool = False) -> str:
        if instruction or self.show == "every":
            asked = f"instruction: {self.wanted.instruction}"
            head += f"{pages.shortened(asked, self.max_chars // 2)}\n"
        page = pages.text(self.shop, self.place, self.page_size, self.max_chars - len(head))
        return head + page

    def _written(self, action: Action) -> str:
        verb, words = action
        return f"{verb}[{words}]"

    def _parsed(self, action: str) -> Action:
        """Return the verb and its words in lower case; both empty for an unknown action."""
        found = ACTION.fullmatch(action.strip())
        return (found[1].lower(), pages.button(found[2])) if found else ("", "")


class ToolShop(WebShop):
    """WebShop with calls of the tools `search` and `click` as actions."""

    turn_format = "tool_call"
    instructions = GOAL
    plain_instructions = PLAIN_GOAL
    refusal = "error: no such button on this page, or not the argument that the tool takes\n"

    def tools(self) -> list[dict[str, Any]]:
        return [tool_spec(name, does, argument) for name, (argument, does) in TOOLS.items()]

    def _written(self, action: Action) -> str:
        verb, words = action
        return canonical(verb, {TOOLS[verb][0]: words})

    def _parsed(self, action: str) -> Action:
        try:
            call = called(action)
        except ValueError:
            return "", ""
        words = call.arguments.get(TOOLS[call.name][0]) if call.name in TOOLS else None
        return (call.name, pages.button(words)) if isinstance(words, str) else ("", "")
