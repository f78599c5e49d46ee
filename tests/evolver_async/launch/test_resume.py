"""A learner that is killed, wherever, goes on as if nothing had happened.

The buffer is the real one, without sockets; its actors' episodes depend on nothing but group and
member, so that a group taken a second time, or made after the kill, is the same. Killed means: an
exception in the middle of a step, after which nothing of that learner is used any more.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from killed_runs import KILLED_AT, PHASES, STEPS, Killed, Run, compare, undisturbed

from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import load_newest
from evolver_async.config import (
    AdvantageConfig,
    CheckpointConfig,
    CriticConfig,
    SafetyConfig,
)
from evolver_async.errors import STOPPED
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.wire import messages
from learner import schedule
from learner.train import Learner

pytestmark = pytest.mark.process

__all__ = ["undisturbed"]  # the fixture


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(name: str = "disturbed", **sections: Any) -> Run:
        runs.append(Run(tmp_path / name, **sections))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_the_undisturbed_run_has_all_that_a_checkpoint_must_carry(undisturbed: Run) -> None:
    losses = [row["loss/policy"] for row in undisturbed.rows().values()]
    assert len(set(losses)) == STEPS
    numbers, tensors = undisturbed.newest()
    assert numbers["baseline"] != 0 and numbers["take"] == STEPS
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in tensors)


@pytest.mark.parametrize("buffer", ["survives", "dies as well"])
@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_resumed_gives_bitwise_the_same(
    phase: str, buffer: str, undisturbed: Run, start: Callable[..., Run]
) -> None:
    run = start()
    with pytest.raises(Killed):
        run.train(PHASES[phase])
    if buffer != "survives":
        run.world.kill()
    assert run.train() == 0
    compare(run, undisturbed)
    written = [(row["lineage"], row["step"]) for row in run.all_rows()]
    assert len(set(written)) == len(written), "lineage and step tell all rows apart"
    newest = current_rows(run.all_rows())
    assert [row["step"] for row in newest] == list(range(1, STEPS + 1))
    assert newest[-1]["lineage"] == 2


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_is_resumed_bitwise(kind: str, start: Callable[..., Run]) -> None:
    sections = {
        "advantage": AdvantageConfig(kind="gae"),
        "critic": CriticConfig(
            kind=kind, lr=1e-2, warmup=KILLED_AT + 1
        ),  # killed while it warms up
    }
    whole, killed = start("whole", **sections), start("killed", **sections)
    assert whole.train() == 0
    with pytest.raises(Killed):
        killed.train(PHASES["after train"])
    killed.world.kill()
    assert killed.train() == 0
    compare(killed, whole)
    numbers, tensors = whole.newest()
    assert numbers["critic_steps"] == STEPS and bool(tensors["critic/head.weight"].any())
    assert any(name.startswith("critic/trunk.") for name in tensors) == (kind == "separate")
    assert "critic_optimizer/exp_avg_sq/head.weight" in tensors


def test_told_to_end_and_resumed_gives_bitwise_the_same(
    undisturbed: Run, start: Callable[..., Run]
) -> None:
    run = start()

    def end_after_take(learner: Learner) -> None:
        train = learner.updater.step

        def last(*arguments: Any) -> Any:
            learner.requests.stopping = learner.state.take == KILLED_AT
            return train(*arguments)

        learner.updater.step = last

    assert run.train(end_after_take) == STOPPED
    assert run.newest()[0]["take"] == KILLED_AT, "what has changed nothing yet is left"
    assert run.train() == 0
    compare(run, undisturbed)


def test_the_seconds_of_a_resumed_run_go_on_from_its_last_row(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the clock takes a second, so that reports and waits take time, too."""
    ticking = SimpleNamespace(perf_counter=itertools.count(1.0).__next__)
    monkeypatch.setattr(schedule, "time", ticking)
    run = start()

    def end_after_take(learner: Learner) -> None:
        write = learner.rows.write

        def last(*arguments: Any) -> None:
            write(*arguments)
            learner.requests.stopping = learner.state.take == KILLED_AT

        learner.rows.write = last

    assert run.train(end_after_take) == STOPPED
    newest, _ = load_newest(run.run_dir / "checkpoints", "run")
    assert history.numbers(newest)["seconds"] > run.all_rows()[-1]["time_s"]
    assert run.train() == 0
    times = [row["time_s"] for row in run.all_rows()]
    assert len(times) == STEPS and times == sorted(set(times))


def test_the_alarms_memory_survives_a_kill(undisturbed: Run, start: Callable[..., Run]) -> None:
    run = start()
    with pytest.raises(Killed):
        run.train(PHASES["after done"])
    numbers, _ = run.newest()
    assert numbers["take"] == 4 and numbers["watched"]["tracks"]["entropy"]["steps"] >= 3
    assert run.train() == 0
    assert run.newest()[0]["watched"] == undisturbed.newest()[0]["watched"]


def test_the_learner_writes_the_checkpoint_that_the_buffer_asks_for(tmp_path: Path) -> None:
    run = Run(
        tmp_path, checkpoint=CheckpointConfig(every=1000, keep=9), safety=SafetyConfig(warmup=99)
    )
    done = run.world.service.learner_requests.done

    def asks_at_take_3(peer: str, request: messages.Done, now: float) -> messages.Reply:
        reply = done(peer, request, now)
        if isinstance(reply, messages.Ok):
            reply.checkpoint = request.take == 3
        return reply

    run.world.service.learner_requests.done = asks_at_take_3
    try:
        assert run.train() == 0
        kept = [one for one in run.asked if isinstance(one, messages.Kept)]
        assert len(kept) == 3 and all(one.bytes > 10_000 for one in kept)
        names = sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())
        assert names == ["000001-step-0", "000002-step-4", "000004-step-10"], "no copy"
    finally:
        run.close()
