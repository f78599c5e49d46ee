"""Progress of a study on the console: one line for each run that ends, and what is left."""

import math
import sys
from pathlib import Path
from typing import NamedTuple

from evolver_async.study import output
from evolver_async.study.directory import OPEN, Study, cold_run, runs_of, state_of
from evolver_async.study.run_results import TESTED, CurveReader
from evolver_async.study.scheduler import EndedRun
from evolver_async.terminal import say

ERROR_CHARACTERS = 300  # of an error in a line; the log and the summary have all of it


class Needs(NamedTuple):
    """Seconds and bytes on disk that a study still needs."""

    seconds: float
    bytes: int


def needs(study: Study, jobs: int) -> Needs | None:
    """Return what open runs need, `jobs` at a time, if each is like the first finished one.

    Cold starts are like the first finished cold start. Seconds are those of training, without the
    start of the processes. None before such a run is finished.
    """
    cold = study.definition.seeds if study.definition.cold_start else ()
    seconds, size = 0.0, 0
    for runs in (runs_of(study), [cold_run(study, seed) for seed in cold]):
        states = [state_of(study, run)[0] for run in runs]
        left = sum(state in OPEN for state in states)
        if left and "finished" not in states:
            return None
        if left:
            first = runs[states.index("finished")]
            steps = CurveReader(study, first, from_cold=False).progress.values()
            seconds += math.ceil(left / jobs) * max((one.seconds for one in steps), default=0.0)
            size += left * size_of(first.directory)
    return Needs(seconds, size)


def size_of(directory: Path) -> int:
    """Return the bytes of the files below a directory."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def duration_text(seconds: float) -> str:
    """Return a time as h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


class StudyProgress:
    """Printer of ended runs; every end writes the tables, the summary and the plots again."""

    def __init__(self, study: Study, jobs: int) -> None:
        self.study = study
        self.jobs = jobs
        self.total = len(runs_of(study))

    def report(self, end: EndedRun, left: int) -> None:
        """Print the line of a run that has ended; `left` runs are not finished."""
        words = f"{end.state} after {duration_text(end.seconds)}"
        if end.error:
            words += f": {' '.join(end.error.split())[:ERROR_CHARACTERS]}"
        elif end.state == "finished":
            words += self._final(end)
        if end.state != "stopped":
            words += f"  left {self._left(left)}"
        say(f"[{self.total - left}/{self.total}] {end.run.name} {words}", flush=True)
        try:
            output.write(self.study)
        except Exception as error:  # a plot must not end runs of hours
            words = f"{type(error).__name__}: {error}"
            say(f"study: the summary could not be written: {words}", file=sys.stderr)

    def _final(self, end: EndedRun) -> str:
        """Return the value that the summary has at the run's end, by its name."""
        metric = self.study.definition.threshold.metric
        curves = CurveReader(self.study, end.run, from_cold=False)
        for name in (TESTED.get(metric, metric), metric):
            if points := curves.points(name):
                return f"  {name} {points[-1].value:.3f}"
        return f"  no {metric}"

    def _left(self, runs: int) -> str:
        """Return the time that the other runs still need, in words."""
        if runs == 0:
            return "nothing"
        left = needs(self.study, self.jobs)
        return f"{runs} runs" if left is None else duration_text(left.seconds)
