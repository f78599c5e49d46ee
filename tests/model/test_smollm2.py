"""A real instruct model through the product: evaluated as it is, trained, evaluated again."""

from pathlib import Path

import pytest

from evolver_async.cli import main
from evolver_async.metrics.tail import Tail

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "configs" / "arithmetic.yaml")
EPISODES = 64


def changes(smollm2: Path) -> list[str]:
    return [f"policy.path={smollm2}", f"tasks.path={ROOT / 'configs' / 'rows' / 'sums.jsonl'}"]


def test_its_own_chat_solves_some_sums(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through a forced <answer> it solved none; by its own message it solves about one in seven."""
    assert main(["eval", RECIPE, *changes(smollm2), "--episodes", str(EPISODES)]) == 0
    shown = capsys.readouterr().out
    success = float(shown.partition("success ")[2].split()[0])
    assert 0.05 <= success <= 0.3, shown


def test_a_short_run_shows_the_untouched_model_and_trains_it(
    smollm2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = [
        *("learner.groups_per_step=4", "learner.minibatches=2", "actors.groups=4"),
        *("selection.kind=all", "stages.0.steps=2", "eval.every=0", "metrics.panel=lines"),
        *("eval.episodes=16", "eval.final_episodes=16", f"run.dir={tmp_path}", "run.name=short"),
    ]
    assert main(["train", RECIPE, *changes(smollm2), *small]) == 0
    rows = Tail(tmp_path / "short" / "metrics.jsonl").rows()
    evaluated = {row["step"]: row["eval/success"] for row in rows if "eval/success" in row}
    steps = [row for row in rows if "train/success" in row]
    assert set(evaluated) == {0, 2}
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["train/reward/number"] == pytest.approx(row["train/success"])
        assert row["train/length_max"] <= 16
    assert "What is" in capfd.readouterr().out, "the first prompt with its reply"
