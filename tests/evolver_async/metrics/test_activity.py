"""Every second of a process belongs to one activity, and the shares of a process add up to 1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.metrics.activity import (
    ACTOR,
    ACTOR_LEVELS,
    AWAITING,
    BLOCKING,
    DELIVERING,
    GENERATING,
    GENERATIONS,
    JUDGING,
    LEASING,
    LOADING,
    OTHER,
    PLAYING,
    STEPPING,
    TOTALS,
    ActivityClock,
    ActorShares,
    shares,
)
from evolver_async.metrics.writer import Timers


class Time:
    """Clock that a test moves; `busy_s` is that of an engine."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy_s = 7.0

    def __call__(self) -> float:
        return self.now

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.busy_s += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> ActivityClock:
    made = ActivityClock(ACTOR_LEVELS, busy=lambda: time.busy_s)
    made.begin(time)
    return made


def nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if value}


def test_every_second_has_one_activity(clock: ActivityClock, time: Time) -> None:
    time.now += 1  # before the first ticket is asked for
    with clock.during(LEASING):
        time.now += 2
        with clock.during(AWAITING):
            time.now += 4
        with clock.during(PLAYING), clock.during(STEPPING):
            time.now += 8  # an environment, while a ticket is asked for
            with clock.during(GENERATING):
                time.compute(16)
                time.now += 32  # the loop's own work between steps
                with clock.during(BLOCKING):
                    time.now += 64
                with clock.during(LOADING):
                    time.now += 128
        with clock.during(DELIVERING):
            time.now += 256
        with clock.during(DELIVERING), clock.during(JUDGING):
            time.now += 512
    assert nonzero(clock.settle()) == {
        "other": 1,
        "tickets": 2,
        "weights": 4 + 128,
        "environment": 8 + 64,
        "engine": 16,
        "rollout": 32,
        "push": 256,
        "judge": 512,
    }
    assert set(clock.seconds) == set(ACTOR)


def test_episodes_side_by_side_do_not_add_up(clock: ActivityClock, time: Time) -> None:
    first, second = clock.during(GENERATING), clock.during(GENERATING)
    first.__enter__()
    second.__enter__()
    time.compute(3)
    first.__exit__(None, None, None)
    time.compute(1)
    second.__exit__(None, None, None)
    time.now += 1
    assert nonzero(clock.totals()) == {"engine": 4, "other": 1, GENERATIONS: 3 + 3 + 1}


def test_a_clock_that_has_not_begun_measures_nothing(time: Time) -> None:
    clock = ActivityClock(ACTOR_LEVELS)
    with clock.during(PLAYING):
        time.now += 5
    assert not any(clock.settle().values())


def test_time_can_be_left_out_and_a_drain_cuts_a_block(clock: ActivityClock, time: Time) -> None:
    with clock.during(PLAYING):
        time.now += 2
        assert nonzero(clock.drain()) == {"rollout": 2}
        time.now += 4
        clock.skip()
        time.now += 1
    assert nonzero(clock.drain()) == {"rollout": 1}


@given(st.lists(st.tuples(st.sampled_from([*ACTOR_LEVELS]), st.integers(0, 100), st.booleans())))
def test_the_seconds_add_up_to_the_wall_time(events: list[tuple[str, int, bool]]) -> None:
    time = Time()
    clock = ActivityClock(ACTOR_LEVELS, busy=lambda: time.busy_s)
    clock.begin(time)
    held = []
    for condition, passed, ends in events:
        if ends and held:
            held.pop(0).__exit__(None, None, None)
        else:
            held.append(clock.during(condition))
            held[-1].__enter__()
        time.now += passed
        time.busy_s += passed // 3
    assert sum(clock.settle().values()) == time.now - 100.0


def test_the_phases_of_the_learner_nest() -> None:
    time, timers = Time(), Timers()
    timers.clock.begin(time)
    with timers("wait"):
        time.now += 1
    with timers("train"):
        time.now += 2
        with timers("forward"):
            time.now += 4
        time.now += 1
    with timers("report"):
        row = timers.shares()
    assert row["throughput/learner/seconds"] == 8
    found = {name.rpartition("/")[2]: value for name, value in row.items()}
    assert nonzero(found) == {"seconds": 8, "data": 1 / 8, "forward": 4 / 8, OTHER: 3 / 8}


def test_shares_of_no_time_are_left_out() -> None:
    assert shares("actor", {"engine": 0.0}) == {}


def test_the_shares_of_actors_are_those_since_the_row_before() -> None:
    actors = ActorShares()

    def row(engine: float, tickets: float, generations: float) -> dict[str, float]:
        totals = {"engine": engine, "tickets": tickets, GENERATIONS: generations}
        named = {f"{TOTALS}{name}": value for name, value in totals.items()}
        return actors.take_in({"buffer/ready": 1.0, **named})

    assert row(10, 10, 20) == {"buffer/ready": 1.0}, "the first totals are older than this row"
    assert row(13, 11, 28) == {
        "buffer/ready": 1.0,
        "throughput/actor/seconds": 4,
        "throughput/actor/engine": 0.75,
        "throughput/actor/tickets": 0.25,
        "throughput/actor/generations": 2,
    }
    assert row(13, 11, 28) == {"buffer/ready": 1.0}, "no actor has reported since"
    assert row(2, 0, 0) == {"buffer/ready": 1.0}, "the buffer was restarted"
    assert row(3, 0, 0)["throughput/actor/engine"] == 1
