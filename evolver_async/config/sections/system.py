"""Sections about processes, GPUs, weight transfer and access."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from evolver_async.config.values.rules import FilePath, Pattern, Positive, Range


@dataclass
class WeightsConfig:
    """The transfer of weights from the learner to the actors."""

    # shm: files of one host; collective: gloo or NCCL, also between hosts; cuda_ipc: learner and
    # engines on one GPU; auto: collective if weights.address is set, cuda_ipc if launch.gpus names
    # one GPU for all and the engine is torch, else shm
    kind: Literal["auto", "shm", "collective", "cuda_ipc"] = "auto"
    dir: Annotated[str, FilePath()] = "/dev/shm"  # parent of the channel's private directory
    address: str = ""  # collective: tcp://host:port of the learner; "" serves this host alone
    trusted_network: bool = False  # allows an address of other hosts; nothing is encrypted there
    deadline_s: Positive = 30.0  # collective: an actor without progress for this time is left out
    # collective: unit of transfer and verification
    bucket_bytes: Annotated[int, Range(ge=1 << 12)] = 64 << 20


@dataclass
class GpusConfig:
    """The GPUs of this host that a process sees, counted from 0. Processes share a repeated one.

    None for a role: its processes see the same GPUs as the launcher.
    """

    # dealt out in order, engine.tensor_parallel to each of actors.count
    actors: list[int] = field(default_factory=list)
    # one for each of learner.ranks; of several hosts, those of each of them
    learner: list[int] = field(default_factory=list)


NO_CLIENT = (
    "auto or local; instead of ray://, start on a node of the cluster or by `ray job submit`"
)


@dataclass
class RayConfig:
    """The places that launch.kind=ray asks for. Data travels over the run's own sockets."""

    # auto: the cluster of this machine or RAY_ADDRESS; local: a new one on this machine
    address: Annotated[str, Pattern("auto|local", NO_CLIENT)] = "auto"
    strategy: Literal["spread", "pack"] = "spread"  # of actors over the nodes
    actor_cpus: float = 1.0
    actor_gpus: float = 0.0
    learner_cpus: float = 1.0  # of one rank; those of a host run on one node
    learner_gpus: float = 0.0
    service_cpus: float = 0.0  # of the buffer, and of the experience service
    # every node sees run.dir: the learner runs on that of weights.address, without one on any
    shared: bool = False
    runtime_env: dict[str, Any] = field(default_factory=dict)  # Ray's own; without secrets


@dataclass
class LaunchConfig:
    """The start, restart and end of processes."""

    # serial: one loop with a virtual clock, reproducible; local: spawned processes; ray: processes
    # on the nodes of a Ray cluster
    kind: Literal["serial", "local", "ray"] = "local"
    restarts: int = 3  # per process; one more failure ends the run with an error
    healthy_s: Positive = 600.0  # running time after which a process has all its restarts again
    backoff_s: float = 1.0  # before the first restart, doubled each time
    # failed episodes in a row, beyond those in play, that end the run if no group finishes; 0: none
    max_failures: int = 200
    # wait after a signal to stop, and after the learner's last progress, before a kill
    drain_s: float = 20.0
    # time without progress and without use of a processor, or without an answer, after which an
    # actor or the buffer is killed and started again; 0: never
    hung_s: float = 300.0
    hung_learner_s: float = 0.0  # the same of the learner, whose own functions may wait for others
    gpus: GpusConfig = field(default_factory=GpusConfig)
    ray: RayConfig = field(default_factory=RayConfig)


@dataclass
class SecurityConfig:
    """Access to the buffer. Without keys its address must belong to this host."""

    # a directory made by `evolver-async keys`, which encrypts every socket
    keys: Annotated[str, FilePath()] = ""
