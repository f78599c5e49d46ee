"""A serial run whose learner is killed at a chosen take and goes on."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_world import World, config, trajectory
from safetensors.torch import load_file

from evolver_async.checkpoint.checkpoints import load_newest
from evolver_async.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LaunchConfig,
    PolicyConfig,
    SafetyConfig,
    StageConfig,
    WeightsConfig,
)
from evolver_async.model import policy
from evolver_async.schema import Ticket, Trajectory
from evolver_async.wire import messages
from evolver_async.wire.client import Rejected
from learner.main import build
from learner.train import Learner

STEPS = 10


GROUPS = 3


KILLED_AT = 5  # the take in which it happens: of checkpoints 4 and 6, between or while writing


OF_THE_LINEAGE = (
    *("lineage", "time", "throughput", "weights/", "ledger/", "buffer/", "actors/", "censor/"),
    *("staleness/", "lag_", "supervision/"),  # what was sampled before a fork is older
)


class Killed(Exception):
    """Stands for SIGKILL."""


def episode(ticket: Ticket, member: int) -> Trajectory:
    """What the actors bring: always the same for the same group and member."""
    rng = np.random.default_rng([ticket.group_id, member])
    made = trajectory(
        ticket, member, length=int(rng.integers(3, 9)), reward=float(rng.integers(0, 5)) / 4
    )
    made.success = made.reward == 1
    (sequence,) = made.sequences
    sequence.tokens = rng.integers(0, 50, len(sequence)).astype(np.int32)
    sequence.logprobs = np.where(
        sequence.roles == 2, -rng.random(len(sequence), np.float32), 0
    ).astype(np.float32)
    return made


class Run:
    """One run directory with its buffer; learners come and go."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        self.run_dir = tmp_path / "run"
        self.run_dir.mkdir(parents=True)
        policy.make_tiny(
            tmp_path / "policy",
            seed=0,
            hidden_size=16,
            layers=1,
            heads=2,
            intermediate_size=32,
            max_length=64,
        )
        small = config(group_size=4, groups_per_step=GROUPS, max_staleness=4)
        small.learner.minibatches = 2
        small.learner.lr = 1e-2
        changed = {
            "policy": PolicyConfig(path=str(tmp_path / "policy"), max_length=64),
            "weights": WeightsConfig(dir=str(tmp_path)),
            "stages": [StageConfig(kind="rl", steps=STEPS)],
            "eval": EvalConfig(every=0, episodes=1, final_episodes=1),
            "checkpoint": CheckpointConfig(every=2),
            "safety": SafetyConfig(warmup=2, patience=1),
            "launch": LaunchConfig(kind="serial"),
            **sections,
        }
        self.config: Config = dataclasses.replace(small, **changed)
        self.world = World(self.run_dir / "journal", self.config)
        self.episode: Callable[[Ticket, int], Trajectory] = episode
        self.takes: dict[int, list[int]] = {}
        self.trained: dict[int, list[int]] = {}  # by take, in the lineage that survives
        self.asked: list[messages.Request] = []
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.world.service.close()
        self.loop.close()

    incarnation = 0

    async def request(self, message: messages.Request, timeout_s: float | None = None) -> Any:
        """What `Client.request` does: the reply, for SAMPLE the groups."""
        self.asked.append(message)
        match message:
            case messages.Sample():
                self._act()
            case messages.Done():
                self.trained[message.take] = message.trained
            case messages.Resume():
                self.trained = {t: ids for t, ids in self.trained.items() if t < message.take}
        replies = self.world.ask("learner", message)
        if isinstance(message, messages.Done) and message.episodes:
            self._finish(*self.world.lease(credit=1))
            replies = self.world.ask("learner", message)  # with the result, so that none waits
        if isinstance(replies[0], messages.Reject):
            raise Rejected(replies[0].reason)
        if not isinstance(message, messages.Sample) or isinstance(replies[0], messages.Fenced):
            return replies[0]
        assert isinstance(replies[-1], messages.Groups), f"nothing to take: {replies}"
        groups = [part.group for part in replies if isinstance(part, messages.GroupReply)]
        self.takes[message.take] = [group.group_id for group in groups]
        return groups

    def _act(self) -> None:
        """Make what the next take lacks, no more: what is sampled earlier is old after a fork."""
        while len(self.world.replay.by_state["ready"]) < GROUPS:
            (ticket,) = self.world.lease(credit=1)
            self._finish(ticket)

    def _finish(self, *tickets: Ticket) -> None:
        """Push every member of these tickets."""
        for ticket in tickets:
            for member in ticket.members:
                push = messages.Push(trajectory=self.episode(ticket, member))
                assert isinstance(self.world.one("actor-0", push), messages.Ack)

    def learner(self) -> Learner:
        return build(self.config, self.run_dir, self, self.loop.run_until_complete)  # pyright: ignore[reportArgumentType]

    def train(self, disturb: Callable[[Learner], None] = lambda _: None) -> int:
        """Run one learner to its end."""
        learner = self.learner()
        disturb(learner)
        try:
            return learner.run()
        finally:
            learner.close()

    def rows(self) -> dict[int, dict[str, Any]]:
        """The newest row of every step, without what depends on clocks and forks."""
        return {
            row["step"]: {n: v for n, v in row.items() if not n.startswith(OF_THE_LINEAGE)}
            for row in self.all_rows()
        }

    def all_rows(self) -> list[dict[str, Any]]:
        """Every row of a step, those that a resumed learner repeated included."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "stage_kind" in row]

    def newest(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The newest checkpoint's numbers and tensors, but for what depends on clocks and forks."""
        path, _ = load_newest(self.run_dir / "checkpoints", "run")
        numbers = json.loads((path / "state.json").read_text())
        for name in ("lineage", "seconds", "stage_seconds"):
            del numbers[name]
        tensors = {
            f"{file.stem}/{name}": tensor
            for file in path.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        return numbers, tensors


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("undisturbed"))
    assert run.train() == 0
    yield run
    run.close()


def kill_after(learner: Learner, owner: object, name: str, take: int) -> None:
    """The learner dies at the end of the call of `name` in which its state is at `take`."""
    original = getattr(owner, name)

    def last_call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if learner.state.take == take:
            raise Killed(name)
        return result

    setattr(owner, name, last_call)


PHASES: dict[str, Callable[[Learner], None]] = {
    "after sample": lambda one: kill_after(one, one, "sample", KILLED_AT),
    "after train": lambda one: kill_after(one, one.updater, "step", KILLED_AT),
    "after publish": lambda one: kill_after(one, one, "publish", KILLED_AT + 1),
    "after done": lambda one: kill_after(one, one, "report", KILLED_AT + 1),
    "after the row": lambda one: kill_after(one, one.rows, "write", KILLED_AT + 1),
    "while writing a checkpoint": lambda one: kill_after(one, one.updater, "save", KILLED_AT + 1),
    "after a checkpoint": lambda one: kill_after(one, one.checkpoints, "write", KILLED_AT + 1),
    "after kept": lambda one: kill_after(one, one, "keep", KILLED_AT + 1),
}


def compare(run: Run, undisturbed: Run) -> None:
    assert run.takes == undisturbed.takes, "the takes must hold the same groups"
    assert run.rows() == undisturbed.rows()
    (numbers, tensors), (numbers_then, tensors_then) = run.newest(), undisturbed.newest()
    assert numbers == numbers_then
    assert tensors.keys() == tensors_then.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], tensors_then[name])] == []
    trained = [group for take in run.trained.values() for group in take]
    assert sorted(run.trained) == list(range(STEPS))
    assert len(trained) == len(set(trained)) == GROUPS * STEPS
