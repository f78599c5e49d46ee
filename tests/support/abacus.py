"""An environment of tool calls for tests: a sum, a tool that adds, and an answer."""

import asyncio
import json
from typing import Any

from actors.formats.tool_calls import canonical
from evolver_async.env import Info, Step
from evolver_async.schema import Task

QUESTION, CODE, ANSWER = "3 + 4", "3 + 4", "7"


class Abacus:
    """`python` adds the numbers of its code; `fail` always does; the answer ends the episode."""

    instructions = "add"

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.added = False
        return QUESTION

    def tools(self) -> list[dict[str, Any]]:
        one = {"type": "object", "properties": {"code": {"type": "string"}}}
        return [
            {"name": "python", "description": "adds", "parameters": one},
            {"name": "fail", "description": "fails", "parameters": {"type": "object"}},
        ]

    def step(self, action: str) -> Step:
        call = json.loads(action)
        if call["name"] == "answer":
            right = call["arguments"] == {"text": ANSWER}
            said = "right" if right else "wrong"
            return Step(said, float(right), True, False, Info(success=right))
        try:
            total = sum(map(int, call["arguments"]["code"].split("+")))
        except (KeyError, ValueError) as error:
            said = f"error: {type(error).__name__}"
            return Step(said, 0.0, False, False, Info(tool_error=True))
        self.added = True
        return Step(str(total), 0.0, False, False, Info())

    def actions(self) -> list[str]:
        return [canonical("python", {"code": CODE}), canonical("answer", {"text": "8"})]

    def solve(self) -> list[str]:
        code, answer = canonical("python", {"code": CODE}), canonical("answer", {"text": ANSWER})
        return [answer] if self.added else [code, answer]

    def close(self) -> None: ...


class Varied(Abacus):
    """Has the tools of the task that was begun, which it has to ask for: `python` where its number
    is even, else `fail`."""

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.number = task.map_seed
        return super().reset(task, dynamics_seed)

    async def tools(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0.001)
        return [super().tools()[self.number % 2]]
