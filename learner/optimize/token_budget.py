"""Token budget of one forward pass, measured so that the pass fits a GPU's free memory.

The memory of a pass is not modelled, because it depends on the model, its precision, its adapters,
recomputed layers and the attention kernel.
"""

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from evolver_async.errors import TrainingError
from evolver_async.weights.collective.process_group import gpu_id
from learner.ranks.mesh import Ranks

SHARE = 0.85  # of the free memory; the rest is for fragments and for passes unlike the measured one
PASSES = 10  # at most
GROWTH = 1.05  # the search ends when a pass would raise the budget by less than this factor
GRAIN = 256  # budgets are multiples of this, unless less fits


def fitting(cost: Callable[[int], int], free: int, unit: int) -> int:
    """Return the budget whose pass about fills `SHARE` of `free` bytes, at least `unit` tokens.

    cost: peak bytes of a pass over a number of tokens, a multiple of `unit`. A pass has several
    peaks, each a constant plus a price per token; the highest depends on its size. So twice the
    tokens need twice the bytes at most, and every pass is tried at a size that the one before has
    proven to fit. TrainingError if not even `unit` tokens fit.
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
    """Memory of the GPU `id`; TrainingError for any other device."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise TrainingError(f"learner.token_budget: 0 measures a GPU's memory, not {device}'s")
        self.device = device
        self.id = gpu_id(str(device))

    def needed(self, pass_: Callable[[int], None], tokens: int) -> int:
        """Return the peak memory of a pass in bytes."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        pass_(tokens)
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def give_back(self) -> None:
        """Release memory that this process holds and does not use."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def free(self) -> int:
        """Return the free GPU memory in bytes."""
        return torch.cuda.mem_get_info(self.device)[0]


def measured(
    pass_: Callable[[int], None],
    optimizers: Iterable[torch.optim.Optimizer],
    ranks: Ranks,
    unit: int,
) -> int:
    """Measure the budget of a GPU in its present state; several ranks agree on one.

    It fits the most expensive of their passes and the least of their free memory. Ranks on one GPU
    share its free memory. pass_: a forward and backward pass over a number of tokens. Memory that
    the optimizers have yet to allocate is left free: two moments per parameter, and as much again
    while they step. TrainingError without a GPU.
    """
    gpu = Gpu(ranks.device)
    reserved = sum(
        (1 if parameter in one.state else 3) * _held(parameter).nbytes
        for one in optimizers
        for group in one.param_groups
        for parameter in group["params"]
    )
    pass_(unit)  # allocates gradients and workspaces of kernels, which stay
    gpu.give_back()  # before any other rank on this GPU looks
    sharers = ranks.gather(gpu.id.encode()).count(gpu.id.encode())
    free = -ranks.largest(reserved - gpu.free() // sharers)
    return fitting(lambda tokens: ranks.largest(gpu.needed(pass_, tokens)), free, unit)


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
