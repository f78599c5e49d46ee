"""The learner's side of evaluations: due dates, outstanding ones and their results.

The buffer grants and counts the episodes. Outstanding evaluations are part of `LearnerState`,
because a resumed learner asks again for those of its own weights.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from evolver_async.checkpoint.history import CheckpointEvaluation
from evolver_async.config import Config
from evolver_async.config.sections.run import FINAL_SET, EvalConfig, EvalSetConfig
from evolver_async.metrics.writer import Metrics
from evolver_async.schema import WeightId
from evolver_async.weights.channel.interface import Publisher
from evolver_async.wire.evaluation_results import EvalResult, SetResult
from learner.state import LearnerState, PendingEvaluation

log = logging.getLogger(__name__)


class Standstill:
    """Deadline of evaluations, in seconds on the caller's clock.

    It is `timeout_s` away. A new group, or progress of one beyond its best so far, moves it.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        self.timeout_s = timeout_s
        self.deadline = now + timeout_s
        self.best: dict[int, int] = {}

    def reached(self, progress: dict[int, int], now: float) -> bool:
        """True if the deadline has passed without progress."""
        better = {group: n for group, n in progress.items() if n > self.best.get(group, n - 1)}
        if better:
            self.best |= better
            self.deadline = now + self.timeout_s
        return now > self.deadline


@dataclass
class EvaluationTracker:
    """Evaluations of a run: `episodes` episodes every `every` versions, and at a stage's end."""

    publisher: Publisher
    metrics: Metrics
    config: EvalConfig
    newest: EvalResult | None = None  # by version, as an earlier one can end later
    blind: bool = False  # some evaluation had rewards, but no success

    def due(self, version: int, *, over: bool, changed: bool) -> int:
        """Return the episodes to ask for after a step; `over`: it ends its stage."""
        due = self.config.every > 0 and changed and version % self.config.every == 0
        return self.config.episodes if over or due else 0

    def ask(
        self,
        state: LearnerState,
        stage: int,
        episodes: int,
        sets: Mapping[str, EvalSetConfig] = MappingProxyType({}),
        *,
        over: bool = True,
        end: bool = False,
    ) -> None:
        """Note that the newest version is to be evaluated on the tasks of `stage` and on `sets`.

        All sets are evaluated if the stage is `over`, else those that are due at the version; that
        of the split test at the `end` of the run alone.
        """
        due = [
            name
            for name, chosen in sets.items()
            if over or not chosen.every or state.version % chosen.every == 0
        ]
        if end and self.config.final_episodes:
            due.append(FINAL_SET)
        weights = state.version, state.changed_take
        asked = PendingEvaluation(*weights, stage, episodes, due, state.progress())
        state.pending = [other for other in state.pending if other.version != asked.version]
        state.pending.append(asked)

    def know(self, state: LearnerState, found: CheckpointEvaluation) -> None:
        """Take over the result of the untouched model, which a resume at step 0 need not repeat."""
        for asked in [one for one in state.pending if (one.version, one.changed_take) == (0, 0)]:
            state.pending.remove(asked)
            state.eval_success = found.success

    def ask_again(
        self, state: LearnerState, stages: Callable[[int], Config]
    ) -> PendingEvaluation | None:
        """Return the evaluation to repeat after a resume; the weights of others are gone.

        The newest result is forgotten if a rollback has left its version. A resume within a stage
        other than rl can have the version, but not the weights, of an evaluation that the stage
        before asked for.

        `stages`: the configurations, which a resume can have changed: removed sets are left out.
        """
        if self.newest is not None and self.newest.weights.step > state.version:
            self.newest = None
        again = [
            replace(asked, sets=[one for one in asked.sets if one in known])
            for asked in state.pending
            for known in [{*stages(asked.stage).eval.sets, FINAL_SET}]
            if (asked.version, asked.changed_take) == (state.version, state.changed_take)
        ]
        kept = [asked.version for asked in again]
        lost = [asked.version for asked in state.pending if asked.version not in kept]
        if lost:
            log.warning("outstanding evaluations of versions %s are lost with their weights", lost)
        state.pending = again
        return again[0] if again else None

    def abandon(self, state: LearnerState) -> None:
        """Give outstanding evaluations up and release their weights."""
        for asked in state.pending:
            self.publisher.release(WeightId(lineage=state.lineage, step=asked.version))
        state.pending = []

    def report_lost(self, state: LearnerState, still_s: float, run_dir: Path) -> None:
        """Log the evaluations that made no progress after the last step."""
        log.error(
            "training is done, but the evaluations of versions %s are lost: no progress for %g s"
            " (eval.timeout_s); to repeat them: evolver-async train --resume %s",
            [asked.version for asked in state.pending],
            still_s,
            run_dir,
        )

    def take_in(
        self, state: LearnerState, results: list[EvalResult], seconds: float
    ) -> list[tuple[EvalResult, PendingEvaluation]]:
        """Log results, each once although the buffer repeats them, and release their weights.

        Returns those that decide, each with what was asked: an evaluation that has lost episodes
        decides nothing, as its average is of other tasks.
        """
        taken_in = []
        outstanding = {WeightId(lineage=state.lineage, step=a.version): a for a in state.pending}
        for result in results:
            asked = outstanding.get(result.weights)
            if asked is None:
                continue
            state.pending.remove(asked)
            self.publisher.release(result.weights)
            if not result.lost and result.episodes:
                taken_in.append((result, asked))
                # Evaluations overlap: one slow episode lets an earlier evaluation end after a later
                # one.
                if self.newest is None or result.weights >= self.newest.weights:
                    self.newest = result
                    if asked.stage == state.stage and not state.finished:
                        state.eval_success = result.success
            self._tell(result)
            values = {
                **_decisive("eval", "success", result),
                "eval/episodes": float(result.episodes),
                "eval/lost": float(result.lost),
                "eval/distinct": float(result.distinct),
                "eval/version": float(result.weights.step),
                "eval/stage": float(asked.stage),
                "time_s": seconds,
                **asked.progress,
            }
            for one in result.sets:
                values |= _set_values(one)
            self.metrics.log(result.step + 1, values)
        return taken_in

    def _tell(self, result: EvalResult) -> None:
        """Alert of what an evaluation cannot say: lost episodes, and rewards without a success."""
        named = [("", result), *((f" of the set {one.name}", one) for one in result.sets)]
        for name, one in named:
            if one.lost:
                text = f"{one.lost} of {one.lost + one.episodes} episodes{name} are lost"
                text = f"evaluation of {result.weights}: {text}, so nothing is decided by it"
                log.warning("%s", text)
                self.metrics.alert("evaluation incomplete", text)
        blind = not result.lost and result.success == 0 and result.reward_mean > 0
        if blind and not self.blind:
            text = (
                f"evaluation of {result.weights}: rewards above 0, never a success:"
                " until_success, checkpoint.keep_best and rollback go by success alone, which an"
                " environment gives by Info(success=True)"
            )
            log.warning("%s", text)
            self.metrics.alert("never a success", text)
        self.blind = self.blind or blind


def _decisive(prefix: str, success: str, result: EvalResult | SetResult) -> dict[str, float]:
    """Return the averages of a result under their names; {} if it has lost episodes."""
    if result.lost or not result.episodes:
        return {}
    return {
        f"{prefix}/{success}": result.success,
        f"{prefix}/reward_mean": result.reward_mean,
        f"{prefix}/turns_mean": result.turns_mean,
        **{f"{prefix}/{name}": value for name, value in result.numbers.items()},
    }


def _set_values(result: SetResult) -> dict[str, float]:
    """Return the metrics of a set; without averages if it has lost episodes."""
    prefix, k = f"eval/{result.name}", result.k
    values = {
        **_decisive(prefix, f"avg@{k}", result),
        f"{prefix}/episodes": float(result.episodes),
        f"{prefix}/lost": float(result.lost),
        f"{prefix}/distinct": float(result.distinct),
    }
    if result.tasks and not result.lost:
        values[f"{prefix}/best@{k}"] = result.best_success
        values[f"{prefix}/reward_best@{k}"] = result.best_reward
    return values
