"""The client of an environment service, against one that misbehaves on demand."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai_server
import pytest
from env_service import EnvService, Lost, lost
from episodes import ticket
from launches import fair_time
from openai_server import Reply, closed_url, cut, dripping, dropped, garbage, silence, status

from actors.adapters import agentevolver_service, service_client
from actors.adapters.agentevolver_service import CUT, AgentEvolver, AgentEvolverCode
from actors.adapters.service_client import EnvironmentService, ServiceError, drain
from actors.checks.config import check
from actors.envs.base import (
    Concluding,
    EnvError,
    EnvironmentFailure,
    Limited,
    Probed,
    Tooled,
    make_env,
)
from actors.formats.tool_calls import canonical
from actors.rollout.environment import TimedEnvironment
from actors.ticket_progress import TicketProgress
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.schema import Task


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses; counts stay in their test, as any actor of this process would report them."""
    monkeypatch.setattr(service_client, "PAUSE_S", 0.01)
    drain()
    yield
    drain()


def task(number: int = 0, split: str = "train") -> Task:
    return Task(task_id=f"t/{split}/{number}", env="agentevolver", split=split, map_seed=number)


def env_of(service: EnvService, **params: Any) -> AgentEvolver:
    usual: dict[str, Any] = {"url": service.url, "env_type": "counting", "timeout_s": 10.0}
    return AgentEvolver(**(usual | params))


def counted() -> dict[str, float]:
    """What went wrong since the test began, or since this was last asked."""
    return {name.removeprefix("env_service/"): count for name, count in drain().items()}


def test_an_episode_is_played_evaluated_and_given_back() -> None:
    with EnvService() as service:
        env = env_of(service)
        assert env.reset(task(1), 7) == "2 times"
        assert env.instructions == "say up"
        first, second = env.step("up"), env.step("up")
        assert (first.observation, first.reward, first.terminated) == ("1 of 2", 0.0, False)
        assert second.terminated and second.reward == 1.0 and second.info.success
        env.close()
        env.close()
    assert service.instances == {} and len(service.released) == 1
    step = next(body for name, body in service.calls if name == "step")
    assert step["messages"] == {"role": "assistant", "content": "up"}
    assert step["instance_id"] == service.released[0]


def test_a_synthetic_query_takes_the_place_of_the_task_of_the_service() -> None:
    made = msgspec.structs.replace(task(), origin="synthetic", query="say down")
    with EnvService() as service:
        env = env_of(service, kwargs={"level": 1})
        assert env.reset(task(), 0) == "3 times"
        assert env.reset(made, 0) == "" and env.instructions == "say up"
        assert env.step("up").observation == "1 of 3"
        env.close()
        sent = [body["params"] for call, body in service.calls if call == "create"]
        assert env.content() == "up-3", "which is told even where the observation is empty"
    assert sent == [{"level": 1}, {"level": 1, "is_open_query": True}]


def test_task_numbers_go_round_the_split_of_the_service() -> None:
    with EnvService() as service:
        env = env_of(service, splits={"train": "train", "test": "dev"})
        shown = [env.reset(task(n, s), 0) for n, s in ((0, "train"), (1, "train"), (2, "train"))]
        assert shown == ["3 times", "2 times", "3 times"]
        assert env.reset(task(5, "test"), 0) == "1 times"
        env.close()
        assert service.asked("get_env_profile") == 2  # once a split
    assert service.instances == {}, "a second reset gives the first instance back"


def test_the_limit_of_moves_truncates_and_asks_what_it_is_worth() -> None:
    with EnvService() as service:
        env = env_of(service, max_moves=2)
        env.reset(task(0), 0)
        env.step("up")
        last = env.step("up")
        assert (last.terminated, last.truncated) == (False, True)
        assert last.reward == pytest.approx(2 / 3) and not last.info.success
        env.close()
        sparse = env_of(service, max_moves=1, sparse=True)
        sparse.reset(task(0), 0)
        assert sparse.step("up").reward == 0.0
        sparse.close()


def test_an_episode_that_the_rollout_ends_is_evaluated_as_it_stands() -> None:
    """A turn that is no action costs a turn of the rollout's and no move of the environment's."""
    with EnvService() as service:
        env = env_of(service)
        assert isinstance(env, Concluding)
        env.reset(task(0), 0)
        env.step("up")
        assert env.verdict() == (pytest.approx(1 / 3), False)
        env.close()
        stepwise = env_of(service, rewards="steps")
        assert isinstance(stepwise, Concluding)
        stepwise.reset(task(0), 0)
        stepwise.step("up")
        assert stepwise.verdict() == (0.0, False) and service.asked("evaluate") == 1
        stepwise.close()


def test_rewards_of_steps_are_taken_where_asked_and_nothing_is_evaluated() -> None:
    with EnvService() as service:
        env = env_of(service, rewards="steps", name="up-2")
        env.reset(task(), 0)
        assert [env.step("up").reward, env.step("up").reward] == [0.25, 0.25]
        assert service.asked("evaluate") == service.asked("get_env_profile") == 0
        env.close()


@pytest.mark.parametrize("refusal", [status(503), status(429)], ids=["503", "429"])
def test_a_step_that_was_refused_is_sent_again(refusal: Reply) -> None:
    with EnvService({"step": [refusal]}) as service:
        env = env_of(service)
        env.reset(task(), 0)
        assert env.step("up").observation == "1 of 3"
        assert counted() == {"step/status": 1, "retries": 1}
        env.close()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (silence(), "timeout"),
        (dripping(), "timeout"),
        (dropped(), "connection"),
        (cut(), "connection"),
        (garbage(), "garbage"),
        (status(500), "status"),
        (openai_server.raw({"success": True, "data": {"state": 7}}), "garbage"),
        (openai_server.endless(8 << 20), "too_long"),
        (openai_server.raw({"success": False, "data": None}), "refused"),
    ],
    ids=["silence", "dripping", "dropped", "cut", "garbage", "500", "shape", "endless", "refused"],
)
def test_a_step_whose_answer_is_lost_is_carried_out_once_and_says_why(
    reply: Reply, kind: str
) -> None:
    with EnvService({"step": [lost(reply)]}) as service:
        env = env_of(service, timeout_s=1.0 if kind == "timeout" else 10.0)
        env.reset(task(), 0)
        instance = next(iter(service.instances.values()))
        began = fair_time()
        with pytest.raises(ServiceError) as failure:
            env.step("up")
        assert fair_time() - began < 30.0
        assert failure.value.kind == kind
        assert instance.said == ["up"], "never twice"
        for part in (service.url, "step", "counting up-3"):
            assert part in str(failure.value)
        assert counted() == {f"step/{kind}": 1, "given_up": 1}
        env.close()
    assert service.instances == {}


@pytest.mark.parametrize("reply", [silence(), dropped(), garbage(), status(500)])
def test_calls_that_change_nothing_are_retried(reply: Reply) -> None:
    trouble: dict[str, list[Reply | Lost | None]] = {
        "evaluate": [reply],
        "get_env_profile": [reply],
    }
    with EnvService(trouble) as service:
        env = env_of(service, timeout_s=1.0 if reply == silence() else 10.0)
        env.reset(task(1), 0)
        env.step("up")
        assert env.step("up").reward == 1.0
        assert counted()["retries"] == 2
        env.close()


def test_retries_are_capped() -> None:
    with EnvService({"evaluate": [status(500)] * 9}) as service:
        env = env_of(service, retries=3, max_moves=1)
        env.reset(task(), 0)
        with pytest.raises(ServiceError, match="after 4 attempts, status"):
            env.step("up")
        assert service.asked("evaluate") == 4
        assert counted() == {"evaluate/status": 4, "retries": 3, "given_up": 1}
        env.close()


def test_an_instance_whose_creation_got_lost_is_released_and_made_anew() -> None:
    with EnvService({"create": [lost(dropped()), lost(silence())]}) as service:
        env = env_of(service, timeout_s=1.0)
        assert env.reset(task(), 0) == "3 times"
        assert len(service.instances) == 1
        assert len(service.released) == 2
        env.close()
    assert service.instances == {}
    names = [body["instance_id"] for name, body in service.calls if name == "create"]
    assert len(set(names)) == 3


def test_an_instance_the_service_has_reaped_is_not_asked_for_again() -> None:
    with EnvService() as service:
        env = env_of(service)
        env.reset(task(), 0)
        service.instances.clear()
        with pytest.raises(ServiceError) as failure:
            env.step("up")
        assert failure.value.kind == "expired"
        assert service.asked("step") == 1
        env.close()
        assert counted() == {"step/expired": 1, "given_up": 1, "release/refused": 1}


def test_a_release_that_fails_costs_no_episode_and_little_time() -> None:
    with EnvService({"release": [silence(), silence()]}) as service:
        env = env_of(service, timeout_s=1.0)
        env.reset(task(), 0)
        began = fair_time()
        env.close()
        assert fair_time() - began < 20
        assert counted() == {"release/timeout": 2}


class Clock:
    """A clock that hung requests and pauses move, and nothing else."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("hung", ["get_env_profile", "create", "evaluate"])
def test_a_service_that_hangs_is_left_within_the_limit_of_one_call(
    hung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it hangs in every request that follows, such as a release."""
    clock, send = Clock(), EnvironmentService._send

    def hanging(host: EnvironmentService, call: str, *more: Any) -> Any:
        if call not in (hung, "release"):
            return send(host, call, *more)
        clock.sleep(more[-1])  # its limit
        return service_client._RequestFailure(kind="timeout", text="no answer")

    monkeypatch.setattr(EnvironmentService, "_send", hanging)
    for module in (service_client, agentevolver_service):
        monkeypatch.setattr(module, "time", clock)
    with EnvService() as service:
        env = env_of(service, timeout_s=8.0, retries=1, max_moves=1)
        assert isinstance(env, Limited) and 16.0 < env.longest_call_s < 16.1
        began = clock.now
        with pytest.raises(ServiceError, match=rf"^{service.url}: {hung} of .* timeout: "):
            env.reset(task(), 0)
            began = clock.now
            env.step("up")
        assert 16.0 < clock.now - began <= env.longest_call_s
        env.close()


def test_an_instance_whose_creation_got_lost_at_last_is_released_by_the_close() -> None:
    with EnvService({"create": [lost(silence())] * 2}) as service:
        env = env_of(service, timeout_s=0.5, retries=1)
        with pytest.raises(ServiceError, match="after 2 attempts, timeout"):
            env.reset(task(), 0)
        env.close()
        assert service.instances == {} and len(service.released) == 2


def test_requests_that_outlast_a_step_are_refused_before_a_start() -> None:
    with EnvService() as service:
        params = f"{{url: '{service.url}', env_type: counting, splits: {{train: train, test: dev}}"
        run = ["stages=[{kind: rl, steps: 1}]", "env.name=agentevolver", "env.step_timeout_s=9"]
        check(load(None, [*run, f"env.params={params}, retries: 1, timeout_s: 4}}"]))
        with pytest.raises(
            ConfigError, match=r"^env\.step_timeout_s: 9 s .*env\.params\.timeout_s"
        ):
            check(load(None, [*run, f"env.params={params}, retries: 1, timeout_s: 4.5}}"]))
        check(load(None, [*run[:2], f"env.params={params}}}"]))


def test_a_service_that_is_not_there_is_a_connection_error() -> None:
    url = closed_url().removesuffix("/v1")
    env = AgentEvolver(url=url, env_type="counting", name="up-1", retries=1)
    with pytest.raises(ServiceError, match="connection") as failure:
        env.reset(task(), 0)
    assert failure.value.kind == "connection" and "after 2 attempts" in str(failure.value)


def test_many_episodes_at_once_keep_their_instances_apart() -> None:
    barrier = threading.Barrier(8)

    def play(number: int) -> list[str]:
        env = env_of(service)
        env.reset(task(number), 0)
        barrier.wait(timeout=20)
        seen = [env.step("up" if i else f"{number}").observation for i in range(3)]
        env.close()
        return seen

    with EnvService() as service, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(play, range(8)))
        assert service.instances == {} and len(service.released) == 8
    assert results == [[f"{i} of {3 if n % 2 == 0 else 2}" for i in range(3)] for n in range(8)]


def test_long_observations_are_cut() -> None:
    with EnvService() as service:
        env = env_of(service, shown_chars=3)
        assert env.reset(task(), 0) == "3 t" + CUT
        env.close()


def test_code_is_sent_as_a_fenced_block_and_an_answer_as_text() -> None:
    with EnvService() as service:
        env = AgentEvolverCode(url=service.url, env_type="counting", max_moves=9)
        assert isinstance(env, Tooled) and not isinstance(env_of(service), Tooled)
        env.reset(task(), 0)
        env.step(canonical("python", {"code": "print(1)"}))
        env.step(canonical("answer", {"text": "up"}))
        assert not env.step(canonical("python", {"code": 3})).info.valid
        (instance,) = service.instances.values()
        assert instance.said == ["```python\nprint(1)\n```", "up"]
        env.close()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, "url"),
        ({"url": "ftp://x", "env_type": "a"}, "url"),
        ({"url": "http://x", "env_type": "../a"}, "env_type"),
        ({"url": "http://x", "env_type": "a", "max_moves": 0}, "max_moves"),
        ({"url": "http://x", "env_type": "a", "timeout_s": 0.0}, "timeout_s"),
        ({"url": "http://x", "env_type": "a", "retries": 99}, "retries"),
        ({"url": "http://x", "env_type": "a", "rewards": "some"}, "rewards"),
    ],
)
def test_parameters_that_cannot_be_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvError, match=rf"env\.params\.{named}"):
        make_env("agentevolver", params)


def test_before_a_start_the_service_is_asked_for_its_tasks() -> None:
    with EnvService() as service:
        env = env_of(service, splits={"train": "train", "test": "dev"})
        assert isinstance(env, Probed)
        env.probe()
        assert service.asked("get_env_profile") == 2 and service.asked("create") == 0
        three = {"train": "train", "validation": "train", "test": "dev"}
        env_of(service, splits=three).probe()
        assert env_of(service, splits=three).reset(task(0, "validation"), 0) == "3 times"
        with pytest.raises(ValueError, match=r"splits: no name for the split 'validation'"):
            env.reset(task(0, "validation"), 0)
    with pytest.raises(ValueError, match=r"env\.params\.url: .*connection"):
        env_of(service, retries=0).probe()
    with pytest.raises(ValueError, match=r"env\.params\.splits: .*'test'"):
        env_of(service, splits={"train": "train"}).probe()


def test_a_failure_names_environment_task_member_and_call() -> None:
    async def play(url: str) -> str:
        played = task(0)
        params = {"url": url, "env_type": "counting", "timeout_s": 5.0}
        asked = Task(task_id="t/0", env="agentevolver", split="train", map_seed=0, params=params)
        world = TimedEnvironment(ticket(asked, members=[3]), 3, 20.0, TicketProgress())
        await world.open()
        await world.call("reset", world.env.reset, played, 0)
        try:
            await world.call("step", world.env.step, "up")
        except EnvironmentFailure as failure:
            return str(failure)
        finally:
            await world.close()
        return "no failure"

    with EnvService({"step": [lost(status(500, "the shop is closed"))]}) as service:
        said = asyncio.run(play(service.url))
        assert service.instances == {}, "given back although it failed"
    for part in ("agentevolver, task t/0, member 3: step", service.url, "status 500", "closed"):
        assert part in said
