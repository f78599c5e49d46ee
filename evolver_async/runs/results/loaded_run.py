"""Results of one run: `load_run` reads its directory, of a live run as of a finished one.

Nothing in the directory is changed, and neither the run nor its journal is locked.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from evolver_async.buffer.log.reader import JournalReader
from evolver_async.checkpoint.checkpoints import is_left, valid
from evolver_async.checkpoint.history import evaluation_of
from evolver_async.config import Config, ConfigError
from evolver_async.launch.run_directory import config_of
from evolver_async.metrics.newest_lineage import current_rows, key_of
from evolver_async.metrics.replies import SavedReply, saved_in
from evolver_async.metrics.tail import Tail
from evolver_async.runs.results.events import RunEvent, events, restarts_logged
from evolver_async.runs.results.group_histories import RunHistory
from evolver_async.runs.results.reading_progress import ProgressReceiver, unheard
from evolver_async.runs.results.table import MetricTable
from evolver_async.runs.results.trajectories import RecordedTrajectory, trajectories
from evolver_async.runs.watch.runs import Ending, ending_of
from evolver_async.schema import Role, Sequence

if TYPE_CHECKING:
    import pandas

EMPTY = "has no metrics yet: no learner step has ended"


@dataclass(frozen=True)
class SavedCheckpoint:
    """One complete checkpoint: its directory, step, and eval/success if it was evaluated.

    `left`: the run has gone back to an earlier checkpoint.
    """

    path: Path
    step: int
    success: float | None
    left: bool


class RunResults:
    """Results in the directory of a run; every part is read when it is first asked for.

    `path` is the directory. With `abandoned`, the tables hold the rows of abandoned lineages too.
    `progress` is called during long work.
    """

    def __init__(
        self, path: Path, abandoned: bool = False, progress: ProgressReceiver = unheard
    ) -> None:
        self.path = path
        self.abandoned = abandoned
        self.progress = progress

    @cached_property
    def config(self) -> Config:
        """The resolved configuration; paths into the run are those of its directory now."""
        return config_of(self.path)

    @cached_property
    def end(self) -> Ending:
        """End of the newest launch: state (also running or killed), exit code, reason, time."""
        return ending_of(self.path)

    @cached_property
    def all_rows(self) -> list[dict[str, Any]]:
        """Every row of metrics.jsonl, those of abandoned lineages included."""
        tail, rows = Tail(self.path / "metrics.jsonl"), []
        size = tail.path.stat().st_size if tail.path.exists() else 0
        for piece in filter(None, tail.pieces()):
            rows += piece
            self.progress("MB of metrics.jsonl read", tail.offset / 1e6, size / 1e6)
        return rows

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl: those of the newest lineage's curve, or all with `abandoned`."""
        return self.all_rows if self.abandoned else current_rows(self.all_rows)

    @cached_property
    def steps(self) -> MetricTable:
        """Table of the learner steps."""
        return self._table("take", self.rows)

    @cached_property
    def evaluations(self) -> MetricTable:
        """Table of the evaluations, each at the step that it evaluates."""
        return self._table("eval", self.rows)

    @cached_property
    def metrics(self) -> MetricTable:
        """Table of both, in the order in which they were written."""
        return MetricTable(self.rows)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return `metrics` as a data frame. ImportError without pandas."""
        return self.metrics.to_pandas()

    def to_csv(self, path: Path | str) -> None:
        """Write `metrics` as CSV."""
        self.metrics.to_csv(path)

    def _table(self, kind: str, rows: Iterable[dict[str, Any]]) -> MetricTable:
        found = [row for row in rows if key_of(row).kind == kind]
        return MetricTable(sorted(found, key=lambda row: row["step"]))

    @cached_property
    def replies(self) -> dict[str, list[SavedReply]]:
        """Episodes that `eval --save` wrote to the run's `evaluations/`, by file, newest first."""
        return saved_in(self.path)

    @cached_property
    def events(self) -> list[RunEvent]:
        """Stages, restarts, rollbacks, alarms and failures; restarts in the log have no step."""
        try:
            log = (self.path / "logs" / "launcher.log").read_text(errors="replace")
        except OSError:
            log = ""
        steps = self._table("take", current_rows(self.all_rows))
        return [*events(self.all_rows, steps), *restarts_logged(log)]

    @cached_property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The complete checkpoints, oldest first."""
        found = []
        for path, manifest in valid(self.path / "checkpoints"):
            note = evaluation_of(path)
            success = None if note is None else note.success
            found.append(SavedCheckpoint(path, manifest.step, success, is_left(path)))
        return found

    @cached_property
    def journal(self) -> JournalReader:
        """Reader of the journal segments that exist now."""
        return JournalReader(self.path / "journal")

    @cached_property
    def history(self) -> RunHistory:
        """Groups, takes and lineages in the journal. Raises JournalError for damage."""
        history, numbers = RunHistory(), self.journal.numbers
        for number in numbers:
            history.follow(self.journal.read_segment(number))
            self.progress("journal segments read", 1 + number - numbers[0], len(numbers))
        return history

    @cached_property
    def trajectories(self) -> list[RecordedTrajectory]:
        """Trajectories of the journal by group and member; `missing` says what is not there."""
        return list(trajectories(self.history, self.journal))

    def trained_at(self, step: int) -> list[RecordedTrajectory]:
        """Return the trajectories that a step trained, in the newest lineage that has the step."""
        return [
            one
            for one in self.trajectories
            if any(
                use.step == step and use.fate == "trained" and not use.abandoned
                for use in one.trainings
            )
        ]

    @property
    def missing(self) -> str:
        """A sentence about trajectories that the run has not kept, "" if it has kept all."""
        numbers, archive = self.journal.numbers, self.config.buffer.archive
        if not numbers:
            return f"{self.path.name} has no journal, so there are no trajectories."
        if numbers[0] == 1:
            return ""
        return (
            f"The first {numbers[0] - 1} of {numbers[-1]} journal segments were removed"
            f" (buffer.archive={archive}), and their trajectories with them;"
            " buffer.archive=all keeps every segment."
        )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the policy, None if its directory is gone."""
        path = Path(self.config.policy.path or self.path / "policy") / "tokenizer.json"
        return Tokenizer.from_file(str(path)) if path.is_file() else None

    def text(self, sequences: Iterable[Sequence]) -> list[tuple[str, str]]:
        """Return the text of sequences as (role, text) runs. ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.config.policy.path}: has no tokenizer.json to decode tokens")
        parts: list[tuple[str, list[int]]] = []
        for sequence in sequences:
            pairs = zip(sequence.roles.tolist(), sequence.tokens.tolist(), strict=True)
            for index, (role, token) in enumerate(pairs):
                name = Role(role).name
                if not index or parts[-1][0] != name:
                    parts.append((name, []))
                parts[-1][1].append(token)
        decode = self.tokenizer.decode
        return [(name, decode(ids, skip_special_tokens=False)) for name, ids in parts]

    def __repr__(self) -> str:
        return f"<run {self.path.name}: {self.end.state}, {len(self.steps)} steps>"


def load_run(
    run_dir: Path | str, *, abandoned: bool = False, progress: ProgressReceiver = unheard
) -> RunResults:
    """Return the results of a run.

    With `abandoned`, its tables include the rows of abandoned lineages, which a resumed run has
    repeated. `progress` is called during long work. Call it again to see what a live run has added.
    ConfigError if no run is there.
    """
    path = Path(run_dir).expanduser()
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: is not a run directory: it has no config.yaml")
    return RunResults(path.resolve(), abandoned, progress)
