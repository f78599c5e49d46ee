"""Training with other settings on the recorded takes of a run, as a run directory of its own."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.errors import TRAINING_ERROR, TrainingError
from evolver_async.launch.run_directory import locked
from evolver_async.runs.watch import runs
from evolver_async.schema import Group
from evolver_async.study.rerun import RerunPlan, make_directory
from learner.diagnostics.step_result import StepResult
from learner.diagnostics.step_rows import StepRows
from learner.rerun.retrainer import Retrainer
from learner.run.checkpoint import Checkpoints
from learner.schedule import Clock

REWARD = "reward trained on"
TABLE = {  # titles of the metrics that the comparison shows
    "loss/policy": "loss",
    REWARD: REWARD,
    "offpolicy/ess": "effective sample size",
    "offpolicy/clip_low": "clipped below",
    "offpolicy/clip_high": "clipped above",
    "offpolicy/masked": "without gradient",
    "offpolicy/kl": "KL from behaviour",
    "loss/kl": "KL to the reference",
    "loss/entropy": "entropy",
    "loss/grad_norm": "gradient norm",
}


def train(made: RerunPlan, progress: Callable[[int], None]) -> list[str]:
    """Train the changed steps into `made.out`; return the comparison with the run."""
    assert made.out is not None and made.changed is not None
    make_directory(made)
    with locked(made.out):
        runs.begin(made.out)
        code, reason = 1, "the rerun was interrupted"
        try:
            lines = _train(made, progress)
            code, reason = 0, ""
        except KeyboardInterrupt:
            code = 130
            raise
        except Exception as error:
            code = TRAINING_ERROR if isinstance(error, TrainingError) else 1
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            runs.end(made.out, code, reason)
    return lines


def _train(made: RerunPlan, progress: Callable[[int], None]) -> list[str]:
    assert made.out is not None and made.changed is not None
    with tempfile.TemporaryDirectory(prefix="evolver-rerun-") as work:
        start = _unchanged(made, Path(work), progress)
        trainer = Retrainer(made, made.changed, made.out, start)
    rows = StepRows(made.changed, made.out, trainer.metrics, trainer.timers)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    clock, began = Clock(), time.perf_counter()
    try:
        for number in range(made.first, made.last + 1):
            stage = trainer.state.stage
            outcome, groups = trainer.step()
            passed, seconds = clock.tick(trainer.state), time.perf_counter() - began
            trainer.metrics.lineage = trainer.state.lineage
            rows.write(trainer.state, number, stage, outcome, {}, seconds, passed)
            pairs.append(_pair(made, number, outcome, groups))
            progress(number + 1)
            trainer.check(stage, outcome)
    finally:
        if trainer.state.take > made.first:
            Checkpoints(made.out, made.changed).write(
                trainer.state, lambda path: trainer.updater.save(path, trainer.state)
            )
        trainer.metrics.close()
    return [*comparison(pairs), _seconds(made, time.perf_counter() - began), str(made.out)]


def _unchanged(made: RerunPlan, work: Path, progress: Callable[[int], None]) -> Path | None:
    """Train the steps before the first changed one as the run did; return the state after them."""
    if made.begin == made.first:
        return made.start
    trainer = Retrainer(made, made.config, work, made.start)
    for number in range(made.begin, made.first):
        trainer.step()
        progress(number + 1)
    state = work / "state"
    state.mkdir()
    trainer.updater.save(state, trainer.state)
    trainer.metrics.close()
    return state


def _pair(
    made: RerunPlan, number: int, outcome: StepResult, groups: list[Group]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a step's metrics of the run and of the rerun, with the reward that each trained."""
    theirs, ours = dict(made.rows.get(number, {})), dict(outcome.metrics)
    for metrics, trained in ((theirs, made.takes.trained(number)), (ours, set(outcome.trained))):
        rewards = [
            one.reward
            for group in groups
            if group.group_id in trained
            for one in group.trajectories
        ]
        if rewards:
            metrics[REWARD] = float(np.mean(rewards))
    return theirs, ours


def comparison(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return two tables of the run and the rerun: means over the steps, and the last step."""
    lines = []
    for title, last in (("mean over the steps", False), ("last step", True)):
        lines.append(f"{title:22}{'run':>13}{'rerun':>13}{'change':>13}")
        for name, metric in TABLE.items():
            found = [(theirs.get(name), ours.get(name)) for theirs, ours in pairs]
            both = np.array([one for one in found if None not in one])
            if len(both):
                run, rerun = both[-1] if last else both.mean(axis=0)
                numbers = (run, rerun, rerun - run)
                lines.append(f"{metric:22}" + "".join(f"{number:>13.5g}" for number in numbers))
    return lines


def _seconds(made: RerunPlan, seconds: float) -> str:
    """Compare the time of the steps with the run's."""
    text = f"{made.last - made.first + 1} steps in {seconds:.1f} s"
    before = made.rows.get(made.first - 1, {}).get("time_s", 0.0) if made.first else 0.0
    last = made.rows.get(made.last)
    if last is None or last["time_s"] <= before:
        return text
    took = last["time_s"] - before
    return f"{text}, {seconds / took:.0%} of the {took:.1f} s that the run took for them"
