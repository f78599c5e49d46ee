"""Bookings: conventions that belong to the service, refusals that say nothing, exact values."""

import json
from datetime import date
from typing import Any

import pytest
from budget import examples
from demonstrations import demonstrated
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import setting, ticket

from actors.envs.base import (
    Described,
    EnvError,
    Measurable,
    Rewindable,
    Scored,
    Tooled,
    make_env,
)
from actors.envs.bookings.bookings_env import Bookings
from actors.envs.bookings.services import (
    CONVENTIONS,
    OFFERS,
    BookingRequest,
    accepted,
    convention_of,
    draw_request,
    written,
)
from actors.formats.tool_calls import ToolCall, canonical
from actors.judge.labels import by_progress
from evolver_async.env import Info
from evolver_async.schema import Task
from evolver_async.splits import split_of

REQUESTS = st.builds(
    draw_request, st.sampled_from(["train", "test"]), st.integers(0, (1 << 63) - 1)
)


def task(number: int = 0, split: str = "train") -> Task:
    return Task(task_id=f"bookings/{split}/{number}", env="bookings", split=split, map_seed=number)


def begun(number: int = 0, split: str = "train", **params: Any) -> Bookings:
    env = Bookings(**params)
    env.reset(task(number, split), 0)
    return env


def refused_calls(env: Bookings) -> list[str]:
    return [call for call in env.actions()[2:] if call != env.solve()[0]]


def test_the_bookings_have_their_abilities() -> None:
    env = make_env("bookings", {})
    for ability in (Described, Rewindable, Scored, Tooled, Measurable):
        assert isinstance(env, ability)
    assert len(OFFERS) >= 8 and len({convention_of(0, service) for service in OFFERS}) >= 8


@settings(max_examples=examples(20), deadline=None)
@given(REQUESTS)
def test_a_call_is_accepted_in_the_one_convention_in_which_it_is_written(
    request: BookingRequest,
) -> None:
    calls = {convention: written(request, convention) for convention in CONVENTIONS}
    for convention in CONVENTIONS[:: len(CONVENTIONS) // 6]:
        read = [other for other, call in calls.items() if accepted(call, convention)]
        assert read == [convention]


def test_a_request_is_written_in_words_and_in_conventions() -> None:
    request = BookingRequest("old_library", 7, date(2027, 5, 3), 90)
    assert (
        request.text
        == "Book a room in the Old Library for customer 7 on 3 May 2027 for 90 minutes."
    )
    calls = [written(request, convention) for convention in CONVENTIONS]
    assert {call.customer for call in calls} == {"7", "C-0007", "customer/7"}
    assert {call.date for call in calls} == {"2027-05-03", "03.05.2027", "05/03/2027", "20270503"}
    assert {call.duration for call in calls} == {90, 1.5, 5400}


def test_requests_are_split_by_content_and_all_services_are_in_every_split() -> None:
    for split in ("train", "test"):
        requests = [draw_request(split, number) for number in range(300)]
        assert all(split_of(request.text) == split for request in requests)
        assert len(set(requests)) == 300
        assert {request.service for request in requests} == OFFERS.keys()
    with pytest.raises(ValueError, match=r"^split: no request belongs to 'dev'"):
        begun(split="dev")


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.integers(0, 5))
def test_the_solution_books_what_was_asked_for(number: int, test: bool, secret: int) -> None:
    env = begun(number, "test" if test else "train", secret=secret)
    (call,) = env.solve()
    assert call in env.actions() and len(set(env.actions())) == len(CONVENTIONS) + 2
    step = env.step(call)
    assert (step.reward, step.terminated, step.info.success) == (1.0, True, True)
    assert env.score() == 1.0


def test_a_convention_belongs_to_its_service_in_all_tasks() -> None:
    formats: dict[str, set[str]] = {}
    for number in range(200):
        env = begun(number)
        call = json.loads(env.solve()[0])["arguments"]
        marks = "".join("9" if mark.isdigit() else mark for mark in call["date"])
        formats.setdefault(env.state(), set()).add(marks)
    assert formats.keys() == OFFERS.keys() and all(len(found) == 1 for found in formats.values())
    assert len(set.union(*formats.values())) >= 3


def test_a_refusal_is_the_same_for_every_wrong_convention_and_the_last_one_ends() -> None:
    env = begun(attempts=2)
    seen, calls = set(), refused_calls(env)
    for call in calls:
        env.reset(task(), 0)
        first, second = env.step(call), env.step(call)
        assert not first.terminated and first.info.valid and first.info.tool_error
        assert second.terminated and not second.info.success and second.reward == 0.0
        seen |= {first.observation, second.observation}
    assert seen == {f"error: {env.state()} refused the call"}


def test_the_score_is_the_share_of_conventions_that_the_best_call_met() -> None:
    env = begun(attempts=35)
    scores = {}
    for call in refused_calls(env):
        env.reset(task(), 0)
        env.step(call)
        scores[call] = env.score()
    thirds = sorted(scores.values())
    # Of 3 * 4 * 3 conventions: none right, one, two.
    counts = [thirds.count(number / 3) for number in range(3)]
    assert counts == [2 * 3 * 2, 3 * 2 + 2 * 2 + 2 * 3, 2 + 3 + 2]
    worse, better = (next(c for c in scores if scores[c] == n / 3) for n in (1, 2))
    env.reset(task(), 0)
    path = [env.score()]
    for call in (worse, worse, better, worse, env.solve()[0]):
        env.step(call)
        path.append(env.score())
    assert by_progress(path) == [1, -1, 1, -1, 1]


def test_another_booking_in_the_right_convention_ends_the_task_without_success() -> None:
    env = begun()
    other = next(
        n for n in range(100) if begun(n).state() == env.state() and begun(n).right != env.right
    )
    step = env.step(begun(other).solve()[0])
    assert (step.terminated, step.reward, step.info.success) == (True, 0.0, False)
    assert env.score() < 1.0


def test_unreadable_calls_cost_nothing() -> None:
    env = begun(attempts=1)
    right = json.loads(env.solve()[0])["arguments"]
    for call in (
        "book a table",
        canonical("cancel", right),
        canonical("list_services", {"all": True}),
        canonical("look_up", {}),
        canonical("look_up", {"service": "moon"}),
        canonical("book", right | {"service": "moon"}),
        canonical("book", right | {"duration": "90"}),
        canonical("book", {"service": env.state()}),
        canonical("book", right | {"table": 3}),
    ):
        step = env.step(call)
        assert step.observation.startswith("error: ") and not step.terminated
        assert not step.info.valid and step.info.tool_error
    for call in env.actions()[:2]:
        step = env.step(call)
        assert env.state() in step.observation and step.info == Info()
    assert env.step(env.solve()[0]).info.success


@pytest.mark.parametrize("attempts, turns", [(1, 1), (1, 3), (2, 3), (3, 2)])
def test_exact_agrees_with_all_ways(attempts: int, turns: int) -> None:
    env = begun(attempts=attempts)

    def chance(left: int) -> float:
        """The chance of success from here, by trying one action of each kind."""
        kinds = ((env.actions()[0], 2), (refused_calls(env)[0], 35), (env.solve()[0], 1))
        before, total = env.snapshot(), 0.0
        for action, count in kinds if left else ():
            step = env.step(action)
            won = float(step.info.success) if step.terminated else chance(left - 1)
            total += won * count / 38
            env.restore(before)
        return total

    assert env.exact(turns).random == pytest.approx(chance(turns))
    assert env.exact(turns).optimal == 1.0 and env.exact(0).optimal == 0.0


def test_demonstrations_by_tool_calls_succeed() -> None:
    how = setting(format=ToolCall(think=False, actions_per_turn=1), max_turns=5, max_length=4096)
    for trajectory in demonstrated(ticket(members=3, env="bookings", max_tokens=200), how, 1.0):
        assert trajectory.success and trajectory.reward == 1.0


@pytest.mark.parametrize("attempts", [0, 36])
def test_attempts_out_of_range_are_named(attempts: int) -> None:
    with pytest.raises(EnvError, match=r"^env\.params\.attempts:"):
        make_env("bookings", {"attempts": attempts})
