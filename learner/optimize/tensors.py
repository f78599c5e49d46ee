"""Weights and optimizer moments as files of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from evolver_async.checkpoint import shards
from evolver_async.checkpoint.shards import Shards
from evolver_async.model import lora
from evolver_async.model.policy import ModelError, state_tensors
from learner.optimize.adamw import follow, master

Optimized = tuple[torch.nn.Module, torch.optim.Optimizer]


def save_tensors(
    directory: Path,
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Optimized],
    *,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Write this rank's part of weights and moments, by file name; rank 0 what is not sharded."""
    files = {name: _weights(module) for name, module in modules.items()}
    files |= {name: _moments(*optimized) for name, optimized in optimizers.items()}
    for name, tensors in files.items():
        held = {
            key: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for key, tensor in tensors.items()
            if isinstance(tensor, DTensor) or rank == 0
        }
        shards.write(directory, name, held, rank, ranks)


@torch.no_grad()
def load_weights(module: torch.nn.Module, directory: Path, name: str) -> None:
    """Copy the weights of a checkpoint into `module`, masters included.

    They may have been written by another number of ranks. ModelError, naming the tensor, for one
    that is missing, unknown or of another shape, and for adapters of other weights.
    """
    own = _weights(module)
    with Shards(directory, name) as stored:
        for key in own.keys() ^ set(stored.names()):
            raise ModelError(f"weight {key} is {'missing' if key in own else 'unknown'}")
        if lora.BASE in own:
            lora.check_base({lora.BASE: stored.rows(lora.BASE)}, own[lora.BASE].cpu())
        for key, tensor in own.items():
            _fill(tensor, stored, key)
    follow(module.parameters())


@torch.no_grad()
def load_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path, name: str
) -> None:
    """Restore Adam's state, each parameter's on its own device, and the random generator."""
    with Shards(directory, name) as stored:
        unknown = set(stored.names()) - {"rng"}
        torch.set_rng_state(stored.rows("rng"))
        for key, parameter in module.named_parameters():
            if f"step/{key}" not in unknown:
                continue
            weight = master(parameter)
            moments = {slot: torch.zeros_like(weight) for slot in ("exp_avg", "exp_avg_sq")}
            for slot, tensor in moments.items():
                _fill(tensor, stored, f"{slot}/{key}")
            moments["step"] = stored.rows(f"step/{key}").to(weight.device)
            optimizer.state[weight] = moments
            unknown -= {f"{slot}/{key}" for slot in moments}
    if unknown:
        raise ValueError(f"{directory / name}: unknown tensor {next(iter(unknown))}")


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return weights by stable name, their masters if they have any."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: master(parameters.get(name, tensor)).detach()
        for name, tensor in state_tensors(module).items()
    }


def _moments(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in module.named_parameters():
        for slot, value in optimizer.state.get(master(parameter), {}).items():
            tensors[f"{slot}/{name}"] = value
    return tensors


def _fill(tensor: torch.Tensor, stored: Shards, name: str) -> None:
    """Copy a stored tensor, or this rank's part of it."""
    if isinstance(tensor, DTensor):
        mesh, local = tensor.device_mesh, tensor.to_local()
        shards = mesh.ndim - 1  # the dimension of the ranks that share a copy
        found = stored.rows(name, mesh.get_local_rank(shards), mesh.size(shards))
    else:
        local, found = tensor, stored.rows(name)
    if local.shape != found.shape:
        raise ModelError(f"weight {name} has shape {list(found.shape)}, not {list(local.shape)}")
    local.copy_(found)
