"""Given runs as a study: cells by what their configurations differ in, and which runs count."""

from pathlib import Path
from typing import Any

import pytest
from studies import write_run

from evolver_async.config import Config, ConfigError, StageConfig
from evolver_async.study.directory import CellRun
from evolver_async.study.given import compared
from evolver_async.study.run_results import results_of
from evolver_async.study.summary import cells_summary, text


def run(directory: Path, *evals: float, seed: int = 0, code: int | None = 0, **keys: Any) -> Path:
    """A run with its own policy; `keys` are of its learner and correction."""
    config = Config(stages=[StageConfig(steps=4)])
    config.run.seed, config.run.name = seed, directory.name
    config.policy.path = str(directory / "policy")
    config.actors.count = keys.pop("actors", 1)
    for name, value in keys.items():
        section = "learner" if hasattr(config.learner, name) else "correction"
        setattr(getattr(config, section), name, value)
    write_run(CellRun(None, seed, directory), evals, code=code, config=config)
    return directory


def test_runs_that_differ_in_their_seed_alone_are_one_cell(tmp_path: Path) -> None:
    """The directory of a run, and of its own policy, is none of its settings."""
    a, b = run(tmp_path / "a", 0.4), run(tmp_path / "b", 0.6, seed=1)
    study = compared([a, b])
    assert [(one.name, one.seed) for one in study.given] == [("a", 0), ("b", 1)]
    (cell,) = cells_summary(study, results_of(study))
    assert cell.cell.name == "base" and cell.final.mean == pytest.approx(0.5)
    assert study.out == tmp_path


def test_cells_are_the_values_of_the_keys_that_differ(tmp_path: Path) -> None:
    directories = [
        run(tmp_path / f"{kind}-{lr}-{seed}", 0.1 * seed + lr * 100, seed=seed, kind=kind, lr=lr)
        for kind in ("ppo", "none")
        for lr in (1e-3, 2e-3)
        for seed in (0, 1)
    ]
    study = compared(directories)
    first, *_ = study.cells
    assert first == study.baseline and first.swept == {
        "learner.lr": "0.001",
        "correction.kind": "ppo",
    }
    assert [cell.name for cell in study.cells] == [
        *("kind-ppo_lr-0.001", "kind-ppo_lr-0.002", "kind-none_lr-0.001", "kind-none_lr-0.002")
    ]
    said = text(study, results_of(study))
    assert "## Effect of learner.lr" in said and "| 0.002 | all | +0.100 ± 0.000 | 2 |" in said


def test_a_seed_that_comes_twice_or_many_keys_make_every_run_a_cell(tmp_path: Path) -> None:
    twice = compared([run(tmp_path / "a", 0.4), run(tmp_path / "b", 0.6)])
    assert [cell.swept for cell in twice.cells] == [{"run": "a"}, {"run": "b"}]
    many = {"lr": 0.5, "grad_clip": 2.0, "weight_decay": 0.1, "eps": 1e-3, "kind": "ppo"}
    other = run(tmp_path / "x" / "a", 0.6, **many)
    study = compared([tmp_path / "a", other])
    assert [cell.name for cell in study.cells] == [f"{tmp_path.name}/a", "x/a"]
    assert [one.cell.name for one in study.given if one.cell] == [f"{tmp_path.name}/a", "x/a"]
    assert len(results_of(study)) == 2


def test_a_run_that_goes_on_counts_if_it_is_given_and_a_failed_one_does_not(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", 0.4, code=None), run(tmp_path / "b", 0.6, seed=1, code=3)
    (cell,) = cells_summary(study := compared([a, b]), results_of(study))
    assert [one.state for one in cell.results] == ["unfinished", "failed"]
    assert cell.final.mean == 0.4 and cell.finished == 1


def test_one_run_given_twice_is_refused(tmp_path: Path) -> None:
    a = run(tmp_path / "a", 0.4)
    with pytest.raises(ConfigError, match=r"a is given twice"):
        compared([a, tmp_path / "b" / ".." / "a"])
