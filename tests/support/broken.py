"""Agents and environments with one mistake each, which write down when they first make it."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from openai import APIStatusError, AsyncOpenAI

from evolver_async.env import Info, Step
from evolver_async.schema import Task

DIRECTORY = "BROKEN_DIRECTORY"  # the environment variable that says where that is written down
MISTAKE = "mistake"  # the file there with the name of the mistake that `fails` makes now
LIMIT_S = 5.0  # of a step, and of an episode: a hang is a failure when this is over


def happened(name: str, in_s: float = 0.0) -> None:
    """Write down that a mistake is made, the first time; `in_s`: it is one only then."""
    try:
        with open(Path(os.environ[DIRECTORY]) / name, "x") as file:
            file.write(str(time.time() + in_s))
    except FileExistsError:
        pass


# ---- agents


async def _ask(base_url: str, api_key: str, **more: Any) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    message: Any = {"role": "user", "content": "go"}
    await client.chat.completions.create(model="policy", messages=[message], **more)


async def raises(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
    happened("raises")
    raise KeyError("no such arm")


async def hangs(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
    happened("hangs", LIMIT_S)
    await asyncio.sleep(3600)
    return 0.0


async def asks_for_less(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
    happened("asks_for_less")
    await _ask(base_url, api_key, top_p=0.5)
    return 0.0


async def calls_on(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
    """Takes a refusal for an answer, so that its episodes end well."""
    for _ in range(2):
        try:
            await _ask(base_url, api_key)
        except APIStatusError:
            happened("calls_on")
    return 0.0


async def earns_nothing(*, base_url: str, api_key: str, task: Task, seed: int) -> None:
    await _ask(base_url, api_key)
    happened("earns_nothing")


async def fails(*, base_url: str, api_key: str, task: Task, seed: int) -> float | None:
    """Makes the mistake whose turn it is."""
    name = (Path(os.environ[DIRECTORY]) / MISTAKE).read_text()
    return await MISTAKES[name](base_url=base_url, api_key=api_key, task=task, seed=seed)


MISTAKES = {one.__name__: one for one in (raises, hangs, asks_for_less, calls_on, earns_nothing)}


# ---- environments


class Works:
    """One step and it is solved."""

    instructions = "go"

    def reset(self, task: Task, dynamics_seed: int) -> str:
        return "here"

    def step(self, action: str) -> Step:
        return Step("there", 1.0, True, False, Info(success=True))

    def close(self) -> None: ...

    def actions(self) -> list[str]:
        return ["go", "stay"]

    def solve(self) -> list[str]:
        return ["go"]


class Raises(Works):
    def step(self, action: str) -> Step:
        happened("Raises")
        raise OSError("the floor fell in")


class Hangs(Works):
    def step(self, action: str) -> Step:
        happened("Hangs", LIMIT_S)
        time.sleep(3600)
        return super().step(action)


class NoNumber(Works):
    def step(self, action: str) -> Step:
        happened("NoNumber")
        return Step("there", float("nan"), True, False, Info())


class Awaited(Works):
    async def reset(self, task: Task, dynamics_seed: int) -> str:
        await asyncio.sleep(0.001)
        return "here"

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0.001)
        happened("Awaited")
        return super().step(action)

    async def close(self) -> None:
        await asyncio.sleep(0.001)
