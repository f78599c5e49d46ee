"""Progress of a study on the console: one line for each run that ends."""

import sys
from dataclasses import replace
from statistics import fmean

from evolver_async.study import report
from evolver_async.study.directory import Study, open_cold_starts, runs_of
from evolver_async.study.estimate import StudyEstimate, duration_text
from evolver_async.study.results import CurveReader
from evolver_async.study.scheduler import EndedRun
from evolver_async.terminal import say

ERROR_CHARACTERS = 300  # of an error in a line; the log and the summary have all of it


class StudyProgress:
    """Printer of ended runs; every end writes the tables, the summary and the plots again.

    Measured times replace those of the estimate.
    """

    def __init__(self, study: Study, jobs: int, expected: StudyEstimate) -> None:
        self.study = study
        self.jobs = jobs
        self.expected = expected
        self.durations: list[float] = []
        self.cold_durations: list[float] = []
        self.total = len(runs_of(study))

    def report(self, end: EndedRun, left: int) -> None:
        """Print the line of a run that has ended; `left` runs are not finished."""
        if end.state == "finished":
            self._note(end)
        words = f"{end.state} after {duration_text(end.seconds)}"
        if end.error:
            words += f": {' '.join(end.error.split())[:ERROR_CHARACTERS]}"
        elif end.state == "finished":
            words += self._final(end)
        if end.state != "stopped":
            words += f"  left {self._left(left)}"
        say(f"[{self.total - left}/{self.total}] {end.run.name} {words}", flush=True)
        try:
            report.write(self.study)
        except Exception as error:  # a plot must not end runs of hours
            words = f"{type(error).__name__}: {error}"
            say(f"study: the summary could not be written: {words}", file=sys.stderr)

    def _final(self, end: EndedRun) -> str:
        metric = self.study.definition.threshold.metric
        points = CurveReader(self.study, end.run, from_cold=False).points(metric)
        return f"  {metric} {points[-1].value:.3f}" if points else f"  no {metric}"

    def _note(self, end: EndedRun) -> None:
        """Replace the estimate of such a run by the mean of those that have finished."""
        run, cold = self.expected.run, self.expected.cold
        if end.run.cell is not None:
            self.durations.append(end.seconds)
            run = replace(run, seconds=fmean(self.durations))
        elif cold is not None:
            self.cold_durations.append(end.seconds)
            cold = replace(cold, seconds=fmean(self.cold_durations))
        self.expected = StudyEstimate(run, cold)

    def _left(self, runs: int) -> str:
        """Return the time that the other runs still need, in words."""
        if runs == 0:
            return "nothing"
        seconds = self.expected.seconds(runs, open_cold_starts(self.study), self.jobs)
        return f"{runs} runs" if seconds is None else duration_text(seconds)
