"""Benefit and cost of experience, judge and questioning on the page of a run."""

from evolver_async.runs.report.plots.curve_plots import CurveBoard, Figure
from evolver_async.runs.report.sections import PageSection, _mechanisms
from evolver_async.runs.results.table import MetricTable

GUIDED = {
    "experience/guided_success": 0.75,
    "experience/unguided_success": 0.5,
    "experience/reliance": 0.125,
    "guidance/gain": 0.25,
    "guidance/groups": 1.0,
    "guidance/wasted": 0.0,
}
AUDITED = {"judge/agreement": 0.97, "judge/praise_bias": -0.02, "judge/length_bias": 0.04}
EXPLORED = {
    "questioning/explored": 8.0,
    "questioning/explored_turns": 40.0,
    "questioning/pool_size": 6.0,
    "questioning/candidates": 0.0,
}


def made(*rows: dict[str, float]) -> list[PageSection]:
    steps = [{"step": number, "lineage": 1, **row} for number, row in enumerate(rows, start=1)]
    evaluated = [{"step": 2, "lineage": 1, "eval/success": 0.5}]
    return _mechanisms(CurveBoard(MetricTable(steps), MetricTable(evaluated), []))


def legend(figure: Figure) -> list[str]:
    return [item.label.value for item in figure.legend[0].items]  # pyright: ignore


def title(figure: Figure) -> str:
    return figure.title.text  # pyright: ignore


def test_a_run_without_experience_judge_and_questioning_has_no_such_section() -> None:
    assert made({"train/success": 0.5, "experience/unguided_success": 0.5}) == []
    assert made() == []


def test_guided_members_stand_beside_unguided_ones_and_evaluations() -> None:
    (section,) = made(GUIDED, GUIDED | {"guidance/upper": 0.375})
    assert section.title == "Experience and judge"
    success, gain, groups, reliance = section.figures
    assert legend(success) == ["guided", "unguided", "evaluation (unguided)"]
    assert legend(gain) == ["newest 200 groups", "upper"]
    assert legend(groups) == ["guided", "wasted of these"]
    assert "Reliance" in title(reliance)
    numbers = "gain +0.25 (upper +0.38), wasted 0%, reliance 0.12 nats"
    assert f"Newest step, guidance: {numbers}." in section.sentences
    assert not any("audit" in sentence for sentence in section.sentences)


def test_an_audited_judge_shows_its_agreement_and_its_biases() -> None:
    (section,) = made(AUDITED | {"judge/labelled_share": 1.0, "judge/good_share": 0.5})
    assert [legend(figure) for figure in section.figures] == [
        ["labelled", "GOOD"],
        ["agreement"],
        ["praise", "length"],
    ]
    assert any("agreement 0.97, praise -0.02" in sentence for sentence in section.sentences)
    assert not any("Guided" in sentence for sentence in section.sentences)


def test_questioning_shows_its_cost_and_what_stays_at_0() -> None:
    (section,) = made(EXPLORED)
    assert section.title == "Questioning"
    assert [title(one) for one in section.figures] == [
        "Synthetic tasks",
        "Explorations since the start",
    ]
    assert section.sentences[-1] == "Always 0: Candidates from explorations."
