"""Requests are answered once what the reply says is durable, whatever is lost on the way."""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import episodes
import numpy as np
import pytest
import zmq
from episodes import episode
from msgspec import structs
from network import needs_ipv6
from virtual_time import virtually

from evolver_async.schema import (
    Group,
    Role,
    Sequence,
    Task,
    Ticket,
    Trajectory,
    VersionRun,
    WeightId,
)
from evolver_async.wire import client as transport_client
from evolver_async.wire import curve
from evolver_async.wire.addresses import beside
from evolver_async.wire.bundles import BUNDLE_BYTES, Bundles
from evolver_async.wire.client import Client, Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.envelope import LIMITS, Envelope, pack, unpack
from evolver_async.wire.in_process import LocalClient, LocalServer
from evolver_async.wire.messages import (
    Ack,
    GroupReply,
    Groups,
    Hello,
    Kept,
    Lease,
    Offer,
    Ok,
    Push,
    Reject,
    Release,
    Reply,
    Resume,
    Retry,
    Sample,
    StatusReply,
    StatusRequest,
    Tickets,
    Wait,
    Welcome,
)
from evolver_async.wire.router import BUNDLE
from evolver_async.wire.server import BATCH_S, Server
from evolver_async.wire.trajectory_bytes import Parcel

TASK = Task(task_id="t/0", env="t", split="train", map_seed=0)


class Store:
    """An in-memory service: a LEASE needs a free ticket, a SAMPLE needs all its groups pushed."""

    def __init__(self, *, groups: int = 2) -> None:
        self.groups = groups
        self.tickets = 0
        self.pushed: dict[int, Trajectory] = {}
        self.log: list[tuple[str, str]] = []  # what happened, in order
        self.busy = 0  # PUSHes to be answered RETRY
        self.ticks = 0

    def handle(self, peer: str, request: Any, now: float) -> list[Reply]:
        self.log.append((type(request).__name__, peer))
        match request:
            case Hello():
                return [Welcome(run_id="run", config={"role": request.role}, weights_address="")]
            case Lease() if self.tickets:
                self.tickets -= 1
                return [Tickets(tickets=[ticket(self.tickets)])]
            case Lease() | Sample() if len(self.pushed) < self.groups:
                return [Wait(reason=f"{len(self.pushed)} of {self.groups} groups")]
            case Push() if self.busy:
                self.busy -= 1
                return [Retry(seconds=0.05)]
            case Push():
                self.pushed[request.trajectory.group_id] = request.trajectory
                return [Ack()]
            case Sample():
                parts = [GroupReply(group=group(t)) for t in self.pushed.values()]
                return [*parts, Groups(count=len(parts))]
            case Release():
                self.tickets += len(request.members)
                return [Ok()]
            case Kept():
                return [Ok(counters={"take": float(request.take)})]
            case StatusRequest():
                return [StatusReply(status={"ticks": self.ticks})]
        return [Reject(reason=f"type: {type(request).__name__}")]

    def commit(self) -> None:
        self.log.append(("commit", ""))

    def tick(self, now: float) -> None:
        self.ticks += 1

    def seen(self, name: str) -> int:
        return sum(entry[0] == name for entry in self.log)


def ticket(group_id: int) -> Ticket:
    return episodes.ticket(TASK, group_id=group_id, max_tokens=8)


def trajectory(group_id: int, length: int = 8) -> Trajectory:
    sequence = Sequence(
        tokens=np.arange(length, dtype=np.int32) + group_id,
        roles=np.full(length, Role.ACTION, np.uint8),
        turns=np.zeros(length, np.int16),
        logprobs=np.zeros(length, np.float32),
        versions=[VersionRun(weights=WeightId(lineage=1, step=2), tokens=length)],
    )
    return episode(sequence, group_id=group_id, reward=1.0, success=True)


def group(member: Trajectory) -> Group:
    return Group(
        group_id=member.group_id,
        task=TASK,
        kind="rollout",
        stage=0,
        use=0,
        trajectories=[member],
    )


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ev"))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # a socket file may go meanwhile, by zmq's own thread


@contextlib.contextmanager
def serving(service: Any, address: str, **options: Any) -> Iterator[Server]:
    server = Server(service, address, "run", **options)
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(10)
        server.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def client(address: str, sender: str = "a", **options: Any) -> Iterator[DealerClient]:
    dealer = DealerClient(address, "run", sender, **options)
    try:
        yield dealer
    finally:
        dealer.close()


async def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.005)


# ---- asking and answering


def test_a_request_is_answered_after_the_commit(directory: Path) -> None:
    store = Store()
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:
        reply = asyncio.run(dealer.request(Push(trajectory=trajectory(1)), 10))
    assert isinstance(reply, Ack)
    assert ("commit", "") in store.log[store.log.index(("Push", "a")) :]
    np.testing.assert_array_equal(
        store.pushed[1].sequences[0].tokens, trajectory(1).sequences[0].tokens
    )


def test_members_that_finish_together_travel_together(directory: Path) -> None:
    """Fewer messages than members, each with the reply to itself; one that is busy asks again."""
    store = Store()
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:
        messages: list[int] = []
        send = dealer._send
        dealer._send = lambda frames: (messages.append(len(frames) - 1), send(frames))[1]  # type: ignore[method-assign]
        store.busy = 2

        async def ask() -> list[Any]:
            pushes = (dealer.request(Push(trajectory=trajectory(n)), 10) for n in range(BUNDLE + 4))
            return await asyncio.gather(*pushes)

        replies = asyncio.run(ask())
    assert {type(reply) for reply in replies} == {Ack}
    assert sorted(store.pushed) == list(range(BUNDLE + 4))
    assert messages[:2] == [BUNDLE, 4] and sum(messages[2:]) == 2


def test_a_bundle_has_no_more_bytes_than_it_may() -> None:
    bundles, sender = Bundles(), Envelope("run", "a", 0, 0, StatusRequest())
    for number, quarters in enumerate((2, 2, 1, 5, 1, 3, 1)):
        bundles.add(number, Parcel(bytes(quarters * BUNDLE_BYTES // 4), 0))
    made = [
        [4 * len(part) // BUNDLE_BYTES for part in parts]
        for _, *parts in bundles.empty(sender, itertools.count(100))
    ]
    assert made == [[2, 2], [1], [5], [1, 3], [1]]


def test_a_faulty_member_of_a_bundle_harms_no_other(directory: Path) -> None:
    store = Store()
    faulty = trajectory(1)
    faulty.sequences[0].logprobs = np.full(8, np.nan, np.float32)
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:

        async def ask() -> list[Any]:
            pushes = (
                dealer.request(Push(trajectory=one), 10)
                for one in (trajectory(0), faulty, trajectory(2))
            )
            return await asyncio.gather(*pushes, return_exceptions=True)

        first, refused, third = asyncio.run(ask())
        assert not dealer._bundles._sent and not dealer._bundles._alone
    assert isinstance(first, Ack) and isinstance(third, Ack) and sorted(store.pushed) == [0, 2]
    assert isinstance(refused, Rejected) and "logprobs" in refused.reason


def test_a_commit_comes_before_its_replies(directory: Path) -> None:
    """While the commit hangs, no reply arrives."""
    store, gate = Store(), threading.Event()

    def commit() -> None:
        if store.seen("Push"):
            assert gate.wait(10)

    store.commit = commit  # type: ignore[method-assign]
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:

        async def ask() -> None:
            push = asyncio.create_task(dealer.request(Push(trajectory=trajectory(1)), 10))
            await until(lambda: store.seen("Push") > 0)
            done, _ = await asyncio.wait({push}, timeout=0.1)
            assert not done
            gate.set()
            assert isinstance(await push, Ack)

        try:
            asyncio.run(ask())
        finally:
            gate.set()


def test_no_answer_waits_long_for_its_commit_to_begin(directory: Path) -> None:
    class Slow(Store):
        now = 0.0

        def handle(self, peer: str, request: Any, now: float) -> list[Reply]:
            self.now += BATCH_S / 4
            return super().handle(peer, request, now)

    slow, count = Slow(), 40
    waiting = zmq.Context.instance().socket(zmq.DEALER)
    waiting.connect(f"ipc://{directory}/s")
    for number in range(count):
        waiting.send_multipart(pack(Envelope("run", "a", 0, number + 1, StatusRequest())))
    with serving(slow, f"ipc://{directory}/s", clock=lambda: slow.now):
        for _ in range(count):
            assert waiting.poll(10_000)
            waiting.recv_multipart()
    waiting.close(linger=0)
    batches = "".join("." if name == "commit" else "x" for name, _ in slow.log).split(".")
    assert sum(map(len, batches)) == count and max(map(len, batches)) <= 5


def test_many_requests_of_several_clients_are_all_answered(directory: Path) -> None:
    store = Store(groups=0)
    with (
        serving(store, f"ipc://{directory}/s") as server,
        contextlib.ExitStack() as stack,
    ):
        dealers = [
            stack.enter_context(client(server.address, f"c{n}", resend_s=60)) for n in range(4)
        ]

        async def ask() -> list[Any]:
            return await asyncio.gather(
                *(
                    dealer.request(Kept(take=100 * n + take), 20)
                    for take in range(100)
                    for n, dealer in enumerate(dealers)
                )
            )

        replies = asyncio.run(ask())
    takes = [100 * n + take for take in range(100) for n in range(4)]
    assert [reply.counters["take"] for reply in replies] == takes
    assert store.seen("Kept") == 400
    assert store.seen("commit") < 400  # one commit serves a batch


def test_hello_tells_the_run_and_other_runs_are_refused(directory: Path) -> None:
    with serving(Store(), f"ipc://{directory}/s") as server:
        new = DealerClient(server.address, sender="new")
        other = DealerClient(server.address, "yesterday", "other")
        assert isinstance(
            asyncio.run(new.request(Hello(role="actor", schema_hash=""), 10)), Welcome
        )
        assert new.run_id == "run"
        with pytest.raises(Rejected, match=r"'yesterday'.*'run'"):
            asyncio.run(other.request(StatusRequest(), 10))
        new.close()
        other.close()


def test_the_loop_may_stand_still_between_requests(directory: Path) -> None:
    """A synchronous learner: the loop runs only inside `run_until_complete`."""
    store = Store()
    loop = asyncio.new_event_loop()
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:
        request = loop.create_task(dealer.request(Kept(take=5), 30))
        loop.run_until_complete(asyncio.sleep(0))  # sends
        deadline = time.monotonic() + 10
        while not store.seen("Kept"):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert loop.run_until_complete(request).counters == {"take": 5.0}
        assert store.seen("Kept") == 1
        assert isinstance(loop.run_until_complete(dealer.request(StatusRequest(), 10)), StatusReply)
        # and another loop may take over
        assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)
        assert isinstance(loop.run_until_complete(dealer.request(StatusRequest(), 10)), StatusReply)
    loop.close()


def test_groups_come_as_a_stream_in_order(directory: Path) -> None:
    store = Store(groups=40)
    for number in range(40):
        store.pushed[number] = trajectory(number, length=2000)
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:
        groups = asyncio.run(dealer.request(Sample(lineage=1, take=0, stage=0), 20))
    assert [group.group_id for group in groups] == list(range(40))
    tokens = groups[7].trajectories[0].sequences[0].tokens
    np.testing.assert_array_equal(tokens, np.arange(2000) + 7)


# ---- parking


def test_a_parked_lease_is_answered_when_something_changes(directory: Path) -> None:
    store = Store()
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:

        async def ask() -> Any:
            lease = asyncio.create_task(dealer.request(Lease(credit=1), 10))
            await until(lambda: store.seen("Lease") > 1)
            assert not lease.done()
            await dealer.request(Release(group_id=0, members=[0], reason="drain"), 10)
            return await lease

        reply = asyncio.run(ask())
    assert isinstance(reply, Tickets) and len(reply.tickets) == 1


def test_a_parked_request_ends_in_wait(directory: Path) -> None:
    store = Store()
    with (
        serving(store, f"ipc://{directory}/s", park_s=0.3) as server,
        client(server.address) as dealer,
    ):
        before = time.monotonic()
        reply = asyncio.run(dealer.request(Sample(lineage=1, take=0, stage=0), 10))
        assert 0.25 < time.monotonic() - before < 9
    assert isinstance(reply, Wait) and reply.reason == "0 of 2 groups"
    assert store.seen("Sample") >= 2


def test_a_newer_request_replaces_the_parked_one(directory: Path) -> None:
    store = Store()
    with (
        serving(store, f"ipc://{directory}/s", park_s=3600) as server,
        client(server.address, resend_s=3600) as dealer,
    ):

        async def ask() -> tuple[Any, Any]:
            first = asyncio.create_task(dealer.request(Lease(credit=1), 60))
            await until(lambda: store.seen("Lease") > 0)
            second = asyncio.create_task(dealer.request(Lease(credit=2), 60))
            assert isinstance(await first, Wait)
            await dealer.request(Release(group_id=0, members=[0, 1], reason="drain"), 10)
            return first.result(), await second

        asyncio.run(ask())
    assert store.tickets == 1  # the first one, which nobody waits for, got none


# ---- losses


def test_a_lost_reply_is_asked_for_again(directory: Path) -> None:
    """A server that swallows the first two copies: the same message id comes a third time."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{directory}/s")
    ids = []

    def answer_the_third() -> None:
        for _ in range(3):
            assert router.poll(10_000)
            identity, *frames = router.recv_multipart()
            ids.append(unpack(frames).message_id)
        router.send_multipart([identity, b"garbage"])
        router.send_multipart([identity, *pack(Envelope("run", "buffer", 0, 999, Ack()))])
        router.send_multipart([identity, *pack(Envelope("run", "buffer", 0, ids[0], Ack()))])

    thread = threading.Thread(target=answer_the_third)
    thread.start()
    with client(f"ipc://{directory}/s", resend_s=0.05) as dealer:
        assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), Ack)
    thread.join(10)
    router.close(linger=0)
    assert len(set(ids)) == 1


def test_tasks_of_many_short_lists_arrive(directory: Path) -> None:
    """A list of two takes three bytes: tasks about graphs hold little else."""

    class Graphs(Store):
        def handle(self, peer: str, request: Any, now: float) -> list[Reply]:
            if not isinstance(request, Lease):
                return [Ok()]
            edges = [[number, number + 1] for number in range(100)] * 2
            task = structs.replace(TASK, params={"edges": edges, "cells": [[]] * 1000})
            granted = [episodes.ticket(task, group_id=number) for number in range(64)]
            return [Tickets(tickets=granted)]

    with serving(Graphs(), f"ipc://{directory}/s") as server, client(server.address) as dealer:
        granted = asyncio.run(dealer.request(Lease(credit=64), 10)).tickets
        assert len(granted) == 64
        tasks = [granted[0].task] * 16
        tasks = [structs.replace(task, params={"edges": task.params["edges"]}) for task in tasks]
        assert isinstance(asyncio.run(dealer.request(Offer(tasks=tasks), 10)), Ok)


def test_a_reply_that_cannot_be_read_fails_its_request_and_a_damaged_one_is_asked_for_again(
    directory: Path,
) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{directory}/s")

    def forged(params: dict[str, Any], number: int) -> list[bytes]:
        task = structs.replace(TASK, params=params)
        reply = Tickets(tickets=[episodes.ticket(task, group_id=1)])
        return pack(Envelope("run", "buffer", 0, number, reply))

    def answer() -> None:
        for _ in range(2):
            assert router.poll(10_000)
            identity, *frames = router.recv_multipart()
            number = unpack(frames).message_id
            reply = GroupReply(group=group(trajectory(0)))
            header, parcel = pack(Envelope("run", "buffer", 0, number, reply))
            router.send_multipart([identity, header, bytes(len(parcel))])
        router.send_multipart([identity, *forged({"x": {True: 1}}, number)])

    thread = threading.Thread(target=answer)
    thread.start()
    with (
        client(f"ipc://{directory}/s", resend_s=0.05) as dealer,
        pytest.raises(Rejected, match=r"unreadable reply: .*neither text nor an integer"),
    ):
        asyncio.run(dealer.request(StatusRequest(), 10))
    thread.join(10)
    router.close(linger=0)


def test_a_member_that_is_damaged_on_its_way_is_sent_again(directory: Path) -> None:
    store, sent = Store(), []
    with (
        serving(store, f"ipc://{directory}/s") as server,
        client(server.address, resend_s=0.1) as dealer,
    ):
        send = dealer._send

        def damage_the_first(frames: list[bytes]) -> None:
            sent.append(frames)
            header, parcel = frames
            send(frames if len(sent) > 1 else [header, parcel[:-1] + b"\x07"])

        dealer._send = damage_the_first  # type: ignore[method-assign]
        reply = asyncio.run(dealer.request(Push(trajectory=trajectory(1)), 10))
    assert isinstance(reply, Ack) and len(sent) > 1 and sorted(store.pushed) == [1]


def test_a_resent_lease_gets_the_same_tickets(directory: Path) -> None:
    store = Store()
    store.tickets = 2
    with serving(store, f"ipc://{directory}/s") as server:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(server.address)
        got = []
        for _ in range(2):
            dealer.send_multipart(pack(Envelope("run", "a", 0, 1, Lease(credit=1))))
            assert dealer.poll(10_000)
            got.append(unpack(dealer.recv_multipart()).message.tickets[0].group_id)
        dealer.close(linger=0)
    assert got[0] == got[1]
    assert store.tickets == 1


def test_an_incomplete_stream_is_not_taken_for_a_whole_one(directory: Path) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{directory}/s")

    def lose_a_part() -> None:
        for lost in (1, None):
            assert router.poll(10_000)
            identity, *frames = router.recv_multipart()
            number = unpack(frames).message_id
            replies = [GroupReply(group=group(trajectory(n))) for n in range(3) if n != lost]
            for reply in (*replies, Groups(count=3)):
                router.send_multipart(
                    [identity, *pack(Envelope("run", "buffer", 0, number, reply))]
                )

    thread = threading.Thread(target=lose_a_part)
    thread.start()
    with client(f"ipc://{directory}/s", park_s=0, resend_s=0.05) as dealer:
        groups = asyncio.run(dealer.request(Sample(lineage=1, take=0, stage=0), 10))
    thread.join(10)
    router.close(linger=0)
    assert [group.group_id for group in groups] == [0, 1, 2]


class SlowLine(Client):
    """A client whose requests are answered with these messages, one every `apart_s`."""

    def __init__(self, apart_s: float, answers: list[list[Reply]]) -> None:
        super().__init__("line", "run", "a", 0)
        self.apart_s = apart_s
        self.answers = answers  # to the request and to its copies, in this order
        self.asked = 0

    def _send(self, frames: list[bytes]) -> None:
        loop, number = asyncio.get_running_loop(), unpack(frames).message_id
        for place, reply in enumerate(self.answers[self.asked], 1):
            answer = pack(Envelope("run", "buffer", 0, number, reply))
            loop.call_later(place * self.apart_s, self._receive, answer)
        self.asked += 1

    def _poll(self) -> None:
        pass

    def close(self) -> None:
        pass


# of six parts those that come, before the stream breaks off
@pytest.mark.parametrize("come", [[*range(6)], [0, 1, 2], [], [0, 2, 4]])
def test_groups_that_take_long_to_come_are_asked_for_once(come: list[int]) -> None:
    """A copy would come behind them, and hold up the next take. A stream that ends is repeated."""
    groups = [GroupReply(group=group(trajectory(n))) for n in range(5)]
    stream = [*groups, Groups(count=5)]
    line = SlowLine(4.0, [[stream[part] for part in come], stream])
    taken = virtually(line.request(Sample(lineage=1, take=0, stage=0), 100))
    assert [group.group_id for group in taken] == [0, 1, 2, 3, 4]
    assert line.asked == 1 + (len(come) < len(stream))


def test_an_outage_leaves_no_copies_that_come_at_its_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_client, "RESEND_LIMIT_S", 0.02)
    address, store, runner = f"ipc://{directory}/s", Store(), asyncio.Runner()
    with runner, client(address, resend_s=0.02) as dealer:
        with serving(Store(), address):
            runner.run(dealer.request(StatusRequest(), 10))
        send, sent = dealer._send, 0

        def count(frames: list[bytes]) -> None:
            nonlocal sent
            sent += 1
            send(frames)

        dealer._send = count  # type: ignore[method-assign]

        async def ask_during_an_outage() -> tuple[Any, int]:
            await until(lambda: dealer._poll() or not dealer._connected())
            push = asyncio.create_task(dealer.request(Push(trajectory=trajectory(1)), 20))
            await asyncio.sleep(1.0)
            queued = sent
            with serving(store, address):
                return await push, queued

        reply, queued = runner.run(ask_during_an_outage())
    assert isinstance(reply, Ack) and queued == 1


def test_a_request_from_before_the_server_goes_out_when_it_is_there(directory: Path) -> None:
    address = f"ipc://{directory}/s"

    async def ask(dealer: DealerClient) -> Any:
        asked = asyncio.create_task(dealer.request(StatusRequest(), 20))
        await asyncio.sleep(0.2)
        with serving(Store(), address):
            return await asked

    with client(address, resend_s=60) as dealer:
        assert isinstance(asyncio.run(ask(dealer)), StatusReply)


def test_retry_is_obeyed(directory: Path) -> None:
    store = Store()
    store.busy = 2
    with (
        serving(store, f"ipc://{directory}/s") as server,
        client(server.address, resend_s=60) as dealer,
    ):
        assert isinstance(asyncio.run(dealer.request(Push(trajectory=trajectory(1)), 10)), Ack)
    assert store.seen("Push") == 3


def test_no_reply_is_a_timeout_that_names_request_and_peer(directory: Path) -> None:
    address = f"ipc://{directory}/s"
    with (
        client(address, resend_s=0.05) as dealer,
        pytest.raises(TimeoutError, match=f"STATUS to {address}: no reply in 0.2 s"),
    ):
        asyncio.run(dealer.request(StatusRequest(), 0.2))


def test_a_request_that_is_resent_in_vain_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """After 2 s and 4 s, give or take a fifth, and then after 8 s more."""
    line = SlowLine(1.0, 9 * [[]])
    with caplog.at_level(logging.WARNING, "evolver_async.wire.client"):
        with pytest.raises(TimeoutError):
            virtually(line.request(StatusRequest(), 20))
        said = "\n".join(record.getMessage() for record in caplog.records)
    found = re.fullmatch(r"STATUS to line: no reply for (.+) s\nSTATUS to line: .* (.+) s", said)
    assert found, said
    assert 4.8 <= float(found[1]) <= 7.2 and 11.2 <= float(found[2]) <= 16.8


@pytest.mark.parametrize(
    "address", ["nonsense", "foo://x", "tcp://127.0.0.1", "ipc://" + 200 * "x"]
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ValueError, match=f"{address}: no address to connect to"):
        DealerClient(address, sender="a")


def test_clients_survive_a_restart_of_the_server(directory: Path) -> None:
    address = f"ipc://{directory}/s"
    first, second = Store(), Store()
    with client(address, "a", resend_s=0.1) as a, client(address, "b", park_s=0, resend_s=0.1) as b:

        async def ask() -> list[Any]:
            with serving(first, address):
                await a.request(StatusRequest(), 10)
                parked = asyncio.create_task(b.request(Lease(credit=1), 20))
                await until(lambda: first.seen("Lease") > 0)
            pushes = [
                asyncio.create_task(a.request(Push(trajectory=trajectory(n)), 20)) for n in range(5)
            ]
            await asyncio.sleep(0)
            second.tickets = 1
            with serving(second, address):
                return [*await asyncio.gather(*pushes), await parked]

        replies = asyncio.run(ask())
    assert [type(reply) for reply in replies] == [Ack] * 5 + [Tickets]
    assert sorted(second.pushed) == [0, 1, 2, 3, 4]


def test_a_proxy_that_cuts_while_the_server_restarts_fails_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curve, "UNCLEAR_S", 0.0)
    monkeypatch.setattr(curve, "UNCLEAR_FAILURES", 1)

    def cut(address: str, times: int) -> None:
        """Accept and close connections at this address, as a proxy without its server does."""
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as proxy:
            proxy.settimeout(10)
            for _ in range(times):
                proxy.accept()[0].close()

    with contextlib.ExitStack() as first, asyncio.Runner() as runner:
        address = first.enter_context(serving(Store(), "tcp://127.0.0.1:*")).address
        with client(address, resend_s=0.1) as dealer:

            async def during() -> Any:
                waiting = asyncio.create_task(dealer.request(StatusRequest(), 30))
                await asyncio.to_thread(cut, address, 4)
                with serving(Store(), address):
                    return await waiting

            assert isinstance(runner.run(dealer.request(StatusRequest(), 10)), StatusReply)
            first.close()
            assert isinstance(runner.run(during()), StatusReply)


@needs_ipv6
def test_an_ipv6_address_is_served(directory: Path) -> None:
    for address in ("tcp://[::1]:*", "tcp://127.0.0.1:*"):
        with serving(Store(), address) as server, client(server.address) as dealer:
            assert server.address.rpartition(":")[0] == address.rpartition(":")[0]
            assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)
    name = server.address.replace("127.0.0.1", "localhost")
    with serving(Store(), server.address), client(name) as dealer:
        assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)


def test_malformed_frames_are_rejected_and_harm_nobody_else(directory: Path) -> None:
    store = Store()
    with serving(store, f"ipc://{directory}/s") as server, client(server.address) as dealer:
        evil = zmq.Context.instance().socket(zmq.DEALER)
        evil.connect(server.address)
        valid = [bytes(f) for f in pack(Envelope("run", "e", 0, 7, Push(trajectory=trajectory(1))))]
        reply = Envelope("run", "e", 0, 8, Ack())
        cases = (
            ([b""], 0, "header"),
            ([os.urandom(500)], 0, "header"),
            (valid[:-1], 7, "parcels"),
            ([*valid[:-1], b"\x07"], 0, "crc"),  # ends no request: it may come again, whole
            ([*valid, b"x" * 1000], 7, "parcels"),
            ([*valid, *[b"x"] * BUNDLE], 0, "parcels"),
            ([bytes(f) for f in pack(reply)], 8, "Ack is not a request"),
        )
        for frames, number, named in cases:
            evil.send_multipart(frames)
            assert evil.poll(10_000)
            answer = unpack(evil.recv_multipart())
            assert isinstance(answer.message, Reject) and named in answer.message.reason
            assert answer.message_id == number
            assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)
        evil.close(linger=0)
    assert not store.pushed


def test_a_frame_over_the_limit_harms_nobody_else(directory: Path) -> None:
    with serving(Store(), f"ipc://{directory}/s") as server, client(server.address) as dealer:
        evil = zmq.Context.instance().socket(zmq.DEALER)
        evil.connect(server.address)
        evil.send_multipart([bytes(LIMITS.parcel_bytes + 1)])
        assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)
        evil.close(linger=0)


def test_a_client_that_left_does_not_stop_the_server(directory: Path) -> None:
    store = Store()
    with serving(store, f"ipc://{directory}/s", park_s=0.2) as server:
        with client(server.address, "gone") as gone, pytest.raises(TimeoutError):
            asyncio.run(gone.request(Lease(credit=1), 0.05))
        with client(server.address) as dealer:
            ticks = store.ticks
            asyncio.run(until(lambda: store.ticks > ticks + 4))
            assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)


# ---- addresses


def test_an_address_in_use_is_named(directory: Path) -> None:
    for address in (f"ipc://{directory}/s", "tcp://127.0.0.1:*"):
        with serving(Store(), address) as server:
            with pytest.raises(OSError, match=server.address.replace(".", r"\.")) as caught:
                Server(Store(), server.address, "run")
            assert caught.value.errno == errno.EADDRINUSE
            with client(server.address) as dealer:  # the first one still serves
                assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)


def test_a_stale_socket_file_is_taken_over(directory: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(f"{directory}/s")
    left.close()
    with (
        serving(Store(), f"ipc://{directory}/s") as server,
        client(server.address) as dealer,
    ):
        assert isinstance(asyncio.run(dealer.request(StatusRequest(), 10)), StatusReply)
    (directory / "file").write_text("not a socket")
    with pytest.raises(OSError, match="not a socket"):
        Server(Store(), f"ipc://{directory}/file", "run")


@pytest.mark.parametrize(
    ("address", "server", "expected"),
    [
        ("tcp://0.0.0.0:4002", "tcp://trainer:4000", "tcp://trainer:4002"),
        ("tcp://*:4002", "tcp://0.0.0.0:4000", "tcp://0.0.0.0:4002"),
        ("tcp://[::]:4002", "tcp://[fd00::1]:4000", "tcp://[fd00::1]:4002"),
        ("tcp://other:4002", "tcp://trainer:4000", "tcp://other:4002"),
        ("tcp://0.0.0.0:4002", "ipc:///s/buffer", "tcp://0.0.0.0:4002"),
        ("ipc:///s/buffer.experience", "ipc:///s/buffer", "ipc:///s/buffer.experience"),
        ("", "tcp://trainer:4000", ""),
    ],
)
def test_a_service_on_every_interface_is_reached_on_the_host_of_the_buffer(
    address: str, server: str, expected: str
) -> None:
    """An actor on another host would look for it on its own."""
    assert beside(address, server) == expected


def test_addresses_open_to_others_are_refused(directory: Path) -> None:
    for address in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.168.1.2:5555", "tcp://eth0:1"):
        with pytest.raises(ValueError, match=r"buffer.address: .* loopback"):
            Server(Store(), address, "run")
    for address in ("ipc://@name", "ipc://*", "inproc://x", "nonsense"):
        with pytest.raises(ValueError, match=r"buffer.address"):
            Server(Store(), address, "run")
    with pytest.raises(ValueError, match="longer than"):
        Server(Store(), f"ipc://{directory}/{'x' * 120}", "run")
    directory.chmod(0o755)
    with pytest.raises(ValueError, match="0700"):
        Server(Store(), f"ipc://{directory}/s", "run")


# ---- the twin within one loop


async def conversation(store: Store, actor: Client, learner: Client) -> list[str]:
    """Every kind of answer once; the types of the replies."""
    said: list[Any] = [await actor.request(Hello(role="actor", schema_hash=""), 20)]
    lease = asyncio.create_task(actor.request(Lease(credit=1), 20))
    sample = asyncio.create_task(learner.request(Sample(lineage=1, take=0, stage=0), 20))
    await until_said(store, "Lease", "Sample")
    said.append(await learner.request(Release(group_id=0, members=[0], reason="drain"), 20))
    said.append(await lease)
    store.busy = 1
    for number in range(2):
        said.append(await actor.request(Push(trajectory=trajectory(number)), 20))
    said += [group.group_id for group in await sample]
    try:
        await learner.request(Resume(lineage=0, take=0, version=0), 20)
    except Rejected as error:
        said.append(error.reason)
    return [item if isinstance(item, int | str) else type(item).__name__ for item in said]


async def until_said(store: Store, *names: str) -> None:
    while not all(store.seen(name) for name in names):
        await asyncio.sleep(0.01)


async def local_conversation(store: Store) -> list[str]:
    server = LocalServer(store, "run")
    server.start()
    said = await conversation(store, LocalClient(server, "actor"), LocalClient(server, "learner"))
    server.close()
    return said


def test_the_local_twin_gives_the_same_answers(directory: Path) -> None:
    over_sockets, in_loop, virtual = Store(), Store(), Store()
    with (
        serving(over_sockets, f"ipc://{directory}/s") as server,
        client(server.address, "actor") as actor,
        client(server.address, "learner") as learner,
    ):
        expected = asyncio.run(conversation(over_sockets, actor, learner))
    assert expected == ["Welcome", "Ok", "Tickets", "Ack", "Ack", 0, 1, "type: Resume"]
    assert asyncio.run(local_conversation(in_loop)) == expected
    assert virtually(local_conversation(virtual)) == expected
    for store in (over_sockets, in_loop, virtual):
        np.testing.assert_array_equal(
            store.pushed[1].sequences[0].tokens, trajectory(1).sequences[0].tokens
        )


def test_the_local_twin_parks_on_the_virtual_clock() -> None:
    async def ask(store: Store) -> float:
        server = LocalServer(store, "run")
        server.start()
        reply = await LocalClient(server, "a").request(Lease(credit=1), 60)
        server.close()
        assert isinstance(reply, Wait)
        return asyncio.get_running_loop().time()

    store, again = Store(), Store()
    assert 5.0 <= virtually(ask(store)) < 5.3
    assert store.ticks in range(49, 54)
    virtually(ask(again))
    assert again.log == store.log


def test_the_local_twin_shares_no_arrays() -> None:
    store = Store()
    sent = trajectory(1)

    async def push() -> None:
        server = LocalServer(store, "run")
        await LocalClient(server, "a").request(Push(trajectory=sent), 5)

    asyncio.run(push())
    got = store.pushed[1].sequences[0].tokens
    assert not np.shares_memory(got, sent.sequences[0].tokens)


def test_an_exception_of_the_service_ends_local_requests() -> None:
    store = Store()

    def fail() -> None:
        raise RuntimeError("disk full")

    store.commit = fail  # type: ignore[method-assign]

    async def ask() -> None:
        server = LocalServer(store, "run")
        one, two = LocalClient(server, "a"), LocalClient(server, "b")
        requests = [asyncio.create_task(c.request(StatusRequest(), 5)) for c in (one, two)]
        for request in requests:
            with pytest.raises(RuntimeError, match="disk full"):
                await request
        for later in (StatusRequest(), Push(trajectory=trajectory(1))):
            with pytest.raises(RuntimeError, match="disk full"):
                await one.request(later, 5)

    asyncio.run(ask())
