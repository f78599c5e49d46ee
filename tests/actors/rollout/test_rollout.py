"""Episodes: what is recorded is what the engine saw and sampled; failures, deadlines, limits."""

import asyncio
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import pytest
from rollouts import (
    CHAT,
    LEFT,
    OLD,
    RIGHT,
    TOKENIZER,
    Adviser,
    Corridor,
    FakeEngine,
    Hanging,
    corridor,
    play,
    roll_out,
    say,
    setting,
)
from stripping import stripped
from virtual_time import virtually

from actors.engines.engine import Generation, Request
from actors.envs.base import EnvironmentFailure
from actors.rollout import environment
from actors.rollout.environment import TimedEnvironment, abandoned_closed
from actors.rollout.episode import EpisodeLate
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Finished
from actors.rollout.group import run_group, run_members
from actors.scripted.demonstrations import demonstrate_group
from actors.ticket_progress import TicketProgress
from evolver_async.config.load import load
from evolver_async.env import Info, Step
from evolver_async.schema import Kind, Role, Task, Trajectory, TurnFlag
from evolver_async.wire.trajectory_bytes import unwrap, wrap
from evolver_async.wire.transcripts import Turn

END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


class Stuck(Corridor):
    """Blocks in its first step until `free` is set."""

    isolation = "thread"
    begun, free = threading.Event(), threading.Event()

    def step(self, action: str) -> Step:
        self.begun.set()
        assert self.free.wait(60)
        return super().step(action)


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_recorded_tokens_are_what_the_engine_saw_and_sampled(end: str) -> None:
    said = say(*(text + end for text in (LEFT, RIGHT, "nonsense", RIGHT, RIGHT, RIGHT)))
    engine = FakeEngine({"0/0/0": said})
    (trajectory,) = roll_out(corridor(), setting(), engine)
    (sequence,) = trajectory.sequences
    tokens = sequence.tokens.tolist()
    action = sequence.roles == Role.ACTION
    for turn, (request, sampled) in enumerate(zip(engine.requests, said, strict=True)):
        where = np.flatnonzero(action & (sequence.turns == turn))
        assert request.tokens == tokens[: where[0]]
        assert tokens[where[0] : where[-1] + 1] == sampled
        expected = [-0.25 - index for index in range(len(sampled))]
        assert sequence.logprobs[where].tolist() == expected
    assert tokens == engine.requests[-1].tokens + said[-1]
    assert action.sum() == sum(len(sampled) for sampled in said) == trajectory.action_tokens
    assert (sequence.turns[~action] == -1).all()
    assert sequence.versions[0].weights == OLD and sequence.versions[0].tokens == 1
    assert trajectory.oldest == OLD and trajectory.policy == "learned"
    assert engine.released == ["0/0/0"]
    messages = [("system", "walk reply with <answer> action</answer>"), ("user", "at 0")]
    for answer, shown in (
        (LEFT, "at -1"),
        (RIGHT, "at 0"),
        ("nonsense", "invalid answer\nat 0"),
        (RIGHT, "at 1"),
        (RIGHT, "at 2"),
    ):
        messages += [("assistant", f"<answer>{answer}"), ("user", shown)]
    text = TOKENIZER.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert engine.requests[-1].tokens == CHAT.tokens_of(text + "<answer>")


def test_end_of_turn_is_an_observation_unless_it_was_sampled() -> None:
    """After a stop string the template's end-of-turn token is appended, and never trained."""
    for end, role in (("", Role.OBSERVATION), ("<|im_end|>", Role.ACTION)):
        engine = FakeEngine({"0/0/0": say(RIGHT + end, RIGHT + end)})
        (trajectory,) = roll_out(corridor(length=2), setting(), engine)
        (sequence,) = trajectory.sequences
        first = int(np.flatnonzero(sequence.turns == 0)[0]) + len(CHAT.tokens_of(RIGHT))
        assert sequence.tokens[first] == END and sequence.roles[first] == role
        assert sequence.tokens[first + 1] != END
        assert Role.PROMPT not in sequence.roles[first:]


class Fleeting(Corridor):
    """Solved while one stands at 1; the episode goes on."""

    def step(self, action: str) -> Step:
        found = super().step(action)
        return found._replace(info=Info(success=self.position == 1))


@pytest.mark.parametrize(
    ("said", "success"), [([RIGHT, LEFT], False), ([RIGHT, LEFT, RIGHT], True)]
)
@pytest.mark.parametrize("at_once", [1, 3])
def test_an_episode_is_a_success_by_its_last_step_alone(
    said: list[str], success: bool, at_once: int
) -> None:
    """Whatever it had reached before, in an earlier turn or by an earlier action of the same."""
    if at_once > 1:
        said = [" || ".join(one.removesuffix("</answer>").strip() for one in said) + "</answer>"]
    how = setting(max_turns=len(said), actions_per_turn=at_once)
    (trajectory,) = roll_out(corridor(env=Fleeting), how, FakeEngine({"0/0/0": say(*said)}))
    assert trajectory.success == success and trajectory.truncated
    assert not trajectory.turn_flags.any()


def test_rewards_flags_and_success_line_up() -> None:
    engine = FakeEngine({"0/0/0": say(RIGHT, "huh", " fly</answer>", RIGHT)})
    (trajectory,) = roll_out(corridor(length=2), setting(), engine)
    assert trajectory.turn_rewards.tolist() == pytest.approx([0, -0.1, -0.1, 1])
    flags = [0, TurnFlag.FORMAT_ERROR, TurnFlag.INVALID_ACTION, 0]
    assert trajectory.turn_flags.tolist() == flags
    assert trajectory.reward == pytest.approx(0.8)
    assert (trajectory.success, trajectory.terminated, trajectory.truncated) == (True, True, False)
    assert set(trajectory.timing) == {"env_s", "generate_s", "total_s"}


def test_so_many_format_errors_end_an_episode() -> None:
    said = say(RIGHT, "huh", RIGHT, "huh", RIGHT)
    for limit, turns in ((0, 5), (1, 2), (2, 4)):
        engine = FakeEngine({"0/0/0": said})
        limited = setting(format_errors=limit, max_turns=5)
        (trajectory,) = roll_out(corridor(length=5), limited, engine)
        assert len(trajectory.turn_rewards) == turns
        assert (trajectory.truncated, trajectory.terminated) == (True, False)


def test_an_action_that_does_not_exist_is_no_format_error() -> None:
    """It costs the penalty and is told, but ends nothing."""
    engine = FakeEngine({"0/0/0": say(" fly</answer>", " fly</answer>", RIGHT, RIGHT)})
    (trajectory,) = roll_out(corridor(length=2), setting(format_errors=1), engine)
    assert trajectory.success and len(trajectory.turn_flags) == 4
    assert trajectory.turn_rewards.tolist() == pytest.approx([-0.1, -0.1, 0, 1])
    assert "invalid answer\nat 0" in TOKENIZER.decode(engine.requests[-1].tokens)


def test_several_actions_of_a_turn_stop_at_the_end() -> None:
    engine = FakeEngine({"0/0/0": say(" right || right || right</answer>")})
    (trajectory,) = roll_out(corridor(length=2), setting(actions_per_turn=3), engine)
    assert trajectory.success and trajectory.turn_rewards.tolist() == [1.0]


def test_episode_is_truncated_at_max_turns_and_by_the_environment() -> None:
    engine = FakeEngine({"0/0/0": say(*[RIGHT] * 2)})
    (trajectory,) = roll_out(corridor(length=5), setting(max_turns=2), engine)
    assert (trajectory.truncated, trajectory.terminated) == (True, False)
    assert trajectory.sequences[0].roles[-1] == Role.ACTION
    engine = FakeEngine({"0/0/0": say(*[RIGHT] * 2)})
    (trajectory,) = roll_out(corridor(length=5, at=1, what="truncate"), setting(), engine)
    assert trajectory.truncated and len(trajectory.turn_rewards) == 2


def test_no_turn_begins_without_room_for_all_its_tokens() -> None:
    lengths = set()
    for max_length in range(150, 230, 7):
        engine = FakeEngine({"0/0/0": say(*[LEFT] * 10)})
        (trajectory,) = roll_out(corridor(length=50), setting(max_length=max_length), engine)
        (sequence,) = trajectory.sequences
        assert trajectory.truncated and sequence.roles[-1] == Role.ACTION
        assert all(len(request.tokens) + 24 <= max_length for request in engine.requests)
        lengths.add(len(engine.requests))
    assert len(lengths) > 1


def test_prompt_that_leaves_no_turn_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="max_length"):
        roll_out(corridor(), setting(max_length=60), FakeEngine({}))


@pytest.mark.parametrize(
    ("what", "named"), [("raise", "OSError: the floor fell in"), ("param", "env.params.what")]
)
def test_failed_environment_names_itself_and_the_cause(what: str, named: str) -> None:
    params: dict[str, Any] = {"at": 1, "what": what} if what == "raise" else {"what": 3}
    engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT, RIGHT)})
    with pytest.raises(EnvironmentFailure, match=named) as caught:
        roll_out(corridor(**params), setting(), engine)
    assert "Corridor" in str(caught.value)


class Cancelling(Corridor):
    """Raises the error of a cancelled task in its second step, as a client with a deadline may."""

    def step(self, action: str) -> Step:
        if self.steps == 1:
            raise asyncio.CancelledError("mine")
        return super().step(action)


class AsyncCancelling(Cancelling):
    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "isolation"),
    [(Cancelling, "loop"), (Cancelling, "thread"), (AsyncCancelling, "loop")],
)
def test_a_cancelled_error_of_an_environment_is_its_failure(
    env: type, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "isolation", isolation)
    engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT)})
    with pytest.raises(EnvironmentFailure, match=r"step for .*CancelledError: mine"):
        roll_out(corridor(env=env), setting(), engine)


def test_a_cancelled_rollout_is_no_failure_of_its_environment() -> None:
    class Slow:
        async def step(self) -> None:
            await asyncio.sleep(1000.0)

    async def cancelled() -> None:
        world = TimedEnvironment(corridor(), 0, 60.0, TicketProgress())
        call = asyncio.create_task(world.call("step", Slow().step))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancelled())


class Strange(Corridor):
    """Every step's reward is `reward`, and what it shows no UTF-8 can hold."""

    def __init__(self, *, reward: float = 0.0) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: str) -> Step:
        return Step("at \ud800", self.reward, False, False, Info())

    def state(self) -> str:
        return "\ud800"

    def content(self) -> str:
        return "\ud801"


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_the_environments_failure(reward: float) -> None:
    engine = FakeEngine({"0/0/0": say(RIGHT)})
    with pytest.raises(EnvironmentFailure, match=f"Strange.*a reward of {reward}"):
        roll_out(corridor(env=Strange, reward=reward), setting(), engine)


class Sloppy(Corridor):
    """Every step returns `result`, or ends the process if there is none."""

    def __init__(self, *, result: Any = None, leaves: bool = False) -> None:
        super().__init__()
        self.result, self.leaves = result, leaves

    def step(self, action: str) -> Step:
        if self.leaves:
            raise SystemExit(3)
        return self.result


@pytest.mark.parametrize("isolation", ["thread", "loop"])
@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, "step must return a Step, returned None"),
        ({"result": Step(None, 1.0, False, False, Info())}, "an observation must be a"),  # pyright: ignore
        ({"result": Step("done", "1", False, False, Info())}, "reward of the Step must be a"),  # pyright: ignore
        ({"result": Step("done", 1.0, False, False, {})}, "info of the Step must be an Info"),  # pyright: ignore
        ({"result": Step("done", 1.0, None, False, Info())}, "terminated of the Step must be"),  # pyright: ignore
        ({"result": Step("done", 1.0, True, 0.5, Info())}, "truncated of the Step must be"),  # pyright: ignore
        ({"result": Step("done", 1.0, True, False, Info(success=2))}, "success of the Info must"),  # pyright: ignore
        ({"leaves": True}, "SystemExit: 3"),
    ],
)
def test_what_a_step_must_not_do_is_the_environments_failure(
    params: dict[str, Any], named: str, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sloppy, "isolation", isolation)
    with pytest.raises(EnvironmentFailure, match=f"Sloppy.*{named}"):
        roll_out(corridor(env=Sloppy, **params), setting(), FakeEngine({"0/0/0": say(RIGHT)}))


class Leaving(Corridor):
    """Async, and wants to end the process in one of its calls."""

    def __init__(self, *, at: str) -> None:
        super().__init__()
        self.leaves_at = at

    async def step(self, action: str) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        raise SystemExit(3) if self.leaves_at == "step" else OSError("the floor fell in")

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.leaves_at == "close":
            raise SystemExit(4)


@pytest.mark.parametrize(("at", "named"), [("step", "SystemExit: 3"), ("close", "OSError: the f")])
def test_no_call_that_is_awaited_ends_the_process(at: str, named: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"Leaving.*{named}"):
        roll_out(corridor(env=Leaving, at=at), setting(), FakeEngine({"0/0/0": say(RIGHT)}))


class Nameless(Corridor):
    """Names its task, or its state, by a number."""

    def __init__(self, *, named: str = "") -> None:
        super().__init__()
        self.named = named

    def content(self) -> Any:
        return 7 if self.named == "content" else "a corridor"

    def state(self) -> Any:
        return 7 if self.named == "state" else "a cell"


@pytest.mark.parametrize("named", ["content", "state"])
def test_a_name_that_is_no_text_is_the_environments_failure(named: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"{named} must be a text, is a int"):
        engine = FakeEngine({"0/0/0": say(RIGHT)})
        play(corridor(env=Nameless, named=named), setting(recorded=True), engine)


class Numeric(Corridor):
    """Computes with numpy, also its verdict and its score; `reward` is that of the last step."""

    def __init__(self, *, length: int = 2, reward: float = 1.0) -> None:
        super().__init__(length=length)
        self.reward = reward

    def step(self, action: str) -> Step:
        step = super().step(action)
        done = np.bool_(step.terminated)
        info: Any = Info(np.True_, done, np.False_)  # type: ignore[arg-type]
        return Step(step.observation, np.float32(self.reward), done, np.False_, info)  # type: ignore[arg-type]

    def verdict(self) -> tuple[float, bool]:
        return np.float32(0.5), np.True_  # type: ignore[return-value]

    def score(self) -> float:
        return np.float32(self.position)  # type: ignore[return-value]


@pytest.mark.parametrize(("turns", "reward"), [(2, 2.0), (1, 1.5)], ids=["its end", "a limit"])
def test_what_numpy_computes_travels_as_plain_values(turns: int, reward: float) -> None:
    how = setting(max_turns=turns, scored=1.0)
    (finished,) = play(corridor(env=Numeric), how, FakeEngine({"0/0/0": say(RIGHT, RIGHT)}))
    trajectory = unwrap(wrap(finished.trajectory))
    assert (trajectory.reward, trajectory.success) == (reward, True)
    assert trajectory.terminated is (turns == 2) and {*map(type, finished.scores)} == {float}


def test_a_reward_that_the_buffer_refuses_is_the_environments_failure() -> None:
    said = FakeEngine({"0/0/0": say(RIGHT, RIGHT)})
    with pytest.raises(EnvironmentFailure, match=r"Numeric.*reward of 6.*safety\.max_reward.* 2"):
        roll_out(corridor(env=Numeric, reward=3.0), setting(max_reward=2.0), said)


def test_a_reward_as_large_as_its_bound_is_allowed_although_it_is_rounded() -> None:
    said = FakeEngine({"0/0/0": say(RIGHT, RIGHT)})
    (finished,) = play(corridor(env=Numeric, reward=0.55), setting(max_reward=1.1), said)
    assert finished.trajectory.reward > 1.1


def test_text_that_no_tokenizer_reads_is_shown_without_it() -> None:
    engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT)})
    how = setting(max_turns=2, recorded=True)
    (finished,) = play(corridor(env=Strange), how, engine)
    assert finished.ending == "at ?" and finished.transcript.turns[1].observation == "at ?"
    assert finished.transcript.turns[1].state == "?", "no message could hold it"
    assert TOKENIZER.decode(engine.requests[1].tokens).count("at ?") == 1
    assert CHAT.plain("at \ud800") == "at ?"


class Weighed(Corridor):
    """Pays nothing by itself; says how far one has come where somebody else ends the episode."""

    verdicts = 0

    def verdict(self) -> tuple[float, bool]:
        type(self).verdicts += 1
        return self.position / self.length, False


@pytest.mark.parametrize(
    ("said", "changes", "params", "reward"),
    [
        ((RIGHT, RIGHT), {"max_turns": 2}, {}, 2 / 3),
        ((RIGHT, "huh"), {"format_errors": 1}, {}, 1 / 3 - 0.1),
        ((RIGHT,), {"max_length": 100}, {}, 1 / 3),
        ((RIGHT,) * 3, {"max_turns": 3}, {}, None),
        ((RIGHT,), {}, {"at": 0, "what": "truncate"}, None),
    ],
    ids=["turns", "format", "room", "its own end", "its own limit"],
)
def test_an_episode_that_the_rollout_ends_is_worth_what_the_environment_says(
    said: tuple[str, ...], changes: dict[str, Any], params: dict[str, Any], reward: float | None
) -> None:
    """Else what it has done so far would be worth nothing, and nobody would be told."""
    before = Weighed.verdicts
    engine = FakeEngine({"0/0/0": say(*said)})
    how = setting(truncated_reward=-1.0, **changes)
    (one,) = roll_out(corridor(env=Weighed, **params), how, engine)
    assert Weighed.verdicts - before == (reward is not None)
    if reward is not None:
        assert one.truncated and one.reward == pytest.approx(reward - 1)


def test_other_members_are_delivered_before_a_failure_is_raised() -> None:
    """Only the first member takes the step that fails; the others end later, or never act."""
    broken = corridor(members=3, length=2, at=1, what="raise")
    script = {
        "0/0/0": say(" right || right</answer>"),
        "0/1/0": say("pause", "pause", RIGHT),
        "0/2/0": say("pause", "pause", "pause", "pause"),
    }
    done: list[Trajectory] = []

    def deliver(finished: Finished) -> None:
        done.append(finished.trajectory)

    engine = FakeEngine(script)
    with pytest.raises(EnvironmentFailure):
        asyncio.run(
            run_group(
                broken, setting(max_turns=3, actions_per_turn=2), engine, TicketProgress(), deliver
            )
        )
    assert [trajectory.member for trajectory in done] == [1, 2]
    assert sorted(engine.released) == ["0/0/0", "0/1/0", "0/2/0"]


def test_missed_deadline_of_a_step_is_an_environment_failure() -> None:
    slow = setting(latency="fixed", latency_median_s=5.0, step_timeout_s=0.02)
    with pytest.raises(EnvironmentFailure, match=r"step for .* env\.step_timeout_s is 0\.02"):
        roll_out(corridor(), slow, FakeEngine({"0/0/0": say(RIGHT)}), run=virtually)


def test_the_limit_of_an_episode_ends_it_as_truncated_with_its_verdict() -> None:
    """Played again until it is short, a task would teach its short episodes alone."""
    script = {"0/0/0": say(RIGHT, RIGHT, RIGHT)}
    how = setting(
        latency="fixed", latency_median_s=3.0, episode_timeout_s=5.0, truncated_reward=-1.0
    )
    (one,) = roll_out(corridor(env=Weighed, length=9), how, FakeEngine(script), run=virtually)
    assert one.truncated and not one.terminated and one.overlong
    assert len(one.turn_rewards) == 2 and one.turn_flags.tolist() == [0, TurnFlag.LATE]
    assert one.reward == pytest.approx(2 / 9 - 1)
    assert not how.failures.totals()


def test_an_episode_that_ends_by_itself_is_not_late() -> None:
    how = setting(latency="fixed", latency_median_s=6.0, episode_timeout_s=5.0)
    (one,) = roll_out(corridor(length=1), how, FakeEngine({"0/0/0": say(RIGHT)}), run=virtually)
    assert one.terminated and one.success and not one.overlong


@pytest.fixture
def hanging() -> Iterator[None]:
    """What hangs goes on after the test."""
    Hanging.free.clear()
    yield
    Hanging.free.set()


@pytest.mark.parametrize("hangs", ["reset", "step"])
@pytest.mark.usefixtures("hanging")
def test_a_call_that_never_returns_is_named_with_member_and_time(
    hangs: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT)})
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure), caplog.at_level(logging.WARNING):
        roll_out(corridor(env=Hanging, hangs=hangs), setting(step_timeout_s=1.0), engine)
    took_s = time.monotonic() - began
    assert took_s < 30, "nobody waits for its end"
    (record,) = caplog.records
    where = f"group 0: environment {Hanging.__module__}:Hanging, task t, member 0: {hangs} for"
    cause = "TimeoutError: env.step_timeout_s is 1"
    found = re.fullmatch(rf"{where} (\d+\.\d) s: {re.escape(cause)}", record.message)
    assert found, record.message
    assert 1.0 <= float(found[1]) <= took_s + 0.05


def test_a_slow_engine_is_not_the_environments_failure() -> None:
    class Sleepy(FakeEngine):
        async def generate(self, request: Request) -> Generation:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(EpisodeLate, match="member 0: generation of turn 0 for"):
        roll_out(corridor(), setting(episode_timeout_s=1.0), Sleepy({}), run=virtually)


def test_a_slow_explorer_is_not_the_environments_failure() -> None:
    """Who explores by an endpoint samples nothing, and the time is the endpoint's all the same."""

    class Endpoint:
        kind: Literal["learned", "scripted"] = "scripted"

        async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
            await asyncio.Event().wait()
            raise AssertionError

        def close(self) -> None: ...

    async def explore(kind: Kind) -> None:
        asked, how = msgspec.structs.replace(corridor(), kind=kind), setting(episode_timeout_s=1.0)
        await run_members(asked, how, lambda _: Endpoint(), TicketProgress(), lambda _: None)  # type: ignore[arg-type]

    with pytest.raises(EpisodeLate, match="generation of turn 0 for"):
        virtually(explore("explore"))
    with pytest.raises(EnvironmentFailure, match="generation of turn 0 for"):
        virtually(explore("demo"))


def test_a_step_that_holds_up_everybody_is_late_as_well() -> None:
    held = corridor(env=Holding)
    with pytest.raises(EnvironmentFailure, match=r"step for [1-9]\d*\.\d s: TimeoutError"):
        roll_out(held, setting(step_timeout_s=0.5), FakeEngine({"0/0/0": say(RIGHT)}))


class Holding(Corridor):
    """Does not say that it blocks."""

    def step(self, action: str) -> Step:
        time.sleep(1.0)
        return super().step(action)


def test_a_failing_close_is_counted_and_its_episode_stands() -> None:
    how, script = setting(), {"0/0/0": say(RIGHT, RIGHT)}
    (one,) = roll_out(corridor(env=Hanging, closes=False), how, FakeEngine(script))
    assert one.success
    (total,) = how.failures.totals()
    assert total.kind == "environment" and "the door is stuck" in total.error
    broken = corridor(env=Hanging, closes=False, at=0, what="raise")
    with pytest.raises(EnvironmentFailure, match="the floor fell in"):
        roll_out(broken, setting(), FakeEngine({"0/0/0": say(RIGHT)}))


@pytest.mark.usefixtures("hanging")
def test_a_close_that_hangs_holds_up_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "CLOSE_S", 0.05)
    how, done = setting(step_timeout_s=1.0), list[Finished]()

    async def play() -> None:
        engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT)})
        one = corridor(env=Hanging, hangs="close")
        await run_group(one, how, engine, TicketProgress(), done.append)
        assert len(done) == 1 and not how.failures.totals(), "it was not waited for"
        await abandoned_closed(60.0)

    asyncio.run(play())
    (total,) = how.failures.totals()
    assert "env.step_timeout_s is 1" in total.error


class Reusable(Corridor):
    """Is dear to make, and says that `reset` begins anew."""

    isolation = "thread"
    reusable = True
    made = 0
    threads: ClassVar[set[int]] = set()

    def __init__(self, *, length: int = 3, at: int = -1, what: str = "") -> None:
        super().__init__(length=length, at=at, what=what)
        type(self).made += 1

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.threads.add(threading.get_ident())
        return super().reset(task, dynamics_seed)


def test_environments_that_say_so_are_used_again() -> None:
    Reusable.made = Reusable.closed = 0
    Reusable.threads.clear()
    how = setting()

    async def play() -> None:
        async def one(**params: Any) -> None:
            engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT, RIGHT)})
            asked = corridor(env=Reusable, **params)
            await run_group(asked, how, engine, TicketProgress(), lambda _: None)

        for _ in range(3):
            await one()
        assert (Reusable.made, Reusable.closed, len(Reusable.threads)) == (1, 0, 1)
        await one(length=1)
        assert Reusable.made == 2, "other parameters need another one"
        with pytest.raises(EnvironmentFailure):
            await one(at=0, what="raise")
        await abandoned_closed(60.0)
        assert (Reusable.made, Reusable.closed) == (3, 1), "one that failed is not used again"
        how.idle.close()
        await abandoned_closed(60.0)
        assert Reusable.closed == 3

    asyncio.run(play())


@pytest.mark.process
def test_a_process_ends_though_an_environment_hangs_in_its_thread() -> None:
    program = """
import threading
from rollouts import RIGHT, FakeEngine, Hanging, corridor, roll_out, say, setting

Hanging.call = lambda self, name: name == "step" and threading.Event().wait()
how = setting(step_timeout_s=0.1)
roll_out(corridor(env=Hanging), how, FakeEngine({"0/0/0": say(RIGHT)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2] / "support",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "env.step_timeout_s is 0.1" in done.stderr


def test_blocking_environment_stops_nobody_else() -> None:
    """The loop goes on, and ends the step that hangs in its thread."""
    Stuck.begun.clear()
    Stuck.free.clear()
    engine = FakeEngine({"0/0/0": say(RIGHT)})
    done = list[Finished]()

    async def play() -> None:
        how = setting(step_timeout_s=90.0, episode_timeout_s=90.0)
        ticket = corridor(env=Stuck, length=1)
        task = asyncio.create_task(run_group(ticket, how, engine, TicketProgress(), done.append))
        while not Stuck.begun.is_set():
            await asyncio.sleep(0.001)
        Stuck.free.set()
        await task

    asyncio.run(play())
    assert len(done) == 1 and done[0].trajectory.success


class Undeclared:
    """Its class says nothing of whether it blocks, and its step does."""

    instructions = "wait"
    free = threading.Event()

    def reset(self, task: Task, dynamics_seed: int) -> str:
        return "here"

    def step(self, action: str) -> Step:
        self.free.wait(60)
        return Step("", 0.0, True, False, Info())

    def close(self) -> None: ...


def test_an_environment_that_says_nothing_of_blocking_stops_nobody_else() -> None:
    Undeclared.free.clear()
    how = setting(step_timeout_s=0.2)
    try:
        with pytest.raises(EnvironmentFailure, match=r"step for .* env\.step_timeout_s is 0\.2"):
            roll_out(corridor(env=Undeclared), how, FakeEngine({"0/0/0": say(RIGHT)}))
    finally:
        Undeclared.free.set()
    (total,) = how.failures.totals()
    assert total.name == f"{__name__}:Undeclared" and total.count == 1
    assert total.error == "step: TimeoutError: env.step_timeout_s is 0.2"


class Awaited:
    """Walks like a corridor, on the loop; one of its calls may take for ever, or fail."""

    instructions = "walk"
    log: ClassVar[list[str]] = []

    def __init__(self, *, hangs: str = "", length: int = 2) -> None:
        self.hangs, self.length, self.position = hangs, length, 0

    async def call(self, name: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        await asyncio.sleep(3600 if self.hangs == name else 0.001)
        self.log.append(name)

    async def reset(self, task: Task, dynamics_seed: int) -> str:
        await self.call("reset")
        return "at 0"

    async def step(self, action: str) -> Step:
        await self.call("step")
        self.position += 1
        done = self.position == self.length
        return Step(f"at {self.position}", float(done), done, False, Info(success=done))

    async def close(self) -> None:
        await self.call("close")


def test_an_async_environment_is_awaited() -> None:
    Awaited.log.clear()
    how = setting()
    (trajectory,) = roll_out(corridor(env=Awaited), how, FakeEngine({"0/0/0": say(RIGHT, RIGHT)}))
    assert trajectory.success and trajectory.reward == 1.0
    assert Awaited.log == ["reset", "step", "step", "close"]


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_async_environment_that_hangs_is_late_and_is_closed(call: str) -> None:
    Awaited.log.clear()
    how = setting(step_timeout_s=0.2)

    async def play() -> None:
        engine = FakeEngine({"0/0/0": say(RIGHT)})
        ticket = corridor(env=Awaited, hangs=call)
        with pytest.raises(EnvironmentFailure, match=f"{call} for"):
            await run_group(ticket, how, engine, TicketProgress(), lambda _: None)
        async with asyncio.timeout(30):
            while "close" not in Awaited.log:
                await asyncio.sleep(0.01)

    asyncio.run(play())


class Together(Corridor):
    """Every call returns once all members are in one, and says which thread it was in."""

    isolation = "thread"
    all_there: ClassVar = threading.Barrier(64)
    threads: ClassVar[dict[str, set[int]]] = {}

    def __init__(self, *, name: str = "") -> None:
        super().__init__(length=2)
        self.note("init")

    def note(self, call: str) -> None:
        self.threads.setdefault(call, set()).add(threading.get_ident())
        self.all_there.wait(30)

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.note("reset")
        return super().reset(task, dynamics_seed)

    def step(self, action: str) -> Step:
        self.note("step")
        return super().step(action)

    def actions(self) -> list[str]:
        self.note("actions")
        return ["left", "right"]

    def solve(self) -> list[str]:
        self.note("solve")
        return ["right"]

    def close(self) -> None:
        self.note("close")
        super().close()


@pytest.mark.parametrize("expert", [0.0, 1.0])
def test_blocking_environments_do_not_wait_for_each_other(expert: float) -> None:
    """Many more than asyncio has threads, none of which gets on before all are there."""
    Together.threads.clear()
    Together.all_there.reset()
    done: list[Trajectory] = []

    def deliver(finished: Finished) -> None:
        done.append(finished.trajectory)

    how = setting(step_timeout_s=40.0, episode_timeout_s=200.0, max_turns=2)
    many = corridor(members=64, env=Together)
    asyncio.run(demonstrate_group(many, how, expert, TicketProgress(), deliver))
    assert len(done) == 64
    script = "solve" if expert else "actions"
    assert set(Together.threads) == {"init", "reset", "step", "close", script}
    for threads in Together.threads.values():
        assert threading.get_ident() not in threads and len(threads) == 64


def test_environments_are_closed_however_the_episode_ends() -> None:
    Corridor.closed = 0
    engine = FakeEngine({"0/0/0": say(*[RIGHT] * 3)})
    roll_out(corridor(), setting(), engine)
    with pytest.raises(EnvironmentFailure):
        roll_out(corridor(at=0, what="raise"), setting(), FakeEngine({"0/0/0": say(RIGHT)}))
    assert Corridor.closed == 2


def test_latency_is_keyed_and_counted_as_environment_time() -> None:
    def env_s(seed: int) -> list[float]:
        script = {f"0/{member}/0": say(RIGHT) for member in range(2)}
        how = setting(latency="lognormal", latency_median_s=0.02, latency_sigma=1.0, seed=seed)
        done = roll_out(corridor(members=2, length=1), how, FakeEngine(script), run=virtually)
        assert all(one.timing["total_s"] >= one.timing["env_s"] > 0 for one in done)
        return [one.member for one in done]  # the one with the smaller draw comes first

    orders = [env_s(seed) for seed in range(6)]
    assert [0, 1] in orders and [1, 0] in orders
    assert env_s(0) == orders[0]


def test_draws_have_their_own_key_and_progress_counts_tokens_and_steps() -> None:
    script = {f"0/{member}/0": say(RIGHT, RIGHT) for member in range(4)}
    engine = FakeEngine(script)
    progress = TicketProgress()
    done = roll_out(corridor(members=4, length=2), setting(), engine, progress)
    assert len({request.seed for request in engine.requests}) == 8
    assert progress.count == sum(one.action_tokens for one in done) + 8


class Mapped(Corridor):
    """A corridor that says where one is and how far one has come."""

    def state(self) -> str:
        return f"cell {self.position}"

    def score(self) -> float:
        return float(self.position)


def test_a_guided_member_sees_experience_and_stripped_it_is_the_others_prompt() -> None:
    both = msgspec.structs.replace(corridor(members=2, env=Mapped), guided=[1])
    script = {f"0/{member}/0": say(RIGHT, RIGHT, RIGHT) for member in (0, 1)}
    guide = Adviser()
    plain, guided = [
        finished.trajectory for finished in play(both, setting(), FakeEngine(script), guide)
    ]
    assert guide.asked == ["at 0"]
    assert (plain.experience_ids, guided.experience_ids) == ([], [7, 9])
    (unguided,), (shown,) = plain.sequences, guided.sequences
    assert not unguided.guided and shown.guided
    assert stripped(shown).tokens.tolist() == unguided.tokens.tolist()
    assert stripped(shown).roles.tolist() == unguided.roles.tolist()
    experience = shown.tokens[shown.roles == Role.EXPERIENCE].tolist()
    assert experience == CHAT.experience("go right <|im_end|>")
    first = int((shown.roles == Role.EXPERIENCE).argmax())
    before = TOKENIZER.decode(shown.tokens[:first].tolist())
    assert before.endswith("<|im_start|>user\n")
    assert TOKENIZER.decode(shown.tokens[first + len(experience) :].tolist()).startswith("at 0")


@pytest.mark.parametrize("text", ["", "word " * 2000])
def test_experience_that_is_not_there_or_too_long_leaves_a_member_unguided(text: str) -> None:
    one = msgspec.structs.replace(corridor(), guided=[0])
    script = {"0/0/0": say(RIGHT, RIGHT, RIGHT)}
    adviser, how = Adviser(text), setting(max_length=600)
    (finished,) = play(one, how, FakeEngine(script), adviser)
    assert not finished.trajectory.sequences[0].guided
    assert finished.trajectory.experience_ids == []
    assert adviser.unguided == bool(text), "there was something to guide with"
    assert ["policy.max_length" in total.error for total in how.failures.totals()] == (
        [True] if text else []
    )


def test_what_is_wanted_of_an_episode_is_kept_in_words_and_scores() -> None:
    script = {"0/0/0": say(RIGHT, "nonsense", " right</answer>", RIGHT)}
    one = corridor(env=Mapped)
    (finished,) = play(one, setting(recorded=True, scored=1.0), FakeEngine(script), Adviser())
    assert finished.query == "at 0"
    assert finished.scores == [0.0, 1.0, 1.0, 2.0, 3.0]
    assert finished.transcript.turns == [
        Turn(observation="at 0", state="cell 0", action="right", text=RIGHT),
        Turn(observation="at 1", state="cell 1", action="", text="nonsense"),
        Turn(observation="at 1", state="cell 1", action="right", text=RIGHT),
        Turn(observation="at 2", state="cell 2", action="right", text=RIGHT),
    ]
    assert finished.transcript.success and finished.transcript.trajectory_id == "0/0/0"
    script = {"0/0/0": say(RIGHT, RIGHT, RIGHT)}
    (bare,) = play(one, setting(), FakeEngine(script), Adviser())
    assert bare.transcript.turns == [] and bare.scores == []


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ([], 0.0),
        (["judge.kind=self"], 0.02),
        (["judge.kind=rule"], 1.0),
        (["judge.kind=own_functions:praise"], 1.0),
    ],
)
def test_scores_are_read_wherever_somebodys_own_function_may_use_them(
    changes: list[str], share: float
) -> None:
    config = load(None, ["stages.0.steps=1", *changes])
    assert setting_of(config, CHAT, "actor-0", 0).scored == share


class SlowClose(Corridor):
    """Blocks in `close` until `free` is set."""

    isolation = "thread"
    free = threading.Event()

    def close(self) -> None:
        self.free.wait(10.0)
        super().close()


def test_an_abandoned_environment_is_waited_for_and_not_for_ever() -> None:
    async def play() -> None:
        world = TimedEnvironment(corridor(env=SlowClose), 0, 60.0, TicketProgress())
        await world.open()
        world.abandon()
        await abandoned_closed(0.05)
        assert SlowClose.closed == 0
        SlowClose.free.set()
        await abandoned_closed(10.0)
        assert SlowClose.closed == 1

    SlowClose.closed = 0
    SlowClose.free.clear()
    asyncio.run(play())


class Talkative(Corridor):
    """Counts its steps, and says more than anybody wants to read."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        info = step.info._replace(metrics={"steps": self.steps, f"at_{self.position}": 0.5})
        return step._replace(observation="the corridor is long " * 40 + "here", info=info)


def test_numbers_of_the_environment_travel_and_the_last_of_a_name_counts() -> None:
    engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT, RIGHT)})
    (trajectory,) = roll_out(corridor(env=Talkative), setting(), engine)
    expected = {"steps": 3.0, "at_1": 0.5, "at_2": 0.5, "at_3": 0.5}
    assert unwrap(wrap(trajectory)).metrics == expected


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        (3, "metrics of the Info must be a mapping"),
        ({"a b": 1.0}, "the name 'a b'"),
        ({1: 1.0}, "the name 1"),
        ({"far": "1"}, "far in the metrics of the Info must be a number"),
        ({"far": math.inf}, "far in the metrics of the Info must be finite"),
        ({f"n{number}": 1.0 for number in range(33)}, "more than 32 names"),
    ],
)
def test_numbers_that_are_none_are_the_environments_failure(metrics: Any, named: str) -> None:
    class Measured(Corridor):
        def step(self, action: str) -> Step:
            return Step("", 0.0, False, False, Info(metrics=metrics))

    globals()["Measured"] = Measured
    Measured.__module__ = __name__
    with pytest.raises(EnvironmentFailure, match=named):
        roll_out(corridor(env=Measured), setting(), FakeEngine({"0/0/0": say(RIGHT)}))


def test_a_long_observation_is_shortened_and_the_policy_reads_how_much_is_left_out() -> None:
    engine = FakeEngine({"0/0/0": say(RIGHT, RIGHT, RIGHT)})
    how = setting(max_observation_tokens=64)
    (trajectory,) = roll_out(corridor(env=Talkative), how, engine)
    assert trajectory.turn_flags.tolist() == [TurnFlag.OBSERVATION_CUT] * 3
    (sequence,) = trajectory.sequences
    assert engine.requests[-1].tokens == sequence.tokens[: len(engine.requests[-1].tokens)].tolist()
    read = TOKENIZER.decode(sequence.tokens[sequence.roles == Role.OBSERVATION].tolist())
    assert read.count("tokens left out") == 2 and read.count("here") == 2
    (whole,) = roll_out(corridor(env=Talkative), setting(), FakeEngine(engine_script()))
    assert not whole.turn_flags.any() and len(whole.sequences[0]) > len(sequence)


def engine_script() -> dict[str, list[list[int]]]:
    return {"0/0/0": say(RIGHT, RIGHT, RIGHT)}


class Cutting(FakeEngine):
    """Reaches its limit in the second turn."""

    async def generate(self, request: Request) -> Generation:
        generation = await super().generate(request)
        generation.finish = "length" if len(self.requests) == 2 else "stop"
        return generation


def test_a_turn_that_reached_its_limit_is_marked_and_one_that_ended_itself_is_not() -> None:
    engine = Cutting({"0/0/0": say(RIGHT, RIGHT, RIGHT)})
    (trajectory,) = roll_out(corridor(), setting(), engine)
    assert trajectory.turn_flags.tolist() == [0, TurnFlag.CUT, 0]
    assert not trajectory.overlong, "its end was its own"
    (shorter,) = roll_out(corridor(), setting(max_turns=2), Cutting(engine_script()))
    assert shorter.overlong and shorter.truncated


def test_an_episode_without_room_for_a_next_turn_is_full_and_one_at_its_last_turn_is_not() -> None:
    (first,) = roll_out(corridor(), setting(max_turns=1), FakeEngine(engine_script()))
    assert not first.overlong and first.truncated
    length = len(first.sequences[0]) + 24
    (trajectory,) = roll_out(corridor(), setting(max_length=length), FakeEngine(engine_script()))
    assert trajectory.turn_flags.tolist()[-1] == TurnFlag.FULL
    assert trajectory.overlong and trajectory.truncated


def test_a_demonstration_has_no_limit_of_tokens() -> None:
    done: list[Finished] = []
    asyncio.run(
        demonstrate_group(corridor(env=Hanging), setting(), 0.0, TicketProgress(), done.append)
    )
    assert not any(one.trajectory.turn_flags.any() for one in done)


def test_the_log_has_the_traceback_of_each_kind_of_failure_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    how = setting()
    for _ in range(2):
        with pytest.raises(EnvironmentFailure):
            roll_out(corridor(at=0, what="raise"), how, FakeEngine({"0/0/0": say(RIGHT)}))
    traced = [record for record in caplog.records if record.exc_info]
    assert len(traced) == 1 and len(caplog.records) == 2
    assert "rollouts.py" in logging.Formatter().format(traced[0])
