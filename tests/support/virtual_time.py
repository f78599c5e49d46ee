"""Loops whose clock a test moves, so that no standstill of the host counts as time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from evolver_async.launch.serial import VirtualLoop

T = TypeVar("T")


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a clock that moves by what is slept, and by nothing else."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def pass_time(seconds: float) -> None:
    """Put the clock of the running loop forward. Its timers of that time are due."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds
