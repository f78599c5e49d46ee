"""Calls of the updater on all ranks: rank 0 sends each to the others, which make it, too.

A call travels as msgpack, groups as the parcels that they came in. Only rank 0 keeps the changes
that a call makes to `LearnerState`; the others wait for the next call.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from evolver_async.config import Config, ConfigError
from evolver_async.config.sections.weight_channel import leaves_host
from evolver_async.lineages import Fork
from evolver_async.metrics.writer import Timers
from evolver_async.process.garbage import give_back_memory
from evolver_async.process.setup import RoleArgs
from evolver_async.room import lacks_room
from evolver_async.schema import Group, Kind, Task, WeightId
from evolver_async.weights.channel.weight_source import WeightSource
from evolver_async.wire.heartbeat import Heartbeat
from evolver_async.wire.messages import Beat
from evolver_async.wire.trajectory_bytes import Parcel, unwrap, wrap
from learner.diagnostics.measure import StepResult
from learner.pass_progress import StepAbandoned
from learner.ranks.agreement import agree, facts_of
from learner.ranks.meeting import AddressMeeting, FileMeeting, Meeting
from learner.ranks.mesh import Ranks, join
from learner.schedule import Stages
from learner.state import LearnerState
from learner.step import Updater

END = "end"


class PackedGroup(msgspec.Struct, array_like=True):
    """Group whose trajectories are parcels."""

    group_id: int
    task: Task
    kind: Kind
    stage: int
    use: int
    head: WeightId | None
    parcels: list[tuple[bytes, int]]


class RankCall(msgspec.Struct, kw_only=True):
    """Method of `Updater` and its arguments."""

    method: str
    kind: str = ""
    stage: int = 0
    steps: int = 0
    path: str = ""
    state: LearnerState = msgspec.field(default_factory=LearnerState)
    forks: dict[int, Fork] = {}
    groups: list[PackedGroup] = []


@dataclass
class Leader:
    """Updater of rank 0, whose calls all ranks make."""

    updater: Updater
    ranks: Ranks

    def enter(self, stage: Config, state: LearnerState) -> None:
        self._tell(RankCall(method="enter", stage=state.stage, state=state))
        self.updater.enter(stage, state)

    def save(self, directory: Path, state: LearnerState) -> None:
        self._tell(RankCall(method="save", path=str(directory), state=state))
        self.updater.save(directory, state)

    def restore(self, directory: Path) -> LearnerState:
        self._tell(RankCall(method="restore", path=str(directory)))
        return self.updater.restore(directory)

    def export_reward_model(self, directory: Path) -> None:
        self._tell(RankCall(method="export_reward_model", path=str(directory)))
        self.updater.export_reward_model(directory)

    def published(self) -> WeightSource:
        """Return weights that all ranks gather; the caller iterates them once."""
        self._tell(RankCall(method="published"))
        return self.updater.published()

    def step(
        self,
        kind: str,
        stage: Config,
        groups: list[Group],
        state: LearnerState,
        forks: dict[int, Fork],
        steps: int,
    ) -> StepResult:
        """Train one step on all ranks and measure it on this one."""
        call = RankCall(method="train", kind=kind, stage=state.stage, steps=steps, state=state)
        call.forks, call.groups = forks, [_pack(group) for group in groups]
        self._tell(call)
        return self.updater.step(kind, stage, groups, state, forks, steps)

    def validate(
        self, kind: str, stage: Config, groups: list[Group], state: LearnerState
    ) -> dict[str, float]:
        """Measure groups on all ranks."""
        call = RankCall(method="validate", kind=kind, stage=state.stage, state=state)
        call.groups = [_pack(group) for group in groups]
        self._tell(call)
        return self.updater.validate(kind, stage, groups, state)

    def end(self) -> None:
        """End the other ranks."""
        self._tell(RankCall(method=END))

    def _tell(self, call: RankCall) -> None:
        self.ranks.tell(msgspec.msgpack.encode(call))


def follow(updater: Updater, stages: Callable[[int, int], Config], ranks: Ranks) -> None:
    """Make the calls of rank 0 until its last; RuntimeError if it dies before.

    `stages`: configuration of a stage after a number of rollbacks.
    """
    restored = LearnerState()
    while True:
        call = msgspec.msgpack.decode(ranks.hear(), type=RankCall)
        if call.method == END:
            return
        if call.method == "restore":
            restored = updater.restore(Path(call.path))
            continue
        rollbacks = restored.rollbacks if call.stage == restored.stage else 0
        _make(updater, stages(call.stage, rollbacks), call)


@contextmanager
def meeting(config: Config, args: RoleArgs) -> Iterator[Ranks | None]:
    """Join the ranks of this learner and leave them afterwards; None if it has only one."""
    learner = config.learner
    if learner.ranks == 1:
        yield None
        return
    if args.meeting is None and learner.hosts == 1:
        raise ConfigError(
            "learner.ranks: the launcher must start several ranks together, by `train`"
        )
    with _meeting_of(config, args) as place:
        ranks = join(
            place,
            args.rank,
            learner.ranks,
            device=learner.device,
            deadline_s=learner.deadline_s,
            here=args.rank % learner.ranks_per_host,
            copies=learner.ranks // learner.shards,
            together=learner.context_parallel,
            nccl_leaves=leaves_host(config),
            agreed=partial(agree, facts=facts_of(config)),
        )
    try:
        yield ranks
    except BaseException:
        with suppress(RuntimeError):  # the first failure says more
            ranks.leave(failed=True)
        raise
    ranks.leave()


@contextmanager
def _meeting_of(config: Config, args: RoleArgs) -> Iterator[Meeting]:
    """Give the place where the ranks meet. Meanwhile the first one tells the buffer who is missing,
    as people start the ranks of other hosts."""
    if args.meeting is not None:
        yield FileMeeting(args.meeting)
        return
    if args.rank > 0:
        yield AddressMeeting(config.learner.address)
        return
    waits = Waits(config, args.run_dir)
    identity = args.address, args.run_dir.name, args.name, args.incarnation, args.keys
    heartbeat = Heartbeat(*identity, warn_s=config.buffer.warn_s, read=waits.beat)
    heartbeat.start()
    try:
        yield AddressMeeting(config.learner.address, waits.note)
    finally:
        heartbeat.stop()


@dataclass
class Waits:
    """The first rank's report of who is missing before the learner begins."""

    config: Config
    run_dir: Path
    phase: str = "start"

    def note(self, missing: list[int]) -> None:
        """Name the hosts of the ranks that are missing, and how to start them."""
        hosts = sorted({rank // self.config.learner.ranks_per_host for rank in missing})
        named = ", ".join(map(str, hosts))
        start = f"evolver-async ranks {self.run_dir} --host {hosts[0]}"
        self.phase = f"wait for the ranks of host {named}: {start}"

    def beat(self) -> Beat:
        return Beat(role="learner", phase=self.phase)


def attend(config: Config, run_dir: Path, ranks: Ranks) -> int:
    """Run a rank until the first one ends it; only the first reacts to signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    give_back_memory()
    follow(Updater(config, run_dir, Timers(), ranks), Stages(config), ranks)
    return 0


def _make(updater: Updater, stage: Config, call: RankCall) -> None:
    groups = [_unpack(packed) for packed in call.groups]
    match call.method:
        case "enter":
            updater.enter(stage, call.state)
        case "save":
            try:
                updater.save(Path(call.path), call.state)
            except OSError as error:  # the first rank tries again
                if not lacks_room(error):
                    raise
        case "export_reward_model":
            updater.export_reward_model(Path(call.path))
        case "published":
            for _ in updater.published().parts():
                pass
        case "train":
            with suppress(StepAbandoned):
                updater.train(call.kind, stage, groups, call.state, call.forks, call.steps)
        case "validate":
            updater.validate(call.kind, stage, groups, call.state)
        case method:
            raise ValueError(f"unknown call {method}")


def _pack(group: Group) -> PackedGroup:
    wrapped = [wrap(one) for one in group.trajectories]
    parcels = [(bytes(one.data), one.crc) for one in wrapped]
    return PackedGroup(
        group.group_id, group.task, group.kind, group.stage, group.use, group.head, parcels
    )


def _unpack(packed: PackedGroup) -> Group:
    facts = {name: getattr(packed, name) for name in packed.__struct_fields__}
    return Group(trajectories=[unwrap(Parcel(*parcel)) for parcel in facts.pop("parcels")], **facts)
