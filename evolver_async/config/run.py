"""The sections about a run as a whole: what it trains, in which stages, who watches."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Run:
    """The run directory and its seed."""

    name: str = ""  # "" names the run after the recipe and the time
    dir: str = "runs"  # the run directory is <dir>/<name>
    seed: int = 0  # every random draw is keyed by this and by what it is for
    hardware: str = ""  # GPUs that the recipe is written for, as 8x80GB, for `doctor`; "": none


@dataclass
class Lora:
    """Low-rank adapters, which are then all that is trained, published and checkpointed."""

    rank: int = 0  # of the adapters; 0 trains the whole model
    alpha: float = 16.0  # the adapters' product is scaled by alpha / rank
    targets: list[str] = field(
        default_factory=list
    )  # last parts of the names of linears, as q_proj; none: all linears of the decoder's layers


@dataclass
class Policy:
    """The model that is trained."""

    path: str = (
        ""  # a Hugging Face causal-LM directory; "" makes the `tiny` preset in the run directory
    )
    hidden_size: int = 64  # tiny preset only, as are the next four
    layers: int = 2
    heads: int = 4
    intermediate_size: int = 192
    max_length: int = 1024  # tokens of context (prompt, actions and observations together)
    dtype: str = "float32"  # float32 or bfloat16
    lora: Lora = field(default_factory=Lora)


@dataclass
class Part:
    """One environment of a mixture."""

    env: str = ""  # a registered name or an import path
    params: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # its share of the tasks, over the sum of all weights


@dataclass
class Tasks:
    """Where tasks come from."""

    train: int = 0  # distinct training tasks, met repeatedly; 0 draws new ones without end
    solved: float = 1.0  # chance that a pass meets a task whose newest group succeeded throughout
    failed: float = 1.0  # the same for one whose newest group failed throughout
    synthetic: float = 0.0  # share of new groups that get a task of the system's own making
    path: str = ""  # a JSONL file of tasks, one a line, instead of numbered ones
    mixture: list[Part] = field(default_factory=list)  # several environments instead of one


@dataclass
class Stage:
    """One stretch of training; ends when the first of its limits is reached (0 = no such limit)."""

    kind: str = "rl"  # sft, world_model, reflect, dpo or rl
    steps: int = 0  # learner steps
    tokens: int = 0  # trained ACTION tokens
    hours: float = 0.0
    until_success: float = 0.0  # the newest eval/success reaches this
    expert_fraction: float = (
        1.0  # sft: share of demonstrations by the environment's solver; the rest is random
    )
    alternatives: int = 3  # world_model, reflect: actions tried beside the expert's in each state
    reset_optimizer: bool = False  # start this stage with a fresh optimizer
    refresh_reference: bool = (
        False  # start this stage with the KL reference set to the current policy
    )
    override: dict[str, Any] = field(
        default_factory=dict
    )  # keys of other sections, for this stage only; those of the whole run are refused


@dataclass
class Buffer:
    """The replay buffer: what is admitted, kept, handed out."""

    max_staleness: int = (
        4  # S: versions between sampling and training; a group over it is never trained
    )
    reuse: int = 1  # how often a group is trained
    sampler: str = "fifo"  # fifo, freshest or prioritized (by the group's reward spread)
    straggler: str = "evict"  # evict groups that grow too old, or wait for them
    lease_s: float = 30.0  # a ticket not renewed for this long is reissued
    stall_s: float = 120.0  # a ticket without progress for this long is not renewed
    warn_s: float = 30.0  # who makes no progress for this long is named in log, status and metrics
    demo_groups: int = 128  # bound on outstanding demonstration groups
    limit_bytes: int = 2 << 30  # memory for groups; stops grants while a full batch is ready
    disk_limit_bytes: int = 20 << 30  # journal size at which grants stop
    segment_bytes: int = 64 << 20  # size of a journal segment
    archive: str = (
        "none"  # old segments kept in journal/archive: none, all, or at most so many bytes
    )
    max_attempts: int = (
        2  # tickets of a task that fail in the environment, none whole between: it is quarantined
    )
    address: str = ""  # ipc:// or tcp:// address; "" makes an ipc socket in a private directory


@dataclass
class Weights:
    """How weights travel from the learner to the actors."""

    kind: str = (
        "auto"  # shm (files of one host), collective (gloo or NCCL, also between hosts) or cuda_ipc
        # (learner and engines on one GPU); auto: collective where weights.address is set, cuda_ipc
        # where launch.gpus has all on one GPU and the engine is torch, else shm
    )
    dir: str = "/dev/shm"  # where the channel's private directory is made
    address: str = ""  # collective: tcp://host:port of the learner; "" serves this host alone
    trusted_network: bool = False  # allows an address of other hosts: nothing is encrypted there
    deadline_s: float = 30.0  # collective: an actor without any progress for this long is left out
    bucket_bytes: int = 64 << 20  # collective: what is sent and checked at a time


@dataclass
class Eval:
    """Evaluation on held-out tasks with exact weights, greedy and never guided."""

    every: int = 25  # versions between evaluations; 0 evaluates only after each stage
    episodes: int = 256
    final_episodes: int = 512  # after the last stage
    temperature: float = 0.0
    timeout_s: float = (
        120.0  # the last evaluation is lost (exit code 4) after so long without any progress
    )


@dataclass
class Checkpoint:
    """Checkpoints in <run>/checkpoints, newest last."""

    every: int = 25  # learner steps; one is also written at the end of a stage and on SIGTERM
    keep: int = 2  # the newest, at least 2
    keep_best: int = 1  # besides, those with the highest eval/success; 0: none
    keep_every: int = 0  # besides, for good, those of every n-th step; 0: none


@dataclass
class Metrics:
    """JSONL always; Weights & Biases when asked."""

    wandb: str = "disabled"  # auto (online with a key, else offline), online, offline or disabled
    project: str = "evolver-async"
    samples: int = 2  # trajectories written to <run>/samples every `samples_every` steps
    samples_every: int = 10
    panel: str = "auto"  # auto (a live panel on a terminal, else lines), panel, lines or none


@dataclass
class Gpus:
    """The GPUs of this host that a process sees, counted from 0; one that is named twice is shared.

    Nothing for a role: its processes see what the launcher sees.
    """

    actors: list[int] = field(
        default_factory=list
    )  # dealt out in order, engine.tensor_parallel to each of actors.count
    learner: list[int] = field(default_factory=list)  # one for each of learner.ranks


@dataclass
class Launch:
    """Who starts the processes."""

    kind: str = (
        "local"  # serial (one loop, virtual clock, reproducible) or local (spawned processes)
    )
    restarts: int = 3  # per process; past it the run ends with an error
    healthy_s: float = 600.0  # a process that ran this long has all its restarts again
    backoff_s: float = 1.0  # before the first restart, doubled each time
    max_failures: int = (
        200  # failed episodes, beyond those being played, that end the run where no group was
        # finished in between; 0: none do
    )
    drain_s: float = (
        20.0  # after Ctrl-C or SIGTERM, and after the last progress of a checkpoint, before a kill
    )
    gpus: Gpus = field(default_factory=Gpus)


@dataclass
class Security:
    """Who may talk to the buffer. Without keys its address must be one of this host alone."""

    keys: str = ""  # a directory made by `evolver-async keys`: every socket of the run is encrypted
