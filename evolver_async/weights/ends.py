"""Choice of the weight channel by configuration, one function an end."""

import msgspec
import torch

from evolver_async.config import Config, ConfigError
from evolver_async.config.sections.weight_channel import channel, versions_kept
from evolver_async.weights.channel.interface import Publisher, Receiver
from evolver_async.weights.collective.channel import CollectivePublisher, CollectiveReceiver
from evolver_async.weights.cuda_ipc import CudaMemory, IpcPublisher, IpcReceiver
from evolver_async.weights.shm import ShmPublisher, ShmReceiver


class ReceiverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain values from which any process makes a receiver.

    `base`: policy directory of the weights under adapters, "" if whole weights are published.
    `dtype` and `scale` belong to it. `threads`: of a receiver that checks what it maps, 0 for the
    machine's usual number. `keep`: newest versions that a receiver by broadcast holds.
    """

    kind: str
    address: str
    deadline_s: float = 30.0
    base: str = ""
    dtype: str = "float32"
    scale: float = 1.0
    threads: int = 0
    keep: int = 2


def publisher(config: Config, address: str, background: bool = True) -> Publisher:
    """Make the learner's end at `address`. Without `background` versions are visible at once."""
    weights, kept = config.weights, versions_kept(config)
    match channel(config):
        case "collective":
            return CollectivePublisher(
                address,
                kept,
                deadline_s=weights.deadline_s,
                bucket_bytes=weights.bucket_bytes,
                device=_gpu(config.learner.device),
            )
        case "cuda_ipc":
            return IpcPublisher(address, CudaMemory(_needed(config.learner.device)), kept)
    gpu = _gpu(config.learner.device)
    return ShmPublisher(address, keep=kept, background=background, gpu=gpu)


def receiver_settings(config: Config, address: str) -> ReceiverSettings:
    """Describe the receivers of a run; `address` is that of WELCOME."""
    from evolver_async.model.precision import stored_dtype  # imports transformers

    policy, lora = config.policy, config.policy.lora
    return ReceiverSettings(
        kind=channel(config),
        address=address,
        deadline_s=config.weights.deadline_s,
        base=policy.path if lora.rank else "",
        dtype=stored_dtype(policy.decided_dtype, config.engine.device),
        scale=lora.alpha / lora.rank if lora.rank else 1.0,
        threads=int(config.launch.kind == "serial"),
        keep=versions_kept(config),
    )


def receiver(settings: ReceiverSettings, device: str, name: str = "") -> Receiver:
    """Make a receiver in the process that samples on `device`; it is called `name` in logs."""
    made = _receiver(settings, device, name)
    if settings.base:
        from evolver_async.weights.lora_receiver import Merger, MergingReceiver  # as above

        return MergingReceiver(made, Merger(settings.base, settings.dtype, settings.scale))
    return made


def _receiver(settings: ReceiverSettings, device: str, name: str) -> Receiver:
    match settings.kind:
        case "collective":
            return CollectiveReceiver(
                settings.address,
                settings.keep,
                deadline_s=settings.deadline_s,
                device=_gpu(device),
                name=name,
            )
        case "cuda_ipc":
            return IpcReceiver(settings.address, CudaMemory(_needed(device)))
    return ShmReceiver(settings.address, threads=settings.threads)


def _gpu(device: str) -> str:
    """The GPU that `device` (auto, cpu, cuda, cuda:N) means, "" for none."""
    if device == "cpu" or not torch.cuda.is_available():
        return ""
    return device if ":" in device else f"cuda:{torch.cuda.current_device()}"


def _needed(device: str) -> str:
    gpu = _gpu(device)
    if not gpu:
        raise ConfigError("weights.kind: cuda_ipc needs a GPU, and this process sees none")
    return gpu
