"""Faults 2, 11, 12, 20 and 30: killed buffers, copies, lost replies, jumping clocks, taken places.

Real sockets and a real buffer process; actors and learner are the light ones of the benchmarks.
"""

import ast
import asyncio
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from buffer_world import HEAD, World, trajectory
from buffer_world import config as small_config
from invariants import check_leaks, check_named, check_run, traces
from launches import COMMAND, wait_for
from producers import GROUP_SIZE, BufferProcess, config, learn, produce

from evolver_async.buffer.service import BufferService
from evolver_async.wire import messages
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.messages import Ack, Dup, Lease, Push, Renew, Resume, Tickets, Welcome
from evolver_async.wire.server import Server

KILLS, PRODUCERS, TOKENS = 10, 3, 200
RESEND_S = 0.2
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = traces()
    yield
    check_leaks(before)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short private directory."""
    directory = Path(tempfile.mkdtemp())
    yield directory
    shutil.rmtree(directory)


# ---- 2


class Crowd(threading.Thread):
    """Producers and a learner in one loop of a thread, until `end`."""

    def __init__(self, address: str, run_id: str) -> None:
        super().__init__(name="crowd")
        self.address, self.run_id = address, run_id
        self.stop = threading.Event()
        self.found: list[Any] = []
        self.start()

    def run(self) -> None:
        async def work() -> list[Any]:
            rest = (self.stop.is_set, RESEND_S)
            return await asyncio.gather(
                learn(self.address, self.run_id, *rest),
                *(
                    produce(self.address, self.run_id, f"producer-{index}", TOKENS, *rest)
                    for index in range(PRODUCERS)
                ),
            )

        self.found = asyncio.run(work())

    def end(self) -> list[Any]:
        self.stop.set()
        self.join()
        assert self.found, "the crowd raised an error"
        return self.found


def test_2_a_buffer_killed_ten_times_loses_nothing_acknowledged(
    tmp_path: Path, sockets: Path, rng: random.Random
) -> None:
    run_dir = tmp_path / "killed"
    settings = config(lease_s=2.0, archive="all", segment_bytes=1 << 20)
    buffer = BufferProcess(run_dir, f"ipc://{sockets}/buffer", settings)
    crowd = Crowd(buffer.address, run_dir.name)
    restarts_s = []
    try:
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.1, 0.6))
            buffer.kill()
            buffer.start()
            restarts_s.append(buffer.cpu_s())  # others may be using the machine too
        time.sleep(1.0)
    finally:
        takes, *delivered = crowd.end()
        buffer.end()
    acked = [place for one in delivered for place in one.acked]
    story = check_run(run_dir, acked)
    assert story.whole and len(acked) > 10 * KILLS and len(takes) > 0
    trained = [group_id for take in takes for group_id in take]
    assert len(trained) == len(set(trained))
    assert max(restarts_s) < 2.0, f"seconds of CPU until it answered: {restarts_s}"


def test_2_what_was_asked_of_a_dead_buffer_is_asked_of_the_next_one_at_once(
    tmp_path: Path, sockets: Path
) -> None:
    """And not when the time for a resend has come, a minute later."""
    buffer = BufferProcess(tmp_path / "asked", f"ipc://{sockets}/buffer", config())

    async def ask() -> float:
        client = DealerClient(buffer.address, "asked", "actor-0", park_s=60.0, resend_s=60.0)
        await client.request(messages.StatusRequest())
        waiting = asyncio.create_task(
            client.request(Lease(credit=GROUP_SIZE, weights=HEAD))
        )  # parked: no learner yet
        await asyncio.sleep(0.5)
        assert not waiting.done()
        buffer.kill()
        await asyncio.to_thread(buffer.start)
        began = time.monotonic()
        learner = DealerClient(buffer.address, "asked", "learner")
        await learner.request(Resume(lineage=0, take=0, version=0))
        reply = await asyncio.wait_for(waiting, 30.0)
        assert isinstance(reply, Tickets)
        client.close()
        learner.close()
        return time.monotonic() - began

    assert asyncio.run(ask()) < 30.0
    assert buffer.end() == 0
    check_run(buffer.run_dir)


# ---- 11


def test_11_pushes_that_come_three_times_in_any_order_give_the_same_groups(
    tmp_path: Path, rng: random.Random
) -> None:
    settings = small_config(group_size=4, groups_per_step=4, max_staleness=3)
    results = []
    for name in ("in order", "shuffled"):
        world = World(tmp_path / name, settings)
        world.resume()
        tickets = world.lease(credit=8)
        copies = [(ticket, member) for ticket in tickets for member in ticket.members]
        if name == "shuffled":
            copies *= 3
            rng.shuffle(copies)
        replies = [
            world.push(ticket, member, reward=float(ticket.group_id * 10 + member))
            for ticket, member in copies
        ]
        assert sum(isinstance(reply, Ack) for reply in replies) == 8 * 4
        assert all(isinstance(reply, Ack | Dup) for reply in replies)
        taken = [group for take in (0, 1) for group in learned(world, take)]
        results.append(
            {group.group_id: [one.reward for one in group.trajectories] for group in taken}
        )
        world.service.close()
    assert results[0] == results[1] and len(results[0]) == 8


def learned(world: World, take: int) -> list[Any]:
    groups = world.sample(take)
    world.done(take, [group.group_id for group in groups], take + 1)
    return groups


# ---- 12


class Deaf(DealerClient):
    """Does not hear the first so many ACKs."""

    ignored = 2

    def _receive(self, frames: list[Any]) -> None:
        if self.ignored and b"ack" in bytes(frames[0]):
            self.ignored -= 1
            return
        super()._receive(frames)


def test_12_what_is_sent_again_because_its_ack_was_lost_is_a_duplicate(
    tmp_path: Path, sockets: Path
) -> None:
    world = World(tmp_path, small_config())
    stop = threading.Event()
    server = Server(world.service, f"ipc://{sockets}/buffer", "run")
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()

    async def talk() -> list[object]:
        client = Deaf(server.address, "run", "actor-0", resend_s=0.1)
        await client.request(Resume(lineage=0, take=0, version=0))
        (ticket,) = (await client.request(Lease(credit=2, weights=HEAD))).tickets
        pushes = [
            client.request(Push(trajectory=trajectory(ticket, member)))
            for member in (*ticket.members, *ticket.members)
        ]
        replies = list(await asyncio.gather(*pushes))
        client.close()
        return replies

    replies = asyncio.run(talk())
    stop.set()
    thread.join()
    server.close()
    assert [type(reply) for reply in replies] == [Dup] * 4
    (held,) = world.replay.at.groups.values()
    assert sorted(held.arrived) == held.members
    assert world.store.state.ledger.received["rollout"].trajectories == len(held.members)
    world.service.close()


# ---- 20

JUMPING = """
import random, sys, time
true = time.time
time.time = lambda: true() + random.choice((-3600, 3600))
from evolver_async.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_20_a_wall_clock_that_jumps_by_an_hour_changes_no_lease_and_no_age(
    tmp_path: Path, sockets: Path
) -> None:
    """The buffer's `time.time` is an hour off, to either side, whenever it is asked."""
    run_dir, address = tmp_path / "jumping", f"ipc://{sockets}/buffer"
    settings = config(lease_s=30.0, stall_s=60.0)  # longer than any pause, shorter than a jump
    steady = BufferProcess(run_dir, address, settings)
    steady.kill()
    arguments = ["buffer", "--connect", address, "--run", str(run_dir), "--name", "buffer"]
    buffer = subprocess.Popen([sys.executable, "-c", JUMPING, *arguments])

    async def hold() -> tuple[list[object], dict[str, Any], list[object]]:
        client = DealerClient(address, run_dir.name, "actor-0")
        await client.request(Resume(lineage=0, take=0, version=0))
        reply = await client.request(Lease(credit=4 * GROUP_SIZE, weights=HEAD))
        assert isinstance(reply, Tickets) and len(reply.tickets) == 4
        renewed = []
        for progress in range(8):
            await asyncio.sleep(0.1)
            groups = {ticket.group_id: progress for ticket in reply.tickets}
            renewed.append(await client.request(Renew(progress=groups)))
        status = (await client.request(messages.StatusRequest())).status
        pushed = [
            await client.request(Push(trajectory=trajectory(ticket, 0))) for ticket in reply.tickets
        ]
        client.close()
        return renewed, status, pushed

    try:
        renewed, status, pushed = asyncio.run(hold())
    finally:
        buffer.terminate()
        buffer.wait()
    assert {type(reply) for reply in renewed} == {messages.Ok}
    assert status["actors"]["actor-0"]["leases"] == 4
    assert {type(reply) for reply in pushed} == {Ack}
    check_run(run_dir, [(group, 0) for group in range(4)])


def test_20_no_decision_reads_the_wall_clock() -> None:
    """It is read for names, logs, the age of a process or directory, and dates in records."""
    allowed = {"durations.py", "gauges.py", "private_directories.py", "runs.py", "http_server.py"}
    found = set()
    for wing in ("evolver_async", "actors", "learner"):
        for path in (ROOT / wing).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    name = f"{node.value.id}.{node.attr}"
                    if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"):
                        found.add(path.name)
    assert found <= allowed


# ---- 30


def test_30_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages: [{kind: rl, steps: 5}]\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        command = [*COMMAND, "train", recipe, f"buffer.address={address}"]
        done = subprocess.run(
            [*command, f"run.dir={tmp_path}/runs"], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    check_named(done.stderr, "buffer.address", address, "already in use")


def test_30_a_second_buffer_on_the_same_journal_or_socket_is_refused(
    tmp_path: Path, sockets: Path
) -> None:
    """Whereas what a killed one left behind, lock and socket, is taken over."""
    run_dir = tmp_path / "once"
    buffer = BufferProcess(run_dir, f"ipc://{sockets}/buffer", config())
    command = [*COMMAND, "buffer", "--run", str(run_dir), "--name", "second", "--connect"]
    for address, words in (
        (f"ipc://{sockets}/other", ("journal", "in use")),
        (buffer.address, ("journal", "in use")),
    ):
        done = subprocess.run(
            [*command, address], capture_output=True, text=True, check=False, timeout=240
        )
        said = (run_dir / "logs" / "second.log").read_text() + done.stderr
        assert done.returncode != 0
        check_named(said, *words)
    wait_for(lambda: asyncio.run(buffer.answers()), "an answer")
    buffer.kill()
    assert Path(buffer.address.removeprefix("ipc://")).is_socket(), "left by the killed one"
    assert buffer.start() < 60.0
    assert buffer.end() == 0
    check_run(run_dir)


def test_30_a_socket_that_is_served_is_not_taken_over(tmp_path: Path, sockets: Path) -> None:
    address = f"ipc://{sockets}/buffer"
    welcome = Welcome(run_id="run", config={}, weights_address="")
    service = BufferService(small_config(), "run", tmp_path, welcome, None, 0.0)
    server = Server(service, address, "run")
    with pytest.raises(OSError, match="in use") as refused:
        Server(service, address, "run")
    check_named(str(refused.value), address)
    server.close()
    service.close()
