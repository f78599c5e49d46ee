"""Sections about tasks and the replay buffer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from evolver_async.config.values.rules import (
    Count,
    FilePath,
    Fraction,
    Open,
    Pattern,
    Positive,
    Range,
    Scope,
)


@dataclass
class PartConfig:
    """One environment of a mixture."""

    env: str = ""  # a registered name or an import path
    params: dict[str, Any] = field(default_factory=dict)  # of its constructor
    weight: Positive = 1.0  # its share of the tasks, relative to the sum of all weights


RowsPath = Annotated[str, FilePath(hub=True)]


@dataclass
class TasksConfig:
    """The source of tasks."""

    train: int = 0  # distinct training tasks, which repeat; 0 draws new ones without end
    # probability that a pass includes a task whose newest group succeeded in all its episodes
    solved: Fraction = 1.0
    failed: Fraction = 1.0  # the same for a task whose newest group failed in all its episodes
    synthetic: Fraction = 0.0  # share of new groups that get a task from questioning
    # rows instead of numbered tasks: JSONL, Parquet (a file or a directory of them), what
    # `save_to_disk` of `datasets` wrote, or the id of a data set of the Hugging Face hub
    path: RowsPath = ""
    # the column with the prompt, text or messages; without it rows are tasks of the environment
    prompt: str = ""
    answer: str = ""  # the column with a prompt's reference; "": `answer`, if there is one
    split: str = ""  # the column with the split; "": a hash of the prompt decides
    validation: RowsPath = ""  # rows of the validation split, as path; path has the others
    test: RowsPath = ""  # the same for the test split
    download: bool = False  # path may be downloaded from the hub; a run keeps its own copy
    revision: str = ""  # of the hub's data set; a run records the commit
    subset: str = ""  # the hub's data set has several configurations: the name of one
    mixture: list[PartConfig] = field(default_factory=list)  # several environments instead of one


DATA_COLUMNS = (  # what a column of `data` can hold
    *("messages", "prompt", "completion", "chosen", "rejected", "label", "text", "tools"),
    *("prompt_token_ids", "token_ids", "logprobs", "sequences", "reward"),
)


@dataclass
class DataConfig:
    """Rows that stages learn from without playing: demonstrations, preferences, texts, and in rl
    stages trajectories of logs. `data` of a stage is short for `override.data`."""

    # as tasks.path: rows with messages, prompt and completion, prompt, chosen and rejected, prompt,
    # completion and label, or text; or tasks of an environment with actions in `reference`; of an
    # rl stage trajectories (token ids, log-probs, reward) or conversations
    path: RowsPath = ""
    # conversations that are measured and never learnt, as path; those of path that files or splits
    # name so belong to them, too
    validation: RowsPath = ""
    # rl stages: the share of groups that are rows instead of episodes; 1 plays none, 0 has no rows
    weight: Fraction = 0.0
    # names of the columns, where they differ: {prompt: question, completion: answer}
    columns: dict[str, str] = field(default_factory=dict)
    # turns of the assistant in messages that are learnt; a message with weight 0 never is
    turns: Literal["all", "last"] = "all"
    download: bool = False  # path may be downloaded from the hub; a run keeps its own copy
    revision: str = ""  # of the hub's data set; a run records the commit
    subset: str = ""  # the hub's data set has several configurations: the name of one


Archive = Annotated[str, Pattern(r"none|all|\d+", "one of none, all, <bytes>")]


@dataclass
class BufferConfig:
    """The replay buffer: admission, storage and sampling of groups."""

    # S: versions between sampling and training; an older group is never trained
    max_staleness: int = 4
    reuse: Annotated[Count, Scope.REPLAY] = 1  # number of times that a group is trained
    # prioritized: by the group's reward spread
    sampler: Annotated[str, Open("fifo", "freshest", "prioritized")] = "fifo"
    params: dict[str, Any] = field(default_factory=dict)  # of a sampler of one's own
    # grants stop while this many steps' worth of groups are ready, so that freshness does not hang
    # on which side is faster; 0: only max_staleness bounds them
    max_ready: Annotated[float, Range(ge=0)] = 0.0
    # groups that grow too old: evict drops them, wait holds the learner for them
    straggler: Literal["evict", "wait"] = "evict"
    # a ticket is reissued after this time without renewal
    lease_s: Annotated[Positive, Scope.RUN] = 30.0
    # a ticket is not renewed after this time without progress
    stall_s: Annotated[Positive, Scope.RUN] = 120.0
    # a process without progress for this time is named in log, status and metrics
    warn_s: Annotated[Positive, Scope.RUN] = 30.0
    demo_groups: Count = 128  # bound on outstanding demonstration groups
    # memory for groups; when it is full, grants stop while a full batch is ready
    limit_bytes: Annotated[int, Range(ge=1 << 20), Scope.RUN] = 2 << 30
    # journal size at which grants stop
    disk_limit_bytes: Annotated[int, Range(ge=1 << 20), Scope.RUN] = 20 << 30
    # size of a journal segment
    segment_bytes: Annotated[int, Range(ge=1 << 16), Scope.RUN] = 64 << 20
    # old segments that stay in journal/archive: none, all, or at most this many bytes
    archive: Annotated[Archive, Scope.RUN] = "none"
    # failed tickets of a task, without a complete group between them, before it is quarantined
    max_attempts: Count = 2
    # ipc:// or tcp:// address; "" makes an ipc socket in a private directory
    address: Annotated[str, Scope.RUN] = ""
