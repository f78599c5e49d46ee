"""Adoption of new weights by a model in this process: by reference wherever that is possible.

Tensors of the model's type in the memory of its device become the model's own. What must be copied
is copied in a thread, while the engine takes no step.
"""

import asyncio
from collections.abc import Callable

from torch import Tensor

from actors.weights.threads import in_thread

Pairs = list[tuple[Tensor, Tensor]]  # the model's tensor and the new one
PIECE = 4 << 20  # numbers of one copy to another device


async def adopt(pairs: Pairs, then: Callable[[], None]) -> None:
    """Make the new tensors the model's, and call `then` before anything else can use it.

    No step may run meanwhile. A cancelled call ends the same way: weights are never mixed.
    """
    if not all(fits(*pair) for pair in pairs):
        preparing = asyncio.ensure_future(in_thread(prepare, pairs))
        try:
            await asyncio.shield(preparing)
        except asyncio.CancelledError:
            await asyncio.wait([preparing])
            bind(preparing.result())
            then()
            raise
        pairs = preparing.result()
    replaced = bind(pairs)
    then()
    await in_thread(drop, replaced)


def fits(own: Tensor, new: Tensor) -> bool:
    """True if `new` can take the place of `own` as it is."""
    return own.device == new.device and own.dtype == new.dtype and new.is_contiguous()


def prepare(pairs: Pairs) -> Pairs:
    """Copy what must be copied; return the pairs that `bind` can take.

    Another device's memory is copied in place, for there may be no room for both.
    """
    bound = []
    for own, new in pairs:
        if own.device == new.device:
            bound.append((own, new if fits(own, new) else new.to(own.dtype).contiguous()))
        elif own.is_contiguous():
            parts = own.detach().view(-1).split(PIECE), new.reshape(-1).split(PIECE)
            for own_part, new_part in zip(*parts, strict=True):
                own_part.copy_(new_part)
        else:
            own.detach().copy_(new)
    return bound


def bind(pairs: Pairs) -> list[Tensor]:
    """Make the new tensors the model's; return those that it had."""
    replaced = []
    for own, new in pairs:
        replaced.append(own.data)
        own.data = new
    return replaced


def drop(tensors: list[Tensor]) -> None:
    """Free tensors one by one: other threads can run in between."""
    while tensors:
        tensors.pop()
