"""What the console says between two rows: the present step, and states that last."""

from typing import Any

import pytest

from evolver_async.runs.watch.step_progress import StateLines, bar, first_eta, step_text
from evolver_async.runs.watch.view import View

PROGRESS: dict[str, Any] = {
    "step": 7,
    "phase": "forward and backward",
    "share": 0.25,
    "for_s": 10.0,
    "eta_s": 30.0,
    "data_s": 20.0,
    "done": 0,
    "needed": 0,
    "micro_batches": 12,
    "tokens": 999,
}
WAITS = {"phase": "data", "micro_batches": 0, "done": 37, "needed": 128, "share": 37 / 128}


def status(stalled: dict[str, float] | None = None, **progress: Any) -> dict[str, Any]:
    """A STATUS with the progress of a step, and with processes that stand still for so long."""
    stalls = [
        {"who": who, "what": "holds group 1", "for_s": for_s, "silent": True}
        for who, for_s in (stalled or {}).items()
    ]
    found: dict[str, Any] = {"stalled": stalls, "busy": [], "waiting": {}, "evaluations": []}
    return found | {"progress": PROGRESS | progress}


def said(lines: StateLines, seconds: int, found: dict[str, Any], begin: int = 0) -> list[int]:
    """The seconds at which lines come, of a STATUS that is the same for so long."""
    times = []
    for now in range(begin, begin + seconds, 2):
        times += [now] * len(lines.feed(found, "", float(now)))
    return times


def test_a_step_under_way_is_a_bar_with_its_time_to_go() -> None:
    assert bar(0.25, 8) == "██░░░░░░" and bar(2.0, 4) == "████"
    text = step_text(status())
    assert text.startswith("forward and backward, 12 micro-batches ████░")
    assert text.endswith("25%, eta 0:30")
    text = step_text(status(**WAITS, eta_s=40.0))
    assert text.startswith("learner waits for data: 37 of 128 members done █")
    assert text.endswith("29%, eta 0:40")
    assert step_text(status() | {"progress": None}) == ""
    assert step_text(status(phase="load of the model", micro_batches=0)) == "load of the model"


def test_a_wait_without_any_data_says_what_is_missing() -> None:
    waiting = {"learner": {"sample": {"reason": "0 actors alive", "for_s": 9.0}}}
    nothing = status(**WAITS | {"done": 0, "share": 0.0}) | {"waiting": waiting}
    assert step_text(nothing).endswith("0 of 128 members done (0 actors alive)")


def test_a_quick_step_needs_no_line_and_a_long_one_few() -> None:
    lines = StateLines(20)
    for step in range(20):
        assert said(lines, 28, status(step=step), 28 * step) == []
    (first, *rest) = said(lines, 600, status(step=20), 560)
    assert first == 590 and rest == [650, 770, 1010], "after growing pauses"


def test_a_stall_is_one_line_at_growing_pauses_and_one_at_its_end() -> None:
    lines = StateLines(0)
    times = said(lines, 1000, status({"actor-0": 41.0}, phase=""))
    assert times == [0, 60, 180, 420, 900]
    (line,) = lines.feed(status(phase=""), "", 1000.0)
    assert line == "actor-0 goes on after 41 s"
    assert said(lines, 100, status(phase=""), 1002) == []


def test_many_processes_that_stand_still_are_one_line() -> None:
    lines = StateLines(0)
    stalled = {f"actor-{n}": 90.0 - n for n in range(64)}
    (line,) = lines.feed(status(stalled, phase=""), "", 0.0)
    assert line.startswith("actor-0 was not heard for 90 s") and "63 more" in line


def test_a_busy_process_is_told_once() -> None:
    lines = StateLines(0)
    busy = [{"who": "learner", "phase": "checkpoint", "for_s": 40.0}]
    told = status(phase="") | {"busy": busy}
    (line,) = lines.feed(told, "", 0.0)
    assert "busy for 40 s in checkpoint" in line
    assert said(lines, 3000, told, 2) == []


@pytest.mark.parametrize(("apart", "eta"), [(True, "about 9:10"), (False, "about 13:30")])
def test_the_first_step_tells_the_time_of_the_run(apart: bool, eta: str) -> None:
    """13 steps follow: of 40 s, as data come beside them, or of 20 s more."""
    assert first_eta(PROGRESS, 20, apart=apart) == eta
    assert first_eta(PROGRESS, 0, apart=apart) == ""
    assert first_eta(PROGRESS | {"eta_s": None}, 20, apart=apart) == ""
    assert first_eta(PROGRESS | WAITS, 20, apart=apart) == "about 9:10 by the data alone"
    assert first_eta(PROGRESS | WAITS | {"share": 0.1}, 20, apart=apart) == "", "too early"


def test_the_estimate_of_a_step_tells_the_time_until_a_step_is_measured() -> None:
    def eta(progress: dict[str, Any] | None) -> str:
        return first_eta(progress, 20, apart=True, estimate_s=60.0)

    assert eta(None).startswith("about 20:00 ")
    assert eta(PROGRESS | WAITS).startswith("about 14:00 ")
    assert eta(PROGRESS | {"eta_s": None}).startswith("about 14:00 ")
    assert eta(PROGRESS) == "about 9:10"
    view = View("run", 20, estimate_s=60.0)
    view.feed_status(status(**WAITS) | {"stage": 0}, 0.0)
    assert dict(view.step_cells())["eta"].startswith("about 14:00 ")


@pytest.mark.parametrize("step_s", [15, 30, 58, 110])
def test_ten_minutes_of_long_steps_are_at_most_forty_lines(step_s: int) -> None:
    """Half of a step waits for data, half computes; every fifth one is evaluated."""
    view, printed = View("run", 100), list[str]()
    for now in range(0, 600, 2):
        step, passed_s = divmod(now, step_s)
        share = passed_s % (step_s / 2) / (step_s / 2)
        waits = passed_s < step_s / 2
        progress: dict[str, Any] = {"step": step + 1, "share": share}
        if waits:
            progress = WAITS | progress | {"done": int(128 * share)}
        found = status(**progress)
        waiting = {"learner": {"sample": {"reason": "8 open", "for_s": 9.0}}} if waits else {}
        waiting |= {"actor-0": {"lease": {"reason": "full", "for_s": 9.0}}}
        found |= {"stage": 0, "waiting": waiting}
        printed += view.feed_status(found, float(now))
        if now + 2 >= (step + 1) * step_s:
            row = {"step": step + 1, "lineage": 1, "time_s": float(now), "stage_kind": "rl"}
            printed.append(view.feed(row) or "")
            if (step + 1) % 5 == 0:
                ended = {"step": step + 1, "lineage": 1, "eval/success": 0.5, "eval/episodes": 64}
                printed.append(view.feed(ended) or "")
    printed = list(filter(None, printed))
    assert len(printed) <= (48 if step_s == 15 else 40), "\n".join(printed)
    assert all(line.startswith("step ") for line in printed), "nothing waits, and nothing is stuck"
