"""Configurations, trajectories and a service on a journal directory: what buffer tests share."""

from pathlib import Path
from typing import Any

import numpy as np
from episodes import episode

from evolver_async.buffer.service import BufferService
from evolver_async.config import (
    ActorsConfig,
    AdvantageConfig,
    BufferConfig,
    Config,
    EvalConfig,
    LearnerConfig,
    QuestioningConfig,
    RolloutConfig,
    StageConfig,
    TasksConfig,
)
from evolver_async.schema import (
    Group,
    Role,
    Sequence,
    Task,
    Ticket,
    Trajectory,
    VersionRun,
    WeightId,
)
from evolver_async.wire import messages

HEAD = WeightId(lineage=1, step=0)  # of a run that has just begun


def config(
    *,
    stages: list[str] | None = None,
    group_size: int = 2,
    groups_per_step: int = 2,
    weight_lag: int = 0,
    train: int = 0,
    synthetic: float = 0.0,
    questioning: QuestioningConfig | None = None,
    **buffer: object,
) -> Config:
    """A small run; `buffer` are keys of that section."""
    return Config(
        tasks=TasksConfig(train=train, synthetic=synthetic),
        questioning=questioning or QuestioningConfig(),
        rollout=RolloutConfig(group_size=group_size),
        learner=LearnerConfig(groups_per_step=groups_per_step, minibatches=1),
        actors=ActorsConfig(weight_lag=weight_lag),
        advantage=AdvantageConfig(kind="reinforce"),  # groups of one member are allowed then
        stages=[StageConfig(kind=kind, steps=1) for kind in stages or ["rl"]],
        eval=EvalConfig(temperature=0.0),
        buffer=BufferConfig(
            **{"lease_s": 10.0, "stall_s": 40.0, "segment_bytes": 1 << 20, **buffer}
        ),
    )


def trajectory(
    ticket: Ticket,
    member: int,
    *,
    weights: WeightId | None = None,
    length: int = 4,
    reward: float = 0.0,
    attempt: int | None = None,
    guided: bool = False,
    **facts: Any,
) -> Trajectory:
    """A member of this ticket: one PROMPT token, then ACTION tokens, in one turn.

    `guided`: the first token is EXPERIENCE.
    """
    roles = np.full(length, Role.ACTION, np.uint8)
    roles[0] = Role.EXPERIENCE if guided else Role.PROMPT
    turns = np.zeros(length, np.int16)
    turns[0] = -1
    learned = ticket.kind != "demo"
    weights = weights or ticket.weights
    sequence = Sequence(
        tokens=np.arange(length, dtype=np.int32),
        roles=roles,
        turns=turns,
        logprobs=np.where(roles == Role.ACTION, -0.5, 0.0).astype(np.float32),
        versions=[VersionRun(weights=weights, tokens=length - 1)] if learned and weights else [],
    )
    return episode(
        sequence,
        group_id=ticket.group_id,
        member=member,
        attempt=ticket.attempt if attempt is None else attempt,
        reward=reward,
        policy="learned" if learned else "scripted",
        **({"success": reward > 0} | facts),
    )


def synthetic(number: int, env: str = "frozen_lake") -> Task:
    """A task as exploration finds them."""
    task_id = f"{env}/made/{number}"
    return Task(task_id=task_id, env=env, split="train", map_seed=number, origin="synthetic")


class World:
    """A service on a journal directory, with short words for what actors and learner ask of it."""

    def __init__(
        self, directory: Path, settings: Config, now: float = 0.0, segment_bytes: int = 1 << 20
    ) -> None:
        self.directory = directory
        self.settings = settings
        self.now = now
        self.segment_bytes = segment_bytes  # smaller than a configuration may ask for
        self.open()

    def open(self) -> None:
        welcome = messages.Welcome(run_id="run", config={}, weights_address="")
        self.service = BufferService(self.settings, "run", self.directory, welcome, None, self.now)
        self.store = self.service.store
        self.store.journal.segment_bytes = self.segment_bytes
        self.replay = self.service.store.replay

    def kill(self) -> None:
        """What was not committed is lost; a new service opens the same journal."""
        self.store.journal.close()
        self.open()

    def ask(self, peer: str, request: messages.Request) -> list[messages.Reply]:
        replies = self.service.handle(peer, request, self.now)
        self.service.commit()
        self.store.state.check()
        return replies

    def one(self, peer: str, request: messages.Request) -> messages.Reply:
        (reply,) = self.ask(peer, request)
        return reply

    def pass_time(self, seconds: float) -> None:
        """With a tick at least every half second, as a server makes them: see `stand_still`."""
        end = self.now + seconds
        while self.now < end:
            self.stand_still(min(0.5, end - self.now))
        self.now = end

    def stand_still(self, seconds: float) -> None:
        """No tick comes until so many seconds have passed."""
        self.now += seconds
        self.service.tick(self.now)
        self.service.commit()

    def resume(
        self,
        lineage: int = 0,
        take: int = 0,
        version: int = 0,
        process: str = "",
        *,
        stage: int | None = None,
        discard: bool = False,
    ) -> int:
        """Begin a lineage in `stage`, by default the present one."""
        request = messages.Resume(
            lineage=lineage, take=take, version=version, process=process, discard=discard
        )
        request.stage = self.replay.at.stage if stage is None else stage
        reply = self.one("learner", request)
        assert isinstance(reply, messages.Resumed), reply
        return reply.lineage

    def lease(
        self,
        credit: float = 1,
        peer: str = "actor-0",
        held: WeightId | None = None,
        visible: WeightId | None = None,
    ) -> list[Ticket]:
        """Tickets for an actor with `held` or the newest weights; none where it is told to wait.

        `credit` is in groups of the present stage. `visible`: the newest weights that it could
        fetch, by default those that it has.
        """
        members = int(credit * self.replay.numbers.group_size)
        held = held or self.replay.at.head
        request = messages.Lease(credit=members, weights=held, visible=visible or held)
        reply = self.one(peer, request)
        return reply.tickets if isinstance(reply, messages.Tickets) else []

    def push(self, ticket: Ticket, member: int, **facts: object) -> messages.Reply:
        made = trajectory(ticket, member, **facts)  # pyright: ignore[reportArgumentType]
        return self.one("actor-0", messages.Push(trajectory=made))

    def finish(self, tickets: list[Ticket], **facts: object) -> None:
        """Push every member of these tickets."""
        for ticket in tickets:
            for member in ticket.members:
                assert isinstance(self.push(ticket, member, **facts), messages.Ack)

    def sample(self, take: int, lineage: int = 1, stage: int = 0) -> list[Group]:
        """The groups of a take; none where the learner is told to wait."""
        request = messages.Sample(lineage=lineage, take=take, stage=stage)
        replies = self.ask("learner", request)
        if isinstance(replies[0], messages.Wait):
            return []
        *parts, last = replies
        assert isinstance(last, messages.Groups) and last.count == len(parts), last
        return [part.group for part in parts if isinstance(part, messages.GroupReply)]

    def done(
        self,
        take: int,
        trained: list[int],
        version: int,
        lineage: int = 1,
        filtered: dict[str, list[int]] | None = None,
        skipped: bool = False,
        episodes: int = 0,
    ) -> messages.Ok:
        request = messages.Done(
            lineage=lineage,
            take=take,
            version=version,
            trained=trained,
            filtered=filtered or {},
            skipped=skipped,
            episodes=episodes,
        )
        reply = self.one("learner", request)
        assert isinstance(reply, messages.Ok), reply
        return reply
