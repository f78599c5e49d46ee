"""A learner that dies repeats its newest takes: the same groups, losses and weights, bitwise.

The buffer is the real one, without sockets. Its actors run ahead of the learner, so that groups are
stale, and stop where admission stops them.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_resume import GROUPS, Killed, Run, kill_after

from evolver_async import messages
from evolver_async.checkpoint import CheckpointError
from evolver_async.config import Checkpoint, Correction, Stage
from evolver_async.schema import WeightId
from learner.train import Learner

STEPS, EVERY = 9, 4  # takes of a run, takes between checkpoints
Tensors = dict[str, torch.Tensor]


class Ahead(Run):
    """A run whose actors make as many groups as they may; it remembers what was published."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        self.published: dict[WeightId, Tensors] = {}
        self.taken: dict[tuple[int, int], list[int]] = {}  # by lineage and take
        sections = {
            "stages": [Stage(kind="rl", steps=STEPS)],
            "checkpoint": Checkpoint(every=EVERY),
            **sections,
        }
        super().__init__(tmp_path, **sections)
        self.config.buffer = dataclasses.replace(self.config.buffer, max_staleness=2)
        self.world.service.close()
        self.world = type(self.world)(self.run_dir / "journal", self.config)

    def _act(self) -> None:
        while tickets := self.world.lease(credit=1):
            for ticket in tickets:
                for member in ticket.members:
                    push = messages.Push(trajectory=self.episode(ticket, member))
                    assert isinstance(self.world.one("actor-0", push), messages.Ack)

    async def request(self, message: messages.Request, timeout_s: float | None = None) -> Any:
        reply = await super().request(message, timeout_s)
        if isinstance(message, messages.Sample):
            groups = [group.group_id for group in reply]
            self.taken[message.lineage, message.take] = groups
        return reply

    def learner(self) -> Learner:
        learner = super().learner()
        publish = learner.publisher.publish

        def keep(weights: WeightId, tensors: Tensors, **options: Any) -> Any:
            self.published[weights] = {name: one.clone() for name, one in tensors.items()}
            return publish(weights, tensors, **options)

        learner.publisher.publish = keep  # pyright: ignore[reportAttributeAccessIssue]
        return learner

    def losses(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Loss and gradient norm by lineage and step."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return {
            (int(row["lineage"]), row["step"]): (row["loss/policy"], row["loss/grad_norm"])
            for row in map(json.loads, lines)
        }

    def check_repeats(self, before: int, lineage: int) -> int:
        """Compare what `lineage` repeated with lineage `before`; returns how many takes."""
        losses = self.losses()
        again = [
            take for old, take in self.taken if old == before and (lineage, take) in self.taken
        ]
        for take in again:
            assert self.taken[lineage, take] == self.taken[before, take], f"take {take}"
            if (before, take + 1) not in losses:
                continue  # the learner died in it
            assert losses[lineage, take + 1] == losses[before, take + 1], f"take {take}"
            step = WeightId(lineage=lineage, step=take + 1)
            was = self.published[WeightId(lineage=before, step=take + 1)]
            assert all(torch.equal(self.published[step][name], was[name]) for name in was)
        return len(again)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ahead]]:
    runs: list[Ahead] = []

    def start(**sections: Any) -> Ahead:
        runs.append(Ahead(tmp_path / str(len(runs)), **sections))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


DEATHS = {  # where in a take a learner dies, and by how much its state is further then
    "sample": 0,
    "train": 0,
    "report": 1,
    "log": 1,
}


@settings(
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    anchor=st.sampled_from(["recompute", "interpolate"]),
    deaths=st.lists(
        st.tuples(st.sampled_from(sorted(DEATHS)), st.integers(0, STEPS - 1), st.booleans()),
        min_size=1,
        max_size=3,
    ),
)
def test_takes_are_repeated_bitwise_wherever_the_learner_dies(
    start: Callable[..., Ahead], anchor: str, deaths: list[tuple[str, int, bool]]
) -> None:
    run = start(correction=Correction(anchor=anchor))
    lineages = 0
    for name, take, buffer_too in deaths:
        further = take + DEATHS[name]
        try:
            run.train(lambda one, name=name, at=further: kill_after(one, one, name, at))
        except Killed:
            lineages += 1
            if buffer_too:
                run.world.kill()
            continue
        break  # it began behind that take
    else:
        assert run.train() == 0
    newest = run.world.replay.at.lineage
    for lineage in range(1, newest + 1):
        for before in range(1, lineage):
            run.check_repeats(before, lineage)
    assert set(run.world.replay.at.repeats) <= {"same"}


@pytest.mark.parametrize("anchor", ["recompute", "interpolate"])
def test_three_stale_takes_are_repeated_and_the_run_goes_on(
    start: Callable[..., Ahead], anchor: str
) -> None:
    run = start(correction=Correction(anchor=anchor))
    with pytest.raises(Killed):
        run.train(lambda one: kill_after(one, one, "train", 6))
    assert run.train() == 0
    assert run.check_repeats(1, 2) == 3 and run.world.replay.at.repeats == {"same": 3}
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["staleness/max"] for row in rows if row["lineage"] == 1) == 2
    trained = [group for take in run.trained.values() for group in take]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS


def test_a_learner_that_dies_before_its_first_checkpoint_is_started_again(
    start: Callable[..., Ahead],
) -> None:
    run = start()
    with pytest.raises(Killed):
        run.train(lambda one: kill_after(one, one, "publish", 0))
    assert not (run.run_dir / "checkpoints").exists()
    run.world.kill()
    assert run.train() == 0
    assert run.world.replay.at.lineage == 2 and sorted(run.trained) == list(range(STEPS))


def test_a_run_that_has_trained_is_not_begun_anew(start: Callable[..., Ahead]) -> None:
    run = start()
    with pytest.raises(Killed):
        run.train(lambda one: kill_after(one, one, "report", 1))
    (run.run_dir / "checkpoints").rename(run.run_dir / "away")
    with pytest.raises(CheckpointError, match=r"checkpoints: no checkpoint left.*trained 1 takes"):
        run.train()
    assert run.world.replay.at.lineage == 1, "nothing has changed"
