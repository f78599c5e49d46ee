"""The live view: what it makes of the rows of a run."""

import json
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from evolver_async.config import Config, StageConfig
from evolver_async.launch.run_directory import record_origin
from evolver_async.metrics.alerts import ALERTS, alert
from evolver_async.metrics.newest_lineage import RowKey, supersedes
from evolver_async.metrics.tail import Tail
from evolver_async.runs.watch import runs
from evolver_async.runs.watch import view as view_module
from evolver_async.runs.watch.live import shown, steps_of, watch
from evolver_async.runs.watch.throughput import Setup
from evolver_async.runs.watch.view import RECENT, View
from evolver_async.terminal import plain

ROW = {
    "lineage": 1,
    "stage_kind": "rl",
    "train/success": 0.5,
    "train/reward_mean": 0.25,
    "train/reward_std": 0.125,
    "staleness/mean": 1.5,
    "staleness/max": 4.0,
    "throughput/tokens_per_s": 12345.6,
    "time/wait_s": 1.0,
    "time/train_s": 3.0,
}


PLAYED = {"eval/episodes": 256, "eval/distinct": 9}


def status(**parts: object) -> dict[str, object]:
    """A STATUS as far as the view reads it."""
    nothing = {"stage": 0, "stalled": [], "waiting": {}, "busy": [], "progress": None}
    return nothing | {"evaluations": [], "failures": []} | parts


def row(step: int, time_s: float) -> dict[str, object]:
    return {"step": step, "time_s": time_s, **ROW}


def text_of(view: View) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(view.panel())
    return captured.get()


def test_only_complete_rows_are_read_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.rows() == []
    path.write_text('{"step": 1}\n{"ste')
    assert tail.rows() == [{"step": 1}]
    assert tail.rows() == []
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert tail.rows() == [{"step": 2}]


def test_held_out_rows_are_told_at_once_and_stay_in_the_panel() -> None:
    view, found = View("run", 20), {"validation/loss": 1.5, "validation/rows": 7}
    line = view.feed({"step": 0, "time_s": 0.0, "lineage": 1} | found)
    assert line is not None and "loss 1.500 over 7 rows" in line
    assert view.feed(row(1, 1.0)) is not None
    assert view.feed(row(2, 1.1)) is None, "too soon after the line before"
    line = view.feed(row(3, 1.2) | found | {"validation/accuracy": 0.25})
    assert line is not None and "loss 1.500, accuracy 0.250 over 7 rows" in line
    view.feed(row(4, 1.3))
    assert "accuracy 0.250 over 7 rows at step 3" in text_of(view)


def test_a_step_is_one_line_with_what_the_row_has() -> None:
    line = View("run", 20).feed(row(10, 5.0))
    assert line is not None
    for part in (
        "step 10/20 rl",
        "success 0.500",
        "reward 0.250 ± 0.125",
        "staleness 1.500 (max 4)",
        "tokens/s 12,346",
        "waiting 25%",
        "time 0:05",
    ):
        assert part in line
    assert "buffer" not in line and " ess " not in line


def test_experience_judge_and_questioning_are_shown_where_they_are_measured() -> None:
    view = View("run", 20)
    view.feed(row(1, 1.0))
    assert not {"guidance", "judge", "questioning"} & {name for name, _ in view.cells()}
    measured = {
        "guidance/gain": 0.21,
        "guidance/upper": 0.3,
        "guidance/wasted": 0.03,
        "experience/reliance": 0.12,
        "judge/agreement": 0.97,
        "judge/praise_bias": -0.02,
        "questioning/pool_size": 1200.0,
        "questioning/explored_turns": 5000.0,
    }
    view.feed(row(2, 2.0) | measured)
    text = text_of(view)
    assert "guidance     gain +0.21 (upper +0.30), wasted 3%, reliance 0.12 nats" in text
    assert "judge        agreement 0.97, praise -0.02" in text
    assert "questioning  1,200 tasks, 5,000 turns" in text
    view.feed(row(3, 3.0) | {"guidance/gain": 0.2, "experience/reliance": None})
    text = text_of(view)
    assert "guidance   gain +0.20 " in text and "judge" not in text


def test_the_steps_before_a_fork_are_not_steps_of_the_run(tmp_path: Path) -> None:
    config = Config(stages=[StageConfig(steps=5), StageConfig(steps=7)])
    assert steps_of(config, tmp_path / "cold") == 12
    for name, origin, step in (("first", "cold", 5), ("second", "first", 3)):
        (tmp_path / name).mkdir()
        record_origin(tmp_path / name, kind="fork", run=str(tmp_path / origin), step=step)
    assert steps_of(config, tmp_path / "first") == 7
    assert steps_of(config, tmp_path / "second") == 4
    assert steps_of(Config(stages=[StageConfig(tokens=9)]), tmp_path / "first") == 0
    own = str(tmp_path / "first")
    record_origin(tmp_path / "first", kind="fork", run=own, step=5)  # leads back to itself
    assert steps_of(config, tmp_path / "first") == 7


def test_lines_keep_a_distance_and_evaluations_always_show() -> None:
    view = View("run", 20)
    assert view.feed(row(1, 10.0)) is not None
    assert view.feed(row(2, 10.5)) is None
    evaluation = {"lineage": 1, "step": 2, "eval/success": 0.75, **PLAYED}
    assert view.feed(evaluation) == "step 2  eval success 0.750 over 256 episodes, 9 distinct"
    assert view.feed(row(3, 12.5)) is not None


def test_the_exact_values_stand_beside_the_evaluations() -> None:
    """Where they are of the same stage and of as many episodes."""
    values = {(1, 256): {"random": 0.02, "optimal": 1.0}, (1, 512): {"random": 0.9, "optimal": 0.9}}
    view = View("run", 20, values)
    evaluation = {"lineage": 1, "step": 2, "eval/success": 0.75, **PLAYED}
    for unknown in ({}, {"eval/stage": 0.0}, {"eval/stage": 1.0, "eval/episodes": 255.0}):
        assert "random" not in str(view.feed(evaluation | unknown))
    line = view.feed(evaluation | {"eval/stage": 1.0, "eval/episodes": 256.0})
    beside = "(random policy 0.020, optimal 1.000)"
    assert line == f"step 2  eval success 0.750 over 256 episodes, 9 distinct {beside}"
    view.feed(row(2, 1.0))
    assert f"0.750 (9 distinct) {beside}" in text_of(view)


def test_the_time_to_go_follows_the_pace_since_the_view_began() -> None:
    view = View("run", 110)
    view.feed(row(10, 100.0))
    line = view.feed(row(60, 150.0))
    assert line is not None and line.endswith("eta 0:50")
    assert "eta" not in str(View("open end", 0).feed(row(60, 150.0)))


def test_a_null_metric_does_not_end_the_view() -> None:
    line = View("run", 20).feed(row(1, 1.0) | {"train/success": None})
    assert line is not None and "success –" in line


def test_the_panel_shows_steps_evaluations_and_who_waits() -> None:
    view = View("run", 20)
    assert "for the first step" in text_of(view)
    view.feed(row(10, 5.0))
    view.feed({"lineage": 1, "step": 10, "eval/success": 0.0, "eval/episodes": 8})
    view.feed({"lineage": 1, "step": 11, "eval/success": 1.0, "eval/episodes": 8})
    waits = {"learner": {"sample": {"reason": "3 of 8 ready", "for_s": 7.2}}}
    stall = {"who": "actor-1", "what": "group 3 waits for members [2]", "for_s": 41.0}
    found = status(stalled=[stall | {"silent": False}], waiting=waits)
    view.feed_status(json.loads(json.dumps(found)), 0.0)
    text = text_of(view)
    assert "10/20 rl" in text and "▁█ 1.000" in text
    assert "learner waits 7 s: 3 of 8 ready" in text
    assert "actor-1 has made no progress for 41 s: group 3 waits for members [2]" in text
    counters = {"supervision/stalled": 2.0, "supervision/longest_s": 41.5}
    view.feed(row(11, 6.0) | counters)
    assert "learner waits" not in text_of(view)
    assert "2 (longest 42 s)" in text_of(view) and "actor-1 has made no progress" in text_of(view)
    view.feed(row(12, 7.0) | dict.fromkeys(counters, 0.0))
    assert "stalled" not in text_of(view) and "actor-1" not in text_of(view)


@pytest.mark.parametrize("name", ["actor[/b]", "[red]actor", "\x1b[2Jactor", "actor\n2: fine"])
def test_names_that_processes_give_themselves_are_text_alone(name: str) -> None:
    """A name in brackets is no markup, which ended the display, and none commands the terminal."""
    view = View("run", 20)
    view.feed(row(10, 5.0))
    stall = {"who": name, "what": f"waits for {name}", "for_s": 41.0, "silent": False}
    waiting = {name: {"lease": {"reason": f"no {name}", "for_s": 7.2}}}
    view.feed_status(status(stalled=[stall], waiting=waiting), 0.0)
    shown, text = plain(name), text_of(view)
    assert f"{shown} has made no progress for 41 s: waits for {shown}" in text
    assert f"{shown} waits 7 s: no {shown}" in text and "\x1b" not in text
    assert View(name, 0).panel().title == Text(name)


def test_the_panel_divides_the_time_of_the_newest_steps() -> None:
    view = View("run", 200, setups=[Setup(slots=8, concurrent=8)])
    assert "time" not in dict(view.time_cells())
    times = {"throughput/learner/seconds": 1.0, "throughput/learner/data": 1.0}
    times |= {"throughput/actor/seconds": 1.0, "throughput/actor/engine": 1.0}
    view.feed(row(1, 1.0) | times)
    assert "engine 100%" in text_of(view) and "data 100%" in text_of(view)
    assert "The actors hold up the learner" in dict(view.time_cells())["advice"]
    times |= {"throughput/learner/data": 0.0, "throughput/learner/forward": 1.0}
    for step in range(2, 2 + RECENT):
        view.feed(row(step, step) | times)
    assert dict(view.time_cells())["learner's time"] == "forward 100%", "the first one is old"
    view.feed(row(99, 99.0) | times | {"stage": 7})
    assert "advice" in dict(view.time_cells()), "of a stage that a resume has added meanwhile"


def test_a_resumed_run_shows_the_newest_lineage_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluation(lineage: int, step: int, success: float) -> dict[str, object]:
        return {"lineage": lineage, "step": step, "eval/success": success, **PLAYED}

    old = [row(10, 50.0), evaluation(1, 10, 0.25), row(20, 90.0), evaluation(1, 20, 0.125)]
    new = [row(15, 60.0) | {"lineage": 2}, evaluation(2, 15, 1.0)]
    view = View("run", 20)
    for text in old:
        view.feed(text)
    assert view.feed(new[0]) is not None, "its clock went back, yet it is shown"
    view.feed(new[1])
    assert view.evals == [0.25, 1.0] and view.row["step"] == 15

    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in old + new))
    watch(tmp_path, Config(stages=[StageConfig(steps=9)]), follow=False)
    out = capsys.readouterr().out
    assert "step 15  eval success 1 over 256" in out and "step 20" not in out


def test_an_evaluation_that_ends_late_is_not_the_newest() -> None:
    """Evaluations overlap, and a slow episode of an earlier one can be the last to come."""

    def evaluation(step: int, success: float) -> dict[str, object]:
        sets = {"eval/swapped/avg@1": success, "eval/swapped/distinct": 1.0}
        return {"lineage": 1, "step": step, "eval/success": success, **PLAYED, **sets}

    view, late = View("run", 20), [evaluation(20, 1.0), evaluation(10, 0.0)]
    for one in [row(20, 5.0), *late]:
        view.feed(one)
    assert "▁█ 1.000 (9 distinct)" in text_of(view)
    assert "eval swapped  avg@1 1 (1 distinct)" in text_of(view)
    assert runs.evaluations(late)[-1] == late[0]


def test_further_sets_of_evaluations_are_shown_beside_the_deciding_one() -> None:
    view = View("run", 20)
    evaluated = {
        "eval/success": 0.5,
        "eval/episodes": 8.0,
        "eval/distinct": 2.0,
        "eval/swapped/distinct": 1.0,
        "eval/sampled/distinct": 4.0,
        "eval/swapped/avg@1": 0.25,
        "eval/swapped/best@1": 0.25,
        "eval/sampled/avg@4": 0.5,
        "eval/sampled/best@4": 0.75,
        "eval/sampled/reward_mean": 0.1,
    }
    line = view.feed({"step": 10, "lineage": 1, "time_s": 1.0, **evaluated})
    assert line is not None
    sets = "swapped avg@1 0.250 (1 distinct); sampled avg@4 0.500 best@4 0.750 (4 distinct)"
    assert line.endswith(f"over 8 episodes, 2 distinct; {sets}")
    assert "eval swapped  avg@1 0.250 (1 distinct)" in text_of(view)
    view.feed(row(5, 1.0) | {"lineage": 2})  # a resume from before the evaluation
    assert "swapped" not in text_of(view) and view.evals == []


def test_a_run_that_goes_back_shows_the_sets_of_the_evaluation_before() -> None:
    view = View("run", 20)
    for step, value in ((4, 0.25), (8, 0.75)):
        sets = {"eval/swapped/avg@1": value, "eval/swapped/distinct": 1.0}
        view.feed({"step": step, "lineage": 1, "eval/success": value, **PLAYED, **sets})
    view.feed(row(5, 1.0) | {"lineage": 2})
    assert view.evals == [0.25] and "eval swapped  avg@1 0.250 (1 distinct)" in text_of(view)


def test_a_row_is_not_compared_with_all_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel of a long run reads some 100,000 steps and 5,000 evaluations when it begins."""
    compared: list[RowKey] = []

    def counted(new: RowKey, old: RowKey) -> bool:
        compared.append(new)
        return supersedes(new, old)

    monkeypatch.setattr(view_module, "supersedes", counted)
    view = View("run", 1000)
    for step in range(1, 1000):
        view.feed(row(step, float(step)))
        if step % 10 == 0:
            view.feed({"step": step, "lineage": 1, "eval/success": 0.5, **PLAYED})
    assert len(view.evals) == 99 and not compared
    view.feed({"step": 980, "lineage": 2, "eval/success": 0.25, **PLAYED})
    assert view.evals == [*[0.5] * 97, 0.25, 0.5] and len(compared) == 1
    view.feed(row(981, 999.0) | {"lineage": 2})
    assert len(view.evals) == 98 and len(compared) == 2


def test_alerts_that_nothing_else_tells_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alert(tmp_path, "crash of actor-0", "exit code 1")  # the launcher's log says so
    alert(tmp_path, "step skipped", "take 3: loss is [nan]", "ERROR", console=True)
    watch(tmp_path, Config(stages=[StageConfig(steps=9)]), follow=False)
    assert capsys.readouterr().err == "step skipped: take 3: loss is [nan]\n"
    view = View("run", 20)
    assert view.feed_alerts(Tail(tmp_path / ALERTS).rows())
    assert "loss is [nan]" in text_of(view) and "exit code" not in text_of(view)


def test_an_alarm_is_printed_when_it_begins_and_shown_while_it_fires() -> None:
    view = View("run", 20)
    quiet, loud = {"alarm/entropy": 0.0}, {"alarm/entropy": 1.0}
    line = "step 3  alarm entropy fires; remedies: docs/alarms.md"
    assert view.feed_alarms(row(2, 2.0) | quiet) == []
    assert view.feed_alarms(row(3, 3.0) | loud) == [line]
    assert view.feed_alarms(row(4, 4.0) | loud) == [], "it has been told"
    assert view.feed_alarms({"lineage": 1, "step": 4, "eval/success": 0.5, **PLAYED}) == []
    assert "entropy fires since step 3" in text_of(view)
    assert view.feed_alarms(row(4, 4.0) | loud | {"lineage": 2}) == [], "it fires on"
    assert view.feed_alarms(row(3, 3.0) | loud | {"lineage": 3}) == [line], "step 3 is repeated"
    assert view.feed_alarms(row(5, 5.0) | quiet | {"lineage": 3}) == []
    assert "entropy" not in text_of(view)


def test_lines_of_a_run_name_its_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(step, float(step)) | {"alarm/entropy": float(step > 1)} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    watch(tmp_path, Config(stages=[StageConfig(steps=9)]), follow=False)
    assert capsys.readouterr().err == "step 2  alarm entropy fires; remedies: docs/alarms.md\n"


def test_a_run_is_followed_until_it_has_recorded_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row(3, 5.0))}\n")
    runs.end(tmp_path, 0)
    watch(tmp_path, Config(stages=[StageConfig(steps=3)]), follow=True)
    assert "step 3/3" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["panel", "lines"])
def test_a_display_that_fails_says_so_and_lets_the_run_go_on(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail(self: View, row: object) -> None:
        failed.set()
        raise KeyError("train/success")

    monkeypatch.setattr(View, "feed", fail)
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row(1, 1.0))}\n")
    config = Config(stages=[StageConfig(steps=1)])
    with shown(tmp_path, config, mode):
        assert failed.wait(60)
    (record,) = caplog.records
    assert "the display failed; the run goes on" in record.getMessage()
    assert f"evolver-async watch {tmp_path}" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is KeyError
