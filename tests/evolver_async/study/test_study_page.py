"""The page of a study: its tables, its figures, and in a real browser that it is drawn."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from bokeh.models import ColumnDataSource, Whisker
from browser import EXECUTABLE, Tab, browsing
from launches import wait_for
from studies import made_study, run_of, write_run

from evolver_async.cli import main
from evolver_async.study.definition import Definition, Threshold
from evolver_async.study.directory import Study, record_failure, runs_of
from evolver_async.study.run_results import results_of
from evolver_async.study.study_page import study_sections, write_study

HOSTILE = "</script><script>document.title = 'owned'</script>"


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Two lags by two corrections over two seeds; one run failed."""
    grid = {"actors.weight_lag": ("0", "4"), "correction.kind": ("none", "decoupled")}
    definition = Definition("recipe", seeds=(0, 1), grid=grid, threshold=Threshold(value=0.8))
    made = made_study(tmp_path / "lags", definition)
    for cell in made.cells:
        for seed in (0, 1):
            write_run(run_of(made, cell.name, seed), [0.2, 0.5, 0.8 + seed / 10])
    record_failure(made.out, f"{made.cells[-1].name}-s1", HOSTILE)
    return made


def test_the_page_has_every_table_figure_and_run(study: Study) -> None:
    results, curves, finals, data, runs = study_sections(study, results_of(study))
    assert [row[0] for row in results.tables[0].rows] == [one.name for one in study.cells]
    assert [figure.title.text for figure in curves.figures] == [
        "eval/success by learner step",
        "eval/success by environment steps",
        "eval/success by seconds of training",
    ]
    assert [figure.title.text for figure in finals.figures] == [
        "Final eval/success by actors.weight_lag",
        "Final eval/success by correction.kind",
    ]
    assert len(data.figures) == 3  # ess, kl and clip by lag
    assert len(runs.tables[0].rows) == 8
    last = runs.tables[0].rows[-1]
    assert last[1] == "failed" and last[-1] == HOSTILE


def test_a_single_seed_has_no_interval(tmp_path: Path) -> None:
    definition = Definition("recipe", seeds=(0,), grid={"actors.weight_lag": ("0", "4")})
    made = made_study(tmp_path / "one", definition)
    for cell in made.cells:
        write_run(run_of(made, cell.name, 0), [0.2, 0.8])
    _, curves, finals, data, _ = study_sections(made, results_of(made))
    for figure in (*curves.figures, *finals.figures, *data.figures):
        for source in {id(one): one for one in figure.select({"type": ColumnDataSource})}.values():
            assert source.data["shown"] == [f"{mean:.3f}" for mean in source.data["mean"]]


def test_a_single_seed_has_no_whisker_beside_cells_of_several(study: Study) -> None:
    _, _, finals, _, _ = study_sections(study, results_of(study))
    places = []
    for whisker in (one for figure in finals.figures for one in figure.select({"type": Whisker})):
        drawn = whisker.source.data
        assert all(low < high for low, high in zip(drawn["low"], drawn["high"], strict=True))
        places.append(len(drawn["place"]))
    assert sorted(places) == [1, 1, 2, 2], "one cell of the four has a single finished seed"


def test_a_study_without_finished_runs_has_a_page_too(tmp_path: Path) -> None:
    definition = Definition("recipe", seeds=(0,), grid={"actors.weight_lag": ("0", "4")})
    page = write_study(made_study(tmp_path / "new", definition))
    assert "2 waiting" in page.read_text()


def test_the_command_writes_the_page_of_a_study(study: Study, tmp_path: Path, capsys) -> None:
    assert main(["report", str(study.out)]) == 0
    assert capsys.readouterr().out.startswith(f"{study.out / 'report.html'}\n")
    assert main(["report", str(study.out), "--out", str(tmp_path / "folder")]) == 2
    assert "the report of a study is one page" in capsys.readouterr().err


def links_of(page: Path) -> dict[str, str]:
    """The links of the tables, by text."""
    shown = page.read_text().partition("<script")[0]
    return {text: href for href, text in re.findall(r'<a href="([^"#]*)">([^<]*)</a>', shown)}


def test_cells_lead_to_their_runs_and_to_a_runs_own_page(study: Study, tmp_path: Path) -> None:
    first, *_ = runs_of(study)
    (first.directory / "report.html").touch()
    page = tmp_path / "pages" / "lags.html"
    write_study(study, page)
    links = links_of(page)
    assert links[first.name] == f"../lags/runs/{first.name}/report.html"
    others = [links[one.name] for one in runs_of(study)[1:]]
    assert others == [f"../lags/runs/{one.name}/" for one in runs_of(study)[1:]]
    assert all((page.parent / href).exists() for href in links.values())
    pages = re.search(r'id="pages">(.*?)</script>', page.read_text())
    assert pages is not None and first.cell is not None
    assert json.loads(pages[1]) == {first.cell.name: [["0", links[first.name]]]}


def test_a_run_that_has_not_begun_leads_nowhere(tmp_path: Path) -> None:
    definition = Definition("recipe", seeds=(0,), grid={"actors.weight_lag": ("0", "4")})
    assert links_of(write_study(made_study(tmp_path / "new", definition))) == {}


def test_the_command_compares_given_runs(study: Study, tmp_path: Path, capsys) -> None:
    runs = [str(one.directory) for one in runs_of(study)[:3]]
    assert main(["report", *runs]) == 0
    page = Path(capsys.readouterr().out.splitlines()[0])
    assert page == study.out / "runs" / "report.html"
    assert "3 given runs" in page.read_text()
    assert main(["report", *runs, "--out", str(tmp_path / "folder")]) == 2
    assert main(["report", runs[0], str(tmp_path)]) == 2
    assert f"{tmp_path}: is not a run directory" in capsys.readouterr().err


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with browsing(tmp_path / "profile") as made:
        yield made


@pytest.mark.process
@pytest.mark.skipif(EXECUTABLE is None, reason="no chromium is on the PATH")
def test_a_browser_draws_the_page_and_runs_no_text_of_it(study: Study, tab: Tab) -> None:
    page = write_study(study)
    tab.open(page)
    wait_for(lambda: tab.evaluate("document.body?.dataset.ready") == "yes", "the page")
    assert tab.evaluate("document.title").startswith("lags")
    count = "[...document.querySelectorAll('.figure')].filter(one => one.firstChild).length"
    assert tab.evaluate(count) == 8
    tap = "{ x: 2.2, y: 0.5 }"
    figure = "Bokeh.documents[0].roots().find(one => one.name === 'by-step')"
    tab.evaluate(f"showRuns({figure}, {tap}, {{}})")
    said = tab.evaluate("document.getElementById('points').textContent")
    assert ", step 2: none of its runs has a page yet" in said
    cells = "[...document.querySelectorAll('td')].map(one => one.textContent)"
    assert HOSTILE in json.loads(tab.evaluate(f"JSON.stringify({cells})"))
