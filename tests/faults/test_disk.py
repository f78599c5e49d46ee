"""Faults 5 to 8 for the journal: power cuts, flipped bits, torn tails, a full or failing disk.

Checkpoints have theirs in `test_checkpoints`.
"""

import asyncio
import errno
import itertools
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from buffer_world import World, config, trajectory
from invariants import check_journal, check_named
from power import cut_at_every_sync
from producers import BufferProcess

from evolver_async.buffer.log import disk
from evolver_async.buffer.log.disk import SyncError
from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.errors import USER_ERROR
from evolver_async.schema import Ticket
from evolver_async.wire import messages
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.envelope import Envelope, pack, unpack
from evolver_async.wire.router import RequestRouter
from evolver_async.wire.server import Server
from evolver_async.wire.trajectory_bytes import wrap

SETTINGS = config(max_staleness=1)
HOLDING = config(max_staleness=1, lease_s=600.0, stall_s=2400.0)  # no lease ends in a test
PATIENT = config(max_staleness=20)
TAKES = 4


def learn(world: World, take: int) -> messages.Ok:
    """One whole step of two groups of two."""
    world.finish(world.lease(credit=2))
    return train(world, take)


def train(world: World, take: int) -> messages.Ok:
    groups = [group.group_id for group in world.sample(take)]
    assert len(groups) == 2
    return world.done(take, groups, take + 1)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# ---- 5


def test_05_acknowledged_trajectories_survive_a_power_cut_at_every_sync(tmp_path: Path):
    journal = tmp_path / "run" / "journal"
    journal.parent.mkdir()
    told = tmp_path / "told"

    def work() -> None:
        world = World(journal, SETTINGS, segment_bytes=2000)
        world.resume()
        with open(told, "w", buffering=1) as file:
            for take in range(4):
                for ticket in world.lease(credit=2):
                    for member in ticket.members:
                        assert isinstance(world.push(ticket, member), messages.Ack)
                        file.write(f"{ticket.group_id} {member}\n")
                train(world, take)
                if take:
                    world.one("learner", messages.Kept(take=take - 1))
        assert world.store.journal.newest > 2

    def check() -> None:
        acked = []
        if told.exists():
            acked = [tuple(map(int, line.split())) for line in told.read_text().splitlines()]
            told.unlink()
        check_journal(journal, SETTINGS, "run", acked)
        for path in journal.iterdir():
            path.unlink()
        journal.rmdir()

    assert cut_at_every_sync(journal.parent, work, check) > 20


# ---- 6


def contents(directory: Path) -> list[bytes]:
    """What a learner that begins anew is given: all trajectories of all takes."""
    world = World(directory, PATIENT, segment_bytes=2500)
    try:
        world.resume(lineage=1)
        found = []
        for take in range(TAKES):
            groups = world.sample(take, lineage=2)
            found += [wrap(one) for group in groups for one in group.trajectories]
            world.done(take, [group.group_id for group in groups], take + 1, lineage=2)
        return found
    finally:
        world.store.journal.close()


def test_06_a_flipped_bit_is_found_or_harms_nobody(tmp_path: Path, rng: random.Random):
    world = World(tmp_path / "whole", PATIENT, segment_bytes=2500)
    world.resume()
    for take in range(TAKES):
        learn(world, take)
    world.store.journal.close()
    shutil.copytree(tmp_path / "whole", tmp_path / "read")
    whole = contents(tmp_path / "read")
    assert len(whole) == 4 * TAKES and len(world.store.journal.sizes) > 2
    found = 0
    for trial in range(40):
        directory = tmp_path / f"trial{trial}"
        shutil.copytree(tmp_path / "whole", directory)
        path = directory / f"{rng.choice(sorted(world.store.journal.sizes)):08d}.log"
        flip(path, rng.randrange(8 * path.stat().st_size))
        damaged = path.read_bytes()
        try:
            assert contents(directory) == whole
        except JournalError as error:
            found += 1
            check_named(str(error), path.name, " at ", "damaged")
            assert (directory / "quarantine" / path.name).read_bytes().startswith(damaged)
            assert path.read_bytes().startswith(damaged)
    assert found > 10


def test_06_a_buffer_with_a_damaged_journal_ends_with_2_and_says_where(tmp_path: Path):
    buffer = BufferProcess(tmp_path / "run", f"ipc://{tmp_path}/s", config())
    buffer.kill()
    path = tmp_path / "run" / "journal" / "00000001.log"
    flip(path, 800)
    before = path.read_bytes()
    ended = subprocess.run(buffer.process.args, capture_output=True, text=True, timeout=240)
    assert ended.returncode == USER_ERROR
    check_named(ended.stderr, f"{path} at 0: damaged", "quarantine")
    assert "Traceback" not in ended.stderr
    assert path.read_bytes() == before


# ---- 7


@pytest.mark.parametrize("filled", [False, True], ids=["short", "zeros"])
def test_07_a_tail_torn_at_every_byte_is_cut_off_and_the_rest_is_intact(tmp_path: Path, filled):
    journal = Journal(tmp_path, 1 << 20)
    assert not list(journal.replay())
    journal.roll(b"snapshot")
    for name in (b"one", b"two", b"three"):
        start = journal.size
        journal.append(name, b"\0body\0" * 5)
        journal.commit()
    journal.close()
    path = tmp_path / "00000001.log"
    data = path.read_bytes()
    for size in range(start, len(data)):
        path.write_bytes(data[:size] + bytes(len(data) - size) * filled)
        journal = Journal(tmp_path, 1 << 20)
        assert [bytes(head) for head, _ in journal.replay()] == [b"snapshot", b"one", b"two"]
        journal.close()
        assert path.read_bytes() == data[:start]


# ---- 8


class Serving:
    """A buffer behind a real socket in a thread of its own, and what an actor says to it."""

    def __init__(self, world: World, address: str) -> None:
        self.server = Server(world.service, address, "run")
        self.address = address
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self.asked = itertools.count()  # each client is a later process, which gets the name
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.server.serve(self.stop)
        except Exception as error:
            self.failure = error
        finally:
            self.server.close()

    def ask(
        self,
        request: messages.Request,
        timeout_s: float = 20.0,
        peer: str = "actor-0",
        resend_s: float = 30.0,
    ):
        async def ask():
            client = DealerClient(self.address, "run", peer, next(self.asked), resend_s=resend_s)
            try:
                return await client.request(request, timeout_s)
            finally:
                client.close()

        return asyncio.run(ask())

    def push(self, ticket: Ticket, member: int) -> messages.Reply:
        """Sent once: a copy that overtakes the answer would make it DUP."""
        return self.ask(messages.Push(trajectory=trajectory(ticket, member)))

    def push_in_vain(self, ticket: Ticket, member: int) -> None:
        """Sent again and again, and never answered."""
        push = messages.Push(trajectory=trajectory(ticket, member))
        with pytest.raises(TimeoutError):
            self.ask(push, timeout_s=0.7, resend_s=0.2)

    def end(self) -> None:
        self.stop.set()
        self.thread.join()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[World, Serving, Ticket]]:
    """A buffer that has granted one ticket of two members to actor-0."""
    world = World(tmp_path / "journal", HOLDING, now=time.monotonic())
    world.resume()
    (ticket,) = world.lease()
    one = Serving(world, f"ipc://{tmp_path}/s")
    yield world, one, ticket
    one.end()
    world.store.journal.close()


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> list[int]:
    """Writes to segments write half and then fail; returns where those are counted."""
    write, refused = os.write, []

    def half(descriptor: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log"):
            return write(descriptor, data)
        refused.append(code)
        if len(refused) % 2:
            return write(descriptor, memoryview(data)[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", half)
    return refused


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_08_what_a_full_disk_refuses_is_not_acknowledged_and_recovers(serving, monkeypatch, code):
    world, one, ticket = serving
    with monkeypatch.context() as patch:
        refused = refuse(patch, code)
        for _ in range(2):  # the second copy is one of a member that is not on disk yet
            one.push_in_vain(ticket, 0)
        one.push_in_vain(ticket, 1)  # told to come again, or nothing
        assert len(refused) > 4, "the commit is tried again"
        status = one.ask(messages.StatusRequest(), peer="watcher").status["journal"]
        assert os.strerror(code).lower() in status["problem"]
        assert isinstance(one.ask(messages.Renew(progress={ticket.group_id: 1})), messages.Ok), (
            "leases are kept meanwhile"
        )
        assert isinstance(one.ask(messages.Counters(values={"judge/calls": 1.0})), messages.Ok), (
            "nor does what an actor tells before hold that up"
        )
    assert isinstance(one.push(ticket, 0), messages.Dup)
    assert isinstance(one.push(ticket, 1), messages.Ack)
    assert not one.ask(messages.StatusRequest(), peer="watcher").status["journal"]["problem"]
    one.end()
    assert one.failure is None
    world.store.journal.close()
    check_journal(world.directory, SETTINGS, "run", [(ticket.group_id, 0), (ticket.group_id, 1)])


def test_08_replies_kept_back_are_given_out_once_with_the_commit(tmp_path: Path, monkeypatch):
    world = World(tmp_path, SETTINGS)
    world.resume()
    (ticket,) = world.lease()
    router = RequestRouter(world.service, "run", 5.0)
    push = messages.Push(trajectory=trajectory(ticket, 0))
    with monkeypatch.context() as patch:
        refuse(patch, errno.ENOSPC)
        router.receive("actor", pack(Envelope("run", "actor-0", 0, 1, push)), 0.0)
        router.receive(
            "watcher", pack(Envelope("run", "watcher", 0, 1, messages.StatusRequest())), 0.0
        )
        ((route, frames),) = router.settle(0.0)
        assert route == "watcher" and isinstance(unpack(frames).message, messages.StatusReply)
        assert router.settle(0.1) == []
    router.tick(0.2)
    ((route, frames),) = router.settle(0.2)
    assert route == "actor" and isinstance(unpack(frames).message, messages.Ack)
    assert router.settle(0.3) == []


def test_08_a_sync_that_fails_ends_the_buffer_and_nothing_of_it_comes_back(serving, monkeypatch):
    world, one, ticket = serving

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        one.push_in_vain(ticket, 0)
        one.thread.join(10)
        assert isinstance(one.failure, SyncError)
        with pytest.raises(SyncError):
            world.service.close()
    world.open()
    assert world.replay.at.groups[ticket.group_id].missing == [0, 1]
    assert isinstance(world.push(ticket, 0), messages.Ack)


def test_messages_are_handled_during_a_sync_and_answered_after_their_own(serving, monkeypatch):
    world, one, ticket = serving
    sync, syncing, gate = os.fdatasync, threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        assert gate.wait(60)
        sync(descriptor)

    held, journal = world.replay.at.groups[ticket.group_id], world.store.journal
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(os, "fdatasync", slow)
        try:
            first = pool.submit(one.push, ticket, 0)
            assert syncing.wait(60)
            size = journal.size
            second = pool.submit(one.push, ticket, 1)
            deadline = time.monotonic() + 60
            while held.missing:
                assert time.monotonic() < deadline, "the second member is not handled"
                time.sleep(0.01)
            assert journal.size == size, "the next commit is written after the sync"
            assert not first.done() and not second.done()
        finally:
            gate.set()
        assert isinstance(first.result(), messages.Ack)
        assert isinstance(second.result(), messages.Ack)
    assert journal.size > size
    one.end()
    world.store.journal.close()
    check_journal(world.directory, SETTINGS, "run", [(ticket.group_id, 0), (ticket.group_id, 1)])


def test_no_lease_runs_out_while_a_sync_holds_up_every_answer(tmp_path: Path, monkeypatch):
    """A disk that is busy with a checkpoint may take longer than `buffer.lease_s`."""
    settings = config(max_staleness=1, lease_s=4.0, stall_s=600.0)
    world = World(tmp_path / "journal", settings, now=time.monotonic())
    world.resume()
    (ticket,) = world.lease()
    one = Serving(world, f"ipc://{tmp_path}/s")
    sync, syncing, gate = os.fdatasync, threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        assert gate.wait(60)
        sync(descriptor)

    try:
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(os, "fdatasync", slow)
            try:
                pushed = pool.submit(one.push, ticket, 0)
                assert syncing.wait(60)
                time.sleep(5.0)
            finally:
                gate.set()
            assert isinstance(pushed.result(), messages.Ack)
        renewed = one.ask(messages.Renew(progress={ticket.group_id: 1}))
        assert isinstance(renewed, messages.Ok), renewed
        assert not world.store.leases.vacant
    finally:
        one.end()
        world.store.journal.close()


def test_08_grants_stop_while_a_checkpoint_fits_and_the_learner_is_asked_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world = World(tmp_path, SETTINGS, segment_bytes=3000)
    world.resume()
    world.one("learner", messages.Kept(take=0, bytes=50_000))
    for take in range(4):
        assert not learn(world, take).checkpoint
    world.kill()  # what a checkpoint needs is remembered
    journal = world.store.journal
    monkeypatch.setattr(disk, "free_bytes", lambda _: 2 * 53_000 - 1)  # scarce, but not full
    journal.measure()
    tickets = world.lease(credit=9)
    assert len(tickets) == 2  # what the learner's next take needs, and no more
    reply = world.one("actor-0", messages.Lease(credit=1))
    assert isinstance(reply, messages.Wait) and "bytes of disk are free" in reply.reason
    world.finish(tickets)
    assert train(world, 4).checkpoint
    world.one("learner", messages.Kept(take=4, bytes=50_000))
    assert len(journal.sizes) < 3
    monkeypatch.setattr(disk, "free_bytes", lambda _: 52_999)  # full
    journal.measure()
    reply = world.one("actor-0", messages.Lease(credit=1))
    assert isinstance(reply, messages.Wait) and "bytes of disk are free" in reply.reason
    monkeypatch.setattr(disk, "free_bytes", lambda _: 2 * 53_000)
    journal.measure()
    assert world.lease()


def test_08_segments_stay_where_the_archive_has_no_room_and_go_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world = World(tmp_path, config(max_staleness=1, archive="all"), segment_bytes=2500)
    world.resume()
    for take in range(6):
        learn(world, take)
    sizes = world.store.journal.sizes.keys()
    assert min(sizes) == 1

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        assert isinstance(world.one("learner", messages.Kept(take=5)), messages.Ok)
        assert min(sizes) == 1
    world.one("learner", messages.Kept(take=6))
    assert min(sizes) > 1
    assert (tmp_path / "archive" / "00000001.log").exists()
    world.store.journal.close()


def test_08_falling_back_one_checkpoint_still_finds_its_data(tmp_path: Path):
    """Two checkpoints are kept; the newer turns out damaged after a restart."""
    world = World(tmp_path, PATIENT, segment_bytes=2500)
    world.resume()
    given = {}
    for take in range(10):
        learn(world, take)
        given[take] = [group.group_id for group in world.sample(take)]
        if take in (3, 6, 9):
            world.one("learner", messages.Kept(take=max(0, take - 3)))
    assert min(world.store.journal.sizes) > 1, "nothing went"
    world.kill()
    world.resume(lineage=1, take=6)
    for take in range(6, 10):
        groups = world.sample(take, lineage=2)
        assert [group.group_id for group in groups] == given[take]
        assert all(len(group.trajectories) == 2 for group in groups)
        world.done(take, given[take], take + 1, lineage=2)
