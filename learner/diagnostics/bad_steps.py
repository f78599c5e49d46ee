"""Steps whose loss or gradient was not finite: batches as files, alerts, the end of the run."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evolver_async.errors import TrainingError
from evolver_async.files import make_own
from evolver_async.metrics.alerts import alert
from learner.state import LearnerState

log = logging.getLogger(__name__)


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
