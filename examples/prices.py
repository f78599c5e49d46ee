"""Async environment with two tools: the agent looks up prices and names the cheapest item."""

import asyncio
import json
import random
from typing import Any

from actors.formats.tool_calls import ANSWER_TOOL, canonical
from evolver_async.env import Info, Step
from evolver_async.schema import Task

ITEMS = ("phoenix", "dragon", "box")


class Prices:
    instructions = "find the item with the lower price ."

    async def reset(self, task: Task, dynamics_seed: int) -> str:
        """Begin `task`; its split and map_seed determine items and prices."""
        rng = random.Random(f"{task.split}/{task.map_seed}")
        self.prices = dict(zip(rng.sample(ITEMS, 2), rng.sample(range(10), 2), strict=True))
        self.seen: list[str] = []
        return "which item ?"

    def tools(self) -> list[dict[str, Any]]:
        """Specs of the tools, the same for every task."""
        item = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
        return [
            {"name": "list", "description": "list items", "parameters": {"type": "object"}},
            {"name": "price", "description": "price of an item", "parameters": item},
        ]

    async def step(self, action: str) -> Step:
        """Call a tool, or judge the answer, which ends the episode."""
        call = json.loads(action)
        if call["name"] == ANSWER_TOOL:
            right = call["arguments"]["text"] == self._cheapest()
            return Step(
                "right" if right else "wrong", float(right), True, False, Info(success=right)
            )
        try:
            output = await self._call(call["name"], call["arguments"])
        except (KeyError, TypeError) as error:  # an unknown tool or item
            return Step(f"error: {error}", 0.0, False, False, Info(tool_error=True))
        return Step(output, 0.0, False, False, Info())

    async def close(self) -> None:
        pass

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(0.01)  # a request to a service
        if name == "list":
            self.seen.append(name)
            return " ".join(self.prices)
        if name == "price":
            price = self.prices[arguments["item"]]
            self.seen.append(arguments["item"])
            return str(price)
        raise KeyError(name)

    def _cheapest(self) -> str:
        return min(self.prices, key=self.prices.__getitem__)

    # The first observation is always the same; this tells how many tasks an evaluation has played.
    def content(self) -> str:
        return str(self.prices)

    # Optional: these two methods allow `sft` stages.
    def actions(self) -> list[str]:
        answers = [canonical(ANSWER_TOOL, {"text": item}) for item in self.prices]
        return [canonical("list", {}), *map(_price, self.prices), *answers]

    def solve(self) -> list[str]:
        calls = {"list": canonical("list", {})} | {item: _price(item) for item in self.prices}
        left = [call for name, call in calls.items() if name not in self.seen]
        return [*left, canonical(ANSWER_TOOL, {"text": self._cheapest()})]


def _price(item: str) -> str:
    return canonical("price", {"item": item})
