"""The serial launcher: learns, gives the same numbers for the same seed, sets the lag exactly.

Every run is the whole system, in this process; one is shared by all tests that can share it.
"""

import asyncio
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from serial_recipe import RECIPE
from serial_runs import Finished, trainer

from actors.envs.bandit import Bandit
from actors.envs.grid.frozen_lake import FrozenLake
from actors.evaluate import evaluate
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.service import BufferService
from evolver_async.checkpoint.checkpoints import resumable
from evolver_async.config.load import dump, load
from evolver_async.launch.creation import create
from evolver_async.launch.serial import VirtualLoop, run
from evolver_async.process.private_directories import PREFIX
from evolver_async.schema import Task

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("serial"), RECIPE)


@pytest.fixture(scope="module")
def plain(train: Callable[..., Finished]) -> Finished:
    return train("plain")


@contextmanager
def loop_of(loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.AbstractEventLoop]:
    try:
        yield loop
    finally:
        loop.close()


def test_it_learns_the_better_arm_from_demonstrations_of_the_format_alone(plain: Finished) -> None:
    success = plain.rl("train/success")
    assert success[0] < 0.8, "the demonstrations must not have taught the arm"
    assert sum(success[-5:]) / 5 >= 0.9
    assert plain.rl("train/format_errors")[0] < 0.1
    last = [row for row in plain.rows if "eval/success" in row][-1]
    assert last["eval/success"] >= 0.9
    assert (last["eval/episodes"], last["eval/test/episodes"]) == (32, 64)
    assert last["eval/test/avg@1"] >= 0.9


def test_another_seed_gives_another_run(plain: Finished, train: Callable[..., Finished]) -> None:
    other = train("other", "run.seed=1", "stages.0.steps=2", "stages.1.steps=2")
    assert other.numbers()[:2] != plain.numbers()[:2]
    assert other.rl("train/reward_mean") != plain.rl("train/reward_mean")[:2]
    assert any(not torch.equal(t, other.tensors[name]) for name, t in plain.tensors.items())


def alike(one: Finished, other: Finished) -> bool:
    """True if two runs have the same numbers and the same tensors, bit by bit."""
    assert one.tensors.keys() == other.tensors.keys()
    return one.numbers() == other.numbers() and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()
    )


def test_equal_seeds_give_bit_identical_runs_whatever_the_keys_of_what_is_off(
    plain: Finished, train: Callable[..., Finished]
) -> None:
    off = train(
        "off",
        "advantage={kind: adca, alpha: 0.5, lam: 0.5}",
        "correction={epsilon: 2.0, low: 0.9, guided: anchor}",
        "experience={top_k: 2, strip_fraction: 0.5, reliance_coef: 1.0}",
        "loss={boost: 0.6, norm_tokens: 3, kl: k1}",
        "rollout.guided=failed",
        "selection={members: 4, keep: 0.25, scale: linear}",
        "tasks.synthetic=0.5",
    )
    assert alike(off, plain)


def test_an_ablated_recipe_trains_as_if_it_did_not_name_what_is_off(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "configs" / "agentevolver.yaml"
    train = trainer(tmp_path, recipe.read_text())
    ablated = (
        *("launch.kind=serial", "experience.kind=none", "judge.kind=none"),
        *("questioning.kind=none", "stages.0.steps=2", "stages.1.steps=3"),
        *("learner.groups_per_step=4", "stages.0.override.learner.groups_per_step=4"),
        *("eval.episodes=8", "eval.final_episodes=0", "eval.every=0"),
    )
    bare = (
        *("experience.similarity=0.5", "loss.boost=0", "tasks.synthetic=0"),
        *("advantage={kind: grpo}", "learner.minibatches=2"),
        *("stages.0.override.rollout.guided_fraction=0.5", "stages.0.override.experience={}"),
    )
    assert alike(train("ablated", *ablated), train("bare", *ablated, *bare))


def test_a_run_that_learns_raises_no_alarm(plain: Finished) -> None:
    alarms = {name for row in plain.rows for name in row if name.startswith("alarm/")}
    assert len(alarms) == 11 and not any(sum(plain.rl(name)) for name in alarms)


def test_a_forced_weight_lag_is_exact(train: Callable[..., Finished]) -> None:
    lagged = train("lagged", "actors.weight_lag=2", "stages.0.steps=3", "stages.1.steps=10")
    mean, largest = lagged.rl("staleness/mean"), lagged.rl("staleness/max")
    # The stage begins with the version that the demonstrations made: nothing older acts in it.
    assert mean == largest == [0, 1] + 8 * [2]
    families = {name.split("/")[0] for row in lagged.rows for name in row if "lag_" in name}
    assert families == {"lag_0", "lag_1", "lag_2"}
    assert lagged.rl("ledger/evicted")[-1] == 0


def test_versions_are_evaluated_while_the_learner_has_data(train: Callable[..., Finished]) -> None:
    """An actor computes at each of its requests: the clock stood still, and nobody saw a version.

    The stage is over within a few steps of the first evaluation.
    """
    settings = ("buffer.max_staleness=8", "eval.every=2", "stages.1.until_success=0.1")
    assert len(train("early", *settings).rl("train/success")) < 10


def test_actors_that_rarely_look_for_weights_are_no_standstill(
    train: Callable[..., Finished], caplog: pytest.LogCaptureFixture
) -> None:
    """The learner's work took so long that the buffer and its disk seemed to stand still."""
    train("rare", "actors.poll_s=5", "stages.0.steps=3", "stages.1.steps=3")
    assert not [message for message in caplog.messages if "stood still" in message]


def test_a_signal_lets_the_learner_save_and_the_run_goes_on_from_there(
    tmp_path: Path, plain: Finished
) -> None:
    run_dir = shutil.copytree(plain.run_dir, tmp_path / plain.run_dir.name)
    config = load(run_dir / "config.yaml", ["stages.1.steps=1000", f"weights.dir={tmp_path}"])
    dump(config, run_dir / "config.yaml")
    begun = resumable(run_dir / "checkpoints")[-1][1].step

    def stop() -> None:
        while len((run_dir / "metrics.jsonl").read_text().splitlines()) <= len(plain.rows) + 1:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert run(config, run_dir) == 128 + signal.SIGTERM
    assert resumable(run_dir / "checkpoints")[-1][1].step > begun


class Barren(FrozenLake):
    """Environment none of whose states can be a goal."""

    def goal(self) -> None:
        return None


def test_a_run_without_tasks_says_so_and_ends_at_a_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its clock stands still: it explores without a pause, and the learner waits for a task."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    changes = [f"env={{name: '{__name__}:Barren', params: {{size: 3}}}}", "policy.max_length=128"]
    changes += ["tasks.synthetic=1", "questioning.kind=goals", "stages=[{kind: rl, steps: 1}]"]
    changes += ["buffer.warn_s=0.2", "run.name=barren", f"run.dir={tmp_path}", "judge.kind=none"]
    config, run_dir = create(load(recipe, [*changes, f"weights.dir={tmp_path}"]), recipe)

    def stop() -> None:
        while "explorations have found none" not in caplog.text:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert run(config, run_dir) == 128 + signal.SIGTERM
    assert resumable(run_dir / "checkpoints")


def test_the_clock_keeps_what_a_signal_adds_while_it_moves() -> None:
    """A stop that was lost there was not heeded in a run whose clock stands still."""
    loop, came = VirtualLoop(), 0

    def advance(*_: object) -> None:
        nonlocal came
        came += 1
        loop.advance(1.0)

    async def compute() -> None:
        while came < 300:
            await asyncio.sleep(0)

    before = signal.signal(signal.SIGVTALRM, advance)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-3, 1e-3)
    try:
        loop.run_until_complete(compute())
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert loop.time() == pytest.approx(came, abs=0.1)
    loop.close()


def test_latency_of_the_environment_costs_no_real_time(train: Callable[..., Finished]) -> None:
    slow = train(
        "slow",
        "env.latency={kind: lognormal, median_s: 5, sigma: 1}",
        "env.step_timeout_s=500",
        "buffer.stall_s=600",
        "eval.timeout_s=600",
        "buffer.max_staleness=0",
        "stages.0.steps=3",
        "stages.1.steps=10",
    )
    assert len(slow.rl("staleness/max")) == 10
    # Synchronous steps follow each other, and each waits for the slowest of its 32 episodes.
    assert slow.wall_s < 10 * 5


class Broken(Bandit):
    """Cannot begin any task."""

    def reset(self, task: Task, dynamics_seed: int) -> str:
        raise KeyError(task.task_id)


def test_an_evaluation_with_failing_episodes_says_so(plain: Finished, tmp_path: Path) -> None:
    run_dir = shutil.copytree(plain.run_dir, tmp_path / "plain")
    config = load(run_dir / "config.yaml", [f"env.name={__name__}:Broken", "engine.threads=2"])
    dump(config, run_dir / "config.yaml")
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match=r"4 of 4 episodes failed, .*Broken/valid.*KeyError"):
        evaluate(run_dir, 4)
    assert torch.get_num_threads() == 2, "engine.threads holds wherever an engine runs"
    torch.set_num_threads(before)


def test_a_run_that_cannot_begin_leaves_no_weights_directory(
    train: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise JournalError("the newest segment is cut")

    monkeypatch.setattr(BufferService, "of_run", refuse)
    with pytest.raises(JournalError):
        train("refused", f"weights.dir={tmp_path}")
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_the_virtual_clock_moves_by_what_is_slept() -> None:
    with loop_of(VirtualLoop()) as loop:
        start = time.perf_counter()
        loop.run_until_complete(asyncio.sleep(3600))
        assert loop.time() == pytest.approx(3600, abs=1)
        assert time.perf_counter() - start < 60


def test_who_waits_for_the_last_instant_of_a_deadline_gets_there() -> None:
    async def reaches(deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        for _ in range(100):
            if loop.time() >= deadline:
                return True
            loop.call_soon(int)  # somebody else is ready, so the clock need not move
            await asyncio.sleep(deadline - loop.time())
        return False

    with loop_of(VirtualLoop()) as loop:
        loop.run_until_complete(asyncio.sleep(65.0))
        assert loop.run_until_complete(reaches(math.nextafter(loop.time(), math.inf)))


def test_a_loop_that_nobody_can_wake_says_so() -> None:
    with loop_of(VirtualLoop()) as loop, pytest.raises(RuntimeError, match="cannot continue"):
        loop.run_until_complete(loop.create_future())
