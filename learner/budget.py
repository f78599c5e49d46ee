"""How many tokens one forward pass may hold: as configured, or as a GPU's free memory allows.

The memory of a pass is measured, not modelled: it depends on the model, its precision, its
adapters, recomputed layers and the attention kernel.
"""

from collections.abc import Callable, Iterable

import torch

from evolver_async.launch.roles import TrainingError

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


def measured(
    pass_: Callable[[int], None],
    optimizers: Iterable[torch.optim.Optimizer],
    device: torch.device,
    unit: int,
) -> int:
    """The budget of a GPU as it is now; TrainingError on any other device.

    pass_: a forward and backward pass over so many tokens. What the optimizers have yet to
    allocate, two moments a parameter, and as much again while they step, is left free.
    """
    if device.type != "cuda":
        raise TrainingError(f"learner.token_budget: 0 measures a GPU's memory, not {device}'s")

    def cost(tokens: int) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        pass_(tokens)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    parameters = [
        (one, parameter)
        for one in optimizers
        for group in one.param_groups
        for parameter in group["params"]
    ]
    reserved = sum(
        (1 if parameter in one.state else 3) * parameter.numel() * parameter.element_size()
        for one, parameter in parameters
    )
    pass_(unit)  # allocates what stays: gradients and the kernels' workspaces
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    return fitting(cost, free - reserved, unit)
