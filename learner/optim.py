"""AdamW with gradient clipping and a guard against non-finite steps; the learning-rate schedule.

The only place where weights change.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


def lr_at(
    step: int,
    *,
    lr: float,
    warmup_steps: int,
    steps: int,
    decay: str,
    decay_start: float,
    lr_final: float,
) -> float:
    """The learning rate of learner step `step` (counted from 0) of a stage of `steps` steps.

    Rises linearly to `lr` over `warmup_steps`, stays, and from `decay_start · steps` on falls
    (`linear` or `cosine`) to `lr_final · lr` at the stage's last step. `none`, or a stage without a
    bound (`steps` 0), never decays.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if decay == "none" or steps == 0:
        return lr
    begin = max(warmup_steps, int(decay_start * steps)) - 1  # the last step at the full rate
    share = min(max((step - begin) / max(steps - 1 - begin, 1), 0.0), 1.0)
    if decay == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    else:
        assert decay == "linear", decay
    return lr * (1 - share * (1 - lr_final))


@dataclass(frozen=True)
class Update:
    """What one optimizer update did; grad_norm is the norm before clipping."""

    applied: bool
    grad_norm: float


def make_adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """A fresh AdamW over the trainable ones of `parameters`.

    Only matrices decay: norms and biases have no scale to hold back.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=betas,
        eps=eps,
        fused=True,
    )


def update(
    moves: Sequence[tuple[torch.optim.Optimizer, float]], *, loss: float, grad_clip: float
) -> list[Update]:
    """Clips gradients, moves the weights, clears the gradients: of each optimizer, at its rate.

    Each is clipped by its own norm. `loss` is that of the whole update. If it or any gradient is
    not finite, only the clearing happens: `applied` is False for all, weights and moments stay
    untouched.
    """
    norms = []
    for optimizer, _ in moves:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, grad_clip)))
    applied = math.isfinite(loss) and all(map(math.isfinite, norms))
    for optimizer, lr in moves:
        if applied:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [Update(applied, norm) for norm in norms]
