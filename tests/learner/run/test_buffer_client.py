"""How long the learner waits for the buffer once it was told to end."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evolver_async.errors import TrainingError
from evolver_async.launch.serial import VirtualLoop
from evolver_async.process.package_versions import versions
from evolver_async.wire import messages
from evolver_async.wire.client import Rejected
from evolver_async.wire.envelope import SCHEMA_HASH
from learner.run.buffer_client import LAST_S, PATIENCE_S, Requests, Stopping

DONE = messages.Done(lineage=1, take=0, version=1, trained=[], filtered={})
KEPT = messages.Kept(take=0)
SAMPLE = messages.Sample(lineage=1, take=1, stage=0)


class Slow:
    """Answers after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def request(self, message: Any) -> messages.Ok:
        await asyncio.sleep(self.seconds)
        return messages.Ok()


class Recorder(Slow):
    """Answers at once, remembers the question, and refuses it if there is a reason."""

    def __init__(self, refusal: str = "") -> None:
        super().__init__(0.0)
        self.refusal = refusal
        self.asked: list[Any] = []

    async def request(self, message: Any) -> messages.Ok:
        self.asked.append(message)
        if self.refusal:
            raise Rejected(self.refusal)
        return messages.Ok()


def test_the_learner_tells_its_host_and_versions() -> None:
    client = Recorder()
    Requests(client, asyncio.run).greet()  # type: ignore[arg-type]
    (hello,) = client.asked
    assert (hello.role, hello.schema_hash, hello.versions) == ("learner", SCHEMA_HASH, versions())
    assert hello.host and hello.pid


def test_a_refused_learner_says_why() -> None:
    client = Recorder("schema: learner has x, the buffer y")
    with pytest.raises(TrainingError, match="refused this learner: schema: learner has x"):
        Requests(client, asyncio.run).greet()  # type: ignore[arg-type]


@pytest.fixture
def ending() -> Iterator[Callable[[float], Requests]]:
    """A learner that was told to end, with a buffer that takes so long; its clock is virtual."""
    loop = VirtualLoop()

    def ending(seconds: float) -> Requests:
        line = Requests(Slow(seconds), loop.run_until_complete)  # type: ignore[arg-type]
        line.stopping = True
        return line

    yield ending
    loop.run_until_complete(asyncio.sleep(0))  # ends what was cancelled
    loop.close()


def test_a_learner_that_is_to_end_greets_nobody_for_long(ending: Any) -> None:
    line = ending(3600.0)
    line.greet()
    assert line.now() < 2 * PATIENCE_S


def test_what_was_done_is_answered_though_it_takes_a_while(ending: Any) -> None:
    line = ending(2.5 * PATIENCE_S)
    assert isinstance(line.ask(DONE), messages.Ok)
    assert isinstance(line.ask(KEPT), messages.Ok)


def test_no_take_is_asked_for_and_nothing_else_waited_for(ending: Any) -> None:
    for message in (SAMPLE, messages.Resume(lineage=0, take=0, version=0)):
        with pytest.raises(Stopping):
            ending(3600.0).ask(message)


def test_a_take_that_is_waited_for_is_given_up(ending: Any) -> None:
    line = ending(3600.0)
    line.stopping = False

    async def told() -> None:
        asyncio.get_running_loop().call_later(20.0, setattr, line, "stopping", True)
        await line._reply_to(SAMPLE)

    with pytest.raises(Stopping, match="SAMPLE"):
        line.call(told())
    assert 20.0 <= line.now() <= 20.1 + PATIENCE_S


def test_a_buffer_that_is_silent_is_waited_for_once(ending: Any) -> None:
    """All replies share the time, so that a last checkpoint is written before the processes die."""
    line = ending(3600.0)
    for message in (DONE, KEPT, KEPT, KEPT):
        with pytest.raises(Stopping):
            line.ask(message)
    assert LAST_S - PATIENCE_S <= line.now() < 2 * LAST_S
    assert line.left_s < 0.0
