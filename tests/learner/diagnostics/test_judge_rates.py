"""Rates of the judge's audit: those of the last steps, from totals that only ever grow."""

from dataclasses import asdict
from pathlib import Path

import pytest

from learner.diagnostics.collapse import LEAST, TOTALS, WINDOW, forget_totals, judge_rates, note
from learner.state import LearnerState, Watched


def report(watched: Watched, **totals: float) -> dict[str, float]:
    """The rates after a report of these totals; the others are 0."""
    note(watched, {f"judge/{name}": totals.get(name, 0.0) for name in TOTALS})
    return judge_rates(watched)


def test_rates_are_those_of_the_window_and_not_of_the_run() -> None:
    watched, found = Watched(), {}
    for step in range(50):
        found = report(watched, known=100.0 * step, known_right=100.0 * step)
    assert found == {"judge/agreement": 1.0}
    for step in range(1, WINDOW + 1):
        found = report(watched, known=4900 + 100.0 * step, known_right=4900.0)
        assert found["judge/agreement"] == pytest.approx(1 - step / WINDOW)
    assert len(watched.judge_totals) == WINDOW + 1


def test_praise_and_length_are_differences_of_shares() -> None:
    watched = Watched()
    assert report(watched) == {}
    found = report(
        watched,
        **{"praised": 10, "praised_good": 9, "unpraised_good": 4},
        **{"longer": 20, "longer_good": 15, "shorter": 10, "shorter_good": 2},
    )
    assert found["judge/praise_bias"] == pytest.approx(0.5)
    assert found["judge/length_bias"] == pytest.approx(0.75 - 0.2)
    assert "judge/agreement" not in found


def test_few_turns_give_no_rate() -> None:
    watched = Watched()
    report(watched)
    few = {"known": LEAST - 1, "praised": LEAST - 1, "longer": 100, "shorter": LEAST - 1}
    assert report(watched, **few) == {}
    assert set(report(watched, **dict.fromkeys(few, LEAST) | {"longer": 100})) == {
        *("judge/agreement", "judge/praise_bias", "judge/length_bias")
    }


def test_what_was_counted_before_this_learner_belongs_to_no_window() -> None:
    watched = Watched()
    assert report(watched, known=10_000, known_right=0) == {}
    assert report(watched, known=10_010, known_right=10) == {"judge/agreement": 1.0}


def test_totals_that_fall_begin_the_window_anew() -> None:
    """As after a restart of the buffer, which forgets what left actors had counted."""
    watched = Watched()
    report(watched, known=100, known_right=100)
    assert report(watched, known=200, known_right=100) == {"judge/agreement": 0.0}
    assert report(watched, known=20, known_right=20) == {}
    assert report(watched, known=40, known_right=40) == {"judge/agreement": 1.0}


def test_a_run_without_an_audit_has_no_window() -> None:
    watched = Watched()
    note(watched, {"judge/labelled": 3.0})
    assert watched.judge_totals == [] and judge_rates(watched) == {}


def test_a_checkpoint_keeps_the_window(tmp_path: Path) -> None:
    state = LearnerState()
    report(state.watched, known=10)
    report(state.watched, known=20, known_right=5)
    state.write(tmp_path)
    found = LearnerState.read(tmp_path)
    assert asdict(found) == asdict(state) and judge_rates(found.watched) == {"judge/agreement": 0.5}


def test_totals_from_before_a_restored_checkpoint_are_forgotten() -> None:
    watched = Watched()
    report(watched, known=100, known_right=0)
    report(watched, known=200, known_right=0)
    note(watched, {"weights/not_arrived": 1.0})
    forget_totals(watched)
    assert judge_rates(watched) == {}
    note(watched, {"weights/not_arrived": 1.0})
    assert watched.not_arrived == [1.0], "the event is not a new one"
