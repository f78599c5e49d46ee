"""The pictures of the README can be drawn from the directory of a run."""

import json
import runpy
import sys
from pathlib import Path
from xml.dom import minidom

import pytest

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump
from evolver_async.launch.run_directory import EXACT

ROOT = Path(__file__).parents[2]


def test_panel_and_curve_show_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump(Config(stages=[StageConfig(steps=4)]), tmp_path / "config.yaml")
    values = {"stage": 0, "episodes": 8, "random": 0.25, "optimal": 1.0}
    (tmp_path / EXACT).write_text(json.dumps({"values": [values]}))
    rows = [
        {
            "step": step,
            "lineage": 1,
            "time_s": float(step),
            "stage_kind": "rl",
            "train/success": step / 8,
        }
        for step in range(1, 5)
    ]
    rows.append({"step": 4, "lineage": 1, "eval/success": 0.625, "eval/episodes": 8})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    arguments = ["make_pictures.py", str(tmp_path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "docs" / "make_pictures.py"), run_name="__main__")

    (tmp_path / "panel.svg").rename(tmp_path / "made.svg")
    monkeypatch.setattr(sys, "argv", [*arguments, "--curve", "own", "--tasks", "sums"])
    runpy.run_path(str(ROOT / "docs" / "make_pictures.py"), run_name="__main__")
    assert not (tmp_path / "panel.svg").exists()

    for name, shown in (("made", "4/4"), ("curve", "held-out maps"), ("own", "held-out sums")):
        text = (tmp_path / f"{name}.svg").read_text()
        minidom.parseString(text)
        assert shown in text, name
        assert ("random policy" in text) == (name != "made"), name


def test_the_committed_pictures_are_well_formed() -> None:
    for name in ("panel", "curve"):
        assert minidom.parse(str(ROOT / f"docs/{name}.svg")).getElementsByTagName("svg"), name
