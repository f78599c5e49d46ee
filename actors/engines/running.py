"""One request in the torch engine, from its arrival to its end."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from actors.engines.base import Generation, Request


@dataclass(eq=False)
class RunningRequest:
    """Waiting or running request. `draws`: its uniform random numbers, one per token."""

    request: Request
    context: np.ndarray
    limit: int
    completers: frozenset[int]
    draws: list[float]
    future: asyncio.Future[Generation]
    out: Generation = field(default_factory=Generation)
