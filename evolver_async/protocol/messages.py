"""The requests and replies of the wire: who asks the buffer what, and what it may answer.

Every request is idempotent or harmless when it arrives twice: delivery is at least once.
"""

from typing import Any

import msgspec

from evolver_async.schema import (
    EvalResult,
    FailureTotal,
    Fork,
    Group,
    Task,
    Ticket,
    Trajectory,
    Transcript,
    WeightId,
)

LOSING = ("environment", "engine", "grade")


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, eq=False, tag_field="type"):
    """Anything that crosses the wire; the tag `type` names its kind."""

    @property
    def kind(self) -> str:
        """The tag in capitals, as logs and documents write it."""
        return str(self.__struct_config__.tag).upper()


# ---- requests


class Hello(Message, tag="hello"):
    """The first word of a process; it asks for the sender's name.

    `tokenizer` is its tokenizer's hash, once it has loaded one. `host` and `pid` are for people.
    """

    role: str
    schema_hash: str
    tokenizer: str | None = None
    host: str = ""
    pid: int = 0


class Lease(Message, tag="lease"):
    """Asks for tickets of up to `credit` members; parked until there is room.

    `generated`: tokens that this incarnation has sampled so far.
    """

    credit: int
    weights: WeightId | None = None
    generated: int = 0


class Push(Message, tag="push"):
    """Hands in one finished member; kept by the sender until a reply."""

    trajectory: Trajectory


class Renew(Message, tag="renew"):
    """Tickets still being worked on, each with a counter of tokens and environment steps done.

    `doing`: what the slowest member of each does, in words; `still_s`: for how many seconds.
    `weights`: what the sender holds now.
    """

    progress: dict[int, int]
    doing: dict[int, str] = {}
    still_s: dict[int, float] = {}
    weights: WeightId | None = None


class Release(Message, tag="release"):
    """Gives members of a ticket back, with the reason.

    drain, weights (not adoptable), engine (too slow for an episode), grade (no judgement) and error
    are not the task's fault; environment is. Members given back for a reason of LOSING have failed.
    """

    group_id: int
    members: list[int]
    reason: str


class Offer(Message, tag="offer"):
    """Synthetic tasks for the pool."""

    tasks: list[Task]


class Counters(Message, tag="counters"):
    """What the sender counts, by metric name: totals since its start, or what is the case now.

    What several processes tell under one name is added. `failures`: totals since its start too.
    """

    values: dict[str, float]
    failures: list[FailureTotal] = []


class Retrieve(Message, tag="retrieve"):
    """Asks the experience service for what helps with a task, which is given in words."""

    query: str


class Contribute(Message, tag="contribute"):
    """Finished episodes of one task, for the experience service to learn from."""

    task_id: str
    query: str
    split: str
    episodes: list[Transcript]


class Purge(Message, tag="purge"):
    """Removes what a source has contributed to the experience; answered with how many entries."""

    source: str


class Sample(Message, tag="sample"):
    """Asks for the groups of take `take`; a repeated key gets the same groups."""

    lineage: int
    take: int
    stage: int


class Done(Message, tag="done"):
    """Reports a take as trained or skipped: how the buffer learns the version.

    `filtered`: group ids left out by selection, by reason. `skipped`: no weights were published.
    `episodes` > 0: evaluate exactly this version on so many held-out episodes.
    """

    lineage: int
    take: int
    version: int
    trained: list[int]
    filtered: dict[str, list[int]]
    skipped: bool = False
    episodes: int = 0


class Resume(Message, tag="resume"):
    """A learner (re)start: the takes from `take` on are repeated, older lineages are fenced.

    A fresh run resumes from lineage 0, take 0, version 0. Evaluations of older lineages are
    abandoned; `episodes` > 0 asks for one of this version under the new lineage, as of `stage`.
    `discard`: no take is repeated; the groups that had been handed out since then are evicted.

    `process` (random) and `incarnation` are the learner's. They are kept in the journal: a process
    begins one lineage, and none once a later incarnation has begun one.
    """

    lineage: int
    take: int
    version: int
    episodes: int = 0
    stage: int = 0
    discard: bool = False
    process: str = ""
    incarnation: int = 0


class Kept(Message, tag="kept"):
    """The oldest take that a kept checkpoint still needs: lets the journal go.

    `bytes`: the size of the newest one. `paused`: why the learner takes nothing for now. Changes
    nothing else when repeated, which is how a learner that trains no more asks for the results of
    evaluations.
    """

    take: int
    bytes: int = 0
    paused: str = ""


class StatusRequest(Message, tag="status"):
    """Asks for occupancy, ledger and rates; for people and tools."""


Request = (
    Hello
    | Lease
    | Push
    | Renew
    | Release
    | Offer
    | Counters
    | Retrieve
    | Contribute
    | Purge
    | Sample
    | Done
    | Resume
    | Kept
    | StatusRequest
)


# ---- replies


class Welcome(Message, tag="welcome"):
    """What a process needs to take part: the resolved config and where weights are published."""

    run_id: str
    config: dict[str, Any]
    weights_address: str
    experience_address: str = ""  # "" where the run has no experience service


class Reject(Message, tag="reject"):
    """Never acceptable as it is; the reason names the field or both sides' values."""

    reason: str


class Tickets(Message, tag="tickets"):
    tickets: list[Ticket]


class Wait(Message, tag="wait"):
    """Nothing now; `reason` says what is missing, from whom, for how long.

    `failures`: after SAMPLE, those of the whole run.
    """

    reason: str
    failures: list[FailureTotal] = []


class Ack(Message, tag="ack"):
    """On disk."""


class Dup(Message, tag="dup"):
    """A copy of this member was taken in before."""


class Stale(Message, tag="stale"):
    """Belongs to no open group."""


class Retry(Message, tag="retry"):
    """Not now; again after `seconds`."""

    seconds: float


class Ok(Message, tag="ok"):
    """Done. After DONE and KEPT: evaluation results; after DONE the buffer's counters as well.

    `evaluating`, after KEPT: progress by group of the tickets that outstanding evaluations need.
    `checkpoint`: the learner is asked for one, so that older data may go. `failures`: after DONE,
    those of the whole run.
    """

    evals: list[EvalResult] = []
    evaluating: dict[int, int] = {}
    counters: dict[str, float] = {}
    checkpoint: bool = False
    failures: list[FailureTotal] = []


class Fenced(Message, tag="fenced"):
    """The sender lost its right: a newer lineage exists, or `groups` were leased to another.

    Without either another process has the sender's name.
    """

    reason: str
    groups: list[int] = []


class Guidance(Message, tag="guidance"):
    """Experience for an episode, best first; empty where nothing fits."""

    ids: list[int]
    texts: list[str]


class Purged(Message, tag="purged"):
    count: int


class GroupReply(Message, tag="part"):
    """One group of a GROUPS reply."""

    group: Group


class Groups(Message, tag="groups"):
    """Closes a GROUPS reply: `count` parts came before it."""

    count: int


class Resumed(Message, tag="resumed"):
    """The learner's new lineage and every fork so far."""

    lineage: int
    forks: list[Fork]


class StatusReply(Message, tag="status_reply"):
    """Occupancy and ledger as nested plain values (see `buffer/service.py: status`)."""

    status: dict[str, Any]


Reply = (
    Welcome
    | Reject
    | Tickets
    | Wait
    | Ack
    | Dup
    | Stale
    | Retry
    | Ok
    | Fenced
    | Guidance
    | Purged
    | GroupReply
    | Groups
    | Resumed
    | StatusReply
)
