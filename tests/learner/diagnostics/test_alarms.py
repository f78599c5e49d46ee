"""Each alarm fires on its collapse, in time and only then; and what is done about it."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from killed_runs import Killed, Run, Ticket, Trajectory, episode
from launches import DEADLINE_S, wait_for

from evolver_async import cli
from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import load_newest, valid
from evolver_async.config import CheckpointConfig, LaunchConfig, SafetyConfig, StageConfig
from evolver_async.config.load import dump
from evolver_async.errors import STOPPED, TrainingError
from evolver_async.launch.run_directory import PAUSED, pause_reason
from evolver_async.wire import messages
from learner import schedule
from learner.diagnostics.alarms import Alarm, judge
from learner.diagnostics.group_signals import input_dependence
from learner.schedule import next_stage
from learner.state import LearnerState, Watched

SAFETY = SafetyConfig()  # the defaults are what is tested
HEALTHY = {
    "reward_spread": 0.3,
    "zero_groups": 0.2,
    "entropy": 0.7,
    "input_dependence": 0.4,
    "log_grad_norm": 0.0,
    "format_errors": 0.02,
    "judge_agreement": 0.9,
    "judge_praise": 0.05,
}
# by alarm: what a step of the collapse shows in place of the healthy value
COLLAPSES = {
    "reward_spread": {"reward_spread": 0.02},
    "zero_variance": {"zero_groups": 0.95},
    "entropy_low": {"entropy": 0.005},
    "entropy_high": {"entropy": 2.5},
    "input_dependence": {"input_dependence": 0.05},
    "grad_norm": {"log_grad_norm": math.log(20.0)},
    "format_errors": {"format_errors": 0.4},
    "judge": {"judge_agreement": 0.3},
    "judge_praise": {"judge_praise": 0.6},
}
QUICK = ("format_errors", "judge", "judge_praise")


def warmup(name: str) -> int:
    return SAFETY.format_warmup if name in QUICK else SAFETY.warmup


def patience(name: str) -> int:
    return SAFETY.format_patience if name in QUICK else SAFETY.patience


def steps(
    watched: Watched, count: int, *, success: float = 0.3, **signals: float
) -> list[list[Alarm]]:
    """What fires in each of `count` steps that are healthy but for `signals`."""
    return [judge(watched, HEALTHY | signals, success, SAFETY)[1] for _ in range(count)]


def names(fired: list[list[Alarm]]) -> list[list[str]]:
    return [[alarm.name for alarm in alarms] for alarms in fired]


# ---- when they fire


@pytest.mark.parametrize("name", COLLAPSES)
def test_an_alarm_fires_after_patience_suspicious_steps_and_until_one_is_not(name: str) -> None:
    watched = Watched()
    assert names(steps(watched, warmup(name))) == [[]] * warmup(name)
    fired = steps(watched, 20, **COLLAPSES[name])
    silent = patience(name) - 1
    assert names(fired) == [[]] * silent + [[name]] * (20 - silent)
    assert [alarm.begins for alarms in fired for alarm in alarms] == [True] + [False] * (
        19 - silent
    )
    assert names(steps(watched, 1)) == [[]]
    again = steps(watched, patience(name), **COLLAPSES[name])
    assert [alarm.begins for alarms in again for alarm in alarms] == [True]


@pytest.mark.parametrize("name", COLLAPSES)
def test_nothing_is_suspicious_during_the_warm_up(name: str) -> None:
    fired = steps(Watched(), warmup(name), **COLLAPSES[name])
    assert names(fired) == [[]] * warmup(name)


@pytest.mark.parametrize("name", COLLAPSES)
def test_an_interrupted_suspicion_begins_anew(name: str) -> None:
    watched = Watched()
    steps(watched, warmup(name))
    for _ in range(3):
        assert names(steps(watched, patience(name) - 1, **COLLAPSES[name]))[-1] == []
        assert names(steps(watched, 1)) == [[]]


@pytest.mark.parametrize("name", COLLAPSES)
def test_an_alarm_says_in_words_what_is_beyond_what(name: str) -> None:
    watched = Watched()
    steps(watched, warmup(name))
    ((alarm,),) = steps(watched, patience(name), **COLLAPSES[name])[-1:]
    text = str(alarm)
    assert text.startswith(f"{name}: ") and f"for {patience(name)} steps" in text
    assert f"{alarm.value:.3g}" in text and f"{alarm.bound:.3g}" in text
    assert (alarm.value > alarm.bound) == ("above" in text) != ("below" in text)


def gains(watched: Watched, values: list[float]) -> list[tuple[float, list[str]]]:
    """By step: the score of the gains before it, and the alarms that fire."""
    found = []
    for value in values:
        metrics, alarms = judge(watched, HEALTHY | {"guided_gain": value}, 0.3, SAFETY)
        found.append((metrics["safety/guided_z"], [alarm.name for alarm in alarms]))
    return found


def test_guidance_that_harms_fires_until_it_no_longer_does() -> None:
    watched = Watched()
    harm = gains(watched, [-0.2, -0.1] * 20)
    first = SAFETY.warmup + SAFETY.patience - 1
    assert [names for _, names in harm] == [[]] * first + [["guidance"]] * (40 - first)
    assert watched.tracks["guided_gain"].steps == 40, "suspicious steps are part of the estimate"
    better = gains(watched, [0.3] * 60)
    assert better[0][1] == ["guidance"] and better[-1][1] == [] and better[-1][0] > 0


def test_a_gain_in_standard_errors() -> None:
    watched, values = Watched(), [-0.4, 0.1, -0.2, 0.3, -0.5, 0.0]
    gains(watched, values)
    ((score, _),) = gains(watched, [0.0])
    assert score == pytest.approx(np.mean(values) / (np.std(values) / math.sqrt(len(values))))


@given(st.lists(st.sampled_from([-0.25, 0.0, 0.25, 0.5]), max_size=40))
def test_guidance_that_does_not_fall_behind_never_fires(values: list[float]) -> None:
    balanced = [number for value in values for number in (abs(value), value)]
    assert all(names == [] for _, names in gains(Watched(), balanced))


def test_without_guided_members_there_is_no_score() -> None:
    metrics, _ = judge(Watched(), HEALTHY, 0.3, SAFETY)
    assert "safety/guided_z" not in metrics and metrics["alarm/guidance"] == 0.0


def test_a_solved_task_may_have_equal_rewards_and_certain_actions() -> None:
    watched = Watched()
    steps(watched, SAFETY.warmup)
    narrow = {"reward_spread": 0.0, "zero_groups": 1.0, "entropy": 0.0, "input_dependence": 0.0}
    assert not any(steps(watched, 50, success=0.9, **narrow))
    assert names(steps(watched, 50, success=0.9, entropy=9.0))[-1] == ["entropy_high"]
    assert names(steps(watched, 50, success=0.5, **narrow))[-1] == [
        "reward_spread",
        "zero_variance",
        "entropy_low",
        "input_dependence",
    ]


def test_a_collapse_is_not_judged_by_itself() -> None:
    watched = Watched()
    steps(watched, SAFETY.warmup)
    assert names(steps(watched, 500, log_grad_norm=math.log(20.0)))[-1] == ["grad_norm"]


def test_what_was_never_there_cannot_be_lost() -> None:
    watched = Watched()
    fired = [steps(watched, 1, input_dependence=0.02 * (-1) ** i)[0] for i in range(100)]
    assert not any(fired)


def test_the_format_may_come_slowly_but_not_go() -> None:
    """Errors fall from .6 to .1, which is no alarm, and are back at .7 within a step, which is."""
    watched = Watched()
    for errors in np.linspace(0.6, 0.1, 60):
        assert steps(watched, 1, format_errors=float(errors)) == [[]]
    fired = names(steps(watched, 6, format_errors=0.7))
    assert fired == [[]] * (SAFETY.format_patience - 1) + [["format_errors"]] * (
        7 - SAFETY.format_patience
    )


def test_a_format_that_is_gone_after_a_few_steps_is_missed_at_once() -> None:
    """As after updates far too large: errors .03, .05, then .9 throughout."""
    watched = Watched()
    fired = [steps(watched, 1, format_errors=errors)[0] for errors in (0.03, 0.05, *[0.9] * 10)]
    assert names(fired).index(["format_errors"]) == 2 + SAFETY.format_patience - 1


def test_what_could_not_be_measured_changes_nothing() -> None:
    watched = Watched()
    steps(watched, SAFETY.warmup)
    steps(watched, SAFETY.patience - 1, entropy=0.0)
    metrics, alarms = judge(watched, {"zero_groups": 0.2}, 0.3, SAFETY)
    assert alarms == [] and metrics["alarm/entropy_low"] == 0.0
    assert names(steps(watched, 1, entropy=0.0)) == [["entropy_low"]]


def test_every_step_has_every_alarm_among_its_metrics() -> None:
    watched = Watched()
    steps(watched, SAFETY.warmup + SAFETY.patience, entropy=0.7)
    metrics, _ = judge(watched, HEALTHY, 0.3, SAFETY)
    assert {name.removeprefix("alarm/") for name in metrics if "alarm/" in name} == {
        *COLLAPSES,
        "guidance",
        "weights",
    }
    assert metrics["safety/entropy"] == 0.7 and metrics["safety/grad_z"] == 0.0


def test_a_new_stage_forgets_the_old_one() -> None:
    state = LearnerState()
    steps(state.watched, SAFETY.warmup)
    steps(state.watched, SAFETY.patience, entropy=2.5)
    state.baseline = 0.5
    next_stage(state)
    assert state.baseline == 0
    assert not any(steps(state.watched, 50, entropy=2.5))


def test_a_run_that_learns_raises_no_alarm() -> None:
    """The course of the default recipe: success .2 to .95, nearly all spread and entropy gone."""
    rng, watched = np.random.default_rng(0), Watched()
    for progress in np.linspace(0, 1, 250):
        success = 0.2 + 0.75 * min(1.0, 2 * progress)
        signals = {
            "zero_groups": 0.2 + 0.78 * progress * rng.uniform(0.9, 1.0),
            "reward_spread": 0.32 * (1 - progress) * rng.uniform(0.7, 1.3),
            "entropy": 0.68 * math.exp(-2.7 * progress) * rng.uniform(0.5, 1.5),
            "input_dependence": 0.05 + 0.6 * progress * rng.uniform(0.7, 1.3),
            "log_grad_norm": rng.normal(progress, 0.6),
        }
        assert judge(watched, signals, success, SAFETY)[1] == []


def test_the_echo_trap_is_seen_before_success_is_gone() -> None:
    """Spread falls off a cliff at step 20, success only afterwards: RAGEN's FrozenLake."""
    watched, first = Watched(), None
    for step in range(100):
        spread = 0.3 if step < 20 else 0.01
        success = 0.25 if step < 60 else 0.25 * max(0.0, 1 - (step - 60) / 30)
        signals = HEALTHY | {"reward_spread": spread, "zero_groups": 0.3 if step < 20 else 0.97}
        if judge(watched, signals, success, SAFETY)[1] and first is None:
            first = step
    assert first == 20 + SAFETY.patience - 1


# ---- input dependence


def slow_dependence(turns: list[list[np.ndarray]]) -> float:
    """In the notation of `input_dependence`, pair by pair."""
    size = 1 + max(int(tokens.max()) for group in turns for tokens in group)
    h = [[np.bincount(tokens, minlength=size) / len(tokens) for tokens in g] for g in turns]
    m = [np.mean(group, axis=0) for group in h]

    def pairs(vectors: list[np.ndarray]) -> float:
        n = len(vectors)
        return float(
            np.mean([vectors[i] @ vectors[j] for i in range(n) for j in range(n) if i != j])
        )

    same, cross = np.mean([pairs(group) for group in h]), pairs(m)
    own = np.mean([np.mean([v @ v for v in group]) for group in h])
    return float((same - cross) / (own - cross)) if own - cross > 1e-9 else 0.0


tokens = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(np.array)


@given(st.lists(st.lists(tokens, min_size=2, max_size=4), min_size=2, max_size=4))
def test_input_dependence_is_what_the_formula_says(turns: list[list[np.ndarray]]) -> None:
    assert input_dependence(turns) == pytest.approx(slow_dependence(turns), abs=1e-6)


def test_input_dependence_is_one_where_the_prompt_decides_and_nought_where_it_does_not() -> None:
    decided = [[np.array([9, action, 8])] * 4 for action in (1, 2, 3)]
    assert input_dependence(decided) == pytest.approx(1.0)
    assert input_dependence([[np.array([9, 1, 8])] * 4] * 3) == 0.0
    rng = np.random.default_rng(0)
    ignored = [[np.array([9, rng.integers(4), 8]) for _ in range(8)] for _ in range(400)]
    assert abs(input_dependence(ignored)) < 0.02


def test_weights_that_did_not_arrive_fire_without_warm_up_and_until_a_step_without() -> None:
    watched = Watched()
    assert names(steps(watched, 1, weights_not_arrived=0.0)) == [[]]
    ((alarm,),) = steps(watched, 1, weights_not_arrived=1.0)
    assert alarm.name == "weights" and alarm.begins and "above 0" in str(alarm)
    assert names(steps(watched, 1, weights_not_arrived=2.0)) == [["weights"]]
    assert names(steps(watched, 1, weights_not_arrived=0.0)) == [[]]


# ---- what is done about them


TRAPPED = 3  # the group from which on all rewards are equal


def trapped(ticket: Ticket, member: int) -> Trajectory:
    made = episode(ticket, member)
    made.reward = made.reward if ticket.group_id < 3 * TRAPPED else 0.25
    return made


@contextlib.contextmanager
def run_with(tmp_path: Path, action: str, kind: str = "serial") -> Iterator[Run]:
    run = Run(
        tmp_path,
        safety=SafetyConfig(action=action, warmup=2, patience=2, grad_z=math.inf),
        checkpoint=CheckpointConfig(every=1000, keep=9),
        launch=LaunchConfig(kind=kind),
    )
    run.config.advantage = replace(run.config.advantage, kind="grpo")
    run.episode = trapped
    dump(run.config, run.run_dir / "config.yaml")
    try:
        yield run
    finally:
        run.close()


def checkpoints(run: Run) -> list[int]:
    return [manifest.step for _, manifest in valid(run.run_dir / "checkpoints")]


def test_warn_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run_with(tmp_path, "warn") as run:
        assert run.train() == 0
        assert checkpoints(run) == [0, 10]
        firing = [step for step, row in run.rows().items() if row["alarm/reward_spread"]]
    assert firing == [5, 6, 7, 8, 9, 10]
    said = [r.message for r in caplog.records if "alarm reward_spread" in r.message]
    assert len(said) == 1 and "take 4: " in said[0]


def test_an_update_that_an_actor_misses_is_an_alarm_at_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(ticket: Ticket, member: int) -> Trajectory:
        if (ticket.group_id, member) == (3 * TRAPPED, 0):
            values = {"weights/checked": 4.0, "weights/not_arrived": 1.0}
            counters = messages.Counters(values=values, failures=[], gauges={})
            assert isinstance(run.world.one("actor-0", counters), messages.Ok)
        return episode(ticket, member)

    with run_with(tmp_path, "warn") as run:
        run.episode = missing
        assert run.train() == 0
        rows = run.all_rows()
    fired = [row["step"] for row in rows if row.get("alarm/weights")]
    told = [row["step"] for row in rows if row.get("weights/not_arrived")]
    assert fired == [told[0] + 1], "once, at the step after the actor's word"
    assert "alarm weights: an engine samples with other weights" in caplog.text


def test_a_checkpoint_is_written_once_for_an_alarm(tmp_path: Path) -> None:
    with run_with(tmp_path, "checkpoint") as run:
        assert run.train() == 0
        assert checkpoints(run) == [0, 5, 10]


def test_a_pause_ends_a_serial_run_until_it_is_told_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_with(tmp_path, "pause") as run:
        with pytest.raises(TrainingError, match=r"paused: take 4: reward_spread: .*unpause"):
            run.train()
        assert checkpoints(run) == [0, 5]
        with pytest.raises(TrainingError, match="paused: take 4"):
            run.train()  # a restart is no permission
        assert cli.main(["unpause", str(run.run_dir)]) == 0
        assert "reward_spread" in capsys.readouterr().out
        assert run.train() == 0
        assert sorted(run.trained) == list(range(10))
        assert cli.main(["unpause", str(run.run_dir)]) == 2  # is not paused
    assert "is not paused" in capsys.readouterr().err


# ---- rollbacks


def until_rolled_back(run: Run, times: int) -> None:
    """Groups are trapped as above until the learner has gone back so often, then never more."""

    def made(ticket: Ticket, member: int) -> Trajectory:
        gone_back = sum(discard for _, discard in resumed_at(run))
        return trapped(ticket, member) if gone_back < times else episode(ticket, member)

    run.episode = made


@contextlib.contextmanager
def rolling_back(tmp_path: Path, **safety: object) -> Iterator[Run]:
    with run_with(tmp_path, "rollback") as run:
        run.config.checkpoint = CheckpointConfig(every=2, keep=2, keep_best=0)
        run.config.safety = replace(run.config.safety, **safety)  # pyright: ignore[reportArgumentType]
        yield run


def resumed_at(run: Run) -> list[tuple[int, bool]]:
    found = [one for one in run.asked if isinstance(one, messages.Resume)]
    return [(one.take, one.discard) for one in found]


def test_a_rollback_goes_on_from_before_the_suspicion_with_a_smaller_learning_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rolling_back(tmp_path, rollback_lr=0.25, rollback={"loss": {"entropy_coef": 0.5}}) as run:
        until_rolled_back(run, 1)
        assert run.train() == 0
        assert resumed_at(run) == [(0, False), (0, True)], "later ones were not seen to act"
        rows = run.all_rows()
        rates = [row["learner/lr"] for row in rows]
        assert len(rows) == 5 + 10
        assert rates[5:10] == pytest.approx([0.25 * rate for rate in rates[:5]])
        assert [row["safety/rollbacks"] for row in rows[4:6]] == [0, 1]
        groups = [group for take in run.trained.values() for group in take]
        assert sorted(run.trained) == list(range(10)) and min(groups) >= 5 * 3, "all are fresh"
        ledger = run.world.service.status(run.world.now)["ledger"]
    assert "rolled_back" in str(ledger)
    said = [r.message for r in caplog.records if "rollback 1 of 3" in r.message]
    assert len(said) == 1 and "'entropy_coef': 0.5" in said[0]


def test_a_rollback_at_the_last_step_of_a_stage_stays_in_that_stage(tmp_path: Path) -> None:
    with rolling_back(tmp_path, rollbacks=1) as run:
        run.config.stages = [StageConfig(steps=5), StageConfig(kind="sft", steps=2)]
        dump(run.config, run.run_dir / "config.yaml")
        with pytest.raises(TrainingError, match="after 1 rollbacks of the stage"):
            run.train()
        assert resumed_at(run) == [(0, False), (0, True)]


def test_rollbacks_that_do_not_help_end_the_run_with_the_reason(tmp_path: Path) -> None:
    with rolling_back(tmp_path, rollbacks=2) as run:
        with pytest.raises(TrainingError, match=r"zero_variance: .* after 2 rollbacks .* --step"):
            run.train()
        assert [take for take, _ in resumed_at(run)] == [0, 0, 0]
        with pytest.raises(TrainingError, match="after 2 rollbacks"):
            run.train()  # a restart is no third one


@pytest.mark.process
@pytest.mark.parametrize("killed", ["go_back", "begin"])
def test_a_learner_killed_while_it_rolls_back_does_it_alike(tmp_path: Path, killed: str) -> None:
    def kill(learner) -> None:
        owner = learner.checkpoints if killed == "go_back" else learner
        original, calls = getattr(owner, killed), []

        def last_call(*arguments: object) -> None:
            original(*arguments)
            calls.append(1)
            if killed == "go_back" or len(calls) == 2:
                raise Killed(killed)

        setattr(owner, killed, last_call)

    with rolling_back(tmp_path / "whole") as whole, rolling_back(tmp_path / "killed") as broken:
        for run in (whole, broken):
            until_rolled_back(run, 1)
        assert whole.train() == 0
        with pytest.raises(Killed):
            broken.train(kill)
        broken.world.kill()
        assert broken.train() == 0
        (numbers, tensors), (numbers_then, tensors_then) = broken.newest(), whole.newest()
    assert numbers == numbers_then and numbers["rollbacks"] == 1 and not numbers["discard"]
    assert [name for name in tensors if not torch.equal(tensors[name], tensors_then[name])] == []


def paused_learner(run: Run) -> tuple[threading.Thread, list[object]]:
    """A learner in a thread that has come to its pause, and where its end will be told."""
    ends: list[object] = []

    def disturb(learner) -> None:
        run.told = learner  # pyright: ignore[reportAttributeAccessIssue]

    def train() -> None:
        asyncio.set_event_loop(run.loop)
        ends.append(run.train(disturb))

    thread = threading.Thread(target=train, daemon=True)  # without an end if a test fails
    thread.start()
    wait_for(lambda: _says_paused(run), "the learner to say that it is paused")
    return thread, ends


def _says_paused(run: Run) -> bool:
    return any(isinstance(asked, messages.Kept) and asked.paused for asked in run.asked)


def test_a_paused_learner_says_why_and_goes_on_when_told(tmp_path: Path) -> None:
    with run_with(tmp_path, "pause", "local") as run:
        thread, ends = paused_learner(run)
        waits = run.world.service.status(run.world.now)["waiting"]["learner"]
        assert "paused: take 4: reward_spread" in waits["pause"]["reason"]
        assert waits["pause"]["reason"].endswith(f"evolver-async unpause {run.run_dir}")
        assert max(run.trained) == 4
        (run.run_dir / PAUSED).unlink()
        thread.join(DEADLINE_S)
        assert ends == [0] and sorted(run.trained) == list(range(10))
        assert "learner" not in run.world.service.status(run.world.now)["waiting"]


def test_a_paused_learner_still_ends_when_told(tmp_path: Path) -> None:
    with run_with(tmp_path, "pause", "local") as run:
        thread, ends = paused_learner(run)
        run.told.requests.stopping = True  # pyright: ignore[reportAttributeAccessIssue]
        thread.join(DEADLINE_S)
        assert ends == [STOPPED] and max(run.trained) == 4
        assert pause_reason(run.run_dir) is not None, "the next launch is paused as well"


@pytest.mark.parametrize("stopped", [False, True])
def test_the_time_of_a_pause_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """It would use up the `hours` of the stage, also where the learner is stopped meanwhile."""
    now = [0.0]
    monkeypatch.setattr(schedule, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with run_with(tmp_path, "pause", "local") as run:

        def disturb(learner) -> None:
            def pass_time(seconds: float) -> None:
                now[0] += 7200.0
                learner.requests.stopping = stopped
                if not stopped:
                    (run.run_dir / PAUSED).unlink()

            def sample() -> object:
                now[0] += 1.0
                return original()

            original, learner.sample = learner.sample, sample
            learner.requests.sleep = pass_time

        assert run.train(disturb) == (STOPPED if stopped else 0)
        newest, _ = load_newest(run.run_dir / "checkpoints", "run")
        seconds = history.numbers(newest)["seconds"]
    assert now[0] > 7200.0 and seconds == len(run.rows())
