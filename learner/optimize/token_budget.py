"""How many tokens one forward pass may hold: as configured, or as a GPU's free memory allows.

The memory of a pass is measured, not modelled: it depends on the model, its precision, its
adapters, recomputed layers and the attention kernel.
"""

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from evolver_async.errors import TrainingError
from evolver_async.weights.collective.process_group import gpu_id
from learner.ranks.process_group import Ranks

SHARE = 0.85  # of the free memory: fragments, and passes that differ from the one measured
PASSES = 10  # at most, until
GROWTH = 1.05  # another one would tell of less than so many times as many tokens
GRAIN = 256  # budgets are multiples of this, unless so little fits


def fitting(cost: Callable[[int], int], free: int, unit: int) -> int:
    """The budget whose pass about fills `SHARE` of `free` bytes, at least `unit` tokens.

    cost: bytes that a pass over so many tokens, a multiple of `unit`, needs at its peak. A pass has
    several peaks, each a constant and a price by token, and which is the highest depends on its
    size: so twice the tokens need twice the bytes at most, and every pass is tried at the size that
    the one before proves to fit. TrainingError where not even `unit` tokens fit.
    """
    room, tokens = SHARE * free, unit
    needed = once = cost(unit)
    for _ in range(PASSES):
        proven = int(tokens * room / max(needed, 1)) // unit * unit
        if proven < GROWTH * tokens:
            break
        tokens, needed = proven, cost(proven)
    tokens = int(tokens * room / max(needed, 1))
    if tokens < unit:
        raise TrainingError(
            f"learner.token_budget: one sequence of policy.max_length ({unit}) tokens needs "
            f"{once / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )
    return max(unit, tokens // GRAIN * GRAIN)


class Gpu:
    """The memory of a GPU, which `id` names; TrainingError for any other device."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise TrainingError(f"learner.token_budget: 0 measures a GPU's memory, not {device}'s")
        self.device = device
        self.id = gpu_id(str(device))

    def needed(self, pass_: Callable[[int], None], tokens: int) -> int:
        """Bytes that a pass takes at its peak."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        pass_(tokens)
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def give_back(self) -> None:
        """Leave to others what this process holds and does not use."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def free(self) -> int:
        """Bytes that nobody has."""
        return torch.cuda.mem_get_info(self.device)[0]


def measured(
    pass_: Callable[[int], None],
    optimizers: Iterable[torch.optim.Optimizer],
    ranks: Ranks,
    unit: int,
) -> int:
    """The budget of a GPU as it is now, which several ranks agree on: what the dearest of their
    passes takes in the least room that one of them has. Ranks on one GPU share what is free there.

    pass_: a forward and backward pass over so many tokens. What the optimizers have yet to
    allocate, two moments a parameter, and as much again while they step, is left free.
    TrainingError without a GPU.
    """
    gpu = Gpu(ranks.device)
    reserved = sum(
        (1 if parameter in one.state else 3) * _held(parameter).nbytes
        for one in optimizers
        for group in one.param_groups
        for parameter in group["params"]
    )
    pass_(unit)  # allocates what stays: gradients and the kernels' workspaces
    gpu.give_back()  # before any other rank on this GPU looks
    sharers = ranks.gather(gpu.id.encode()).count(gpu.id.encode())
    free = -ranks.largest(reserved - gpu.free() // sharers)
    return fitting(lambda tokens: ranks.largest(gpu.needed(pass_, tokens)), free, unit)


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
