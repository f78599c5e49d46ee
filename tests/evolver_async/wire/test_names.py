"""A host name that does not resolve is named, at the start of an actor and when replies stop."""

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from actors.main import await_name, serve
from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.process.setup import RoleArgs
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.messages import StatusRequest
from evolver_async.wire.names import unresolved

PROBLEM = "the name localhost does not resolve to an IPv4 address (Name or service not known)"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nobody listens, with a name that this process cannot look up."""

    def fail(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    return f"tcp://localhost:{port}"


def test_a_request_without_reply_tells_of_a_name_that_does_not_resolve(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(client: DealerClient) -> None:
        asking = asyncio.create_task(client.request(StatusRequest(), timeout_s=60))
        while PROBLEM not in caplog.text and not asking.done():
            await asyncio.sleep(0.01)
        asking.cancel()

    client = DealerClient(address, sender="actor-x", resend_s=0.05)
    try:
        with caplog.at_level(logging.WARNING):
            asyncio.run(ask(client))
    finally:
        client.close()
    assert f"STATUS to {address}: no reply for" in caplog.text and PROBLEM in caplog.text


def test_an_actor_of_an_unknown_host_ends_with_one_sentence(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.main.NAME_S", 0.0)
    with pytest.raises(ConfigError) as error:
        serve(RoleArgs(address=address, name="actor-x", incarnation=0, run_dir=tmp_path))
    assert str(error.value) == f"--connect: {address}: {PROBLEM}"


def test_an_actor_waits_for_a_name_that_is_published_late(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail, asked = socket.getaddrinfo, 0

    def late(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked < 3:
            fail("localhost", None)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr("time.sleep", lambda _: None)
    await_name(address)
    assert asked == 3 and caplog.text.count(PROBLEM) == 1


def test_the_status_of_an_unknown_host_is_a_mistake_of_the_user(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", address]) == 2
    assert capsys.readouterr().err == f"evolver-async: {address}: {PROBLEM}\n"


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://127.0.0.1:4000", "tcp://[::1]:4000", "ipc:///tmp/buffer", "inproc://a"),
        *("tcp://*:4000", "tcp://0.0.0.0:4000"),  # which clients of this host reach by loopback
    ],
)
def test_an_address_without_a_name_is_not_looked_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "getaddrinfo")
    assert unresolved(address) == ""


def test_a_name_in_brackets_is_looked_up_as_libzmq_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def six(name: str, port: None, family: int, *_: object) -> None:
        if family != socket.AF_INET6:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", six)
    assert unresolved("tcp://[six]:4000") == ""
    assert "IPv4" in unresolved("tcp://six:4000")


@pytest.mark.parametrize(
    "address",
    ["tcp://a", "tcp://:4000", "tcp://::1:4000", "tcp://a:0", "tcp://a:65536", "tcp://a:b"],
)
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    """libzmq accepts most of them and never connects."""
    with pytest.raises(ValueError, match=r"no address to connect to \(must be tcp://host:port"):
        DealerClient(address, sender="actor-x")
