"""Tables, summary and plots of studies whose runs were made from numbers."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from studies import EPISODES, STEP_S, TURNS, made_study, run_of, write_cold, write_run

from evolver_async.config import Config, ConfigError, StageConfig
from evolver_async.study import directory, output, plots
from evolver_async.study.cells import cells_of
from evolver_async.study.curves import StudyCurve, by_lag, height, mean_curve, reached
from evolver_async.study.definition import Definition, Threshold
from evolver_async.study.directory import Study, difference_of, existing, record_failure, state_of
from evolver_async.study.run_results import RECEIVED_TURNS, results_of, rows_of
from evolver_async.study.statistics import Interval, Reach
from evolver_async.study.study_figures import bands
from evolver_async.study.summary import cells_summary, effects, shown_reach, text

LAGS = Definition(
    "recipe",
    seeds=(0, 1, 2),
    grid={"actors.weight_lag": ("0", "4")},
    threshold=Threshold(value=0.8),
    equivalence=0.05,
)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Lag 0 is finished; of lag 4 one run is below the threshold, one failed."""
    study = made_study(tmp_path / "study", LAGS)
    for seed, last in ((0, 0.8), (1, 0.9), (2, 1.0)):
        write_run(run_of(study, "weight_lag-0", seed), [0.2, 0.5, last])
    write_run(run_of(study, "weight_lag-4", 0), [0.2, 0.9, 0.7])
    write_run(run_of(study, "weight_lag-4", 1), [0.2, 0.4, 0.6])
    write_run(run_of(study, "weight_lag-4", 2), [0.9], code=3, reason="weights are nan")
    return study


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_run_is_a_row_of_the_cells(study: Study) -> None:
    output.write(study)
    found = {(row["weight_lag"], row["seed"]): row for row in rows(study.out / "cells.csv")}
    assert len(found) == 6
    one = found["0", "0"]
    assert (one["state"], one["error"], one["cell"]) == ("finished", "", "weight_lag-0")
    assert (float(one["final"]), float(one["best"]), one["best_step"]) == (0.8, 0.8, "3")
    assert float(one["area"]) == pytest.approx((0.35 + 0.65) / 2)
    assert one["steps_to_threshold"] == "3"
    assert float(one["env_steps_to_threshold"]) == 3 * EPISODES * TURNS
    assert float(one["seconds_to_threshold"]) == 3 * STEP_S, "of the weights, not of the result"
    means = [float(one["ess"]), float(one["clip_high"])]
    assert means == pytest.approx([0.9, 0.1])
    failed = found["4", "2"]
    assert (failed["state"], failed["error"]) == ("failed", "weights are nan")
    assert found["4", "1"]["steps_to_threshold"] == "", "not reached"


def test_turns_that_a_run_has_not_recorded_are_not_0(study: Study) -> None:
    rows = rows_of(run_of(study, "weight_lag-0", 1).directory)
    lines = ({name: row[name] for name in row if name != RECEIVED_TURNS} for row in rows)
    path = run_of(study, "weight_lag-0", 1).directory / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first, second = cells_summary(study, results_of(study))
    assert mean_curve(first, "env_steps") is None
    assert mean_curve(second, "env_steps") is not None
    assert mean_curve(first, "step") is not None
    assert "| `weight_lag-0` | 3 ± 0 | not recorded | 6 ± 0 |" in text(study, results_of(study))


def test_the_summary_says_of_how_many_tasks_a_success_is(study: Study) -> None:
    assert "\nLast evaluation of a run: 5 distinct tasks.\n" in text(study, results_of(study))


def test_curves_are_in_long_form(study: Study) -> None:
    output.write(study)
    found = rows(study.out / "curves.csv")
    assert list(found[0])[:3] == ["cell", "seed", "weight_lag"]
    picked = [
        (row["step"], float(row["value"]))
        for row in found
        if (row["cell"], row["seed"], row["metric"]) == ("weight_lag-4", "0", "eval/success")
    ]
    assert picked == [("1", 0.2), ("2", 0.9), ("3", 0.7)]
    assert {"train/success", "offpolicy/ess", "offpolicy/kl"} <= {row["metric"] for row in found}


def test_a_swept_key_has_a_column_of_its_own(tmp_path: Path) -> None:
    grid = {"stages.0.steps": ("3", "4"), "learner.value": ("1", "2")}
    study = made_study(tmp_path / "study", Definition("r", seeds=(0,), grid=grid))
    output.write(study)
    for name in ("cells.csv", "curves.csv"):
        head, *_ = (study.out / name).read_text().splitlines()
        columns = head.split(",")
        assert columns[2:4] == ["0.steps", "learner.value"]
        assert len(set(columns)) == len(columns)


def test_a_failed_run_is_listed_and_in_no_mean(study: Study) -> None:
    said = text(study, results_of(study))
    assert "- `weight_lag-4-s2`: weights are nan" in said
    first, second = cells_summary(study, results_of(study))
    assert (first.finished, second.finished) == (3, 2)
    assert second.final.mean == pytest.approx(0.65)
    assert "| `weight_lag-4` | 2 of 3 |" in said
    # pairs: seeds 0 and 1, differences -.1 and -.3; t(.975, 1) = 12.706 leads beyond -1 and 1
    assert "| -0.200 (-1.000 to +1.000) | 2 |" in said
    assert "not shown (TOST p = " in said


def test_a_metric_that_is_no_number_leaves_a_whole_summary(study: Study) -> None:
    """The learner writes null where it measured nan or an infinity."""
    of_one: dict[str, list[Any]] = {
        "train/success": [None, 0.2, 0.3],
        "offpolicy/ess": [None, None, None],
        "lag_3-4/ess": [0.5, None, 0.5],
        "lag_3-4/tokens": [30.0, 30.0, None],
    }
    write_run(run_of(study, "weight_lag-0", 1), [0.2, 0.5, 0.9], metrics=of_one)
    output.write(study)
    said = (study.out / "summary.md").read_text()
    assert "| `weight_lag-0` | 3 of 3 |" in said and "| `weight_lag-4` | 2 of 3 |" in said
    assert "-0.200 (-1.000 to +1.000)" in said
    found = {(row["weight_lag"], row["seed"]): row for row in rows(study.out / "cells.csv")}
    assert len(found) == 6 and float(found["0", "1"]["final"]) == 0.9


CROSSED = {"actors.weight_lag": ("0", "8"), "correction.kind": ("none", "ppo", "vcpo")}
FINALS = {  # by lag and correction, over the seeds
    ("0", "none"): (0.5, 0.6, 0.7),
    ("0", "ppo"): (0.6, 0.6, 0.9),
    ("0", "vcpo"): (0.5, 0.5, 0.5),
    ("8", "none"): (0.1, 0.2, 0.3),
    ("8", "ppo"): (0.3, 0.5, None),
    ("8", "vcpo"): (0.4, 0.4, 0.4),
}


def crossed(out: Path, **changes: Any) -> Study:
    """Two lags by three corrections; one run is not finished."""
    study = made_study(out, Definition("recipe", grid=CROSSED, **changes))
    for (lag, kind), finals in FINALS.items():
        for seed, final in enumerate(finals):
            if final is not None:
                write_run(run_of(study, f"weight_lag-{lag}_kind-{kind}", seed), [final])
    return study


def found_effects(study: Study, key: str) -> list[tuple[str, dict[str, str] | None, float, int]]:
    cells = cells_summary(study, results_of(study))
    return [
        (one.value, one.level, round(one.difference.mean, 6), one.difference.count)
        for one in effects(cells, study.baseline, key)
    ]


def test_effects_are_differences_within_each_level_and_their_mean(tmp_path: Path) -> None:
    study = crossed(tmp_path / "study")
    lag = "actors.weight_lag"
    assert found_effects(study, "correction.kind") == [
        ("ppo", {lag: "0"}, 0.1, 3),
        ("ppo", {lag: "8"}, 0.25, 2),
        ("ppo", None, round((0.1 + 0.2 + 0.0 + 0.3) / 4, 6), 2),  # seeds that both levels have
        ("vcpo", {lag: "0"}, -0.1, 3),
        ("vcpo", {lag: "8"}, 0.2, 3),
        ("vcpo", None, 0.05, 3),
    ]
    kinds = [level["correction.kind"] for _, level, *_ in found_effects(study, lag) if level]
    assert kinds == ["none", "ppo", "vcpo"]
    said = text(study, results_of(study))
    assert "| vcpo | actors.weight_lag=8 | +0.200 ± " in said
    assert "| vcpo | all | +0.050 ± " in said
    assert "## Effect of correction.kind" in said and "## Effect of actors.weight_lag" in said


def test_a_baseline_by_name_is_what_cells_and_levels_are_compared_with(tmp_path: Path) -> None:
    study = crossed(tmp_path / "study", baseline="weight_lag-8_kind-vcpo")
    assert [one[:3] for one in found_effects(study, "correction.kind")][:2] == [
        ("none", {"actors.weight_lag": "0"}, 0.1),
        ("none", {"actors.weight_lag": "8"}, -0.2),
    ]
    lines = text(study, results_of(study)).splitlines()
    first, *_ = (line for line in lines if line.startswith("| `weight_lag-8_kind-vcpo`"))
    assert "| baseline | |" in " ".join(first.split())
    assert "+0.200" in next(line for line in lines if "`weight_lag-0_kind-none` |" in line)
    again = existing(study.out)
    assert again is not None and again.baseline.name == "weight_lag-8_kind-vcpo"


def test_a_baseline_that_is_no_cell_is_refused(tmp_path: Path) -> None:
    study = crossed(tmp_path / "study", baseline="weight_lag-8_kind-vcp")
    with pytest.raises(ConfigError, match=r"^baseline: .* did you mean weight_lag-8_kind-vcpo\?"):
        _ = study.baseline


def test_a_study_of_one_key_has_no_table_of_its_effect(study: Study) -> None:
    assert "## Effect" not in text(study, results_of(study))


def test_the_interval_of_a_rate_ends_at_0_and_1(study: Study) -> None:
    first, second = cells_summary(study, results_of(study))
    assert (first.final.low, first.final.high) == (pytest.approx(0.6516, abs=1e-4), 1.0)
    assert (second.final.low, second.final.high) == (pytest.approx(0.0147, abs=1e-4), 1.0)
    assert second.means["offpolicy/ess"].bounds == (0, 1)
    curve = mean_curve(first, "step")
    assert curve is not None
    assert all(0 <= low <= high <= 1 for low, high in zip(curve.low, curve.high, strict=True))


def test_a_censored_run_is_never_left_out_of_a_mean_silently(study: Study) -> None:
    said = text(study, results_of(study))
    assert "| `weight_lag-4` | not reached (1 of 2 seeds) |" in said
    assert "| `weight_lag-0` | 3 ± 0 |" in said


def test_a_metric_that_no_run_has_is_named(study: Study) -> None:
    definition = Definition("recipe", (0, 1, 2), LAGS.grid, threshold=Threshold("train/succes", 1))
    again = made_study(study.out, definition)
    said = text(again, results_of(again))
    assert said.count("metric train/succes occurs in no finished run") == 2 * 3
    assert "not reached" not in said


def test_the_median_is_shown_if_most_runs_reach_the_threshold() -> None:
    assert shown_reach(Reach((10, 30), 1)) == "not reached (1 of 3 seeds), median 30"
    assert shown_reach(Reach((10,), 1)) == "not reached (1 of 2 seeds)"
    assert shown_reach(Reach((), 3)) == "not reached (3 of 3 seeds)"
    assert shown_reach(Reach((), 0)) == "–"


def test_the_summary_exists_before_anything_has_run(tmp_path: Path) -> None:
    study = made_study(tmp_path / "study", LAGS)
    output.write(study)
    said = (study.out / "summary.md").read_text()
    assert "0 of 6 runs are finished" in said
    assert "Not finished: `weight_lag-0-s0`" in said
    assert not list(study.out.glob("plots/*"))


def test_plots_are_drawn_of_what_is_finished(study: Study) -> None:
    output.write(study)
    drawn = {path.name for path in (study.out / "plots").iterdir()}
    assert drawn == {
        *("curve_by_step.png", "curve_by_time.png", "curve_by_env_steps.png"),
        *("final_by_actors.weight_lag.png", "ess_by_lag.png", "kl_by_lag.png", "clip_by_lag.png"),
    }


def test_values_by_lag_are_those_of_finished_runs(tmp_path: Path) -> None:
    study = made_study(tmp_path / "study", LAGS)
    first, second = run_of(study, "weight_lag-0", 0), run_of(study, "weight_lag-0", 1)
    write_run(first, [0.5])
    write_run(second, [0.5], code=3, reason="weights are nan", metrics={"lag_0/ess": [0.1]})
    cell = cells_summary(study, results_of(study))[0]
    assert by_lag(cell, "ess").values[0].mean == 1.0


def test_curves_are_interpolated_between_their_points() -> None:
    curve = [(0.0, 0.0), (10.0, 1.0), (10.0, 0.5), (20.0, 0.5)]
    assert [height(curve, place) for place in (-1, 5, 15, 99)] == [0.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("level", "place"), [(0.1, 0.0), (0.2, 0.0), (0.3, 5.0), (0.4, 10.0), (0.6, 25.0), (0.9, None)]
)
def test_a_mean_curve_reaches_a_level_between_its_places(level: float, place: float | None) -> None:
    means = (0.2, 0.4, 0.4, 0.8)
    curve = StudyCurve("", [0.0, 10.0, 20.0, 30.0], [Interval(mean, None, 1) for mean in means])
    found = reached(curve, level)
    assert found is None if place is None else found == pytest.approx(place)
    assert reached(StudyCurve("", [], []), level) is None


def curve_of(tmp_path: Path, *seeds: dict[int, float]) -> StudyCurve | None:
    """The mean curve by step of runs with these values by step."""
    definition = Definition("r", seeds=tuple(range(len(seeds))))
    study = made_study(tmp_path / "study", definition)
    for seed, values in enumerate(seeds):
        run = run_of(study, "base", seed)
        write_run(run, [0.0])
        rows = [{"step": step, "lineage": 1, "eval/success": v} for step, v in values.items()]
        (run.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    (cell,) = cells_summary(study, results_of(study))
    return mean_curve(cell, "step")


def test_seeds_with_other_steps_have_a_curve_where_all_of_them_are(tmp_path: Path) -> None:
    curve = curve_of(tmp_path, {2: 0.0, 6: 0.4, 9: 0.4}, {3: 0.1, 5: 0.3, 8: 0.6})
    assert curve is not None
    found = [(place, one.mean) for place, one in zip(curve.places, curve.values, strict=True)]
    assert found == [
        (3, pytest.approx(0.1)),
        (5, pytest.approx(0.3)),
        (6, pytest.approx(0.4)),
        (8, pytest.approx(0.5)),
    ]


def test_one_common_step_is_a_point_and_none_is_no_curve(tmp_path: Path) -> None:
    curve = curve_of(tmp_path / "one", {4: 0.5}, {4: 0.7})
    assert curve is not None and curve.places == [4]
    (line,) = _drawn(curve)
    assert line.get_marker() == "o"
    assert [one.glyph.__class__.__name__ for one in bands("", "", [curve]).renderers].count(
        "Scatter"
    )
    assert curve_of(tmp_path / "none", {4: 0.5}, {5: 0.7}) is None


def _drawn(curve: StudyCurve) -> list[Any]:
    _, axes = plots.plt.subplots()
    plots._band(axes, curve)
    plots.plt.close()
    return axes.get_lines()


def test_a_forked_run_begins_with_the_end_of_its_cold_start(tmp_path: Path) -> None:
    definition = Definition("r", seeds=(0,), grid=LAGS.grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    write_cold(study, 0, 0.3)
    run = run_of(study, "weight_lag-0", 0)
    write_run(run, [0.5], before_s=2 * STEP_S)
    result = results_of(study)[0]
    assert [point[:] for point in result.points] == [
        (0, 0.0, 0.0, 0.3),
        (1, EPISODES * TURNS, STEP_S, 0.5),
    ]


def test_an_evaluation_that_ended_late_is_not_the_last_one_of_a_cold_start(tmp_path: Path) -> None:
    definition = Definition("r", seeds=(0,), grid=LAGS.grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    write_cold(study, 0, 0.3)
    path = directory.cold_run(study, 0).directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[2:], lines[1]]))
    write_run(run_of(study, "weight_lag-0", 0), [0.5], before_s=2 * STEP_S)
    assert results_of(study)[0].points[0].value == 0.3


@pytest.mark.parametrize(
    "override",
    [{"env": {"params": {"size": 6}}}, {"tasks": {"train": 9}, "rollout": {"max_turns": 3}}],
)
def test_a_forked_run_that_is_evaluated_otherwise_begins_with_its_own_first_evaluation(
    tmp_path: Path, override: dict[str, Any]
) -> None:
    definition = Definition("r", seeds=(0,), grid=LAGS.grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    write_cold(study, 0, 0.3)
    second = StageConfig(steps=4, override=override)
    forked = Config(stages=[StageConfig(kind="sft", steps=4), second])
    write_run(run_of(study, "weight_lag-0", 0), [0.5], before_s=2 * STEP_S, config=forked)
    write_run(run_of(study, "weight_lag-4", 0), [0.5], before_s=2 * STEP_S)
    for result in results_of(study)[:2]:
        points = [point[:] for point in result.points]
        assert points == [(1, EPISODES * TURNS, STEP_S, 0.5)], "curves of all cells compare"


def test_a_study_is_read_without_its_cold_starts(tmp_path: Path) -> None:
    definition = Definition("r", seeds=(0,), grid=LAGS.grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    write_run(run_of(study, "weight_lag-0", 0), [0.5], before_s=2 * STEP_S)
    assert [point.value for point in results_of(study)[0].points] == [0.5]


def test_lags_are_weighted_by_their_tokens(study: Study) -> None:
    result = results_of(study)[0]
    assert result.by_lag["ess", "3-4"] == (pytest.approx(0.52), 90.0)
    assert result.by_lag["clip", "3-4"][0] == pytest.approx(0.3)
    assert ("ess", "9+") not in result.by_lag


def test_states_follow_from_what_runs_have_left(study: Study) -> None:
    run = run_of(study, "weight_lag-0", 1)
    assert state_of(study, run) == ("finished", "")
    write_run(run, [0.5], code=130)
    assert state_of(study, run) == ("unfinished", "")
    record_failure(study.out, run.name, "it fell")
    assert state_of(study, run) == ("failed", "it fell")
    record_failure(study.out, run.name, None)
    assert state_of(study, run) == ("unfinished", "")
    assert state_of(study, run_of(study, "weight_lag-4", 2)) == ("failed", "weights are nan")


def test_a_failed_cold_start_fails_the_cells_of_its_seed(tmp_path: Path) -> None:
    definition = Definition("r", seeds=(0, 1), grid=LAGS.grid, cold_start=True)
    study = made_study(tmp_path / "study", definition)
    record_failure(study.out, "cold-0", "no memory")
    states = [(result.run.seed, result.state, result.error) for result in results_of(study)]
    error = "its cold start failed: no memory"
    assert states == [(0, "failed", error)] * 2 + [(1, "waiting", "")] * 2


def test_the_failure_of_a_variant_called_cold_is_none_of_the_cold_start(tmp_path: Path) -> None:
    variants = {"cold": {"learner.lr": "1e-3"}, "warm": {"learner.lr": "1e-4"}}
    study = made_study(tmp_path, Definition("r", variants=variants, cold_start=True))
    record_failure(study.out, run_of(study, "cold", 0).name, "it fell")
    assert state_of(study, run_of(study, "cold", 0)) == ("failed", "it fell")
    assert state_of(study, run_of(study, "warm", 0)) == ("waiting", "")


def test_another_study_is_refused_and_named(study: Study) -> None:
    before = existing(study.out)
    assert before is not None and difference_of(before, study) == ""
    fewer = Definition("recipe", seeds=(0, 1), grid=LAGS.grid)
    with pytest.raises(ConfigError, match=r"another study: seeds: was 0,1,2, is 0,1; choose"):
        made_study(study.out, fewer)
    other = Definition("recipe", grid={"actors.weight_lag": ("0", "8")})
    with pytest.raises(ConfigError, match=r"grid: was actors.weight_lag=0,4, is actors.weight_"):
        made_study(study.out, other)
    config = study.configs["weight_lag-4"]
    config.learner.lr = 0.25
    with pytest.raises(ConfigError, match=r"cell weight_lag-4: learner.lr was 0.0005, is 0.25"):
        directory.begin(study)


def test_a_study_whose_own_code_has_changed_is_refused_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "study_env.py"
    own.write_text("class Maze: ...\n")
    definition = Definition("recipe", grid=LAGS.grid)
    config = Config(stages=[StageConfig(steps=4)])
    config.env.name = "study_env:Maze"
    study = Study(
        tmp_path / "study",
        definition,
        cells_of(definition),
        {cell.name: config for cell in cells_of(definition)},
    )
    directory.begin(study)
    directory.begin(study)  # continued
    own.write_text("class Maze: size = 2\n")
    with pytest.raises(ConfigError, match=r"own code: study_env.py has changed since .* put (\S+)"):
        directory.begin(study)
    (kept,) = (study.out / "code").glob("*/study_env.py")
    own.write_text(kept.read_text())
    directory.begin(study)
    own.unlink()
    with pytest.raises(ConfigError, match=r"own code: study_env.py is gone since"):
        directory.begin(study)


def test_the_threshold_can_change(study: Study) -> None:
    definition = Definition("recipe", grid=LAGS.grid, threshold=Threshold(value=0.5))
    made_study(study.out, definition)
    again = existing(study.out)
    assert again is not None and again.definition.threshold.value == 0.5
