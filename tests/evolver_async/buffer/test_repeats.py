"""A learner that dies repeats its newest takes: the same groups, losses and weights, bitwise.

The buffer is the real one, without sockets. Its actors run ahead of the learner, so that groups are
stale, and stop where admission stops them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import examples
from buffer_world import World, config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killed_runs import GROUPS, Killed, Run, kill_after
from published import whole_tensors

from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.log.segment import COMMIT, END
from evolver_async.buffer.service import BufferService
from evolver_async.checkpoint.checkpoints import CheckpointError
from evolver_async.config import CheckpointConfig, CorrectionConfig, StageConfig
from evolver_async.schema import Group, WeightId
from evolver_async.weights import probe
from evolver_async.weights.channel.weight_source import WeightSource
from evolver_async.wire import messages
from learner.train import Learner

STEPS, EVERY = 11, 5  # takes of a run, takes between checkpoints
Tensors = dict[str, torch.Tensor]


class Ahead(Run):
    """A run whose actors make groups for `ahead` takes; it remembers what was published."""

    def __init__(self, tmp_path: Path, ahead: int = 3, **sections: Any) -> None:
        self.ahead = ahead
        self.published: dict[WeightId, Tensors] = {}
        self.taken: dict[tuple[int, int], list[int]] = {}  # by lineage and take
        sections = {
            "stages": [StageConfig(kind="rl", steps=STEPS)],
            "checkpoint": CheckpointConfig(every=EVERY),
            **sections,
        }
        super().__init__(tmp_path, **sections)
        self.config.buffer = dataclasses.replace(self.config.buffer, max_staleness=2)
        self.world.service.close()
        self.world = type(self.world)(self.run_dir / "journal", self.config)

    def _act(self) -> None:
        while len(self.world.replay.by_state["ready"]) < self.ahead * GROUPS:
            tickets = self.world.lease(credit=1)
            if not tickets:
                return
            self._finish(*tickets)

    async def request(self, message: messages.Request, timeout_s: float | None = None) -> Any:
        reply = await super().request(message, timeout_s)
        if isinstance(message, messages.Sample):
            groups = [group.group_id for group in reply]
            self.taken[message.lineage, message.take] = groups
        return reply

    def learner(self) -> Learner:
        learner = super().learner()
        publish = learner.publisher.publish

        def keep(weights: WeightId, source: WeightSource, **options: Any) -> Any:
            self.published[weights] = whole_tensors(source)
            return publish(weights, source, **options)

        learner.publisher.publish = keep  # pyright: ignore[reportAttributeAccessIssue]
        return learner

    def losses(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Loss and gradient norm by lineage and step."""
        return {
            (int(row["lineage"]), row["step"]): (row["loss/policy"], row["loss/grad_norm"])
            for row in self.all_rows()
        }

    def check_repeats(self, before: int, lineage: int) -> int:
        """Compare what `lineage` repeated with lineage `before`; returns how many takes."""
        losses = self.losses()
        again = [
            take for old, take in self.taken if old == before and (lineage, take) in self.taken
        ]
        for take in again:
            assert self.taken[lineage, take] == self.taken[before, take], f"take {take}"
            died = [one for one in (before, lineage) if (one, take + 1) not in losses]
            for one in died:  # in its last take, so that it wrote no row
                assert take == max(of for owner, of in self.taken if owner == one)
            if died:
                continue
            assert losses[lineage, take + 1] == losses[before, take + 1], f"take {take}"
            step = WeightId(lineage=lineage, step=take + 1)
            was = self.published[WeightId(lineage=before, step=take + 1)]
            # a process that begins again writes another text for its probe
            names = was.keys() - {probe.TOKENS, probe.LOGPROBS}
            assert all(torch.equal(self.published[step][name], was[name]) for name in names)
        return len(again)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ahead]]:
    runs: list[Ahead] = []

    def start(ahead: int = 3, **sections: Any) -> Ahead:
        runs.append(Ahead(tmp_path / str(len(runs)), ahead, **sections))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


DEATHS = {  # where in a take a learner dies, and by how much its state is further then
    "sample": 0,
    "updater.step": 0,
    "report": 1,
    "rows.write": 1,
}


def kill_in(learner: Learner, name: str, take: int) -> None:
    """The learner dies at the end of the call of `name`, its own or that of a part."""
    part, _, method = name.rpartition(".")
    kill_after(learner, getattr(learner, part) if part else learner, method, take)


@pytest.mark.process
@settings(
    max_examples=examples(6),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    anchor=st.sampled_from(["recompute", "interpolate"]),
    ahead=st.integers(1, 3),
    deaths=st.lists(
        st.tuples(st.sampled_from(sorted(DEATHS)), st.integers(0, STEPS - 1), st.booleans()),
        min_size=1,
        max_size=3,
    ),
)
def test_takes_are_repeated_bitwise_wherever_the_learner_dies(
    start: Callable[..., Ahead], anchor: str, ahead: int, deaths: list[tuple[str, int, bool]]
) -> None:
    run = start(ahead, correction=CorrectionConfig(anchor=anchor))
    for name, take, buffer_too in deaths:
        further = take + DEATHS[name]
        try:
            run.train(lambda one, name=name, at=further: kill_in(one, name, at))
        except Killed:
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
def test_takes_sampled_past_the_fork_are_repeated_and_the_run_goes_on(
    start: Callable[..., Ahead], anchor: str
) -> None:
    run = start(correction=CorrectionConfig(anchor=anchor))
    with pytest.raises(Killed):
        run.train(lambda one: kill_after(one, one.rows, "write", 10))  # the checkpoint is of take 5
    assert run.train() == 0
    assert run.check_repeats(1, 2) == 5 and run.world.replay.at.repeats == {"same": 5}
    rows = run.all_rows()
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


# ---- a journal that ends too early


def commits(data: bytes) -> list[int]:
    """Where the commits of a segment end."""
    ends, offset = list[int](), 0
    while offset < len(data):
        payload, _ = COMMIT.unpack_from(data, offset)
        offset += COMMIT.size + payload + END.size
        ends.append(offset)
    return ends


def test_a_journal_that_was_cut_after_a_whole_commit_is_refused(
    start: Callable[..., Ahead],
) -> None:
    """Wherever it was: it is refused, or has all that the newest checkpoint was made of."""
    run = start()
    for take in (2, 7):
        with pytest.raises(Killed):
            run.train(lambda one, take=take: kill_after(one, one, "report", take))
    run.world.service.close()
    (segment,) = (run.run_dir / "journal").glob("*.log")
    whole = segment.read_bytes()
    newest = max((run.run_dir / "checkpoints").iterdir())
    assert newest.name.endswith("-step-5")
    refused = []
    for end in commits(whole):
        segment.write_bytes(whole[:end])
        try:
            service = BufferService.of_run(run.config, run.run_dir, None, 0.0)
        except JournalError as error:
            refused.append(end)
            assert f"{segment} with {end} bytes ends" in str(error) and str(newest) in str(error)
            assert "missing" in str(error) and segment.read_bytes() == whole[:end]
        else:
            at = service.store.replay.at
            service.close()
            assert (at.lineage, at.next_take) >= (2, 5)
    assert len(refused) > 24 and refused == commits(whole)[: len(refused)]
    segment.write_bytes(whole)
    state = newest / "state.json"
    numbers = state.read_bytes()
    state.write_bytes(b"?" * len(numbers))
    BufferService.of_run(
        run.config, run.run_dir, None, 0.0
    ).close()  # what is damaged proves nothing
    state.write_bytes(numbers)
    segment.write_bytes(whole[: refused[-1]])
    run.world.open()
    with pytest.raises(
        CheckpointError, match=r"000\d+-step-5: .*take 4, all up to take 4 is missing"
    ):
        run.train()
    assert segment.read_bytes() == whole[: refused[-1]], "nothing was written behind the gap"
    segment.write_bytes(whole)


# ---- the buffer alone


def three_takes(tmp_path: Path, **buffer: Any) -> tuple[World, dict[int, list[int]]]:
    """A buffer whose learner died after its third take, with the groups of each."""
    world = World(tmp_path, config(**{"max_staleness": 2, **buffer}))
    world.resume()
    taken = {}
    for take in range(3):
        world.finish(world.lease(credit=9))
        groups = world.sample(take)
        taken[take] = [group.group_id for group in groups]
        if take < 2:
            world.done(take, taken[take], take + 1)
    return world, taken


def ids(groups: list[Group]) -> list[int]:
    return [group.group_id for group in groups]


@pytest.mark.parametrize("sampler", ["fifo", "freshest", "prioritized"])
@pytest.mark.parametrize("reuse", [1, 2])
def test_a_take_is_repeated_with_its_groups_also_by_the_next_buffer(
    tmp_path: Path, sampler: str, reuse: int
) -> None:
    world, taken = three_takes(tmp_path, sampler=sampler, reuse=reuse)
    for lineage in (2, 3):
        assert world.resume(lineage=lineage - 1) == lineage
        for take, groups in taken.items():
            world.kill()
            found = world.sample(take, lineage=lineage)
            assert ids(found) == groups == ids(world.sample(take, lineage=lineage))
            assert {group.head for group in found} == {WeightId(lineage=1, step=take)}
            assert world.replay.at.lineage == lineage
            if take < 2:
                counters = world.done(take, groups, take + 1, lineage=lineage).counters
    assert counters["buffer/repeats/same"] == 5.0
    world.done(2, taken[2], 3, lineage=3)
    fresh = world.sample(3, lineage=3)
    if not fresh:
        world.finish(world.lease(credit=9))
        fresh = world.sample(3, lineage=3)
    assert {group.head for group in fresh} == {WeightId(lineage=3, step=3)}


def test_a_take_that_the_staleness_rule_forbids_is_counted_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, taken = three_takes(tmp_path)
    world.settings.buffer.max_staleness = 0  # as `train --resume RUN buffer.max_staleness=0` does
    world.kill()
    world.resume(lineage=1)
    assert ids(world.sample(0, lineage=2)) == taken[0], "its groups were as new as could be"
    world.done(0, taken[0], 1, lineage=2)
    for _ in range(2):
        world.sample(1, lineage=2)
        assert world.replay.at.repeats == {"same": 1, "stale": 1, "diverged": 1}
        world.kill()
    assert "take 1 and later ones are not repeated: stale" in caplog.text
    assert not world.replay.at.groups.keys() & {*taken[1], *taken[2]}
    assert world.store.state.ledger.closed["rollout"]["evicted"]["fork"].groups >= 4
    for take in (1, 2):
        world.finish(world.lease(credit=9))
        groups = ids(world.sample(take, lineage=2))
        assert groups and not set(groups) & {*taken[1], *taken[2]}
        world.done(take, groups, take + 1, lineage=2)


def test_a_take_of_another_stage_is_not_repeated(tmp_path: Path) -> None:
    world, taken = three_takes(tmp_path, stages=["rl", "rl"])
    world.resume(lineage=1, take=1, version=1)
    assert world.sample(1, lineage=2, stage=1) == [], "this learner is in the next stage already"
    assert world.replay.at.repeats == {"stage": 1, "diverged": 1}
    evicted = world.store.state.ledger.closed["rollout"]["evicted"]
    assert evicted["stage"].groups >= len({*taken[1], *taken[2]})


def test_a_lag_is_new_where_a_repeated_take_makes_another_version(tmp_path: Path) -> None:
    world, taken = three_takes(tmp_path, max_staleness=9)
    world.resume(lineage=1)
    world.sample(0, lineage=2)
    world.done(0, [], 0, lineage=2, filtered={"spread": taken[0]}, skipped=True)
    (head,) = {group.head for group in world.sample(1, lineage=2)}
    assert head == WeightId(lineage=2, step=0), "not 1.1: this learner never had such weights"


def test_discarded_takes_are_chosen_anew_and_their_groups_counted(tmp_path: Path) -> None:
    world, taken = three_takes(tmp_path, max_staleness=9)
    request = messages.Resume(lineage=1, take=1, version=1, discard=True, process="again")
    for _ in range(2):  # the second is the same request, sent again
        reply = world.one("learner", request)
        assert isinstance(reply, messages.Resumed) and reply.lineage == 2
    gone = {*taken[1], *taken[2]}
    evicted = world.store.state.ledger.closed["rollout"]["evicted"]
    assert evicted["rolled_back"].groups == len(gone)
    world.kill()
    assert not gone & world.replay.at.groups.keys()
    world.finish(world.lease(credit=9))
    groups = ids(world.sample(1, lineage=2))
    assert groups and not set(groups) & {*gone, *taken[0]}
    assert world.replay.at.repeats == {}


def test_a_fork_that_goes_back_to_its_beginning_discards_all_takes(tmp_path: Path) -> None:
    world, taken = three_takes(tmp_path, max_staleness=9)
    refused = world.one("learner", messages.Resume(lineage=0, take=0, version=0, process="lost"))
    assert isinstance(refused, messages.Reject) and "a fresh start" in refused.reason
    back = messages.Resume(lineage=0, take=0, version=0, discard=True, process="back")
    reply = world.one("learner", back)
    assert isinstance(reply, messages.Resumed) and reply.lineage == 2
    assert not {*taken[0], *taken[1], *taken[2]} & world.replay.at.groups.keys()
