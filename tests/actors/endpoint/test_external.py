"""Agents elsewhere: they start and finish episodes by HTTP, each with a key of its own."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from launches import free_port
from scripted_agents import ASK, CHAT, Scripted, setting, ticket

from actors.endpoint import external
from actors.endpoint.runner import AgentRunner, RewardMissing
from actors.engines.engine import Engine
from actors.envs.base import EnvironmentFailure
from actors.rollout.finished import Finished
from actors.ticket_progress import TicketProgress, renewal
from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.config.sections.rollout import EndpointConfig
from evolver_async.doctor.probes.recipe import recipe as probe
from evolver_async.launch.start_checks import check_addresses
from evolver_async.schema import Role

KEY, VARIABLE = "key of those who start episodes".replace(" ", "-"), "EVOLVER_TEST_EPISODES"
STAGE = "stages=[{kind: rl, steps: 9}]"
ELSEWHERE = f"rollout={{agent: external, endpoint: {{port: 8200, key_env: {VARIABLE}}}}}"
CALL = {"messages": ASK}


@pytest.fixture(autouse=True)
def start_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


class Elsewhere:
    """A ticket whose members are played over HTTP, and what came of it."""

    def __init__(
        self, engine: Engine, members: int, reward_wait_s: float = 0.0, **changes: Any
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        endpoint = EndpointConfig(port=self.port, key_env=VARIABLE)
        self.runner = AgentRunner(
            *(None, "external", engine, CHAT), settings=endpoint, reward_wait_s=reward_wait_s
        )
        self.progress = TicketProgress()
        self.finished: list[Finished] = []
        self.http = httpx.AsyncClient(trust_env=False, timeout=20)
        self.playing = asyncio.create_task(
            self.runner.run(
                ticket(members), setting(**changes), self.progress, self.finished.append
            )
        )

    async def post(
        self, url: str, body: Any = None, key: str = KEY, header: str = "authorization"
    ) -> tuple[int, Any]:
        value = f"Bearer {key}" if header == "authorization" else key
        url = url if url.startswith("http") else f"{self.url}/episodes/{url}"
        while True:
            try:
                answer = await self.http.post(url, json=body, headers={header: value})
                return answer.status_code, answer.json()
            except httpx.ConnectError:  # it does not listen yet
                await asyncio.sleep(0.01)

    async def start(self) -> dict[str, Any]:
        status, episode = await self.post("start")
        assert status == 200, episode
        return episode

    async def call(self, episode: dict[str, Any], **options: Any) -> tuple[int, Any]:
        url = f"{episode['base_url']}/chat/completions"
        return await self.post(url, CALL, **{"key": episode["api_key"], **options})

    async def finish(self, episode: dict[str, Any], **body: Any) -> int:
        return (await self.post(f"{episode['episode']}/finish", body))[0]

    async def reward(self, episode: dict[str, Any], **body: Any) -> int:
        return (await self.post(f"{episode['episode']}/reward", body))[0]

    def told(self) -> int:
        """Progress that a RENEW of this moment reports."""
        work = int(1000 * self.runner.worked_s())
        renewed = renewal({5: self.progress}, work, None, None, self.progress.clock, 0)
        return renewed.progress[5]


@asynccontextmanager
async def _elsewhere(engine: Engine, members: int, **changes: Any) -> AsyncIterator[Elsewhere]:
    one = Elsewhere(engine, members, **changes)
    try:
        yield one
    finally:
        one.playing.cancel()
        with suppress(asyncio.CancelledError, EnvironmentFailure):
            await one.playing
        await one.http.aclose()
        await one.runner.close()


def play(
    agents: Callable[[Elsewhere], Awaitable[None]],
    engine: Engine,
    members: int = 1,
    **changes: Any,
) -> None:
    async def whole() -> None:
        async with _elsewhere(engine, members, **changes) as one, asyncio.timeout(30):
            await agents(one)

    asyncio.run(whole())


def test_an_episode_is_started_played_and_finished_by_http() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        assert episode["model"] == "policy" and isinstance(episode["seed"], int)
        assert episode["task"]["task_id"] == "t" and episode["task"]["map_seed"] == 3
        status, answer = await one.call(episode)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "gold"
        assert await one.finish(episode, reward="1") == 400  # and it goes on
        assert await one.finish(episode, reward=0.5, success=True, metrics={"steps": 3}) == 200
        await one.playing
        (finished,) = one.finished
        trajectory = finished.trajectory
        assert (trajectory.reward, trajectory.success, trajectory.truncated) == (0.5, True, False)
        (sequence,) = trajectory.sequences
        said = sequence.tokens[sequence.roles == Role.ACTION].tolist()
        assert CHAT.text_of(said) == "gold"

    play(agent, Scripted("gold"))


def test_an_episode_of_several_players_has_a_reward_for_each_by_http() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        assert (episode["model"], episode["players"]) == ("even", ["even", "odd"])
        status, _ = await one.call(episode)
        assert status == 404, "its model is none of them"
        for player in episode["players"]:
            url = f"{episode['base_url']}/chat/completions"
            status, _ = await one.post(url, CALL | {"model": player}, key=episode["api_key"])
            assert status == 200
        for wrong in ({"even": 1}, {"even": 1, "odd": 0, "third": 0}, {}, {"even": 1, "odd": None}):
            assert await one.finish(episode, reward=wrong) == 400  # and it goes on
        assert await one.finish(episode, reward={"even": 1, "odd": -1}) == 200
        assert await one.finish(episode, reward={"odd": -1, "even": 1}) == 200
        assert await one.finish(episode, reward={"even": 1, "odd": 1}) == 409
        await one.playing
        (finished,) = one.finished
        found = [(one.name, one.reward, one.turns) for one in finished.trajectory.players]
        assert found == [("even", 1.0, [0]), ("odd", -1.0, [1])]

    play(agent, Scripted("head", "tail"), players=("even", "odd"))


def test_to_finish_again_changes_nothing() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        assert await one.finish(episode, reward=1) == 409  # nothing to learn from
        await one.call(episode)
        assert [await one.finish(episode, reward=1) for _ in range(2)] == [200, 200]
        await one.playing
        assert await one.finish(episode, reward=1) == 200
        assert await one.finish(episode, reward=0) == 409
        assert await one.finish({"episode": "f" * 24}, reward=1) == 404
        assert [finished.trajectory.reward for finished in one.finished] == [1.0]
        assert (await one.call(episode))[0] == 404

    play(agent, Scripted("gold"))


def test_a_reward_can_come_after_the_episode() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        await one.call(episode)
        assert await one.reward(episode, reward=1) == 409  # it has not been finished
        assert [await one.finish(episode) for _ in range(2)] == [200, 200]
        await one.playing  # the member's place in the actor is free
        assert one.progress.played == 1 and (await one.call(episode))[0] == 404
        (finished,) = one.finished
        assert finished.rewarded is not None
        waiting = asyncio.ensure_future(finished.rewarded())
        await asyncio.sleep(0)
        before = one.told()
        while one.told() == before:  # the lease is renewed meanwhile
            await asyncio.sleep(0.01)
        url = f"{episode['episode']}/reward"
        assert (await one.post(url, {"reward": 1}, key=episode["api_key"]))[0] == 401
        for wrong in ({}, {"reward": "1"}, {"error": "no"}):
            assert await one.reward(episode, **wrong) == 400  # and it waits on
        assert await one.reward(episode, reward=0.5, success=True, metrics={"stars": 4}) == 200
        rewarded = (await waiting).trajectory
        assert (rewarded.reward, rewarded.success, rewarded.metrics) == (0.5, True, {"stars": 4.0})
        assert rewarded.sequences[0].action_tokens > 0
        assert await one.reward(episode, reward=0.5, success=True, metrics={"stars": 4}) == 200
        assert await one.reward(episode, reward=0.5) == 409
        assert await one.finish(episode, reward=0.5) == 409
        assert await one.reward({"episode": "f" * 24}, reward=1) == 404
        counts = one.runner.counters()
        assert (counts["agent/episodes"], counts["agent/unrewarded"]) == (1, 0)

    play(agent, Scripted("gold"), reward_wait_s=20.0)


def test_a_reward_that_comes_too_late_is_counted_and_trains_nothing() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        await one.call(episode)
        await one.finish(episode)
        await one.playing
        (finished,) = one.finished
        assert finished.rewarded is not None
        with pytest.raises(RewardMissing):
            await finished.rewarded()
        assert await one.reward(episode, reward=1) == 410
        assert one.runner.counters()["agent/unrewarded"] == 1
        told = {total.kind: total for total in one.runner.failures.totals()}["agent"]
        assert told.count == 1 and "rollout.reward_wait_s" in told.error

    play(agent, Scripted("gold"), reward_wait_s=0.2)


def test_an_episode_is_finished_with_its_reward_unless_the_run_waits_for_it() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        await one.call(episode)
        assert await one.finish(episode) == 400
        assert await one.finish(episode, reward=1) == 200
        assert await one.reward(episode, reward=1) == 409

    play(agent, Scripted("gold"))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("chat/completions", "invalid_request_error"),
        ("responses", "invalid_request_error"),
        ("messages", "authentication_error"),
    ],
)
def test_an_episode_is_called_with_its_own_key_alone(path: str, kind: str) -> None:
    body = {"input": "find it"} if path == "responses" else CALL | {"max_tokens": 9}

    async def agent(one: Elsewhere) -> None:
        mine, other = await one.start(), await one.start()
        assert mine["api_key"] != other["api_key"] and mine["base_url"] != other["base_url"]
        url = f"{mine['base_url']}/{path}"
        for key in (other["api_key"], KEY, mine["api_key"][:-1], ""):
            for header in ("authorization", "x-api-key", "accept"):
                status, answer = await one.post(url, body, key=key or "x", header=header)
                assert status == 401, answer
                assert answer["error"]["type"] == kind
                assert answer["error"]["code"] == "invalid_api_key"
        for header in ("authorization", "x-api-key"):
            assert (await one.post(url, body, key=mine["api_key"], header=header))[0] == 200
        assert one.runner.counters()["agent/refused"] == 0  # strangers are not the agent's fault

    play(agent, Scripted("gold", "gold"), members=2)


def test_the_commands_of_the_page_play_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    assert shutil.which("curl"), "the page's commands need curl"
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async def agent(one: Elsewhere) -> None:
        while "waiting" not in one.progress.slowest()[0]:
            await asyncio.sleep(0.01)
        monkeypatch.setenv("ENDPOINT", one.url)
        monkeypatch.setenv("EPISODES_KEY", KEY)
        shell = await asyncio.create_subprocess_exec("bash", "-euc", commands)
        assert await shell.wait() == 0
        await one.playing
        assert [finished.trajectory.reward for finished in one.finished] == [1.0]

    play(agent, Scripted("gold"))


def test_only_who_has_the_key_of_the_run_starts_and_finishes_episodes() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        await one.call(episode)
        for key in (episode["api_key"], "x"):
            assert (await one.post("start", key=key))[0] == 401
            path = f"{episode['episode']}/finish"
            assert (await one.post(path, {"reward": 1}, key=key))[0] == 401
        assert (await one.post(f"{episode['episode']}/stop"))[0] == 404
        assert not one.finished and not one.playing.done()

    play(agent, Scripted("gold"))


def test_two_agents_at_once_play_different_members() -> None:
    async def agents(one: Elsewhere) -> None:
        async def agent(reward: float) -> tuple[int, str]:
            episode = await one.start()
            _, answer = await one.call(episode)
            await one.finish(episode, reward=reward)
            return episode["seed"], answer["choices"][0]["message"]["content"]

        (seed, said), (other_seed, other_said) = await asyncio.gather(agent(0.25), agent(0.75))
        await one.playing
        assert seed != other_seed and {said, other_said} == {"left", "right"}
        found = sorted(finished.trajectory.reward for finished in one.finished)
        assert found == [0.25, 0.75]
        assert {finished.trajectory.member for finished in one.finished} == {0, 1}

    play(agents, Scripted("left", "right"), members=2)


def test_a_connection_is_kept_for_longer_than_clients_keep_it() -> None:
    async def agent(one: Elsewhere) -> None:
        await one.call(await one.start())
        connections: Any = one.runner._server._state.connections
        (kept,) = connections
        assert kept.timeout_keep_alive > 30  # seconds; aiohttp's clients keep them 15

    play(agent, Scripted("gold"))


def test_a_hundred_agents_can_connect_at_once() -> None:
    async def agents(one: Elsewhere) -> None:
        episode = await one.start()
        place = "127.0.0.1", one.port
        held = await asyncio.gather(*(asyncio.open_connection(*place) for _ in range(150)))
        head = f"GET /{episode['episode']}/v1/models HTTP/1.1\r\nhost: x\r\n"
        for _, writer in held:
            writer.write(f"{head}x-api-key: {episode['api_key']}\r\n\r\n".encode())
        for reader, writer in held:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    play(agents, Scripted())


def test_an_agent_that_is_gone_is_ended_by_the_time_since_it_started() -> None:
    limits = {"episode_timeout_s": 0.3, "step_timeout_s": 0.1}

    async def agent(one: Elsewhere) -> None:
        await asyncio.sleep(0.6)  # longer than an episode may last
        episode = await one.start()
        assert (await one.call(episode))[0] == 200
        await one.playing
        (finished,) = one.finished
        assert finished.trajectory.truncated and finished.trajectory.overlong
        assert one.runner.counters()["agent/late"] == 1
        assert await one.finish(episode, reward=1) == 410

    play(agent, Scripted("gold"), **limits)


def test_an_agent_that_gives_up_fails_its_episode_in_its_own_words() -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        assert await one.finish(episode, error="no such browser") == 200
        with pytest.raises(EnvironmentFailure, match="no such browser"):
            await one.playing

    play(agent, Scripted())


def test_a_member_waits_for_an_agent_as_long_as_it_takes_and_seems_to_work() -> None:
    async def agent(one: Elsewhere) -> None:
        while "waiting" not in one.progress.slowest()[0]:
            await asyncio.sleep(0.01)
        before = one.told()
        while one.told() == before:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # both limits are shorter
        assert not one.playing.done() and "waiting" in one.progress.slowest()[0]

    play(agent, Scripted(), episode_timeout_s=0.1, step_timeout_s=0.1)


def test_an_agent_that_hangs_up_or_waits_in_vain_costs_no_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def agent(one: Elsewhere) -> None:
        episode = await one.start()
        monkeypatch.setattr(external, "START_WAIT_S", 0.1)
        status, answer = await one.post("start")
        assert (status, answer["error"]["code"]) == (503, "no_episode_yet")
        monkeypatch.setattr(external, "START_WAIT_S", 20.0)
        starting = one.runner._external._starting  # type: ignore[union-attr]
        leaving = asyncio.create_task(one.start())
        while not starting:
            await asyncio.sleep(0.01)
        leaving.cancel()
        while starting:
            await asyncio.sleep(0.01)
        again = asyncio.create_task(
            one.runner.run(ticket(1), setting(), TicketProgress(), one.finished.append)
        )
        for started in (episode, await one.start()):
            await one.call(started)
            await one.finish(started, reward=1)
        await asyncio.gather(one.playing, again)
        assert len(one.finished) == 2

    play(agent, Scripted("left", "right"))


def test_a_taken_port_leaves_the_next_one() -> None:
    async def agent(one: Elsewhere) -> None:
        await one.start()
        endpoint = EndpointConfig(port=one.port, key_env=VARIABLE, public_host="box.example")
        second = AgentRunner(None, "external", Scripted(), CHAT, settings=endpoint)
        playing = asyncio.create_task(
            second.run(ticket(1), setting(), TicketProgress(), one.finished.append)
        )
        while (listener := second._server._listener) is None:
            await asyncio.sleep(0.01)
        port = listener.sockets[0].getsockname()[1]
        assert one.port < port < one.port + 64
        _, episode = await one.post(f"http://127.0.0.1:{port}/episodes/start")
        assert episode["base_url"].startswith(f"http://box.example:{port}/")
        playing.cancel()
        await second.close()

    play(agent, Scripted())


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("rollout.endpoint.key_env=''", "rollout.endpoint.key_env"),
        ("rollout.endpoint={bind: 0.0.0.0, key_env: ''}", "rollout.endpoint.key_env"),
        ("rollout.endpoint.key_env=NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE"),
        ("rollout.endpoint.key_env=EVOLVER_TEST_SHORT", "EVOLVER_TEST_SHORT"),
        ("rollout.endpoint.port=0", "rollout.endpoint.port"),
        ("rollout.endpoint.bind=192.0.2.1", "rollout.endpoint.bind"),
    ],
)
def test_train_and_doctor_refuse_agents_elsewhere_without_a_key_or_an_address(
    argument: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EVOLVER_TEST_SHORT", "short-secret")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages: [{kind: rl, steps: 9}]\n")
    arguments = [ELSEWHERE, argument, "env.name=bandit", f"run.dir={tmp_path}"]
    assert main(["train", str(recipe), *arguments]) == 2
    said = capsys.readouterr()
    assert "rollout.endpoint." in said.err and named in said.err
    assert "short-secret" not in said.err + said.out
    try:
        problems = probe(str(recipe), *arguments).summary
    except ConfigError as error:
        problems = str(error)
    assert "rollout.endpoint." in problems and named in problems


def test_an_agent_of_ones_own_can_have_any_interface_of_this_host() -> None:
    """Its episodes have keys that it alone was given."""
    own = ["rollout.agent=examples.arms:play", "env.name=bandit", STAGE]
    check_addresses(load(None, [*own, "rollout.endpoint.bind=0.0.0.0"]))
    with pytest.raises(ConfigError, match=r"^rollout\.endpoint\.bind: 192\.0\.2\.1"):
        check_addresses(load(None, [*own, "rollout.endpoint.bind=192.0.2.1"]))
