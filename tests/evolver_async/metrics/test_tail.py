"""A torn line costs no other line, and no row is written behind one as if it were whole."""

from pathlib import Path

import pytest

from evolver_async.metrics.tail import Tail, append_row


def test_lines_that_cannot_be_read_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n\0\0\0\n3\n{"step": 4}\n{"step"')
    tail = Tail(path)
    assert tail.rows() == [{"step": 1}, {"step": 4}]
    assert f"{path}: 3 lines cannot be read" in caplog.text
    with open(path, "ab") as file:
        file.write(b": 5}\n")
    assert tail.rows() == [{"step": 5}]


def test_a_row_is_a_line_of_its_own_also_behind_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "launches.jsonl"
    append_row(path, {"number": 1})
    with open(path, "ab") as file:
        file.write(b'{"number": 2, "reci')
    append_row(path, {"number": 3})
    append_row(path, {"number": 4})
    assert [row["number"] for row in Tail(path).rows()] == [1, 3, 4]
