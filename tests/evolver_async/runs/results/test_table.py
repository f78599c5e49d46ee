"""Columns of metrics are arrays over the rows, with NaN where a row has no number."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evolver_async.runs.results import table as table_module
from evolver_async.runs.results.table import MetricTable


def test_columns_are_arrays_and_rows_are_dicts() -> None:
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "name": "rl"}, {"step": 3}]
    table = MetricTable(rows)
    assert list(table) == rows and len(table) == 3
    np.testing.assert_array_equal(table["loss"], [0.5, np.nan, np.nan])
    assert table["name"].tolist() == [None, "rl", None]
    assert "loss" in table and "lost" not in table
    assert list(table.columns("lo")) == ["loss"]
    with pytest.raises(KeyError, match="no row has 'lost'"):
        table["lost"]


def test_a_table_becomes_a_data_frame_and_a_file_of_cells(tmp_path: Path) -> None:
    rows = [
        {"time": "2026-05-04T12:30:00.250Z", "step": 1, "loss": 0.5},
        {"time": "2026-05-04T12:30:01.000Z", "step": 2, "loss": None, "non_finite": ["loss"]},
        {"step": 3, "name": "a,b"},
    ]
    frame = MetricTable(rows).to_pandas()
    assert list(frame) == ["time", "step", "loss", "non_finite", "name"] and len(frame) == 3
    assert frame["time"][1].timestamp() - frame["time"][0].timestamp() == 0.75
    assert str(frame["time"].dt.tz) == "UTC" and frame["loss"].isna().tolist() == [
        False,
        True,
        True,
    ]
    MetricTable(rows).to_csv(tmp_path / "m.csv")
    with open(tmp_path / "m.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    assert [one["step"] for one in cells] == ["1", "2", "3"]
    assert (cells[1]["loss"], cells[1]["non_finite"], cells[2]["name"]) == ("", '["loss"]', "a,b")


def test_an_empty_table_has_no_columns() -> None:
    assert len(MetricTable([])) == 0 and MetricTable([]).columns() == {}


def test_a_table_grows_as_if_it_were_made_anew() -> None:
    rows = [{"step": 1, "loss": 0.5}, {"step": 2}, {"step": 3, "loss": 1.0, "name": "rl"}]
    table = MetricTable(rows[:2])
    table["loss"][0] = 9.0  # a copy
    np.testing.assert_array_equal(table["loss"], [0.5, np.nan])
    grown, whole = table.extended(rows[2:]), MetricTable(rows)
    assert (grown.rows, grown.names, len(table)) == (whole.rows, whole.names, 2)
    for name in whole.names:
        np.testing.assert_array_equal(grown[name], whole[name])


def test_a_table_that_grows_can_be_asked_for_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views are drawn while another thread reads the files."""
    rows = [{"step": 1, "loss": 0.5, "reward": 1.0}, {"step": 2, "loss": 0.25, "reward": 0.0}]
    table, whole = MetricTable(rows[:1]), table_module._column
    np.testing.assert_array_equal(table["loss"] * table["step"], [0.5])

    def drawing(some: Sequence[dict[str, Any]], name: str) -> np.ndarray:
        monkeypatch.setattr(table_module, "_column", whole)
        table["reward"]
        return whole(some, name)

    monkeypatch.setattr(table_module, "_column", drawing)
    grown = table.extended(rows[1:])
    np.testing.assert_array_equal(grown["loss"], [0.5, 0.25])
    np.testing.assert_array_equal(grown["reward"], [1.0, 0.0])
