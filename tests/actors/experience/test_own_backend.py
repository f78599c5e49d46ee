"""Experience of a backend of one's own, and the example that speaks to ReMe."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from contributions import LOST, WON
from http_server import HttpServer, Reply, raw
from virtual_time import virtually

from actors.checks.config import check_own
from actors.experience.guide import ExperienceGuide
from actors.experience.own_backend import CONTRIBUTE_S, own_backend
from actors.failure_counts import FailureCounts
from actors.rollout.episode_policy import Advice
from evolver_async.config import Config, ExperienceConfig, ablation
from evolver_async.config.load import load, stage_config
from evolver_async.schema import Task

QUERY = "walk to the goal"
TRAIN, HELD_OUT = (
    Task(task_id=f"lake/{split}/1", env="lake", split=split, map_seed=1)
    for split in ("train", "eval")
)


def guide_of(
    failures: FailureCounts, made: str = "shelves:shelf", **params: Any
) -> ExperienceGuide:
    section = ExperienceConfig(kind=made, params=params)
    return ExperienceGuide(own_backend(Config(experience=section)), section, failures)


def test_what_a_backend_was_told_of_training_guides_the_next() -> None:
    async def run() -> None:
        guide = guide_of(failures := FailureCounts())
        assert await guide.advise(QUERY) == Advice()
        guide.contribute(HELD_OUT, QUERY, [WON, LOST])
        await asyncio.sleep(1)
        assert await guide.advise(QUERY) == Advice()
        guide.contribute(TRAIN, QUERY, [WON, LOST])
        await asyncio.sleep(1)
        advice = await guide.advise(QUERY)
        assert advice.text == f"- say {WON.turns[0].action}" and len(advice.ids) == 1
        assert failures.totals() == [] and not any(guide.counters().values())
        await guide.close()

    virtually(run())


@pytest.mark.parametrize(
    ("kind", "said"), [("hanging", "in time"), ("cancelling", "Cancelled"), ("numbers", "a text")]
)
def test_a_backend_that_fails_leaves_episodes_unguided_and_is_named(kind: str, said: str) -> None:
    async def run() -> None:
        guide = guide_of(failures := FailureCounts(), kind=kind)
        assert await guide.advise(QUERY) == Advice()
        (failure,) = failures.totals()
        assert failure.kind == "experience" and said in failure.error
        assert guide.counters()["experience/unguided"] == 1
        await guide.close()

    virtually(run())


def test_a_group_that_a_backend_does_not_take_is_counted() -> None:
    async def run() -> None:
        guide = guide_of(failures := FailureCounts(), kind="numbers")
        guide.contribute(TRAIN, QUERY, [WON])
        await asyncio.sleep(1)
        (failure,) = failures.totals()
        assert failure.name == "experience.kind" and "the shelf is full" in failure.error
        assert guide.counters()["experience/dropped"] == 1
        await guide.close()

    virtually(run())


def test_a_backend_may_read_a_group_for_minutes() -> None:
    async def run() -> None:
        guide = guide_of(failures := FailureCounts(), kind="slow")
        guide.contribute(TRAIN, QUERY, [WON, LOST])
        await asyncio.sleep(CONTRIBUTE_S)
        assert (await guide.advise(QUERY)).text == f"- say {WON.turns[0].action}"
        assert failures.totals() == [] and not any(guide.counters().values())
        await guide.close()

    virtually(run())


@pytest.mark.parametrize("kind", ["shelves:absent", "shelves:nothing", "nowhere:shelf"])
def test_what_makes_no_backend_is_refused_at_the_start(kind: str) -> None:
    with pytest.raises(ValueError, match=r"experience\.kind"):
        check_own(Config(experience=ExperienceConfig(kind=kind)))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("experience={kind: contrast, params: {a: 1}}", "params"),
        ("experience={kind: 'shelves:shelf', rewrite: true}", "rewrite"),
        ("experience={kind: contrast, vet: true}", "vet"),
    ],
)
def test_keys_that_its_kind_does_not_read_are_inert(change: str, key: str) -> None:
    config = load(None, ["env.name=bandit", "stages=[{kind: rl, steps: 1}]", change])
    (line,) = ablation.lines(config)
    assert line.startswith(f"inert: experience.{key} (experience.kind=")
    assert not getattr(stage_config(config, 0).experience, key)


def test_the_example_tells_reme_of_groups_and_asks_it_for_tasks() -> None:
    asked: list[tuple[str, Any]] = []
    answers: dict[str, Callable[[], Reply]] = {
        "/retrieve_task_memory": lambda: raw({"answer": "look before you leap" * (len(asked) > 2)}),
        "/summary_task_memory": lambda: raw({"answer": "", "success": True}),
    }

    def reply(path: str, headers: dict[str, str], body: Any) -> Reply:
        asked.append((path, body))
        return answers[path]()

    async def run() -> None:
        where = {"url": server.url, "workspace": "w"}
        guide = guide_of(failures := FailureCounts(), "examples.reme:backend", **where)
        assert await guide.advise(QUERY) == Advice()
        guide.contribute(TRAIN, QUERY, [WON, LOST])
        while guide._waiting:
            await asyncio.sleep(0.01)
        assert (await guide.advise(QUERY)).text == "- look before you leap"
        assert failures.totals() == []
        await guide.close()

    server = HttpServer(reply)
    server.start()
    try:
        asyncio.run(run())
    finally:
        server.end()
    path, body = asked[1]
    assert path == "/summary_task_memory" and body["workspace_id"] == "w"
    assert [one["score"] for one in body["trajectories"]] == [WON.reward, LOST.reward]
    chat = body["trajectories"][0]["messages"]
    assert chat[0] == {"role": "user", "content": QUERY} and chat[-1]["role"] == "assistant"
    assert asked[0][1] == {"query": QUERY, "top_k": 5, "workspace_id": "w"}
