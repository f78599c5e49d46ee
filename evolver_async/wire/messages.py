"""Messages of the wire: delivery of finished members, requests and replies.

Each may arrive twice, for delivery is at least once. One group on its way, with the main fields:

    actor    LEASE credit 8, weights 1.41    TICKETS group 12, members 0..7, attempt 0
    actor    RENEW progress {12: 310}        OK
    actor    PUSH group 12, member 3         ACK, once it is on disk
    learner  SAMPLE lineage 1, take 41       PART group 12, ..., GROUPS count 32
    learner  DONE take 41, version 42        OK
"""

from typing import Annotated, Any

import msgspec

from evolver_async.lineages import Fork
from evolver_async.schema import Group, Task, Ticket, Trajectory, WeightId
from evolver_async.wire.evaluation_results import EvalResult
from evolver_async.wire.failure_totals import FailureTotal
from evolver_async.wire.transcripts import Transcript

LOSING = ("environment", "engine", "grade")
REPLY_CHARS = 4000  # of an actor's first reply, prompt included


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, eq=False, tag_field="type"):
    """Anything that crosses the wire; the tag `type` names its kind."""

    @property
    def kind(self) -> str:
        """The tag in capitals, as logs and documents write it."""
        return str(self.__struct_config__.tag).upper()


class Push(Message, tag="push"):
    """One finished member; kept by the sender until a reply."""

    trajectory: Trajectory


class Pushes(Message, tag="pushes"):
    """Several PUSHes in one message, each under a number of its own (`ids`).

    The client's transport makes it, and the server's takes it apart again: no service sees it.
    """

    ids: list[int]
    trajectories: list[Trajectory]

    def __post_init__(self) -> None:
        if not 0 < len(self.ids) == len(self.trajectories):
            raise ValueError(f"ids: {len(self.ids)}, trajectories: {len(self.trajectories)}")
        if len(set(self.ids)) < len(self.ids) or min(self.ids) < 0:
            raise ValueError("ids: negative, or a number twice")


class Reject(Message, tag="reject"):
    """Refusal of a request; the reason names the field or both sides' values."""

    reason: str


class Ack(Message, tag="ack"):
    """Receipt: the member is on disk."""


class Dup(Message, tag="dup"):
    """Receipt of a copy: the member was accepted before."""


class Stale(Message, tag="stale"):
    """Receipt of a member of no open group."""


class Retry(Message, tag="retry"):
    """Request to try again after `seconds`."""

    seconds: float


class Receipts(Message, tag="receipts"):
    """Replies to PUSHES, in the order of its numbers."""

    ids: list[int]
    replies: list[Ack | Dup | Stale | Retry | Reject]


class Hello(Message, tag="hello"):
    """First message of a process; claims the sender's name. `tokenizer`: hash of a loaded one.

    `versions`: those of its code and packages, from `process.package_versions`.
    """

    role: str
    schema_hash: str
    tokenizer: str | None = None
    host: str = ""
    pid: int = 0
    versions: dict[str, str] = {}


class Lease(Message, tag="lease"):
    """Request for tickets of up to `credit` members; parked until there is room.

    `groups`: the groups of the tickets that the sender holds. It does not know of others: a buffer
    can die between the record of a grant and its answer. None: not reported.
    """

    credit: int
    groups: list[int] | None = None
    weights: WeightId | None = None  # those that the sender holds
    visible: WeightId | None = None  # the newest that it can fetch
    generated: int = 0  # tokens that this incarnation has sampled so far
    seconds: dict[str, float] = {}  # of this incarnation by activity (`metrics.activity`)
    launch: int = 0  # of the WELCOME that the sender got; another one fences it


class Renew(Message, tag="renew"):
    """Renewal of tickets, each with a counter of tokens and environment steps done.

    `doing`, `still_s`: activity of the slowest member of each, and its duration in seconds; the
    rest as in LEASE. Also sent when weights change while a LEASE is parked."""

    progress: dict[int, int]
    doing: dict[int, str] = {}
    still_s: dict[int, float] = {}
    weights: WeightId | None = None
    visible: WeightId | None = None
    seconds: dict[str, float] = {}
    launch: int = 0


class Release(Message, tag="release"):
    """Return of members of a ticket, with the reason.

    drain, weights (not adoptable), engine (too slow for an episode), grade (no judgement), reward
    (none in time) and error are not the task's fault; environment is. Members given back for a
    reason of LOSING have failed.
    """

    group_id: int
    members: list[int]
    reason: str


class Offer(Message, tag="offer"):
    """Synthetic tasks for the pool."""

    tasks: list[Task]


class Counters(Message, tag="counters"):
    """Totals since the sender's start, or current values; those of several senders are added.

    `first_reply`: an actor's first episode as text, in one message.
    """

    values: dict[str, float]  # by metric name
    failures: list[FailureTotal] = []
    gauges: dict[str, float] = {}  # of the sender's process and host, which are not added
    first_reply: Annotated[str, msgspec.Meta(max_length=REPLY_CHARS)] = ""


class Beat(Message, tag="beat"):
    """Heartbeat, sent by a thread beside the work: a step or a forward pass may take minutes.

    `count` changes with every piece of work. `busy`: the process or a descendant has used a
    processor, or moved data, since its last beat. `phase`: its present activity. `cpu_share`: share
    of its host's processors that it and its descendants used of late. The others are the learner's:
    `step_s` seconds of computation of step `step`, whose passes are done to `share`, in
    `micro_batches` of `tokens` in all; `left_s` more by the pace of those.
    """

    role: str
    phase: str
    count: int = 0
    busy: bool = False
    incarnation: int = 0
    cpu_share: float = 0.0
    step: int = 0
    step_s: float = 0.0
    left_s: float = 0.0
    share: float = 0.0
    micro_batches: int = 0
    tokens: int = 0


class Retrieve(Message, tag="retrieve"):
    """Query of the experience service for a task, which is given in words.

    `state`: key of the state before a turn, to which the entries must apply; "" for a whole task.
    """

    query: str
    state: str = ""


class Contribute(Message, tag="contribute"):
    """Finished episodes of one task in a stage, for the experience service to learn from."""

    stage: int
    task_id: str
    query: str
    split: str
    episodes: list[Transcript]


class Purge(Message, tag="purge"):
    """Removal of the entries that a source has contributed to the experience."""

    source: str


class Sample(Message, tag="sample"):
    """Request for the groups of take `take`; a repeated key gets the same groups."""

    lineage: int
    take: int
    stage: int


class Done(Message, tag="done"):
    """Report of a take as trained or skipped, with the new version.

    `filtered`: ids of groups that did not train, by reason. `skipped`: no weights were published.
    `episodes` > 0: evaluate exactly this version on so many held-out episodes, and on those of
    `sets`, names of `eval.sets`.
    """

    lineage: int
    take: int
    version: int
    trained: list[int]
    filtered: dict[str, list[int]]
    skipped: bool = False
    episodes: int = 0
    sets: list[str] = []


class Resume(Message, tag="resume"):
    """Start of a learner: the takes from `take` on are repeated, older lineages are fenced.

    A fresh run resumes from lineage 0, take 0, version 0. `stage`: of the next take; grants of
    another one end. Evaluations of older lineages are abandoned; `episodes` > 0 asks for one of
    this version in the new lineage, as DONE of `eval_stage`.
    `discard`: no take is repeated; the groups that had been handed out since then are evicted.

    `process` (random) and `incarnation` are the learner's. They are kept in the journal: a process
    begins one lineage, and none once a later incarnation has begun one.
    """

    lineage: int
    take: int
    version: int
    episodes: int = 0
    sets: list[str] = []
    eval_stage: int = 0
    stage: int = 0
    discard: bool = False
    process: str = ""
    incarnation: int = 0


class Kept(Message, tag="kept"):
    """The oldest take that a kept checkpoint still needs; older journal segments can be deleted.

    `bytes`: the size of the newest checkpoint. `paused`: the reason why the learner takes
    nothing for now, and the command that ends the pause. A learner that trains no more repeats the
    message to get the results of evaluations.
    """

    take: int
    bytes: int = 0
    paused: str = ""


class StatusRequest(Message, tag="status"):
    """Request for occupancy, ledger and rates."""


ActorRequest = Lease | Push | Pushes | Renew | Release | Offer
LearnerRequest = Sample | Done | Resume | Kept
ExperienceRequest = Retrieve | Contribute | Purge
Request = (
    Hello | Counters | Beat | StatusRequest | ActorRequest | LearnerRequest | ExperienceRequest
)


class Welcome(Message, tag="welcome"):
    """Facts that every process needs: the resolved config and the addresses of other services."""

    run_id: str
    config: dict[str, Any]
    weights_address: str
    experience_address: str = ""  # "" where the run has no experience service
    launch: int = 0  # number of the launch, for which the config and the addresses hold


class Tickets(Message, tag="tickets"):
    tickets: list[Ticket]


class Wait(Message, tag="wait"):
    """Nothing to give now; `reason` names the missing part, its holder and the time."""

    reason: str
    failures: list[FailureTotal] = []  # after SAMPLE: those of the whole run


class Ok(Message, tag="ok"):
    """Success. After DONE and KEPT: evaluation results; after DONE the buffer's counters as well.

    `evaluating`, after KEPT: progress by group of the tickets that outstanding evaluations need.
    `checkpoint`: the learner is to write one, which frees data. `failures`: the run's, after DONE.
    """

    evals: list[EvalResult] = []
    evaluating: dict[int, int] = {}
    counters: dict[str, float] = {}
    checkpoint: bool = False
    failures: list[FailureTotal] = []


class Fenced(Message, tag="fenced"):
    """Loss of a right: a newer lineage, `groups` leased to another, or a name held by another."""

    reason: str
    groups: list[int] = []


class Guidance(Message, tag="guidance"):
    """Experience for an episode, best first; empty if nothing fits."""

    ids: list[int]
    texts: list[str]


class Purged(Message, tag="purged"):
    count: int


class GroupReply(Message, tag="part"):
    """One group of a GROUPS reply."""

    group: Group


class Groups(Message, tag="groups"):
    """End of a GROUPS reply, after `count` parts."""

    count: int


class Resumed(Message, tag="resumed"):
    """The learner's new lineage and every fork so far."""

    lineage: int
    forks: list[Fork]


class StatusReply(Message, tag="status_reply"):
    """Occupancy and ledger as nested plain values (see `buffer/service.py: status`)."""

    status: dict[str, Any]


ActorReply = Tickets | Ack | Dup | Stale | Retry | Receipts
LearnerReply = GroupReply | Groups | Resumed
ExperienceReply = Guidance | Purged
Reply = (
    Welcome
    | Reject
    | Wait
    | Ok
    | Fenced
    | StatusReply
    | ActorReply
    | LearnerReply
    | ExperienceReply
)
