"""The training loop: evaluations across stages and restarts, and ends that are not planned."""

import asyncio
import itertools
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from evolver_async.buffer.service import BufferService
from evolver_async.checkpoint.checkpoints import load_newest, valid
from evolver_async.config import Config
from evolver_async.config.load import dump, load
from evolver_async.config.sections.run import FINAL_SET, EvalConfig, EvalSetConfig
from evolver_async.errors import EVALUATION_LOST, STOPPED, TrainingError
from evolver_async.launch.registry import resolve
from evolver_async.launch.serial import VirtualLoop, run
from evolver_async.metrics.families import AXES, CLOCK
from evolver_async.metrics.writer import Metrics, Timers
from evolver_async.process.setup import RoleArgs
from evolver_async.schema import Group, WeightId
from evolver_async.weights.shm import ShmPublisher
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.evaluation_results import EvalResult
from evolver_async.wire.failure_totals import FailureTotal
from evolver_async.wire.in_process import LocalClient, LocalServer
from learner import train
from learner.diagnostics.step_result import StepResult
from learner.diagnostics.step_rows import StepRows
from learner.main import build
from learner.progress import StepProgress
from learner.run.evaluations import EvaluationTracker, Standstill
from learner.schedule import Stages
from learner.stage_steps import train_take
from learner.state import LearnerState, PendingEvaluation
from learner.step import Updater
from learner.train import Learner
from tests.support.killed_runs import Run

RECIPE = """
env: {name: bandit}
policy: {max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 2, max_turns: 1, max_tokens: 2}
actors: {count: 1, groups: 2}
advantage: {kind: reinforce}
learner: {groups_per_step: 2, minibatches: 1, decay: none}
stages: [{kind: rl, steps: 2}]
eval: {every: 0, episodes: 4, final_episodes: 6}
launch: {kind: serial}
"""


def prepared(tmp_path: Path, *dotlist: str) -> tuple[Config, Path]:
    """A configuration with a policy, and its run directory."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    paths = [f"policy.path={run_dir}/policy", f"weights.dir={tmp_path}"]
    config = load(tmp_path / "recipe.yaml", [*paths, *dotlist])
    dump(config, run_dir / "config.yaml")
    resolve("prepare")(RoleArgs(address="", name="prepare", incarnation=0, run_dir=run_dir))
    return config, run_dir


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def state_of(run_dir: Path) -> dict[str, Any]:
    newest, _ = load_newest(run_dir / "checkpoints", run_dir.name)
    return json.loads((newest / "state.json").read_text())


def test_a_slow_machine_costs_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = prepared(tmp_path, "eval.timeout_s=31")
    passed = itertools.count(step=1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(passed))
    assert run(config, run_dir) == 0
    (result,) = [row for row in rows(run_dir) if "eval/success" in row]
    assert (result["step"], result["eval/version"], result["eval/episodes"]) == (2, 2, 4)
    assert result["eval/test/episodes"] == 6
    assert state_of(run_dir)["pending"] == []


def test_an_evaluation_without_progress_is_an_error_and_a_resume_repeats_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No actor plays it: the learner has trained all stages and waits."""
    config, run_dir = prepared(tmp_path)
    loop = VirtualLoop()
    service = BufferService.of_run(config, run_dir, None, now=0.0)
    server = LocalServer(service, run_dir.name)

    async def start() -> None:
        server.start()

    learner = build(config, run_dir, LocalClient(server, "learner"), loop.run_until_complete)
    asked = PendingEvaluation(version=0, changed_take=0, stage=0, episodes=6)
    learner.state = LearnerState(stage_take=-2, finished=True, pending=[asked])
    try:
        loop.run_until_complete(start())
        assert learner.run() == EVALUATION_LOST
        assert 120 < loop.time() < 125
    finally:
        learner.close()
        server.close()
        service.close()
        loop.close()
    assert "evaluations of versions [0] are lost: no progress for 120 s" in caplog.text
    assert state_of(run_dir)["pending"] == [asdict(asked)]
    assert not any("eval/success" in row for row in rows(run_dir))
    assert run(config, run_dir) == 0
    (result,) = [row for row in rows(run_dir) if "eval/success" in row]
    assert (result["eval/version"], result["eval/episodes"]) == (0, 6)
    assert state_of(run_dir)["pending"] == []


def test_only_an_evaluation_that_stands_still_is_lost() -> None:
    still = Standstill(10.0, now=0.0)
    assert not still.reached({7: -1}, now=9.0)
    assert not still.reached({7: 3}, now=18.0)
    assert not still.reached({8: 0}, now=27.0), "the next episode has begun"
    assert not still.reached({7: 2}, now=36.0)
    assert still.reached({7: 3, 8: 0}, now=38.0), "an episode that is repeated stands still"
    assert not still.reached({7: 4}, now=39.0)


def test_told_to_end_without_a_buffer_it_leaves_a_checkpoint(tmp_path: Path) -> None:
    config, run_dir = prepared(tmp_path)
    loop = asyncio.new_event_loop()

    async def connect() -> DealerClient:
        return DealerClient(f"ipc://{tmp_path}/nobody", "run", "learner")

    client = loop.run_until_complete(connect())
    learner = build(config, run_dir, client, loop.run_until_complete)
    try:
        loop.call_later(0.1, setattr, learner.requests, "stopping", True)
        assert learner.run() == STOPPED
    finally:
        learner.close()
        client.close()
        loop.close()
    assert len(valid(run_dir / "checkpoints")) == 1


ONE_STEP = ", ".join(50 * ["{kind: rl, steps: 1}"])


@pytest.mark.parametrize("stages", ["{kind: rl, steps: 50}", "{kind: dpo, steps: 50}", ONE_STEP])
def test_a_run_that_has_nothing_to_train_on_says_so(tmp_path: Path, stages: str) -> None:
    """Steps in a row, also of several stages."""
    selection = "selection={kind: spread, max_empty: 2}"
    config, run_dir = prepared(tmp_path, selection, f"stages=[{stages}]", "learner.lr=0")
    with pytest.raises(TrainingError, match="2 steps in a row had nothing to train on"):
        run(config, run_dir)


def test_a_stop_within_a_step_leaves_the_step_to_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped_in_the_second(updater: Updater, stages: Stages, state: LearnerState, *data: Any):
        updater.ranks.progress.stops = lambda: state.take == 1
        return train_take(updater, stages, state, *data)

    weights = []
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        config, run_dir = prepared(tmp_path / name, "checkpoint.every=1")
        if name == "stopped":
            with monkeypatch.context() as patched:
                patched.setattr(train, "train_take", stopped_in_the_second)
                assert run(config, run_dir) == STOPPED
            assert state_of(run_dir)["take"] == 1
        assert run(config, run_dir) == 0
        newest, _ = load_newest(run_dir / "checkpoints", run_dir.name)
        weights.append((newest / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_step_with_an_update_is_finished() -> None:
    progress = StepProgress(stops=lambda: True)
    assert not progress.abandons(), "outside of a step nothing is abandoned"
    progress.begin(3)
    assert progress.abandons()
    progress.updated = True
    assert not progress.abandons()


def test_what_a_step_has_to_go_does_not_grow_with_a_micro_batch_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("learner.progress.time.monotonic", lambda: now[0])
    progress = StepProgress()
    progress.begin(3)
    progress.plan(400, gradient=True)
    progress.plan(200, gradient=False)
    now[0] += 2
    assert progress.left_s == 0, "nothing is done yet"
    progress.count(200, gradient=False)
    assert progress.left_s == pytest.approx(12)
    now[0] += 5  # the next micro-batch is half of the step
    assert progress.left_s == pytest.approx(7)
    progress.count(200, gradient=True)
    assert progress.left_s == pytest.approx(7 * 14 / 8 - 7)


def test_a_supervised_step_between_empty_ones_has_something_to_train_on(tmp_path: Path) -> None:
    stages = ", ".join(8 * ["{kind: rl, steps: 1}, {kind: sft, steps: 1}"])
    selection = "selection={kind: spread, max_empty: 2}"
    config, run_dir = prepared(tmp_path, selection, f"stages=[{stages}]", "learner.lr=0")
    assert run(config, run_dir) == 0
    kept = [row["selection/kept_share"] for row in rows(run_dir) if row.get("stage_kind") == "rl"]
    assert kept.count(0.0) > 1


class Bench:
    """The learner's evaluations with a real weight channel and real metrics."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.publisher = ShmPublisher(tmp_path / "weights", keep=2, background=False)
        self.metrics = Metrics(tmp_path)
        config = EvalConfig(every=2, episodes=4, final_episodes=8)
        self.evaluations = EvaluationTracker(self.publisher, self.metrics, config)

    def rows(self) -> list[float]:
        return [row["eval/success"] for row in rows(self.directory) if "eval/success" in row]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def result(lineage: int, step: int, success: float, episodes: int = 4) -> EvalResult:
    return EvalResult(
        weights=WeightId(lineage=lineage, step=step),
        step=step,
        episodes=episodes,
        success=success,
        reward_mean=0.0,
        turns_mean=1.0,
        distinct=episodes,
    )


def test_results_are_those_of_exact_weights_and_count_once(bench: Bench) -> None:
    state = LearnerState(lineage=2, version=5)
    bench.evaluations.ask(state, 0, 4)
    bench.evaluations.take_in(state, [result(1, 5, 0.25)], 0.0)
    assert bench.rows() == [] and len(state.pending) == 1
    for _ in range(2):
        bench.evaluations.take_in(state, [result(2, 5, 0.75)], 0.0)
    assert bench.rows() == [0.75] and state.pending == []
    assert state.eval_success == 0.75


def test_an_evaluation_has_reward_terms_and_the_environments_own_numbers(bench: Bench) -> None:
    state = LearnerState(lineage=2, version=5)
    bench.evaluations.ask(state, 0, 4)
    found = msgspec.structs.replace(
        result(2, 5, 0.5), numbers={"reward/exact": 0.5, "env/moves": 7}
    )
    bench.evaluations.take_in(state, [found], 0.0)
    (row,) = rows(bench.directory)
    assert (row["eval/reward/exact"], row["eval/env/moves"]) == (0.5, 7)


def test_an_evaluation_that_lost_episodes_decides_nothing(bench: Bench) -> None:
    """The average over the others is one of other tasks."""
    state = LearnerState(lineage=2, version=5)
    bench.evaluations.ask(state, 0, 4)
    found = msgspec.structs.replace(result(2, 5, 1.0, episodes=2), lost=2)
    assert bench.evaluations.take_in(state, [found], 0.0) == []
    assert state.eval_success == -1.0 and bench.evaluations.newest is None
    (row,) = rows(bench.directory)
    assert (row["eval/episodes"], row["eval/lost"]) == (2, 2)
    assert not {"eval/success", "eval/reward_mean"} & row.keys()
    assert alerts(bench) == ["evaluation incomplete"]


def test_rewards_without_any_success_are_told_once(bench: Bench) -> None:
    state = LearnerState(lineage=2)
    for version in (5, 6):
        state.version = version
        bench.evaluations.ask(state, 0, 4)
        found = msgspec.structs.replace(result(2, version, 0.0), reward_mean=0.5)
        bench.evaluations.take_in(state, [found], 0.0)
    assert alerts(bench) == ["never a success"]


def alerts(bench: Bench) -> list[str]:
    lines = (bench.directory / "alerts.jsonl").read_text().splitlines()
    return [json.loads(line)["title"] for line in lines]


def test_a_version_is_outstanding_once(bench: Bench) -> None:
    state = LearnerState(version=5)
    bench.evaluations.ask(state, 0, 4)
    bench.evaluations.ask(state, 0, 8)
    progress = state.progress()
    assert state.pending == [PendingEvaluation(5, 0, stage=0, episodes=8, progress=progress)]


def test_only_the_resumed_version_is_evaluated_again(bench: Bench) -> None:
    asked = [PendingEvaluation(version, 0, stage=0, episodes=4) for version in (3, 5)]
    state = LearnerState(version=5, pending=list(asked))
    stages = Stages(load(None, ["stages=[{kind: rl, steps: 9}]"]))
    assert bench.evaluations.ask_again(state, stages) == asked[1]
    assert state.pending == asked[1:]
    state.version = 6
    assert bench.evaluations.ask_again(state, stages) is None and state.pending == []


def test_a_rollback_forgets_the_newest_result_of_a_version_that_it_leaves(bench: Bench) -> None:
    stages = Stages(load(None, ["stages=[{kind: rl, steps: 9}]"]))
    state = LearnerState(lineage=1, version=5)
    bench.evaluations.ask(state, 0, 4)
    bench.evaluations.take_in(state, [result(1, 5, 0.75)], 0.0)
    bench.evaluations.ask_again(LearnerState(lineage=1, version=5), stages)
    assert bench.evaluations.newest is not None
    bench.evaluations.ask_again(LearnerState(lineage=1, version=4), stages)
    assert bench.evaluations.newest is None, "the alert of the run's end would name it"


def test_weights_that_changed_within_their_version_are_not_evaluated_again(bench: Bench) -> None:
    """The steps of stages other than rl make no version."""
    state = LearnerState(take=2, version=1, changed_take=2)
    bench.evaluations.ask(state, 0, 4)
    stages = Stages(load(None, ["stages=[{kind: sft, steps: 9}]"]))
    state.count([], 0, updates=0)
    assert bench.evaluations.ask_again(state, stages) is not None, "a step without an update"
    state.count([], 0, updates=1)
    assert bench.evaluations.ask_again(state, stages) is None and state.pending == []


def test_an_earlier_evaluation_that_ends_later_is_not_the_newest(bench: Bench) -> None:
    """One slow episode holds it back, while those of the next version are played."""
    state = LearnerState(version=3)
    bench.evaluations.ask(state, 0, 4)
    state.version = 4
    bench.evaluations.ask(state, 0, 4)
    bench.evaluations.take_in(state, [result(0, 4, 0.25), result(0, 3, 1.0)], 0.0)
    assert bench.rows() == [0.25, 1.0] and state.pending == []
    assert state.eval_success == 0.25, "by which until_success ends the stage"
    assert bench.evaluations.newest == result(0, 4, 0.25), "the alert of the run's end names it"


def test_an_evaluation_without_episodes_is_no_success_of_zero(bench: Bench) -> None:
    state = LearnerState(version=5)
    bench.evaluations.ask(state, 0, 4)
    bench.evaluations.take_in(state, [result(0, 5, 0.0, episodes=0)], 0.0)
    assert bench.rows() == [] and state.pending == [] and state.eval_success == -1.0


def test_the_last_stage_s_success_does_not_end_the_next_one(bench: Bench) -> None:
    state = LearnerState(version=5)
    bench.evaluations.ask(state, 0, 4)
    state.stage = 1
    bench.evaluations.take_in(state, [result(0, 5, 1.0)], 0.0)
    assert bench.rows() == [1.0] and state.eval_success == -1.0


def test_when_evaluations_are_due(bench: Bench) -> None:
    due = bench.evaluations.due
    assert due(2, over=False, changed=True) == 4
    assert due(3, over=False, changed=True) == 0
    assert due(2, over=False, changed=False) == 0
    assert due(3, over=True, changed=False) == 4


def test_the_split_test_is_measured_at_the_end_alone(bench: Bench) -> None:
    def asked(**when: bool) -> list[str]:
        state = LearnerState(version=3)
        bench.evaluations.ask(state, 0, 4, {"own": EvalSetConfig()}, **when)
        return state.pending[0].sets

    assert asked(over=False) == asked(over=True) == ["own"]
    assert asked(over=True, end=True) == ["own", FINAL_SET]
    bench.evaluations.config.final_episodes = 0
    assert asked(over=True, end=True) == ["own"]


def test_weights_change_only_once_the_version_before_is_copied(tmp_path: Path) -> None:
    """A version is copied beside the next step, so that its first update waits for the copy."""
    seen: list[str] = []

    def watch(learner: Learner) -> None:
        model, publish = learner.updater.model, learner.publisher.publish  # pyright: ignore[reportAttributeAccessIssue]
        held: list[torch.Tensor] = []

        def publishing(*args: Any, **more: Any) -> None:
            seen.append("publish")
            held[:] = [one.detach().clone() for one in model.parameters()]
            publish(*args, **more)

        def copied() -> None:
            seen.append("copied")
            time.sleep(0.01)
            if seen[-2] == "publish":
                assert all(map(torch.equal, held, model.parameters()))

        learner.publisher.publish = publishing
        learner.publisher.copied = copied

    killed = Run(tmp_path)
    killed.train(watch)
    killed.close()
    waits = [row["weights/publish_s"] for row in killed.all_rows() if "weights/publish_s" in row]
    assert len(waits) > 2 and min(waits) >= 0.02, "the step's row has the wait of both its updates"
    assert seen.count("publish") > 2
    follows = [next_ for one, next_ in itertools.pairwise(seen) if one == "publish"]
    assert set(follows) == {"copied"}, "two minibatches, and a copy before each"


def test_failures_before_the_first_step_have_every_axis(tmp_path: Path) -> None:
    """Else W&B does not draw them, and a run that only fails has no other row."""

    def fail(learner: Learner) -> None:
        sample = learner.sample

        def failing() -> list[Group]:
            total = FailureTotal(kind="agent", name="my:play", error="KeyError", count=1)
            learner.guard.report_failures([total], learner.state.take, 0.5)
            return sample()

        learner.sample = failing

    killed = Run(tmp_path)
    killed.train(fail)
    killed.close()
    first = rows(killed.run_dir)[0]
    assert first["failures/agent"] == 1.0
    assert {*AXES} - {CLOCK} <= first.keys()


def test_a_step_has_no_samples_of_a_lineage_that_the_run_has_left(tmp_path: Path) -> None:
    """W&B and the report find them by the step alone."""
    config, run_dir = prepared(tmp_path)
    metrics = Metrics(run_dir)
    rows = StepRows(config, run_dir, metrics, Timers())
    old = run_dir / "samples" / "step_000008.jsonl"
    old.parent.mkdir()
    old.write_text("{}\n")
    state = LearnerState(lineage=2, take=8)
    rows.write(state, 7, 0, StepResult([], {}, 0, 0), {}, 1.0, 1.0)
    metrics.close()
    assert not old.exists()
