"""Needs of a run that an actor checks on its host before it asks for tasks."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launches import DEADLINE_S

from actors.checks.config import check
from actors.envs.bandit import Bandit
from actors.main import check_host, main
from evolver_async.buffer.service import BufferService
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.file_formats import RUN
from evolver_async.model.tokenizer import ModelError
from evolver_async.process.setup import RoleArgs
from evolver_async.wire import messages
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.server import Server

STAGE = "stages=[{kind: rl, steps: 9}]"
UNSET = "${oc.env:EVOLVER_TEST_UNSET}"


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        (
            f"env={{name: bandit, params: {{low_arm: '{UNSET}'}}}}",
            r"env\.params\.low_arm",
        ),
        (
            f"tasks.mixture=[{{env: bandit}}, {{env: bandit, params: {{low_arm: '{UNSET}'}}}}]",
            r"tasks\.mixture\[1\]\.params\.low_arm",
        ),
        (
            f"eval.sets.far.env={{name: bandit, params: {{low_arm: '{UNSET}'}}}}",
            r"eval\.sets\.far\.env\.params\.low_arm",
        ),
    ],
)
def test_a_variable_that_an_actor_lacks_is_named_with_its_key(
    argument: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, [STAGE, argument])
    with pytest.raises(ValueError, match=rf"^{key}: the environment variable EVOLVER_TEST_UNSET"):
        check_host(config, probes=False)
    monkeypatch.setenv("EVOLVER_TEST_UNSET", "raven")
    check_host(config, probes=False)


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("env.name=not_here:Env", r"env\.name: cannot import 'not_here:Env'"),
        ("env.params.colour=red", r"env\.params\.colour: .* has no such parameter"),
        ("tasks.mixture=[{env: bandit}, {env: 'not_here:Env'}]", r"env\.name: .*'not_here:Env'"),
        ("eval.sets.far.env.name=not_here:Env", r"env\.name: cannot import 'not_here:Env'"),
        ("rollout.agent=not_here:play", r"rollout\.agent: cannot import 'not_here:play'"),
        ("judge.kind=not_here:judge", r"judge\.kind: cannot import 'not_here:judge'"),
        ("reward=[not_here:term]", r"reward\.terms\[0\]: .*'not_here:term'"),
        ("rollout.format=not_here:style", r"rollout\.format: cannot import 'not_here:style'"),
    ],
)
def test_code_that_an_actors_host_lacks_is_named_before_a_task_fails(
    argument: str, key: str
) -> None:
    config = load(None, [STAGE, argument])
    with pytest.raises(ConfigError, match=rf"^host .+ cannot play .*: {key}"):
        check_host(config, probes=False)


def test_the_reward_model_of_a_run_is_missed_where_its_directory_is_not(tmp_path: Path) -> None:
    scored = "{kind: rl, steps: 1, override: {reward: {terms: [reward_model]}}}"
    config = load(None, [f"stages=[{{kind: reward_model, steps: 1}}, {scored}]"])
    with pytest.raises(ConfigError, match=r"^host .+ cannot play .*: reward\.terms: "):
        check_host(config, probes=False, run_dir=tmp_path)
    (tmp_path / RUN).touch()
    check_host(config, probes=False, run_dir=tmp_path)
    config.reward.model.url = "http://elsewhere"
    check_host(config, probes=False, run_dir=tmp_path / "other")


class Choosy(Bandit):
    """Environment that needs a sandbox."""

    def probe(self) -> None:
        raise ValueError("env.name: Choosy needs a sandbox")


def test_what_an_environment_needs_is_asked_of_a_host_that_joins() -> None:
    config = load(None, [STAGE, f"env.name={__name__}:Choosy"])
    check_host(config, probes=False)
    with pytest.raises(ConfigError, match=r"^host .+ cannot play .*: env\.name: Choosy needs"):
        check_host(config, probes=True)


class Broken(Bandit):
    """Environment whose probe finds something that it does not expect."""

    def probe(self) -> None:
        raise KeyError("SERVICE_URL")


def test_a_probe_that_raises_another_error_names_its_environment() -> None:
    config = load(None, [STAGE, f"env.name={__name__}:Broken"])
    said = rf"env\.name: '{__name__}:Broken' cannot be probed: KeyError: 'SERVICE_URL'"
    with pytest.raises(ConfigError, match=said):
        check_host(config, probes=True)
    with pytest.raises(ValueError, match=f"^{said}"):
        check(config)


def test_the_environment_of_a_task_file_must_be_there_although_the_file_is_not(
    tmp_path: Path,
) -> None:
    config = load(None, [STAGE])
    config.tasks.path = str(tmp_path / "on_the_launchers_host.jsonl")
    check_host(config, probes=True)
    config.env.name = "not_here:Env"
    with pytest.raises(ConfigError, match=r"env\.name: cannot import 'not_here:Env'"):
        check_host(config, probes=True)


class Distant(Bandit):
    """Environment that asks a service by coroutines, in a loop of its own, and gets no answer."""

    asked = 0

    def probe(self) -> None:
        Distant.asked += 1
        asyncio.run(asyncio.sleep(0))
        raise ValueError("env.name: Distant has no answer")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a buffer, whose run has the environment `Distant`."""
    config = load(None, [STAGE, f"env.name={__name__}:Distant"])
    config.policy.path = str(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # enough to be compared
    now, stop = time.monotonic(), threading.Event()
    service = BufferService.of_run(config, tmp_path, None, now)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        server = Server(service, f"ipc://{directory}/buffer", tmp_path.name)
        thread = threading.Thread(target=server.serve, args=(stop,))
        thread.start()
        yield server.address
        stop.set()
        thread.join()
        server.close()
        service.close()


def test_an_environment_is_asked_beside_no_running_loop(address: str, tmp_path: Path) -> None:
    Distant.asked = 0
    args = RoleArgs(address=address, name="actor-0", incarnation=0, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"env\.name: Distant has no answer"):
        main(args)
    assert Distant.asked == 1


def state_of_actor(address: str) -> str:
    """The state of actor-0 by the buffer's status."""

    async def ask() -> messages.StatusReply:
        client = DealerClient(address, sender="watch")
        try:
            return await client.request(messages.StatusRequest(), DEADLINE_S)
        finally:
            client.close()

    actors: Any = asyncio.run(ask()).status["actors"]
    return actors["actor-0"]["state"]


def test_an_actor_whose_host_lacks_something_says_that_it_leaves(
    address: str, tmp_path: Path
) -> None:
    """Else status said for an hour that it loads its model."""
    args = RoleArgs(address=address, name="actor-0", incarnation=0, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"env\.name: Distant has no answer"):
        main(args)
    assert state_of_actor(address) == "left"


def test_a_host_without_the_policy_is_named_by_its_key(address: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").unlink()
    args = RoleArgs(address=address, name="actor-0", incarnation=0, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"cannot play .*: policy\.path: .* no tokenizer\.json"):
        main(args)
    assert state_of_actor(address) == "left"
    with pytest.raises(ModelError):  # a launcher tries again: the path was there
        main(replace(args, parent_pid=1))


class Counted(Bandit):
    """Environment that counts how often it is asked."""

    asked = 0

    def probe(self) -> None:
        Counted.asked += 1


def test_an_environment_is_asked_once_whatever_the_number_of_stages_and_sets() -> None:
    name, stages = f"{__name__}:Counted", "stages=[{kind: rl, steps: 1}, {kind: rl, steps: 1}]"
    config = load(None, [stages, f"env.name={name}", f"eval.sets.far.env.name={name}"])
    Counted.asked = 0
    check_host(config, probes=True)
    assert Counted.asked == 1
