"""Light stand-ins for actors and a learner: they keep a buffer busy with trajectories of one shape.

They speak the real wire and generate nothing. `produce` leases tickets and pushes their members,
several in flight; `learn` takes, unpacks and reports every group, so admission never stops for
long. Both live through the death of the buffer, of which `BufferProcess` is one to be killed.
"""

import asyncio
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from evolver_async.config import BufferConfig, Config, LearnerConfig, RolloutConfig, StageConfig
from evolver_async.config.load import dump
from evolver_async.schema import Role, Sequence, Ticket, Trajectory, VersionRun, WeightId
from evolver_async.wire.client import Client
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.messages import (
    Ack,
    Done,
    Kept,
    Lease,
    Push,
    Resume,
    Sample,
    StatusRequest,
    Tickets,
    Wait,
)

TURNS = 10
BYTES_PER_TOKEN = 11  # token 4, role 1, turn 2, log-prob 4
IN_FLIGHT, CREDIT = 64, 64  # what an actor of 8 groups of 8 has under way
GROUPS_PER_STEP, GROUP_SIZE = 32, 8
CHECKPOINT_EVERY = 25  # takes
POLL_S = 0.1
PAUSE_S = 0.02
ANSWER_S = 0.2
NEWEST = WeightId(lineage=1, step=1 << 30)  # producers need no weights: they say they hold any


def config(**buffer: object) -> Config:
    """A run of the usual size; `buffer` are keys of that section."""
    return Config(
        rollout=RolloutConfig(group_size=GROUP_SIZE),
        learner=LearnerConfig(groups_per_step=GROUPS_PER_STEP),
        buffer=BufferConfig(**{"max_staleness": 4, **buffer}),  # pyright: ignore[reportArgumentType]
        stages=[StageConfig(kind="rl", steps=1)],
    )


class Sequences:
    """Sequences of `tokens` tokens; a new one only where the weights are new."""

    def __init__(self, tokens: int) -> None:
        turn = np.full(tokens // TURNS, Role.OBSERVATION, np.uint8)
        turn[:8] = Role.ACTION
        roles = np.full(tokens, Role.PROMPT, np.uint8)
        roles[-TURNS * len(turn) :] = np.tile(turn, TURNS)
        turns = np.full(tokens, -1, np.int16)
        turns[-TURNS * len(turn) :] = np.repeat(np.arange(TURNS), len(turn))
        self.arrays = {
            "tokens": np.random.default_rng(0).integers(0, 512, tokens, np.int32),
            "roles": roles,
            "turns": turns,
            "logprobs": np.where(roles == Role.ACTION, -0.5, 0.0).astype(np.float32),
        }
        self.actions = int((roles == Role.ACTION).sum())
        self.made: dict[WeightId, Sequence] = {}

    def sampled_by(self, weights: WeightId) -> Sequence:
        if weights not in self.made:
            run = VersionRun(weights=weights, tokens=self.actions)
            self.made = {weights: Sequence(**self.arrays, versions=[run])}
        return self.made[weights]


def member_of(
    ticket: Ticket, member: int, sequence: Sequence, turns: int, success: bool
) -> Trajectory:
    """An episode of one sequence with so many turns."""
    return Trajectory(
        group_id=ticket.group_id,
        member=member,
        attempt=ticket.attempt,
        actor="producer",
        incarnation=0,
        content=0,
        sequences=[sequence],
        reward=float(success),
        success=success,
        terminated=True,
        truncated=False,
        turn_rewards=np.zeros(turns, np.float32),
        turn_flags=np.zeros(turns, np.uint8),
        labels=np.zeros(turns, np.int8),
        label_source="",
        experience_ids=[],
        policy="learned",
        timing={"engine": 0.1, "env": 0.1},
    )


@dataclass
class Delivered:
    """What one producer was told: times of replies and how long each was waited for, in seconds.

    `acked`: group and member of every ACK; `others`: how many DUPs and STALEs came.
    """

    ends: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    acked: list[tuple[int, int]] = field(default_factory=list)
    others: int = 0


async def produce(
    address: str,
    run_id: str,
    name: str,
    tokens: int,
    stopped: Callable[[], bool],
    resend_s: float = 2.0,
    keys: Path | None = None,
    active: Callable[[], bool] = lambda: True,
) -> Delivered:
    """Pushes trajectories of so many tokens until `stopped`, while `active`."""
    delivered = Delivered()
    sequences = Sequences(tokens)
    members: asyncio.Queue[tuple[Ticket, int]] = asyncio.Queue(2 * CREDIT)

    async def push(client: Client) -> None:
        while True:
            while not active():
                await asyncio.sleep(PAUSE_S)
            ticket, member = await members.get()
            assert ticket.weights is not None
            sequence = sequences.sampled_by(ticket.weights)
            trajectory = member_of(ticket, member, sequence, TURNS, member % 2 == 1)
            start = time.perf_counter()
            reply = await client.request(Push(trajectory=trajectory))
            end = time.perf_counter()
            if isinstance(reply, Ack):
                delivered.ends.append(end)
                delivered.waits.append(end - start)
                delivered.acked.append((ticket.group_id, member))
            else:
                delivered.others += 1  # its ACK was lost, or its lease had run out

    async def lease(client: Client) -> None:
        while True:
            reply = await client.request(Lease(credit=CREDIT, weights=NEWEST))
            for ticket in reply.tickets if isinstance(reply, Tickets) else []:
                for member in ticket.members:
                    await members.put((ticket, member))

    client = DealerClient(address, run_id, name, resend_s=resend_s, keys=keys)
    tasks = [asyncio.create_task(push(client)) for _ in range(IN_FLIGHT)]
    tasks.append(asyncio.create_task(lease(client)))
    await _until(stopped, tasks)
    client.close()
    return delivered


async def learn(
    address: str,
    run_id: str,
    stopped: Callable[[], bool],
    resend_s: float = 2.0,
    keys: Path | None = None,
) -> list[list[int]]:
    """Trains every take and lets the journal go now and then; the groups of each take."""
    takes: list[list[int]] = []
    client = DealerClient(address, run_id, "learner", resend_s=resend_s, keys=keys)

    async def loop() -> None:
        lineage = (await client.request(Resume(lineage=0, take=0, version=0))).lineage
        while True:
            take = len(takes)
            groups = await client.request(Sample(lineage=lineage, take=take, stage=0))
            if isinstance(groups, Wait):
                continue
            takes.append([group.group_id for group in groups])
            await client.request(
                Done(lineage=lineage, take=take, version=take + 1, trained=takes[-1], filtered={})
            )
            if (take + 1) % CHECKPOINT_EVERY == 0:
                await client.request(Kept(take=take + 1 - CHECKPOINT_EVERY))

    await _until(stopped, [asyncio.create_task(loop())])
    client.close()
    return takes


async def _until(stopped: Callable[[], bool], tasks: list[asyncio.Task[None]]) -> None:
    """Let the tasks run; what one of them raises is raised here."""
    while not stopped():
        await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- each in a process of its own


class BufferProcess:
    """The role `buffer` of a run that has nothing else, killed and started again at will."""

    def __init__(self, run_dir: Path, address: str, config: Config) -> None:
        policy = run_dir / "policy"
        policy.mkdir(parents=True)
        (policy / "tokenizer.json").write_text("{}")
        config.policy.path = str(policy)
        dump(config, run_dir / "config.yaml")
        self.run_dir = run_dir
        self.address = address
        self.kills = 0
        self.start()

    def start(self) -> float:
        """Start it and wait until it answers; the seconds that took."""
        began = time.monotonic()
        command = [sys.executable, "-m", "evolver_async.cli", "buffer", "--connect", self.address]
        with open(self.run_dir / "buffer.out", "ab") as output:
            self.process = subprocess.Popen(
                [*command, "--run", str(self.run_dir), "--name", "buffer"],
                stdout=output,
                stderr=output,
            )
        while not asyncio.run(self.answers()):
            log = self.run_dir / "logs" / "buffer.log"
            assert self.process.poll() is None, f"the buffer died: {log.read_text()[-500:]}"
            assert time.monotonic() - began < TIMEOUT_S, "the buffer does not answer"
        return time.monotonic() - began

    async def answers(self) -> bool:
        """Whether it replies within a moment."""
        try:
            await self.status(ANSWER_S)
        except TimeoutError:
            return False
        return True

    async def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """What it says of itself; TimeoutError if it says nothing for so long."""
        client = DealerClient(self.address, self.run_dir.name, "visitor", resend_s=ANSWER_S / 4)
        try:
            return (await client.request(StatusRequest(), timeout_s=timeout_s)).status
        finally:
            client.close()

    def cpu_s(self) -> float:
        """CPU seconds used so far: what its start takes on a machine with nothing else to do."""
        spent = psutil.Process(self.process.pid).cpu_times()
        return spent.user + spent.system

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        self.kills += 1

    def end(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        return self.process.wait(TIMEOUT_S)


Context = multiprocessing.get_context("spawn")
TIMEOUT_S = 60.0


class Crowd:
    """Producers and a learner, each a process, from `start` to `end`."""

    def __init__(
        self, address: str, run_id: str, producers: int, tokens: int, keys: Path | None = None
    ) -> None:
        self.names = [f"producer-{index}" for index in range(producers)]
        self.active = Context.Event()
        self.active.set()
        self._stop = Context.Event()
        self._results = Context.Queue()
        common = (address, run_id, keys, self._stop, self._results)
        self.processes: dict[str, BaseProcess] = {
            "learner": Context.Process(target=_learn, args=common, daemon=True)
        }
        for name in self.names:
            args = (name, tokens, self.active, *common)
            self.processes[name] = Context.Process(target=_produce, args=args, daemon=True)

    def start(self, *names: str) -> None:
        """Start these; all of them if none is named."""
        for name in names or self.processes:
            self.processes[name].start()

    def end(self) -> tuple[list[Delivered], list[list[int]]]:
        """What every producer was told, and the groups of each take."""
        self._stop.set()
        found = dict(self._results.get(timeout=TIMEOUT_S) for _ in self.processes)
        for process in self.processes.values():
            process.join()
        return [found[name] for name in self.names], found["learner"]


def _produce(
    name: str,
    tokens: int,
    active: Event,
    address: str,
    run_id: str,
    keys: Path | None,
    stop: Event,
    results: multiprocessing.Queue,
) -> None:
    common = {"keys": keys, "active": active.is_set}
    told = asyncio.run(produce(address, run_id, name, tokens, stop.is_set, **common))
    results.put((name, told))


def _learn(
    address: str, run_id: str, keys: Path | None, stop: Event, results: multiprocessing.Queue
) -> None:
    results.put(("learner", asyncio.run(learn(address, run_id, stop.is_set, keys=keys))))
