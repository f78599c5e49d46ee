"""AdamW with gradient clipping and a guard against non-finite steps.

The only place where weights change.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from evolver_async.model.cpu.products import forget
from learner.ranks.mesh import whole_tensor


@dataclass(frozen=True)
class Update:
    """Result of one optimizer update; grad_norm is the norm before clipping."""

    applied: bool
    grad_norm: float


def make_adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Make an AdamW over trainable `parameters`, or the float32 masters of those in less precision.

    Only matrices decay; norms and biases do not.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    # Most updates are smaller than the distance of two numbers in bfloat16: rounded, they would be
    # lost.
    short = [parameter for parameter in trainable if parameter.dtype != torch.float32]
    for parameter in short:
        _give_master(parameter)
    masters = [master(parameter) for parameter in trainable]
    matrices = [parameter for parameter in masters if parameter.ndim > 1]
    vectors = [parameter for parameter in masters if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=betas,
        eps=eps,
        fused=True,
    )
    optimizer.register_step_post_hook(lambda *_: follow(trainable))
    return optimizer


def master(weight: torch.Tensor) -> torch.Tensor:
    """Return the float32 copy that is optimized in a weight's place, else the weight itself."""
    return getattr(weight, "master", weight)


@torch.no_grad()
def follow(parameters: Iterable[torch.Tensor]) -> None:
    """Round masters to their parameters, and drop what changed parameters were rounded to."""
    for parameter in parameters:
        if master(parameter) is not parameter:
            parameter.copy_(master(parameter))
        forget(parameter)


def _give_master(parameter: torch.nn.Parameter) -> None:
    """Attach a float32 copy, which takes over every gradient as soon as it is accumulated."""
    twin = torch.nn.Parameter(parameter.detach().float())

    def take(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        grad = weight.grad.float()
        twin.grad = grad if twin.grad is None else twin.grad.add_(grad)
        weight.grad = None

    parameter.register_post_accumulate_grad_hook(take)
    setattr(parameter, "master", twin)  # noqa: B010


def update(
    moves: Sequence[tuple[torch.optim.Optimizer, float]], *, loss: float, grad_clip: float
) -> list[Update]:
    """Clip gradients, move the weights of each optimizer at its rate, and clear the gradients.

    Each is clipped by its own norm, over all ranks. `loss` is that of the whole update. If it or
    any gradient is not finite, gradients are only cleared: `applied` is False for all.
    """
    norms = []
    for optimizer, _ in moves:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
        norms.append(float(whole_tensor(norm)))
    applied = math.isfinite(loss) and all(map(math.isfinite, norms))
    for optimizer, lr in moves:
        if applied:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    clear(moves)
    return [Update(applied, norm) for norm in norms]


def with_gradient(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the weights that the next update moves."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [weight for weight in weights if weight.grad is not None]


@torch.no_grad()
def take_back(optimizer: torch.optim.Optimizer, moved: list[torch.Tensor], lr: float) -> None:
    """Undo the last update of an AdamW, which moved the weights `moved` at `lr`, up to rounding.

    The first moments become 0: the next update would go on in the direction that is taken back. The
    second ones stay.
    """
    retrace(optimizer, moved, lr, back=True)
    for weight in moved:
        optimizer.state[weight]["exp_avg"].zero_()


@torch.no_grad()
def retrace(
    optimizer: torch.optim.Optimizer, moved: list[torch.Tensor], lr: float, *, back: bool
) -> None:
    """Move the weights `moved` by the last update of an AdamW at `lr` back, or on again.

    The moments tell how far each weight went, so no copy of the weights is needed. It is exact up
    to rounding.
    """
    wanted = set(moved)
    for group in optimizer.param_groups:
        beta_1, beta_2 = group["betas"]
        for weight in group["params"]:
            if weight not in wanted:
                continue
            state = optimizer.state[weight]
            step, first, second = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
            scale = (second / (1 - beta_2**step)).sqrt_().add_(group["eps"])
            size, decayed = lr / (1 - beta_1**step), 1 - lr * group["weight_decay"]
            if back:
                weight.addcdiv_(first, scale, value=size).div_(decayed)
            else:
                weight.mul_(decayed).addcdiv_(first, scale, value=-size)


def clear(moves: Sequence[tuple[torch.optim.Optimizer, float]]) -> None:
    """Clear the gradients of each optimizer's weights."""
    for optimizer, _ in moves:
        optimizer.zero_grad(set_to_none=True)
