"""Rows of metrics as a table: columns are numpy arrays, NaN where a row lacks a number."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas


class MetricTable:
    """Rows of one kind, by step.

    `table["loss/policy"]` is a column; `table.rows` are the rows as dicts. Iteration yields the
    rows, `len` counts them, and `in` asks for a column. Rows are converted once.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)
        self.names = _names(self.rows)
        self._columns: dict[str, np.ndarray] = {}  # that were asked for

    def extended(self, rows: Sequence[dict[str, Any]]) -> "MetricTable":
        """Return a table with further rows behind these; only the further ones are converted."""
        made, further = MetricTable([]), MetricTable(rows)
        made.rows = [*self.rows, *rows]
        made.names = list(dict.fromkeys((*self.names, *further.names)))
        # A copy, because another thread can draw this table and ask for a column meanwhile.
        made._columns = {
            name: np.concatenate([column, _column(rows, name)])
            for name, column in self._columns.copy().items()
        }
        return made

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a column: float64, or objects where it holds text. KeyError if no row has it."""
        if name not in self.names:
            raise KeyError(f"no row has {name!r}")
        if name not in self._columns:
            self._columns[name] = _column(self.rows, name)
        return self._columns[name].copy()

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self, prefix: str = "") -> dict[str, np.ndarray]:
        """Return the columns whose names begin with `prefix`, by name."""
        return {name: self[name] for name in self.names if name.startswith(prefix)}

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame with a column for each name; `time` holds times in UTC.

        ImportError without pandas.
        """
        import pandas

        frame = pandas.DataFrame(self.columns())
        if "time" in frame:
            frame["time"] = pandas.to_datetime(frame["time"], utc=True, format="ISO8601")
        return frame

    def to_csv(self, path: Path | str) -> None:
        """Write the rows as CSV with a line of names; a cell is empty where a row lacks a value."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.names)
            writer.writeheader()
            for row in self.rows:
                lists = {name: json.dumps(v) for name, v in row.items() if isinstance(v, list)}
                writer.writerow(row | lists)

    def __repr__(self) -> str:
        return f"<{len(self.rows)} rows, {len(self.names)} columns>"


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names of all rows in the order of their first appearance."""
    found: dict[str, Any] = {}
    for row in rows:
        found.update(row)
    return list(found)


def _column(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    values = [row.get(name) for row in rows]
    if {str, list}.intersection(map(type, values)):
        return np.array(values, dtype=object)
    return np.array(values, dtype=np.float64)  # None becomes NaN
