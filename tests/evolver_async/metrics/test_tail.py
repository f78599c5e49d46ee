"""A torn line costs no other line, and no row is written behind one as if it were whole."""

import json
import re
import tracemalloc
from pathlib import Path

import pytest

from evolver_async.metrics import alerts, gauges, tail
from evolver_async.metrics.newest_lineage import key_of
from evolver_async.metrics.tail import Tail, append_row
from evolver_async.metrics.wandb_rows import StepExtras
from evolver_async.metrics.writer import JsonlWriter


def test_lines_that_cannot_be_read_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n\0\0\0\n3\n{"step": 4}\n{"step"')
    tail = Tail(path)
    assert tail.rows() == [{"step": 1}, {"step": 4}]
    assert re.search(f"{path}: 3 .* line 2$", caplog.text, re.MULTILINE)
    with open(path, "ab") as file:
        file.write(b": 5}\n\0\n")
    assert tail.rows() == [{"step": 5}]
    assert re.search(f"{path}: 1 .* line 7$", caplog.text, re.MULTILINE)
    assert tail.unreadable == 3 + 1


def test_the_upload_waits_for_no_row_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n{"step": 4')
    writer = JsonlWriter(path)
    writer.write({"step": 5})
    writer.close()
    assert writer.count == len(Tail(path).rows()) == 3


def test_a_torn_sample_costs_no_other_trajectory(tmp_path: Path) -> None:
    sample = {
        **{"trajectory": "t", "task": "a", "actor": "b", "reward": 1.0, "success": 1.0},
        **{"turn_rewards": [1.0], "turn_versions": [["1:0"]], "labels": [], "terms": {}},
        **{"text": [["ACTION", "left"]], "text_turns": [0]},
    }
    path = tmp_path / "samples" / "step_000001.jsonl"
    path.parent.mkdir()
    path.write_text(f'{json.dumps(sample)[:40]}\n{json.dumps(sample)}\n{{"traj')
    key = key_of({"step": 1, "lineage": 0, "version": 1, "stage_kind": "rl"})
    assert key.kind == "take"
    assert len(StepExtras(tmp_path).trajectories(key)) == 1


def test_a_row_is_a_line_of_its_own_also_behind_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "launches.jsonl"
    append_row(path, {"number": 1})
    with open(path, "ab") as file:
        file.write(b'{"number": 2, "reci')
    append_row(path, {"number": 3})
    append_row(path, {"number": 4})
    assert [row["number"] for row in Tail(path).rows()] == [1, 3, 4]


def test_an_upload_does_not_hold_the_gauges_of_a_long_run(tmp_path: Path) -> None:
    gauge = {"process": "actor-0", "host": "h", **dict.fromkeys(gauges.NAMES, 0.5)}
    times = [gauges.PERIOD_S * number for number in range(40_000)]
    lines = "".join(f"{json.dumps({'time': time, **gauge})}\n" for time in times)
    (tmp_path / gauges.SYSTEM).write_text(f'{lines}{{"time": ')
    extras = StepExtras(tmp_path)
    tracemalloc.start()
    try:
        clocks = [row["clock_s"] for row in extras.gauges(last=True)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert clocks == times
    assert peak < 2 * len(lines), "read as a whole they take eight times their size"


def test_a_full_disk_costs_alerts_and_gauges_and_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (alerts.ALERTS, gauges.SYSTEM):
        (tmp_path / name).symlink_to("/dev/full")
    alerts.alert(tmp_path, "stall of actor-0", "it waits")
    gauges.append(tmp_path, "actor-0", "host", {"rss_bytes": 1.0})
    assert "stall of actor-0: it waits" in caplog.text
    assert caplog.text.count("No space left on device") == 2


def test_a_line_longer_than_a_piece_ends_no_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "PIECE_BYTES", 16)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + 100 * "\0" + '\n{"step": 2}\n')
    assert [row for rows in Tail(path).pieces() for row in rows] == [{"step": 1}, {"step": 2}]


def test_a_sample_may_hold_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"ratios": [1.0, Infinity]}\n[NaN]\n{"ratios": [2.0]}\n')
    assert Tail(path).rows() == [{"ratios": [1.0, float("inf")]}, {"ratios": [2.0]}]


def test_rows_share_their_names(tmp_path: Path) -> None:
    """A row of metrics needs twice the memory with names of its own."""
    path = tmp_path / "metrics.jsonl"
    names = [f"{'x' * length}/{number}" for length in (5, 40) for number in range(200)]
    for value in ("1.0", "NaN"):
        line = json.dumps(dict.fromkeys(names)).replace("null", value)
        path.write_text(f"{line}\n{line}\n")
        first, second = Tail(path).rows()
        assert list(first) == list(second) == names
        assert all(one is other for one, other in zip(first, second, strict=True))
