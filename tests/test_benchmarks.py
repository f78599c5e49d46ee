"""Benchmarks still run: a learner's steps beside a bare loop."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"


def test_a_step_beside_a_bare_loop_has_all_its_updates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    bench = importlib.import_module("bench_bare_loop")
    bench.compare("64x2")  # asserts that no update was left out
    assert "64x2: " in capsys.readouterr().out
