"""Checkpoints of a run: evaluations are noted beside their own weights alone."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import valid
from evolver_async.config.load import load
from evolver_async.schema import WeightId
from evolver_async.wire.evaluation_results import EvalResult
from learner.run.checkpoint import Checkpoints
from learner.state import LearnerState, PendingEvaluation

STAGES = "stages=[{kind: sft, steps: 2}, {kind: sft, steps: 9}]"


def checkpoints_of(tmp_path: Path, keep: int) -> Checkpoints:
    config = load(None, [STAGES, f"checkpoint={{keep: {keep}, keep_best: 1}}"])
    return Checkpoints(tmp_path / "run", config)


def trained(checkpoints: Checkpoints, state: LearnerState, steps: int) -> None:
    """Train steps of a supervised stage, each with a checkpoint after it."""
    for _ in range(steps):
        state.count([], 0, updates=1)
        write(checkpoints, state)


def write(checkpoints: Checkpoints, state: LearnerState) -> None:
    def fill(path: Path) -> None:
        (path / "model").write_text(f"weights of take {state.changed_take}")
        (path / "state.json").write_text(json.dumps(asdict(state)))

    checkpoints.write(state, fill)


def test_one_is_due_by_steps_or_by_minutes(tmp_path: Path) -> None:
    config, now = load(None, [STAGES, "checkpoint={every: 10, minutes: 1.5}"]), 100.0
    checkpoints = Checkpoints(tmp_path / "run", config, lambda: now)
    assert checkpoints.due(10, False) and not checkpoints.due(11, False)
    now += 90.0
    assert checkpoints.due(11, False)
    write(checkpoints, LearnerState(lineage=1, take=11))
    assert not checkpoints.due(12, False)
    never = Checkpoints(tmp_path / "run", load(None, [STAGES]), lambda: now)
    now += 1e9
    assert checkpoints.due(12, False) and not never.due(12, False)


@pytest.mark.parametrize(("every", "staleness"), [(1, 4), (10, 32), (25, 4)])
def test_a_rollback_goes_back_no_further_than_it_must(
    tmp_path: Path, every: int, staleness: int
) -> None:
    """Many newer checkpoints follow before an alarm could go back to one."""
    rolls = ["stages=[{kind: rl, steps: 900}]", "safety.action=rollback"]
    config = load(None, [*rolls, "checkpoint.keep=2", f"buffer.max_staleness={staleness}"])
    checkpoints, state = Checkpoints(tmp_path / "run", config), LearnerState(lineage=1)
    write(checkpoints, state)
    for _ in range(203):
        state.count([], 0, updates=1)
        if state.take % every == 0:
            write(checkpoints, state)
    patience = config.safety.patience
    chosen = checkpoints.go_back(state, patience)
    earliest = state.take - patience - staleness - 1
    assert len(valid(checkpoints.directory)) <= 6
    assert earliest - max(every, patience + staleness) <= history.numbers(chosen)["take"]
    assert history.numbers(chosen)["take"] <= earliest


def test_a_rollback_returns_to_the_best_evaluated_one_however_good_the_suspicious_are(
    tmp_path: Path,
) -> None:
    """Also after an earlier rollback, whose checkpoints are kept."""
    rolls = ["stages=[{kind: rl, steps: 900}]", "safety.action=rollback", "buffer.max_staleness=4"]
    config = load(None, [*rolls, "checkpoint={every: 2, keep: 2, keep_best: 1}"])
    checkpoints, state = Checkpoints(tmp_path / "run", config), LearnerState(lineage=1)

    def go_on(end: int, scores: dict[int, float]) -> None:
        while state.take < end:
            state.count([], 0, updates=1)
            state.version += 1
            if state.take % 2 == 0:
                write(checkpoints, state)
            if state.take in scores:
                asked = PendingEvaluation(state.version, state.changed_take, stage=0, episodes=4)
                checkpoints.evaluated(success(state.version, scores[state.take]), asked)

    write(checkpoints, state)
    go_on(113, {50: 0.7, 100: 0.9, 104: 0.8, 110: 0.99})
    for best, scores in ((100, {150: 0.95, 170: 0.6, 200: 0.99}), (150, {})):
        chosen = history.numbers(checkpoints.go_back(state, config.safety.patience))
        assert chosen["take"] == best
        state = LearnerState(lineage=1, take=best, changed_take=best, version=best)
        state.rollbacks = chosen["rollbacks"]
        write(checkpoints, state)
        go_on(203, scores)
    assert len(valid(checkpoints.directory)) <= 7


def success(version: int, success: float) -> EvalResult:
    return EvalResult(
        weights=WeightId(lineage=1, step=version),
        step=1,
        episodes=4,
        success=success,
        reward_mean=0.0,
        turns_mean=1.0,
        distinct=4,
    )


def noted(checkpoints: Checkpoints) -> list[str]:
    found = [path for path, _ in valid(checkpoints.directory)]
    return [path.name for path in found if history.evaluation_of(path) is not None]


def test_a_late_result_is_noted_beside_its_own_weights_alone(tmp_path: Path) -> None:
    """A following stage that is not rl trains other weights under the same version."""
    checkpoints, state = checkpoints_of(tmp_path, keep=9), LearnerState(lineage=1)
    trained(checkpoints, state, 1)
    state.count([], 0, updates=1)
    state.version = 1
    asked = PendingEvaluation(state.version, state.changed_take, stage=0, episodes=4)
    state.pending = [asked]
    write(checkpoints, state)
    state.count([], 0, updates=0)  # the same weights
    write(checkpoints, state)
    trained(checkpoints, state, 2)
    checkpoints.evaluated(success(1, 0.5), asked)
    assert noted(checkpoints) == ["000002-step-2", "000003-step-3"]
    best, *_ = history.best(valid(checkpoints.directory))
    assert (best / "model").read_text() == "weights of take 2"


def test_only_the_weights_of_an_outstanding_evaluation_outlast_newer_ones(tmp_path: Path) -> None:
    checkpoints, state = checkpoints_of(tmp_path, keep=2), LearnerState(lineage=1, version=1)
    trained(checkpoints, state, 1)
    state.pending = [PendingEvaluation(1, state.changed_take, stage=0, episodes=4)]
    trained(checkpoints, state, 3)
    names = [path.name for path, _ in valid(checkpoints.directory)]
    assert names == ["000001-step-1", "000003-step-3", "000004-step-4"]
