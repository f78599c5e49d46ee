"""Choice of the weight channel by configuration, one function an end."""

import torch

from evolver_async.config import Config, ConfigError
from evolver_async.config.sections.channel import channel, versions_kept
from evolver_async.weights.channel.base import Publisher, Receiver
from evolver_async.weights.collective.channel import CollectivePublisher, CollectiveReceiver
from evolver_async.weights.cuda_ipc import CudaMemory, IpcPublisher, IpcReceiver
from evolver_async.weights.shm import ShmPublisher, ShmReceiver


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


def receiver(config: Config, address: str, name: str = "") -> Receiver:
    """Make an actor's end of the channel at `address`, from WELCOME; `name` is the actor's."""
    match channel(config):
        case "collective":
            return CollectiveReceiver(
                address,
                deadline_s=config.weights.deadline_s,
                device=_gpu(config.engine.device),
                name=name,
            )
        case "cuda_ipc":
            return IpcReceiver(address, CudaMemory(_needed(config.engine.device)))
    return ShmReceiver(address, threads=int(config.launch.kind == "serial"))


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
