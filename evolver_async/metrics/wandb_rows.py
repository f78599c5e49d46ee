"""Additions of an upload to the rows of metrics.jsonl: histograms, trajectories, replies, gauges.

The learner writes the histograms and the samples of a step before the step's row of metrics.jsonl,
so that they are there when the row is read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evolver_async.config import ConfigError
from evolver_async.metrics.gauges import SYSTEM, GaugeRows
from evolver_async.metrics.histograms import HISTOGRAMS, Histogram, read
from evolver_async.metrics.newest_lineage import RowKey
from evolver_async.metrics.replies import SavedReply, files_in, load
from evolver_async.metrics.tail import Tail
from evolver_async.terminal import say

COLUMNS = (
    *("step", "trajectory", "task", "actor", "reward", "success", "terms", "turn", "turn_reward"),
    *("label", "versions", "prompt", "experience", "observation", "action"),
)
REPLY_COLUMNS = (  # of a saved evaluation, as `SavedReply`
    *("evaluated", "set", "task", "sample", "success", "reward", "turns", "prompt", "reply"),
)
LABELS = {1: "GOOD", -1: "BAD", 0: ""}
CELL_CHARS = 4000  # of a text in the table
TURNS = 500  # of one step in the table
REPLIES = 1000  # of one saved evaluation in its table


class StepExtras:
    """Histograms, trajectories, saved evaluations and gauges of one run directory, read as they are
    written."""

    def __init__(self, run_dir: Path) -> None:
        self._samples = run_dir / "samples"
        self._histograms = Tail(run_dir / HISTOGRAMS)
        self._system = Tail(run_dir / SYSTEM)
        self._gauges = GaugeRows()
        self._waiting: dict[tuple[int, int], dict[str, Histogram]] = {}
        self._run_dir = run_dir
        self._replies: dict[Path, int] = {}  # files that were read, and their times

    def histograms(self, key: RowKey) -> dict[str, Histogram]:
        """Return the histograms of a row of metrics.jsonl, {} for a row that has none."""
        if key.kind != "take":
            return {}
        if (key.lineage, key.step) not in self._waiting:
            for row in self._histograms.rows():
                self._waiting[row["lineage"], row["step"]] = read(row)
        return self._waiting.pop((key.lineage, key.step), {})

    def trajectories(self, key: RowKey) -> list[list[Any]]:
        """Return the turns of the sampled trajectories of a row, by COLUMNS."""
        path = self._samples / f"step_{key.step:06d}.jsonl"
        if key.kind != "take":
            return []
        rows = [row for sample in Tail(path).rows() for row in _turns(key.step, sample)]
        return rows[:TURNS]

    def replies(self) -> Iterator[tuple[str, list[list[Any]]]]:
        """Yield name and rows, by REPLY_COLUMNS, of each saved evaluation that is new or changed.

        A file that is none is named once and left out.
        """
        for path, changed in files_in(self._run_dir).items():
            if self._replies.get(path) == changed:
                continue
            self._replies[path] = changed
            try:
                found = load(path)
            except ConfigError as error:
                say(f"not sent to W&B: {error}", flush=True)
                continue
            yield path.stem, [_replied(one) for one in found[:REPLIES]]

    def gauges(self, last: bool) -> Iterator[dict[str, Any]]:
        """Yield new rows of gauges, of one piece of the file; `last`: all, also the incomplete one.

        An upload begins with those of the whole run, which rows of steps must not wait for.
        """
        for lines in self._system.pieces():
            yield from self._gauges.take_in(lines)
            if not last:
                return
        yield from self._gauges.rest()


def _turns(step: int, sample: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield a row for each turn of a sample: its label, reward, versions and text by role."""
    texts: list[dict[str, str]] = [{} for _ in sample["turn_rewards"]]
    for (role, text), turn in zip(sample["text"], sample["text_turns"], strict=True):
        if 0 <= turn < len(texts):
            texts[turn][role] = texts[turn].get(role, "") + text
    terms = ", ".join(f"{name} {value:.4g}" for name, value in sample["terms"].items())
    labels = sample["labels"] or [0] * len(texts)
    for turn, text in enumerate(texts):
        yield [
            *(step, sample["trajectory"], sample["task"], sample["actor"]),
            *(sample["reward"], bool(sample["success"]), terms),
            *(
                turn,
                sample["turn_rewards"][turn],
                LABELS[labels[turn]],
                ", ".join(sample["turn_versions"][turn]),
            ),
            *(_cut(text.get(r, "")) for r in ("PROMPT", "EXPERIENCE", "OBSERVATION", "ACTION")),
        ]


def _replied(one: SavedReply) -> list[Any]:
    return [
        *(one.evaluated, one.set_name, one.task, one.sample, one.success, one.reward, one.turns),
        *(_cut(one.prompt), _cut(one.reply)),
    ]


def _cut(text: str) -> str:
    return text if len(text) <= CELL_CHARS else f"{text[:CELL_CHARS]}…"
