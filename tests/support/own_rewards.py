"""Reward functions of a user's own, with TRL's signature, and some that misbehave."""

import asyncio
import os
import sys
import time
import zlib
from typing import Any


def bonus(completions, **columns) -> list[float]:
    """A reward that no environment gives."""
    return [100.0] * len(completions)


def broken_bonus(completions, **columns) -> list[float]:
    return [float("nan")] * len(completions)


def varied(completions, **columns) -> list[float]:
    """A reward that the text decides: untrained policies would earn the same in every episode."""
    texts = ["".join(turn["content"] for turn in turns[::2]) for turns in completions]
    return [(zlib.crc32(text.encode()) % 5) / 4 for text in texts]


def correct(prompts, completions, answer) -> list[float]:
    """TRL's quick start."""
    print("a print is no reply")
    return [float(c[0]["content"].endswith(a)) for c, a in zip(completions, answer, strict=True)]


async def slowly(completions, level, **columns) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(one) for one in level]


def told(prompts, completions, completion_ids, trainer_state, log_metric, **columns) -> list[float]:
    """Tell what it was given by way of an error."""
    log_metric("told", 3.0)
    columns = {name: values[0] for name, values in columns.items() if name != "task"}
    raise RuntimeError(f"{prompts} {completions} {completion_ids} {trainer_state} {columns}")


def logs(completions, log_metric) -> list[float]:
    log_metric("words", len(completions[0][0]["content"].split()))
    return [0.5]


def if_easy(completions, level, **columns) -> list[float | None]:
    return [1.0 if one == "easy" else None for one in level]


def raises(completions, **columns) -> list[float]:
    raise KeyError("turns")


def hangs(completions, **columns) -> list[float]:
    while True:
        time.sleep(60.0)


def exits(completions, **columns) -> list[float]:
    sys.exit(0)


def dies(completions, **columns) -> list[float]:
    os._exit(3)


def two(completions, **columns) -> list[float]:
    return [1.0, 2.0]


def text(completions, **columns) -> Any:
    return ["much"]


def number(completions, **columns) -> Any:
    return 1.0


def enormous(completions, **columns) -> list[float]:
    return [1e9]


async def async_hangs(completions, **columns) -> list[float]:
    await asyncio.sleep(600.0)
    return [1.0]


async def async_cancels(completions, **columns) -> list[float]:
    raise asyncio.CancelledError


async def async_exits(completions, **columns) -> list[float]:
    raise SystemExit
