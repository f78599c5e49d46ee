"""Tables and picture of the evidence study follow from the directory of the study."""

import importlib
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from studies import made_study, run_of, write_cold, write_run

from evolver_async.study.definition import Definition, Threshold
from evolver_async.study.directory import Study, record_failure

ROOT = Path(__file__).parents[2]
VARIANTS: dict[str, dict[str, str]] = {
    "none": {},
    "N": {"learner.lr": "1e-3"},
    "A": {"learner.lr": "2e-3"},
    "sparse": {"learner.lr": "3e-3"},
    "sparse_A": {"learner.lr": "4e-3"},
    "only_own": {"learner.lr": "5e-3"},
}
STATE = """
`make evidence` (`configs/studies/evidence.yaml`), from one cold start a seed, seeds 0, 1: 8 of 12
runs are finished. Failed: `A-s1`. Missing, without a finished seed: `A`.
"""
MEANING = """
Success is that of the greedy policy on held-out tasks, never guided (`eval/success`), at the end;
intervals are 95 % (Student t) over the finished seeds. The difference is that of the success to
`none`, seed by seed; at equal steps, the same at the number of environment steps that `none` has
taken at its end. Environment steps count from the cold start until the mean curve over the finished
seeds is at 0.5, linear between evaluations; the ratio is that to `none`'s, a bound if one of both
is never there. Last evaluation of a run: 5 distinct tasks.
"""
EMPTY = "# Page\n\n<!-- evidence -->\nbygone\n<!-- /evidence -->\n\nThe end.\n"
RUNS = {  # a step has 24 environment steps; a cold start ends at a success of 0
    ("none", 0): [0.2, 0.4, 0.6],
    ("none", 1): [0.2, 0.4, 0.8],
    ("N", 0): [0.4, 0.6, 0.8],
    ("N", 1): [0.4, 0.6, 0.9],
    ("sparse", 0): [0.0, 0.1, 0.2],
    ("sparse_A", 0): [0.1, 0.2, 0.3],
    ("only_own", 0): [0.1, 0.2, 0.35],
    ("only_own", 1): [0.1, 0.2, 0.35],
}
GUIDED = {
    "guidance/wasted": [0.0, 0.1, 0.2],
    "boost/freed_fraction": [0.0, 0.06, 0.03],
}

Script = Callable[[Path], int]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """The script, run on a directory with two small files."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    evidence = importlib.import_module("evidence")
    (tmp_path / "docs").mkdir()
    for name in ("docs/evidence.md", "docs/page.md"):
        (tmp_path / name).write_text(EMPTY)

    def run(study: Path) -> int:
        files = [
            "--results",
            str(tmp_path / "docs/evidence.md"),
            "--page",
            str(tmp_path / "docs/page.md"),
        ]
        monkeypatch.setattr(sys, "argv", ["evidence.py", str(study), *files])
        return evidence.main()

    return run


def begun(out: Path, **changes: object) -> Study:
    values = {"seeds": (0, 1), "threshold": Threshold(value=0.5), "cold_start": True} | changes
    return made_study(out, Definition("workshop.yaml", variants=VARIANTS, **values))  # pyright: ignore


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Both seeds of most cells are finished, one of `sparse`; of `A` one failed, one goes on."""
    study = begun(tmp_path / "study")
    for seed in (0, 1):
        write_cold(study, seed, 0.0)
    for (cell, seed), evals in RUNS.items():
        metrics = GUIDED if cell == "N" else None
        write_run(run_of(study, cell, seed), evals, before_s=4.0, metrics=metrics)
    write_run(run_of(study, "A", 0), [0.9], code=None, before_s=4.0)
    record_failure(study.out, "A-s1", "no memory")
    return study


def between_markers(path: Path) -> str:
    before, _, rest = path.read_text().partition("<!-- evidence -->\n")
    found, _, after = rest.partition("\n<!-- /evidence -->")
    assert (before, after) == ("# Page\n\n", "\n\nThe end.\n")
    return found


def test_the_results_get_the_full_table(study: Study, script: Script, tmp_path: Path) -> None:
    assert script(study.out) == 0
    state, table, meaning, *others = between_markers(tmp_path / "docs/evidence.md").split("\n\n")
    assert state == STATE.strip()
    assert table.splitlines() == [  # t(.975, 1) = 12.706 times .1, .05, and so on
        "| variant | seeds | success | difference | at equal steps | mean of the curve"
        " | environment steps | ratio | RL steps | wasted, last | wasted, mean | freed |",
        f"|{' --- |' * 12}",
        "| `none` | 2 of 2 | 0.700 (0.000 to 1.000) | baseline | – | 0.317 ± 0.212 | 56 | 1.00 | 2"
        " | – | – | – |",
        "| `N` | 2 of 2 | 0.850 (0.215 to 1.000) | +0.150 ± 0.635 | +0.150 ± 0.635 | 0.475 ± 0.106"
        " | 36 | 0.64 | 2 | 0.200 ± 0.000 | 0.100 ± 0.000 | 0.030 ± 0.000 |",
        "| `sparse` | 1 of 2 | 0.200 (one seed) | -0.400 (one seed) | -0.400 (one seed)"
        " | 0.067 (one seed) | not reached | > 1.29 | not reached | – | – | – |",
        "| `sparse_A` | 1 of 2 | 0.300 (one seed) | -0.300 (one seed) | -0.300 (one seed)"
        " | 0.150 (one seed) | not reached | > 1.29 | not reached | – | – | – |",
        "| `only_own` | 2 of 2 | 0.350 ± 0.000 | -0.350 (-1.000 to +0.921)"
        " | -0.350 (-1.000 to +0.921) | 0.158 ± 0.000"
        " | not reached | > 1.29 | not reached | – | – | – |",
    ]
    whole = " ".join(meaning.split())
    assert whole.startswith(" ".join(MEANING.split())) and "`guidance/wasted`" in whole
    assert MEANING.endswith("5 distinct tasks.\n")
    judged, turns, own = others
    assert "is at 0.180, 90 % of the best value of `sparse`'s" in " ".join(judged.split())
    assert turns.splitlines() == [
        "| variant | environment steps | ratio |",
        "| --- | --- | --- |",
        "| `sparse` | 67 | 1.00 |",
        "| `sparse_A` | 43 | 0.64 |",
    ]
    assert own.endswith("`only_own` ends at 0.350: 50 % of the 0.700 of `none`.")


def test_variants_are_compared_at_the_environment_steps_of_the_first_cell(
    script: Script, tmp_path: Path
) -> None:
    study = begun(tmp_path / "study")
    for seed in (0, 1):
        write_cold(study, seed, 0.0)
        write_run(run_of(study, "none", seed), [0.2, 0.4], before_s=4.0)
        write_run(run_of(study, "N", seed), [0.2, 0.5, 0.9], before_s=4.0)
    assert script(study.out) == 0
    assert "| +0.500 ± 0.000 | +0.100 ± 0.000 |" in between_markers(tmp_path / "docs/evidence.md")


def test_the_page_gets_a_short_table_and_a_picture(
    study: Study, script: Script, tmp_path: Path
) -> None:
    assert script(study.out) == 0
    table = textwrap.dedent("""
        | variant | seeds | success | difference | at equal steps | environment steps | ratio |
        | --- | --- | --- | --- | --- | --- | --- |
        | `none` | 2 of 2 | 0.700 (0.000 to 1.000) | baseline | – | 56 | 1.00 |
        | `N` | 2 of 2 | 0.850 (0.215 to 1.000) | +0.150 ± 0.635 | +0.150 ± 0.635 | 36 | 0.64 |
        | `sparse` | 1 of 2 | 0.200 (one seed) | -0.400 (one seed) | -0.400 (one seed) \
| not reached | > 1.29 |
        | `sparse_A` | 1 of 2 | 0.300 (one seed) | -0.300 (one seed) | -0.300 (one seed) \
| not reached | > 1.29 |
        | `only_own` | 2 of 2 | 0.350 ± 0.000 | -0.350 (-1.000 to +0.921) \
| -0.350 (-1.000 to +0.921) \
| not reached | > 1.29 |
        """)
    picture = "![Success on held-out tasks by environment steps](evidence.png)"
    bands = "Means over the finished seeds; bands are the intervals."
    parts = [STATE, table, MEANING, picture, bands]
    page = tmp_path / "docs" / "page.md"
    assert between_markers(page) == "\n\n".join(part.strip() for part in parts)
    assert (tmp_path / "docs" / "evidence.png").read_bytes().startswith(b"\x89PNG")

    first = page.read_text()
    assert script(study.out) == 0
    assert page.read_text() == first, "a second time changes nothing"


def test_the_ratio_is_a_bound_if_the_first_cell_never_reaches_the_threshold(
    script: Script, tmp_path: Path
) -> None:
    study = begun(tmp_path / "study", seeds=(0,), threshold=Threshold(value=0.7))
    write_cold(study, 0, 0.0)
    for cell in ("none", "N"):
        write_run(run_of(study, cell, 0), RUNS[cell, 0], before_s=4.0)
    assert script(study.out) == 0
    said = between_markers(tmp_path / "docs/evidence.md")
    assert "| not reached | – | not reached |" in said
    assert "| 60 | < 0.83 | 2 |" in said, "60 of more than 72"
    assert "sparse" not in said.partition("Missing")[2].partition("|")[2]


def test_without_the_first_cell_nothing_is_compared(script: Script, tmp_path: Path) -> None:
    study = begun(tmp_path / "study")
    for seed in (0, 1):
        write_cold(study, seed, 0.0)
        write_run(run_of(study, "N", seed), RUNS["N", seed], before_s=4.0)
    assert script(study.out) == 0
    said = between_markers(tmp_path / "docs/evidence.md")
    assert "2 of 12\nruns are" in said and "`none`, `A`, `sparse`" in said
    assert "| `N` | 2 of 2 | 0.850 (0.215 to 1.000) | – | – | 0.475 ± 0.106 | 36 | – | 2 |" in said


@pytest.mark.parametrize(
    "text",
    ["", "<!-- evidence -->\n", "<!-- /evidence -->\n<!-- evidence -->\n", f"{EMPTY}{EMPTY}"],
)
def test_missing_markers_are_named_and_nothing_is_written(
    study: Study, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.write_text(text)
    assert script(study.out) == 2
    needed = "needs <!-- evidence --> once and <!-- /evidence --> once after it"
    assert capsys.readouterr().err == f"evidence: {page}: {needed}\n"
    assert page.read_text() == text
    assert (tmp_path / "docs/evidence.md").read_text() == EMPTY
    assert not (tmp_path / "docs" / "evidence.png").exists()


def test_other_directories_are_refused(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path / "waiting")
    begun(tmp_path / "whole", cold_start=False)
    begun(tmp_path / "other", threshold=Threshold("train/success", 0.5))
    for name, message in (
        ("nothing", "is not the directory of a study"),
        ("waiting", "no run is finished"),
        ("whole", "needs a cold start and a threshold of eval/success"),
        ("other", "needs a cold start and a threshold of eval/success"),
    ):
        assert script(tmp_path / name) == 2
        assert capsys.readouterr().err == f"evidence: {tmp_path / name}: {message}\n"
    assert (tmp_path / "docs/evidence.md").read_text() == EMPTY


def test_the_documents_have_their_markers(script: Script) -> None:
    evidence = importlib.import_module("evidence")
    for name in ("docs/evidence.md", "docs/evolving.md"):
        assert "\nfigures\n" in evidence.replaced(ROOT / name, "figures")
