"""Reactions to failing training: alarms, pauses, rollbacks, skipped steps, the end of a run."""

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evolver_async.config import Config
from evolver_async.errors import TrainingError
from evolver_async.files import make_own
from evolver_async.launch import run_directory
from evolver_async.metrics.alerts import alert
from evolver_async.metrics.writer import Metrics
from evolver_async.wire.evaluation_results import EvalResult
from evolver_async.wire.failure_totals import FailureTotal
from learner.data.players import NON_FINITE, TARGET_KL
from learner.diagnostics.collapse import Alarm, judge, judge_rates
from learner.diagnostics.measure import StepResult
from learner.ranks.layer_times import FACTOR, LOST_S, SLOWEST
from learner.state import LearnerState

log = logging.getLogger(__name__)

SIGNALS = {  # of the alarms, by the metrics that they are
    "reward_spread": "safety/reward_spread",
    "zero_groups": "safety/zero_groups",
    "input_dependence": "safety/input_dependence",
    "format_errors": "train/format_errors",
    "guided_gain": "experience/guided_gain",
    "entropy": "loss/entropy",
    "judge_agreement": "judge/agreement",
    "judge_praise": "judge/praise_bias",
}
MASKED_STEPS = 5  # consecutive ones end the run
CUT_STEPS = 5  # consecutive ones are told
SLOW_STEPS = 10  # consecutive ones with the same slow rank are told
SLOW_FACTOR, SLOW_SHARE = 1.5, 0.05  # of its time for a layer, and of the step that this costs


class Guard:
    """Checks of every step of rl and dpo stages; what they decide by is in `LearnerState`."""

    def __init__(self, run_dir: Path, metrics: Metrics) -> None:
        self.run_dir = run_dir
        self.metrics = metrics
        self.reported: set[tuple[str, str]] = set()  # kinds and names of failures
        self.cut_steps = 0  # consecutive steps of which `loss.target_kl` left one update
        self.slow_steps = 0  # consecutive steps with the slow rank `slow_rank`
        self.slow_rank = -1

    def watch(self, stage: Config, state: LearnerState, outcome: StepResult) -> list[Alarm]:
        """Raise alarms about a step of an rl stage and add their state to its metrics.

        Return the alarms that begin. A pause starts before the next take.
        """
        found = outcome.metrics
        found |= judge_rates(state.watched)
        signals = {signal: found[name] for signal, name in SIGNALS.items() if name in found}
        if found.get("loss/grad_norm", 0.0) > 0:
            signals["log_grad_norm"] = math.log(found["loss/grad_norm"])
        if len(totals := state.watched.not_arrived) > 1:
            signals["weights_not_arrived"] = max(0.0, totals[-1] - totals[-2])
        metrics, alarms = judge(state.watched, signals, found["train/success"], stage.safety)
        found |= metrics
        begun = [alarm for alarm in alarms if alarm.begins]
        for alarm in begun:
            log.warning("take %d: alarm %s", state.take, alarm)
            self.metrics.alert(f"alarm {alarm.name}", f"take {state.take}: {alarm}")
        if begun and stage.safety.action == "pause":
            run_directory.pause(self.run_dir, f"take {state.take}: {'; '.join(map(str, begun))}")
        if stage.safety.action == "rollback":
            found["safety/rollbacks"] = float(state.rollbacks)
        return begun

    def allow_rollback(self, stage: Config, state: LearnerState, begun: list[Alarm]) -> None:
        """Raise TrainingError, with the reason, if no further rollback is allowed."""
        reasons = "; ".join(map(str, begun))
        if state.rollbacks >= stage.safety.rollbacks:
            raise TrainingError(
                f"{reasons}; after {state.rollbacks} rollbacks of the stage; to go on:"
                f" train --resume {self.run_dir} --step best, with other settings"
            )
        changes = f"learner.lr times {stage.safety.rollback_lr:g}"
        if stage.safety.rollback:
            changes += f" and {stage.safety.rollback}"
        text = f"rollback {state.rollbacks + 1} of {stage.safety.rollbacks}, with {changes}"
        log.warning("step %d: %s", state.take, text)
        self.metrics.alert("rollback", f"step {state.take}: {text}: {reasons}", console=True)

    def report_failures(self, failures: list[FailureTotal], take: int, seconds: float) -> None:
        """Report every failing component of the actors once, in the log and in the metrics.

        `seconds`: age of the run.
        """
        new = [one for one in failures if (one.kind, one.name) not in self.reported]
        for failure in new:
            self.reported.add((failure.kind, failure.name))
            log.warning("take %d: %s", take, failure)
            self.metrics.alert(f"{failure.kind} fails", str(failure))
        if new:
            counts = Counter[str]()
            for failure in failures:
                counts[f"failures/{failure.kind}"] += failure.count
            values = {name: float(count) for name, count in counts.items()}
            self.metrics.log(take, {"time_s": seconds, **values})

    def report_end(self, state: LearnerState, newest: EvalResult | None) -> None:
        """Alert of the end of this learner: after the last stage, or before it on request.

        `newest`: the last evaluation.
        """
        title = "run finished" if state.finished else "run stopped"
        text = f"step {state.take}, version {state.version}, {state.seconds:.0f} s of training"
        if newest is not None:
            text += f", newest eval/success {newest.success:.3f} ({newest.distinct} distinct)"
        if not state.finished:
            text += f"; to go on: evolver-async train --resume {self.run_dir}"
        self.metrics.alert(title, text, "INFO")

    def check(self, stage: Config, state: LearnerState, outcome: StepResult) -> None:
        """Raise TrainingError, with the reason, if the run has nothing left to learn from."""
        if state.empty_steps >= stage.selection.max_empty:
            raise TrainingError(
                f"{state.empty_steps} steps in a row had nothing to train on"
                f" ({', '.join(outcome.filtered) or 'no ACTION tokens'})"
            )
        self._tell_cuts(stage, state, outcome)
        masked = outcome.metrics.get("offpolicy/masked", 0.0)
        if state.masked_steps:
            log.warning("%.0f %% of the tokens are masked", 100 * masked)
        if state.masked_steps >= MASKED_STEPS:
            raise TrainingError(
                f"{MASKED_STEPS} steps in a row had {masked:.0%} of their tokens masked"
            )

    def tell_slow_rank(self, take: int, metrics: dict[str, float], passed: float) -> None:
        """Alert of a rank of the learner that was slower than the others for several steps, once.

        `passed`: seconds of the step.
        """
        factor, lost_s = metrics.get(FACTOR, 1.0), metrics.get(LOST_S, 0.0)
        slow = factor >= SLOW_FACTOR and lost_s >= SLOW_SHARE * passed
        rank = int(metrics[SLOWEST]) if slow else -1
        self.slow_steps = self.slow_steps + 1 if rank == self.slow_rank else 1
        self.slow_rank = rank
        if slow and self.slow_steps == SLOW_STEPS:
            text = (
                f"rank {rank} of the learner takes {factor:.1f} times as long for its layers as the"
                f" others, which wait for it: {lost_s:.2g} s of a step of {passed:.2g} s in the"
                " forward pass alone; something else uses its GPU or processors, or throttles them"
            )
            log.warning("take %d: %s", take, text)
            self.metrics.alert(f"slow rank {rank}", f"take {take}: {text}", console=True)

    def _tell_cuts(self, stage: Config, state: LearnerState, outcome: StepResult) -> None:
        """Alert of a `loss.target_kl` that leaves most of the data out."""
        beyond = outcome.metrics.get("offpolicy/kl_beyond")
        self.cut_steps = self.cut_steps + 1 if beyond is not None and outcome.updates <= 1 else 0
        if self.cut_steps == CUT_STEPS:
            text = (
                f"{CUT_STEPS} steps in a row ended after one update or none; the data"
                f" had moved {beyond:.3g} nats a token, loss.target_kl is {stage.loss.target_kl:g}"
            )
            log.warning("take %d: %s", state.take, text)
            self.metrics.alert("target_kl", f"take {state.take}: {text}", console=True)

    def count(self, stage: Config, state: LearnerState, outcome: StepResult) -> None:
        """Count consecutive steps with nothing, or nearly nothing, to train."""
        empty = not outcome.updates and not {NON_FINITE, TARGET_KL} & outcome.filtered.keys()
        masked = outcome.metrics.get("offpolicy/masked", 0.0) > stage.correction.max_masked
        state.empty_steps = state.empty_steps + 1 if empty else 0
        state.masked_steps = state.masked_steps + 1 if masked else 0


@dataclass
class BadSteps:
    """Skipped steps of one learner process; the one that `writes` makes the files and alerts.

    `most` in a row end the run, and so many files are kept.
    """

    run_dir: Path
    most: int
    writes: bool
    told: set[str] = field(default_factory=set)  # causes

    def tell(self, take: int, cause: str) -> None:
        """Alert once of a cause, as it does not always fail the step; "" is none."""
        if not cause or cause in self.told:
            return
        self.told.add(cause)
        log.error("take %d: %s", take, cause)
        if self.writes:
            alert(self.run_dir, "not finite", f"take {take}: {cause}", "ERROR", console=True)

    def skipped(self, state: LearnerState, what: str, cause: str, values: Iterable[object]) -> None:
        """Count a skipped step and write the arrays of `values`. TrainingError after several.

        `what`: the numbers that are not finite. `cause`: the reason, "" if it is not known.
        """
        state.bad_steps += 1
        path = self.run_dir / "bad" / f"take_{state.take:06d}.npz"
        why = f"; {cause}" if cause else ""
        text = f"take {state.take}: {what}, batch in {path}{why}"
        log.error("step skipped: %s", text)
        if self.writes:
            write_bad_step(path, values, keep=self.most)
            alert(self.run_dir, "step skipped", text, "ERROR", console=True)
        if state.bad_steps >= self.most:
            raise TrainingError(
                f"{state.bad_steps} non-finite steps in a row; batches in {path.parent}{why}"
            )


def write_bad_step(path: Path, values: Iterable[object], keep: int) -> None:
    """Write the arrays among the fields of `values`; of all files beside it the newest `keep` stay.

    A run of weeks can skip a step now and then.
    """
    make_own(path.parent)
    fields = {name: value for one in values for name, value in vars(one).items()}
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    others = [one for one in path.parent.glob("*.npz") if one != path]  # whatever the clock says
    others.sort(key=lambda one: one.lstat().st_mtime_ns, reverse=True)
    for old in others[keep - 1 :]:
        old.unlink()
