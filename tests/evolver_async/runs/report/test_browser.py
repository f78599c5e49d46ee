"""The page in a real browser: it draws, answers clicks, and runs no text of a trajectory.

Its data is tested without a browser in `test_page.py`. No Python package ships a browser.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import EXECUTABLE, Tab, browsing
from launches import wait_for
from reported_runs import HOSTILE, MadeRun

from evolver_async.runs.report import browser as data
from evolver_async.runs.report.write import write
from evolver_async.runs.results.loaded_run import load_run

pytestmark = pytest.mark.skipif(
    EXECUTABLE is None,
    reason="no chromium is on the PATH; Debian and Ubuntu have it as the package chromium",
)
LISTED = "[...document.querySelectorAll('#list tr td:first-child')].map(one => one.textContent)"
DETAIL = "document.getElementById('detail').textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    run = MadeRun(tmp_path_factory.mktemp("runs") / "run")
    for texts in (["left", HOSTILE], ["up"], ["down"]):
        run.step(*texts)
    run.measure(load_run(run.run_dir).trajectories[0].load(), 1)
    run.close()
    return run


@pytest.fixture(scope="module")
def page(made: MadeRun) -> Path:
    return write(load_run(made.run_dir)).page


def see(tab: Tab, expression: str, wanted: object) -> None:
    wait_for(lambda: tab.evaluate(expression) == wanted, f"{expression} to be {wanted}")


def fill(tab: Tab, name: str, value: object) -> None:
    tab.evaluate(
        f"filters.{name}.value = {json.dumps(value)};"
        "document.getElementById('filters').dispatchEvent(new Event('input'))"
    )


def press(tab: Tab, selector: str) -> None:
    """Click at the middle of an element."""
    x, y = tab.evaluate(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
        "one.scrollIntoView({behavior: 'instant', block: 'center'});"
        "const box = one.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    tab.click(x, y)


def test_a_click_on_a_curve_lists_the_samples_of_its_step(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.evaluate("document.body.dataset.ready") == "yes"
    wait_for(
        lambda: tab.evaluate("Bokeh.index.roots.every(one => one.bbox?.width > 100)"), "the figures"
    )
    press(tab, "#figure-0")  # its middle is at step 1.5 of 0 … 3, give or take a label
    wait_for(lambda: tab.evaluate("filters.step.value") != "", "the step of the click")
    step = int(tab.evaluate("filters.step.value"))
    trained = [f"{2 * step - 2}/0/0", f"{2 * step - 2}/1/0", f"{2 * step - 1}/0/0"]
    see(tab, f"{LISTED}.slice(0, 3)", trained)
    assert f"trained at step {step}" in tab.evaluate(
        "document.getElementById('summary').textContent"
    )
    assert tab.problems == []


def test_a_trajectory_is_shown_with_its_turns_and_what_is_known(tab: Tab, page: Path) -> None:
    tab.open(page)
    fill(tab, "measured", "1")
    see(tab, LISTED, ["0/0/0"])
    press(tab, "#list tr:nth-child(2)")
    wait_for(lambda: "Turn 2, reward 1" in tab.evaluate(DETAIL), "the turns")
    shown = tab.evaluate(DETAIL)
    for part in ("BAD", "format error", "Guided: as it was sampled", "Stripped: without", HOSTILE):
        assert part in shown
    experience = "[...document.querySelectorAll('.views > div')].map(one =>"
    experience += " one.querySelectorAll('.role1').length > 0)"
    assert tab.evaluate(experience) == [True, False]
    assert tab.evaluate("document.querySelectorAll('#detail img, #detail script').length") == 0
    assert tab.evaluate("document.body.dataset.broken === undefined")
    for mode in ("version", "log-prob", "label", "ratio", "advantage"):
        tab.evaluate(
            f"(() => {{ const one = document.querySelector('.modes select'); one.value = '{mode}';"
            "one.dispatchEvent(new Event('change')); })()"
        )
        colored = "[...document.querySelectorAll('.turn .tokens span')]"
        assert tab.evaluate(f"{colored}.some(one => one.style.backgroundColor !== '')"), mode
    tip = "document.querySelector('.turn .tokens span').title"
    assert tab.evaluate(tip).endswith("ratio 1.5, advantage -0.5")
    assert tab.problems == []


def test_the_list_is_filtered_and_sorted(tab: Tab, page: Path) -> None:
    tab.open(page)
    fill(tab, "group", 2)
    see(tab, LISTED, ["2/0/0", "2/1/0"])
    fill(tab, "group", "")
    fill(tab, "guided", "0")
    tab.evaluate("sorting.key.value = 'trained at step'; sorting.order.value = '-1'")
    fill(tab, "reward", 0.5)
    see(tab, f"{LISTED}.slice(0, 2)", ["4/1/0", "5/1/0"])
    fill(tab, "reward", 2)
    see(tab, LISTED, [])
    assert tab.problems == []


def test_the_list_shows_and_searches_what_was_written(tab: Tab, page: Path) -> None:
    tab.open(page)
    fill(tab, "said", "DOWN")
    see(tab, LISTED, ["4/0/0", "4/1/0", "5/0/0", "5/1/0"])
    last = "document.querySelector('#list tr:nth-child(2) td:last-child').textContent"
    assert "down" in tab.evaluate(last)
    fill(tab, "said", HOSTILE[:20])
    assert tab.evaluate("document.querySelectorAll('#list img, #list script').length") == 0
    assert tab.problems == []


def test_a_trajectory_without_measurements_says_so(tab: Tab, page: Path) -> None:
    tab.open(page)
    fill(tab, "measured", "0")
    press(tab, "#list tr:nth-child(2)")
    wait_for(lambda: "were not recorded: it is not in samples/" in tab.evaluate(DETAIL), "a note")
    options = "[...document.querySelectorAll('.modes option')].map(one => one.textContent)"
    assert "ratio (not recorded)" in tab.evaluate(options)


def test_a_folder_loads_its_trajectories_when_they_are_shown(
    tab: Tab, made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "PART", 2)
    tab.open(write(load_run(made.run_dir), tmp_path / "folder").page)
    loaded = "document.querySelectorAll('head script[src]').length"
    assert tab.evaluate(loaded) == 0
    press(tab, "#list tr:nth-child(4)")
    wait_for(lambda: "Trajectory 1/0/0" in tab.evaluate(DETAIL), "the trajectory")
    assert tab.evaluate(loaded) == 1 and tab.problems == []
