"""What a learner checkpoint holds, as files: tensors in safetensors, numbers in JSON.

Training is a pure function of this and of the groups taken afterwards.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from evolver_async.policy import load_state, state_tensors
from learner.critic import Critic


@dataclass(frozen=True)
class Asked:
    """An evaluation of `version` that has been asked for, on the tasks of `stage`."""

    version: int
    stage: int
    episodes: int


@dataclass
class Track:
    """What a stage has shown of one signal so far: running mean and variance.

    `first` is the mean at the end of the warm-up, `peak` the largest mean since.
    """

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0
    first: float = 0.0
    peak: float = 0.0


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


def save(
    directory: Path,
    state: State,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: torch.nn.Module | None,
    critic: Critic | None,
) -> None:
    """Write everything into `directory`, which exists and is empty."""
    save_file(_plain(state_tensors(model)), directory / "model.safetensors")
    save_file(_optimizer_tensors(model, optimizer), directory / "optimizer.safetensors")
    if reference is not None:
        save_file(_plain(state_tensors(reference)), directory / "reference.safetensors")
    if critic is not None:
        save_file(_plain(state_tensors(critic.module)), directory / "critic.safetensors")
        moments = _optimizer_tensors(critic.module, critic.optimizer)
        save_file(moments, directory / "critic_optimizer.safetensors")
    (directory / "state.json").write_text(json.dumps(asdict(state), indent=1))


def load(
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: torch.nn.Module | None,
    critic: Critic | None,
) -> State:
    """Restore what `save` wrote, in place; returns the numbers."""
    load_policy(model, directory)
    if reference is not None:
        load_state(reference, load_file(directory / "reference.safetensors"))
    if critic is not None:
        load_state(critic.module, load_file(directory / "critic.safetensors"))
        moments = directory / "critic_optimizer.safetensors"
        load_optimizer(critic.module, critic.optimizer, moments)
    load_optimizer(model, optimizer, directory / "optimizer.safetensors")
    numbers = json.loads((directory / "state.json").read_text())
    pending = [Asked(**asked) for asked in numbers.pop("pending")]
    watched = numbers.pop("watched")
    tracks = {name: Track(**track) for name, track in watched["tracks"].items()}
    return State(
        **numbers, pending=pending, watched=Watched(tracks, suspicious=watched["suspicious"])
    )


def has_reference(directory: Path) -> bool:
    """Whether the checkpoint holds a KL reference."""
    return (directory / "reference.safetensors").exists()


def has_critic(directory: Path) -> bool:
    """Whether the checkpoint holds a critic."""
    return (directory / "critic.safetensors").exists()


def load_policy(model: torch.nn.Module, directory: Path) -> None:
    """Copy the policy of a checkpoint into `model`."""
    load_state(model, load_file(directory / "model.safetensors"))


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Restore Adam's state, each parameter's on its own device, and the random generator."""
    tensors = load_file(file)
    torch.set_rng_state(tensors.pop("rng"))
    for name, parameter in model.named_parameters():
        if f"step/{name}" in tensors:
            optimizer.state[parameter] = {
                slot: tensors.pop(f"{slot}/{name}").to(parameter.device)
                for slot in ("exp_avg", "exp_avg_sq", "step")
            }
    if tensors:
        raise ValueError(f"{file}: unknown tensor {next(iter(tensors))}")


def _optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{slot}/{name}"] = value
    return _plain(tensors)


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
