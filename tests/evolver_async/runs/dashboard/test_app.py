"""The full-screen view, driven by keys as a terminal would."""

import asyncio
import functools
import json
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launches import DEADLINE_S
from reported_runs import MadeRun
from textual.pilot import Pilot

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump
from evolver_async.launch.run_directory import locked, pause
from evolver_async.metrics.replies import SavedReply, save
from evolver_async.runs.dashboard.app import VIEWS, RunDashboard
from evolver_async.runs.dashboard.feed import RunFeed, Status
from evolver_async.runs.watch.runs import end
from evolver_async.wire import messages
from evolver_async.wire.failure_totals import FailureTotal

SIZES = [(80, 24), (200, 60)]
LAGS = {
    f"lag_{bucket}/{name}": value
    for bucket in ("0", "1", "3-4")
    for name, value in (("trajectories", 8.0), ("tokens", 80.0), ("ess", 0.875), ("kl", 0.25))
}
ROW = {
    "lineage": 1,
    "stage": 0.0,
    "stage_kind": "rl",
    "train/success": 0.5,
    "train/reward_mean": 0.25,
    "train/reward_std": 0.125,
    "loss/policy": -0.125,
    "staleness/mean": 1.5,
    "staleness/max": 4.0,
    "alarm/entropy_low": 1.0,
    **LAGS,
}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop of its own."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def text_of(app: RunDashboard) -> str:
    """What the terminal shows, row by row."""
    width, height = app.size
    strips = app.screen._compositor.render_strips(app.size)
    rows = ["".join(segment.text for segment in strip) for strip in strips]
    assert len(rows) == height and all(len(row) <= width for row in rows)
    return "\n".join(row.rstrip() for row in rows)


async def shown(pilot: Pilot[None], *parts: str) -> str:
    """Wait until the terminal shows all of this; the last screen is the error without it."""
    assert isinstance(pilot.app, RunDashboard)
    deadline = time.monotonic() + DEADLINE_S
    while not all(part in (text := text_of(pilot.app)) for part in parts):
        missing = [part for part in parts if part not in text]
        assert time.monotonic() < deadline, f"{missing} not in\n{text}"
        await pilot.pause(0.05)
    return text


def write_rows(run_dir: Path, count: int, first: int = 1, **values: Any) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        for step in range(first, first + count):
            file.write(json.dumps({"step": step, "time_s": float(step), **ROW, **values}) + "\n")


def asking(made: MadeRun) -> Callable[[], Awaitable[Status]]:
    """The STATUS of the made run's buffer, without a socket."""

    async def ask() -> Status:
        return made.world.service.status(made.world.now)

    return ask


@pytest.mark.parametrize("size", SIZES)
@in_loop
async def test_every_view_shows_a_finished_run(made: MadeRun, size: tuple[int, int]) -> None:
    made.step()
    made.step(filtered="spread")
    made.close()
    (made.run_dir / "logs").mkdir()
    log = "2026-01-02T03:04:05.678Z ERROR actors.worker: KeyError: 'map'\n"
    (made.run_dir / "logs" / "actor-0.log").write_text(log)
    end(made.run_dir, 0)
    app = RunDashboard(RunFeed(made.run_dir, made.config))
    async with app.run_test(size=size) as pilot:
        text = await shown(
            pilot, "? keys  q quit  finished  s: each step", "success 0.500", "loss 0.1"
        )
        assert "─ reward" in text and "\nstep 2/1 rl" in text and "eta " not in text
        await pilot.press("2")
        await shown(pilot, "no step has trained sampled tokens yet")
        await pilot.press("3")
        await shown(pilot, "The run has ended", "2026-01-02T03:04:05Z: KeyError: 'map'")
        await pilot.press("4")
        text = await shown(pilot, "from the journal", "filtered by reason: 2", "rollout: spread")
        assert "rollout         8     0      0      0        6         2        0  closes" in text
        await pilot.press("5")
        await shown(pilot, "finished", "step 1 stage", "stage 0 (rl) starts")
        await pilot.press("6")
        await shown(pilot, "no step has metrics of experience")


@pytest.mark.parametrize("size", SIZES)
@in_loop
async def test_experience_judge_and_questioning_have_a_view(
    made: MadeRun, size: tuple[int, int]
) -> None:
    guided: dict[str, Any] = {
        "experience/guided_success": 0.75,
        "experience/unguided_success": 0.5,
        "guidance/gain": 0.25,
        "guidance/upper": 0.375,
        "guidance/wasted": 0.03125,
        "judge/agreement": 0.875,
    }
    write_rows(made.run_dir, 12, **guided)
    write_rows(made.run_dir, 1, 13, **guided | {"judge/agreement": None})
    with open(made.run_dir / "metrics.jsonl", "a") as file:
        evaluated = {"eval/success": 0.5, "eval/episodes": 8, "eval/distinct": 3, "eval/stage": 0}
        file.write(json.dumps({"step": 13, "lineage": 1, **evaluated}) + "\n")
    made.close()
    app = RunDashboard(RunFeed(made.run_dir, made.config))
    async with app.run_test(size=size) as pilot:
        await shown(pilot, "eval success 0.500 (best 0.500, 3 distinct)", "guidance gain +0.25")
        await pilot.press("6")
        text = await shown(pilot, "guidance: gain +0.25 (upper +0.38), wasted 3%", "─ guided 0.750")
        assert "unguided 0.500" in text and "─ gain 0.250" in text and "upper 0.375" in text
        assert "─ judge agreement 0.875" in text and "synthetic tasks" not in text
        await pilot.press("s")
        await shown(pilot, "s: mean of 10", "─ gain 0.250 over 10", "upper 0.375")


@pytest.mark.parametrize("size", SIZES)
@in_loop
async def test_a_live_run_is_followed(made: MadeRun, size: tuple[int, int]) -> None:
    made.step()
    failed = FailureTotal(kind="agent", name="my:play", error="KeyError: \x1b[31m'map'", count=7)
    made.world.lease(peer="actor-1")
    made.world.one("actor-1", messages.Counters(values={}, failures=[failed]))
    made.world.sample(made.takes, made.lineage)
    write_rows(made.run_dir, 3, first=2)
    with locked(made.run_dir):
        app = RunDashboard(RunFeed(made.run_dir, made.config, asking(made)))
        async with app.run_test(size=size) as pilot:
            await shown(pilot, "running  s: each step", "step 4", "staleness 1.5")
            write_rows(made.run_dir, 1, first=5)
            await shown(pilot, "step 5")
            await pilot.press("2")
            await shown(pilot, "lag of trained data, 5 steps", "3-4 ", "ESS", "0.875")
            await pilot.press("3")
            text = await shown(pilot, "1 working, 1 idle", "1.1", "last error")
            assert "agent my:play: KeyError: ?[31m'map'" in text
            await pilot.press("4")
            await shown(pilot, "uses outstanding", "rollout", "closes", "journal:", "open       1")
            await pilot.press("5")
            await shown(pilot, "learner waits", "agent my:play, 7 times", "fire now: entropy_low")
            pause(made.run_dir, "alarm of the test")
            await shown(pilot, "paused  s: each step", "paused: alarm of the test; to go on:")
            end(made.run_dir, 3, "the policy fell apart")
            await shown(
                pilot, "failed  s: each step", "failed with exit code 3: the policy fell apart"
            )
    made.close()


@pytest.mark.parametrize("size", SIZES)
@in_loop
async def test_a_run_without_rows_says_so_in_every_view(
    made: MadeRun, size: tuple[int, int]
) -> None:
    with locked(made.run_dir):
        app = RunDashboard(RunFeed(made.run_dir, made.config, asking(made)))
        async with app.run_test(size=size) as pilot:
            await shown(pilot, "running", "waiting for the first step", "no values yet")
            for key, part in (
                ("2", "no step has trained"),
                ("3", "actors: none yet"),
                ("4", "nothing has been received yet"),
                ("5", "none yet"),
                ("6", "no step has metrics of experience, of a judge or of questioning"),
                ("7", "no replies of an evaluation are kept"),
            ):
                await pilot.press(key)
                await shown(pilot, part)
    made.close()


@pytest.mark.parametrize("size", SIZES)
@in_loop
async def test_the_replies_of_the_newest_evaluation_are_shown(
    made: MadeRun, size: tuple[int, int]
) -> None:
    made.step()
    made.close()
    end(made.run_dir, 0)
    saved = made.run_dir / "evaluations"

    def reply(task: str, success: bool, text: str) -> SavedReply:
        return SavedReply(
            evaluated="step 4",
            task=task,
            success=success,
            reward=0.25,
            turns=1,
            prompt="what is it?",
            reply=text,
        )

    app = RunDashboard(RunFeed(made.run_dir, made.config))
    async with app.run_test(size=size) as pilot:
        await pilot.press("7")
        await shown(pilot, "no replies of an evaluation are kept")
        saved.mkdir()
        save(
            saved / "greedy.jsonl", [reply("t/1", True, "it is"), reply("t/2", False, "no\x1b[2J")]
        )
        text = await shown(pilot, "greedy.jsonl: step 4, 1 of 2", "t/2: no success, reward 0.25")
        assert text.index("t/2: ") < text.index("t/1: ") and "no?[2J" in text and "it is" in text
        (saved / "newer.jsonl").write_text("{}\n")
        os.utime(saved / "newer.jsonl", (2e9, 2e9))
        await shown(pilot, "newer.jsonl, line 1")


@in_loop
async def test_a_buffer_that_does_not_answer_is_said_and_metrics_go_on(made: MadeRun) -> None:
    answers = [made.world.service.status(0.0)]

    async def ask() -> Status:
        if answers:
            return answers.pop()
        raise TimeoutError

    with locked(made.run_dir):
        app = RunDashboard(RunFeed(made.run_dir, made.config, ask))
        async with app.run_test(size=(80, 24)) as pilot:
            await shown(pilot, "the buffer has not answered for")
            write_rows(made.run_dir, 1, first=7)
            await shown(pilot, "step 7")
    made.close()


@in_loop
async def test_a_killed_run_is_told_from_its_files(made: MadeRun) -> None:
    write_rows(made.run_dir, 2)
    with open(made.run_dir / "metrics.jsonl", "a") as file:
        file.write("broken\n")
    made.close()
    app = RunDashboard(RunFeed(made.run_dir, made.config))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await shown(pilot, "killed: no launcher runs", "metrics.jsonl: some of it is not readable")


@in_loop
async def test_a_serial_run_says_why_it_has_no_status(tmp_path: Path) -> None:
    config = Config(stages=[StageConfig(steps=9)])
    config = replace(config, launch=replace(config.launch, kind="serial"))
    dump(config, tmp_path / "config.yaml")
    with locked(tmp_path):
        app = RunDashboard(RunFeed(tmp_path, config))
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("3")
            await shown(pilot, "launch.kind=serial")


@in_loop
async def test_a_long_reason_is_cut_in_the_last_line_and_whole_in_the_events(
    made: MadeRun,
) -> None:
    made.close()
    reason = " ".join(f"word{number}" for number in range(40))
    end(made.run_dir, 1, reason)
    app = RunDashboard(RunFeed(made.run_dir, made.config))
    async with app.run_test(size=(80, 24)) as pilot:
        await shown(pilot, "failed  s: each step  t: over step  run  word0", "…")
        await pilot.press("5")
        await shown(pilot, "failed with exit code 1: word0", "word39")


@in_loop
async def test_a_huge_run_is_drawn_with_all_its_steps(tmp_path: Path) -> None:
    config = Config(stages=[StageConfig(steps=9)])
    dump(config, tmp_path / "config.yaml")
    write_rows(tmp_path, 5000)
    app = RunDashboard(RunFeed(tmp_path, config))
    async with app.run_test(size=(200, 60)) as pilot:
        await shown(pilot, "step 5000")
        await pilot.press("s", "t", "2")
        await shown(pilot, "lag of trained data, 5000 steps")


@in_loop
async def test_keys_switch_views_means_and_axes(made: MadeRun) -> None:
    write_rows(made.run_dir, 60)
    made.close()
    app = RunDashboard(RunFeed(made.run_dir, made.config))
    async with app.run_test(size=(80, 24)) as pilot:
        await shown(pilot, "s: each step  t: over step", "step 60")
        await pilot.press("s")
        await shown(pilot, "s: mean of 10", "success 0.500 over 10")
        await pilot.press("s", "s", "t")
        await shown(pilot, "s: each step  t: over time", "1:00")
        await pilot.press("left")
        assert VIEWS[app.chosen] == "replies"
        await pilot.press("right", "right")
        assert VIEWS[app.chosen] == "staleness"
        await pilot.press("question_mark")
        await shown(pilot, "quit; the run goes on", "means of 10 or 50 steps")
        await pilot.press("escape")
        assert len(app.screen_stack) == 1
        await pilot.press("q")
    assert app.return_code == 0


@in_loop
async def test_a_look_that_ends_after_the_app_draws_nothing(made: MadeRun) -> None:
    made.close()
    end(made.run_dir, 0)
    app = RunDashboard(RunFeed(made.run_dir, made.config))
    async with app.run_test(size=SIZES[0]) as pilot:
        await shown(pilot, "finished")
        await app.screen_stack[0].query_one("#scroll").remove()
        app._draw()  # the screen goes
    app._draw()  # it is gone
