"""The table of where the seconds go, and the sentence that says what to change."""

import dataclasses
from typing import Any

import pytest

from evolver_async.config import BufferConfig, Config, StageConfig
from evolver_async.metrics.activity import ACTOR, LEARNER
from evolver_async.runs.watch.throughput import (
    SLOWS,
    Setup,
    TimeBudget,
    advice,
    line,
    table,
    time_lines,
)

SETUP = Setup(slots=64, concurrent=128, staleness=4)
CONFIG = Config(stages=[StageConfig(steps=1)])


def row(actor_s: float, learner_s: float, **shares: float) -> dict[str, Any]:
    """A row whose actors play, and whose learner computes, for the rest of their time."""
    tickets, data = shares.get("tickets", 0.0), shares.get("data", 0.0)
    made: dict[str, Any] = {"throughput/learner/seconds": learner_s}
    made |= {"throughput/learner/data": data, "throughput/learner/forward": 1 - data}
    if actor_s:
        made |= {"throughput/actor/seconds": actor_s, "throughput/actor/generations": 8.0}
        made |= {"throughput/actor/tickets": tickets, "throughput/actor/engine": 1 - tickets}
    return made


def budget(**changes: Any) -> TimeBudget:
    """Shares of both roles; those that are not given share the rest in the engine and forward."""
    actor = dict.fromkeys(ACTOR, 0.0) | changes.pop("actor", {})
    learner = dict.fromkeys(LEARNER, 0.0) | changes.pop("learner", {})
    actor["engine"] += 1 - sum(actor.values())
    learner["forward"] += 1 - sum(learner.values())
    return TimeBudget(actor, learner, 20.0, 10.0, **changes)


def test_rows_count_by_their_seconds_from_the_first_report_of_the_actors_on() -> None:
    rows = [row(0.0, 50.0, data=1.0), row(30.0, 10.0, tickets=0.5), row(10.0, 30.0, data=0.4)]
    found = TimeBudget.of(rows)
    assert (found.actor_s, found.learner_s, found.generations) == (40.0, 40.0, 8.0)
    assert found.actor["tickets"] == pytest.approx(15 / 40)
    assert found.learner["data"] == pytest.approx(12 / 40)
    assert sum(found.actor.values()) == pytest.approx(1.0)
    assert sum(found.learner.values()) == pytest.approx(1.0)


def test_the_table_has_both_roles_the_largest_share_first() -> None:
    parts = {"engine": 0.25, "tickets": 0.25, "push": 0.0, "other": 0.5}
    found = TimeBudget(parts, {"forward": 0.875, "data": 0.125}, 20.0, 10.0)
    assert table(found) == [
        "actors          20.0 s    learner         10.0 s",
        "engine         25.0%      forward        87.5%",
        "tickets        25.0%      data           12.5%",
        "other          50.0%",
    ]


def test_a_run_without_figures_has_neither_table_nor_advice() -> None:
    assert time_lines([{"step": 1, "time/wait_s": 1.0}], CONFIG) == []
    assert time_lines([{"throughput/actor/seconds": None}], CONFIG) == []
    assert advice(TimeBudget.of([]), SETUP) == "" and line({}) == ""


def test_the_advice_is_of_the_stage_of_the_newest_step() -> None:
    """A stage with larger groups fills the slots; one with smaller groups leaves them empty."""
    larger = StageConfig(steps=1, override={"rollout": {"group_size": 32}})
    config = Config(stages=[StageConfig(kind="sft", steps=1), larger, StageConfig(steps=1)])
    config.rollout.group_size, config.actors.groups, config.engine.slots = 2, 4, 64
    assert [setup.concurrent for setup in Setup.by_stage(config)] == [32, 128, 32]
    smaller = StageConfig(kind="sft", steps=1, override={"rollout": {"group_size": 1}})
    assert [one.concurrent for one in Setup.by_stage(Config(stages=[smaller]))] == [64]
    held_up = row(10.0, 10.0, data=0.5) | {"throughput/actor/generations": 20.0}
    said = [time_lines([held_up | {"stage": float(stage)}], config)[-1] for stage in (0, 1)]
    assert ["actors.groups" in one for one in said] == [True, False]
    assert "actors.count" in said[1]


def test_both_waiting_asks_for_staleness() -> None:
    found = advice(budget(actor={"tickets": 0.4}, learner={"data": 0.3}), SETUP)
    assert "buffer.max_staleness, now 4" in found and "30%" in found and "40%" in found


def test_both_waiting_asks_for_ready_groups_where_they_are_bounded() -> None:
    """Actors stop for buffer.max_ready long before buffer.max_staleness is reached."""
    config = Config(buffer=BufferConfig(max_ready=1.5), stages=[StageConfig(steps=1)])
    waiting = row(1.0, 1.0, tickets=0.4, data=0.3) | {"stage": 0.0}
    said = time_lines([waiting], config)[-1]
    assert "buffer.max_ready, now 1.5" in said and "max_staleness" not in said


@pytest.mark.parametrize(
    ("actor", "generations", "setup", "change"),
    [
        ({}, 60.0, {}, "engine.slots"),
        ({}, 60.0, {"concurrent": 64}, "actors.count"),
        ({}, 20.0, {"concurrent": 32}, "actors.groups"),
        ({}, 20.0, {}, "actors.count"),
        ({}, 0.0, {"concurrent": 32}, "actors.count"),
        ({"environment": 0.6}, 20.0, {}, "actors.groups"),
        ({"rollout": 0.6}, 20.0, {}, "actors.count"),
        ({"weights": 0.6}, 20.0, {}, "buffer.max_staleness"),
        ({"other": 0.6}, 20.0, {}, "endpoint"),
    ],
)
def test_a_waiting_learner_asks_for_what_slows_the_actors(
    actor: dict[str, float], generations: float, setup: dict[str, int], change: str
) -> None:
    found = budget(actor=actor | {"tickets": 0.1}, learner={"data": 0.5}, generations=generations)
    said = advice(found, dataclasses.replace(SETUP, **setup))
    assert said.startswith("The actors hold up the learner, which waits 50%") and change in said


@pytest.mark.parametrize("slowest", ["engine", "rollout"])
def test_where_all_processors_are_in_use_more_actors_are_no_advice(slowest: str) -> None:
    actor = {slowest: 0.9} if slowest != "engine" else {}
    found = budget(actor=actor, learner={"data": 0.5}, busy=0.97, own=0.9)
    said = advice(found, SETUP)
    assert said.startswith(
        f"The actors hold up the learner, which waits 50% of its time; {slowest}"
    )
    assert "97% in use" in said and "actors.count" not in said
    assert "actors.count" in advice(dataclasses.replace(found, busy=0.5, own=0.4), SETUP)
    balanced = budget(learner={"data": 0.1}, busy=0.95, own=0.9)
    assert "95% in use" in advice(balanced, SETUP) and "actors.count" not in advice(balanced, SETUP)
    others = advice(dataclasses.replace(found, own=0.2), SETUP)
    assert "20% by this run" in others and "other hosts" in others


@pytest.mark.parametrize(
    ("slowed", "found", "change"),
    [
        ("learner", {"actor": {"tickets": 0.7}, "learner": {"data": 0.05}}, "fewer actors"),
        ("engine", {"actor": {"tickets": 0.02}, "learner": {"data": 0.8}}, "engine.slots"),
        (
            "environment that sleeps, beside other jobs",
            {
                "actor": {"environment": 0.92},
                "learner": {"data": 0.8},
                "busy": 1.0,
                "own": 0.1,
            },
            "actors.groups",
        ),
        (
            "environment that computes",
            {"actor": {"environment": 0.92}, "learner": {"data": 0.8}, "busy": 1.0, "own": 0.95},
            "more processors",
        ),
        (
            "disk of the journal",
            {
                "actor": {"push": 0.55, "tickets": 0.3},
                "learner": {"report": 0.5, "data": 0.4},
                "sync_s": 0.7,
            },
            "faster disk",
        ),
        (
            "disk, seen by the learner alone",
            {"actor": {"push": 0.1}, "learner": {"report": 0.5}, "sync_s": 0.7},
            "faster disk",
        ),
        (
            "network to the buffer",
            {
                "actor": {"push": 0.55, "tickets": 0.3},
                "learner": {"report": 0.1, "data": 0.6},
                "sync_s": 0.004,
            },
            "network",
        ),
        (
            "network of the weights",
            {"actor": {"weights": 0.6}, "learner": {"data": 0.5}},
            "faster network",
        ),
        ("judge", {"actor": {"judge": 0.6}, "learner": {"data": 0.5}}, "faster judge"),
        ("checkpoint", {"actor": {"tickets": 0.6}, "learner": {"checkpoint": 0.5}}, "every"),
    ],
)
def test_the_advice_names_what_alone_is_slow(
    slowed: str, found: dict[str, Any], change: str
) -> None:
    said = advice(budget(generations=60.0, **found), SETUP)
    assert change in said and "max_staleness, now" not in said, slowed


def test_a_learner_that_holds_up_the_actors_is_named_whatever_their_pushes_take() -> None:
    said = advice(budget(actor={"tickets": 0.4, "push": 0.3}, learner={"data": 0.05}), SETUP)
    assert said.startswith("The learner holds up")


def test_processors_in_use_count_by_the_seconds_of_the_rows_that_know_them() -> None:
    rows = [row(30.0, 10.0), row(10.0, 10.0), row(50.0, 10.0), row(0.0, 10.0)]
    rows[3]["throughput/actor/host_cpu_share"] = 0.1  # between two reports of the actors
    rows[0]["throughput/actor/host_cpu_share"], rows[1]["throughput/actor/host_cpu_share"] = (
        1.0,
        0.6,
    )
    assert TimeBudget.of(rows).busy == pytest.approx(0.9)
    assert TimeBudget.of(rows[2:3]).busy == 0.0


def test_every_activity_of_the_actors_has_a_change() -> None:
    assert set(SLOWS) | {"engine", "tickets"} == set(ACTOR)


@pytest.mark.parametrize(
    ("learner", "change"),
    [
        ({"publish": 0.3, "optimizer": 0.3}, "learner.groups_per_step"),
        ({"checkpoint": 0.2, "backward": 0.5}, "actors.count"),
    ],
)
def test_waiting_actors_ask_for_what_slows_the_learner(
    learner: dict[str, float], change: str
) -> None:
    said = advice(budget(actor={"tickets": 0.5}, learner=learner | {"data": 0.1}), SETUP)
    assert said.startswith("The learner holds up the actors, which wait 50%") and change in said


def test_short_waits_and_serial_runs_have_sentences_of_their_own() -> None:
    balanced = budget(actor={"tickets": 0.1}, learner={"data": 0.2})
    assert advice(balanced, SETUP).startswith("Neither side waits long")
    assert "launch.kind=local" in advice(balanced, dataclasses.replace(SETUP, serial=True))


def test_a_line_leaves_out_what_rounds_to_nothing() -> None:
    assert line({"engine": 0.75, "push": 0.004, "other": 0.246}) == "engine 75%, other 25%"
