"""Records of the journal: every decision that must survive a restart, and their snapshot.

A record is encoded as msgpack; its tag belongs to the journal's format. The trajectory of an
`Arrived` lies beside it in the journal. As JSON the records of one group would be, shortened:

    {"record": "granted", "group_id": 12, "task": {...}, "members": [0, 1], "actor": "actor-0"}
    {"record": "arrived", "group_id": 12, "member": 1, "attempt": 0, "tokens": 57, "reward": 1.0}
    {"record": "arrived", "group_id": 12, "member": 0, "attempt": 0, "tokens": 31, "reward": 0.0}
    {"record": "taken", "take": 41, "stage": 0, "groups": [12]}
    {"record": "reported", "take": 41, "version": 42, "fates": {"12": "trained"}, "episodes": 0}
"""

import msgspec

from evolver_async.buffer.state.evaluations import EvaluationQueue, SetEpisode, SetSizes
from evolver_async.buffer.state.guidance import GuidanceRecord
from evolver_async.buffer.state.ledger import Ledger
from evolver_async.buffer.state.position import Position
from evolver_async.buffer.tasks.stream import Cursor
from evolver_async.file_formats import JOURNAL_FORMAT, foreign
from evolver_async.schema import Kind, Task, WeightId


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="record"):
    """One change of the state."""


class Granted(Record, tag="granted"):
    """Grant of a new group to an actor. `pinned`: an evaluation episode of these weights;
    `episode`: its place in a set of `eval.sets`, None in the deciding one. `guided`: the members
    that experience is to guide. `weights`: the oldest that may play it."""

    group_id: int
    task: Task
    kind: Kind
    members: list[int]
    actor: str
    wait: bool = False
    pinned: WeightId | None = None
    episode: SetEpisode | None = None
    guided: list[int] = []
    weights: WeightId | None = None


class Reissued(Record, tag="reissued"):
    """Repeated grant of missing members. `weights`: the oldest that may play them."""

    group_id: int
    members: list[int]
    actor: str
    weights: WeightId | None = None


class Arrived(Record, tag="arrived", omit_defaults=True):
    """Arrival of a member, with the facts that decisions need."""

    group_id: int
    member: int
    attempt: int
    content: int
    tokens: int
    bytes: int
    reward: float
    success: bool
    guided: bool
    turns: int
    sampled: list[WeightId]
    numbers: dict[str, float] = {}
    players: dict[str, tuple[float, bool]] = {}  # reward and success of those that moved
    conversation: int = 0  # of people; 0 for an episode that was played


class Failed(Record, tag="failed"):
    """Failure of members: they could not be run."""

    group_id: int
    members: list[int]


class Evicted(Record, tag="evicted"):
    """End of groups that were not trained."""

    groups: list[int]
    reason: str


class Quarantined(Record, tag="quarantined"):
    """Quarantine of a task: it is not issued again."""

    task_id: str
    reason: str


class Offered(Record, tag="offered"):
    """New synthetic tasks in the pool; `duplicates`: offers of tasks that it held already."""

    tasks: list[Task]
    duplicates: int = 0


class Switched(Record, tag="switched"):
    """Start of a stage."""

    stage: int


class GroupsTaken(Record, tag="taken"):
    """A take: the learner gets these groups, for the first time or again."""

    take: int
    stage: int
    groups: list[int]


class RepeatsDropped(Record, tag="let_go"):
    """End of repetition: this take of an abandoned lineage and later ones are not repeated.

    Their groups are ready again.
    """

    take: int
    reason: str


class Reported(Record, tag="reported"):
    """End of a take.

    `fates`: "trained" or the filter's reason by group; `delivered`: the weights of evaluations
    whose results the learner has; `sets`: those to evaluate with `episodes`.
    """

    take: int
    version: int
    fates: dict[int, str]
    episodes: int
    delivered: list[WeightId]
    sets: SetSizes = {}


class LineageStarted(Record, tag="resumed"):
    """Start of a lineage before this take. `discard`: the takes since then are not repeated.

    `stage`: of the evaluation that `episodes` asks for.
    """

    lineage: int
    parent: int
    take: int
    version: int
    episodes: int = 0
    sets: SetSizes = {}
    stage: int = 0
    discard: bool = False
    process: str = ""
    incarnation: int = 0


class TakesReleased(Record, tag="kept"):
    """Release of the takes before this one. `bytes`: size of the newest checkpoint."""

    take: int
    bytes: int = 0


class NumberedSnapshot(msgspec.Struct, tag_field="record", tag="snapshot"):
    """Snapshot of any format."""

    format: int


class StateSnapshot(Record, tag="snapshot"):
    """The whole state: the first record of every journal segment, so older ones can be deleted."""

    run_id: str
    position: Position
    ledger: Ledger
    cursor: Cursor
    guidance: GuidanceRecord
    evaluations: EvaluationQueue
    conversations: list[int] | msgspec.UnsetType = msgspec.UNSET  # of people, the newest
    format: int = JOURNAL_FORMAT


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
    """Decode a record. Raises msgspec.DecodeError for bytes that `encode` has not written, a
    ValueError with the numbers for a snapshot of another format."""
    try:
        found = _decoder.decode(data)
    except msgspec.DecodeError:
        _refuse_foreign(data)
        raise
    if isinstance(found, StateSnapshot) and found.format != JOURNAL_FORMAT:
        _refuse_foreign(data)
    return found


def _refuse_foreign(data: bytes | memoryview) -> None:
    """Raise ValueError for a snapshot of a journal of another format."""
    try:
        number = msgspec.msgpack.decode(data, type=NumberedSnapshot).format
    except msgspec.DecodeError:
        return
    if number != JOURNAL_FORMAT:
        raise ValueError(foreign("journal", number, JOURNAL_FORMAT))
