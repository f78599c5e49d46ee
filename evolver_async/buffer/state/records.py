"""The journal's records: every decision that must survive a restart, and the snapshot of them all.

A record is encoded as msgpack; the trajectory of an `Arrived` lies beside it in the journal.
"""

import msgspec

from evolver_async.buffer.state.evaluations import EvaluationQueue
from evolver_async.buffer.state.ledger import Ledger
from evolver_async.buffer.state.position import Position
from evolver_async.buffer.tasks.stream import Cursor
from evolver_async.schema import Kind, Task, WeightId


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="record"):
    """Something that happened."""


class Granted(Record, tag="granted"):
    """A new group was given to an actor. `pinned`: an evaluation episode of these weights."""

    group_id: int
    task: Task
    kind: Kind
    members: list[int]
    actor: str
    wait: bool = False
    pinned: WeightId | None = None


class Reissued(Record, tag="reissued"):
    """Missing members were given to an actor again."""

    group_id: int
    members: list[int]
    actor: str


class Arrived(Record, tag="arrived"):
    """A member came; facts that decisions need, so that the trajectory need not be read again."""

    group_id: int
    member: int
    attempt: int
    tokens: int
    bytes: int
    reward: float
    success: bool
    turns: int
    oldest: WeightId | None


class Failed(Record, tag="failed"):
    """These members could not be run."""

    group_id: int
    members: list[int]


class Evicted(Record, tag="evicted"):
    """These groups end untrained."""

    groups: list[int]
    reason: str


class Quarantined(Record, tag="quarantined"):
    """This task is not issued again."""

    task_id: str
    reason: str


class Offered(Record, tag="offered"):
    """Synthetic tasks joined the pool; so many others were offered that are in it."""

    tasks: list[Task]
    duplicates: int = 0


class Switched(Record, tag="switched"):
    """The learner is in this stage now."""

    stage: int


class GroupsTaken(Record, tag="taken"):
    """The learner was given these groups, for the first time or again: the consumption log."""

    take: int
    stage: int
    groups: list[int]


class RepeatsDropped(Record, tag="let_go"):
    """This take of an abandoned lineage, and those after it, are not repeated; their groups are
    ready again."""

    take: int
    reason: str


class Reported(Record, tag="reported"):
    """A take is over. `fates`: "trained" or the filter's reason by group; `delivered`: evaluations
    whose results the learner has."""

    take: int
    version: int
    fates: dict[int, str]
    episodes: int
    delivered: list[WeightId]


class LineageStarted(Record, tag="resumed"):
    """A learner began a new lineage before this take, with its head evaluated again or not.

    `discard`: the takes since then are not repeated.
    """

    lineage: int
    parent: int
    take: int
    version: int
    episodes: int = 0
    stage: int = 0
    discard: bool = False
    process: str = ""
    incarnation: int = 0


class TakesReleased(Record, tag="kept"):
    """Takes before this one will not be asked for again. `bytes`: of the newest checkpoint."""

    take: int
    bytes: int = 0


class StateSnapshot(Record, tag="snapshot"):
    """All that was before: the head of every journal segment, so that older ones can go."""

    run_id: str
    position: Position
    ledger: Ledger
    cursor: Cursor
    evaluations: EvaluationQueue


AnyRecord = (
    Granted
    | Reissued
    | Arrived
    | Failed
    | Evicted
    | Quarantined
    | Offered
    | Switched
    | GroupsTaken
    | RepeatsDropped
    | Reported
    | LineageStarted
    | TakesReleased
    | StateSnapshot
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes | memoryview) -> AnyRecord:
    """Raises msgspec.DecodeError for anything `encode` has not written."""
    return _decoder.decode(data)
