"""What a learner checkpoint holds, as files: tensors in safetensors, numbers in JSON.

Training is a pure function of this and of the groups taken afterwards.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from evolver_async.checkpoint import shards
from evolver_async.checkpoint.shards import Shards
from evolver_async.model.policy import ModelError, state_tensors
from learner.advantage.critic import Critic
from learner.optimize.adamw import follow, master


@dataclass(frozen=True)
class Asked:
    """An evaluation of `version` that has been asked for, on the tasks of `stage`."""

    version: int
    stage: int
    episodes: int


@dataclass
class Track:
    """What a stage has shown of one signal so far: running mean and variance.

    `first` is the mean at the end of the warm-up, `peak` and `least` are the largest and the
    smallest since.
    """

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0
    first: float = 0.0
    peak: float = 0.0
    least: float = 0.0


@dataclass
class Watched:
    """The memory of the alarms: tracks by signal, suspicious steps in a row by alarm."""

    tracks: dict[str, Track] = field(default_factory=dict)
    suspicious: dict[str, int] = field(default_factory=dict)


@dataclass
class State:
    """The learner's numbers. `take` counts SAMPLEs, `version` publishes, over the whole run."""

    lineage: int = 0
    take: int = 0
    version: int = 0
    stage: int = 0
    stage_take: int = 0  # take at which the stage began
    entered: int = -1  # the stage whose beginning has been carried out
    stage_tokens: int = 0  # ACTION tokens trained in the stage
    stage_seconds: float = 0.0
    seconds: float = 0.0
    baseline: float = 0.0  # of the reinforce estimator
    critic_steps: int = 0  # steps that trained the critic
    bad_steps: int = 0  # non-finite, in a row
    empty_steps: int = 0  # nothing selected, in a row
    masked_steps: int = 0  # nearly everything masked, in a row
    eval_success: float = -1.0  # the newest evaluation of the stage; -1 before the first
    pending: list[Asked] = field(default_factory=list)  # evaluations without a result yet
    watched: Watched = field(default_factory=Watched)  # by the alarms, in this stage
    rollbacks: int = 0  # of this stage
    discard: bool = False  # gone back: what was taken since is not to be taken again
    finished: bool = False  # the last stage is over


def save(
    directory: Path,
    state: State,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: torch.nn.Module | None,
    critic: Critic | None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Write what this rank holds into `directory`, which exists; rank 0 what all have besides."""
    moments = _optimizer_tensors(model, optimizer)
    sharded = {"model": _weights(model), "optimizer": moments}
    if reference is not None:
        sharded["reference"] = _weights(reference)
    if critic is not None:
        sharded["critic"] = _weights(critic.module)
        sharded["critic_optimizer"] = _optimizer_tensors(critic.module, critic.optimizer)
    for name, tensors in sharded.items():
        held = {
            key: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for key, tensor in tensors.items()
            if isinstance(tensor, DTensor) or rank == 0
        }
        shards.write(directory, name, held, rank, ranks)
    if rank > 0:
        return
    (directory / "state.json").write_text(json.dumps(asdict(state), indent=1))


def load(
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: torch.nn.Module | None,
    critic: Critic | None,
) -> State:
    """Restore what `save` wrote, on as many ranks as it may have been, in place; the numbers."""
    load_weights(model, directory, "model")
    if reference is not None:
        load_weights(reference, directory, "reference")
    if critic is not None:
        load_weights(critic.module, directory, "critic")
        load_optimizer(critic.module, critic.optimizer, directory, "critic_optimizer")
    load_optimizer(model, optimizer, directory, "optimizer")
    numbers = json.loads((directory / "state.json").read_text())
    pending = [Asked(**asked) for asked in numbers.pop("pending")]
    watched = numbers.pop("watched")
    tracks = {name: Track(**track) for name, track in watched["tracks"].items()}
    return State(
        **numbers, pending=pending, watched=Watched(tracks, suspicious=watched["suspicious"])
    )


def has_reference(directory: Path) -> bool:
    """Whether the checkpoint holds a KL reference."""
    return shards.exists(directory, "reference")


def has_critic(directory: Path) -> bool:
    """Whether the checkpoint holds a critic."""
    return shards.exists(directory, "critic")


@torch.no_grad()
def load_weights(module: torch.nn.Module, directory: Path, name: str) -> None:
    """Copy the weights of a checkpoint into `module`, masters included.

    ModelError, naming the tensor, for what is missing, unknown or of another shape.
    """
    own = _weights(module)
    with Shards(directory, name) as stored:
        for key in own.keys() ^ set(stored.names()):
            raise ModelError(f"weight {key} is {'missing' if key in own else 'unknown'}")
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
    """What is trained, by stable name: masters where there are any."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: master(parameters.get(name, tensor)).detach()
        for name, tensor in state_tensors(module).items()
    }


def _optimizer_tensors(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in module.named_parameters():
        for slot, value in optimizer.state.get(master(parameter), {}).items():
            tensors[f"{slot}/{name}"] = value
    return tensors


def _fill(tensor: torch.Tensor, stored: Shards, name: str) -> None:
    """Copy a stored tensor, or what this rank holds of it."""
    if isinstance(tensor, DTensor):
        mesh, local = tensor.device_mesh, tensor.to_local()
        found = stored.rows(name, mesh.get_local_rank(), mesh.size())
    else:
        local, found = tensor, stored.rows(name)
    if local.shape != found.shape:
        raise ModelError(f"weight {name} has shape {list(found.shape)}, not {list(local.shape)}")
    local.copy_(found)
