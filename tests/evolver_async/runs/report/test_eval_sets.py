"""Evaluation sets on the page of a run."""

from evolver_async.runs.report.plots.curve_plots import CurveBoard
from evolver_async.runs.report.sections import _eval_sets
from evolver_async.runs.results.table import MetricTable


def board(*names: str) -> CurveBoard:
    rows = [
        {"step": step, "eval/success": 0.5, **dict.fromkeys(names, step / 100)} for step in (20, 40)
    ]
    return CurveBoard(MetricTable([]), MetricTable(rows), [])


def test_every_metric_of_the_sets_is_a_figure_with_a_curve_for_each_set() -> None:
    names = ("eval/a/avg@1", "eval/b/avg@1", "eval/b/reward_mean", "eval/b/episodes")
    (section,) = _eval_sets(board(*names, "eval/a/distinct"))
    assert section.title == "Evaluation sets"
    assert section.sentences == ["Distinct tasks: a 0.400."]
    legends = {
        figure.title.text: [item.label.value for item in figure.legend[0].items]  # pyright: ignore
        for figure in section.figures
    }
    assert legends == {"avg@1": ["a", "b"], "reward_mean": ["b"]}


def test_a_run_without_sets_has_no_such_section() -> None:
    assert _eval_sets(board()) == []
