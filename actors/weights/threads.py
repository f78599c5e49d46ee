"""Threads for work on weights."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")
S = TypeVar("S")


async def in_thread(work: Callable[[R], S], subject: R) -> S:
    """Call `work` in a thread of its own and wait for it; in a serial run, whose clock does not
    wait, here.

    The loop's own threads are few, and blocking calls of agents and environments can hold them all.
    """
    loop = asyncio.get_running_loop()
    if getattr(loop, "virtual", False):
        return work(subject)
    thread = ThreadPoolExecutor(1, "weights")
    try:
        return await loop.run_in_executor(thread, work, subject)
    finally:
        thread.shutdown(wait=False)
