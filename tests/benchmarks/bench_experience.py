"""What experience costs: a retrieval at 10,000 entries, and rollouts with and without the service.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_experience.py

The retrieval is timed inside the service (embedding, search, ranking) and as an actor sees it: over
its socket, from a process that holds the same pool. Rollouts are FrozenLake groups under a fixed
latency of 50 ms a step with an engine that answers at once; every member asks for guidance, every
group is contributed, and nothing that is found fits, so that the episodes are the same.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from actors.engines.base import Generation, Request
from actors.envs.grid.frozen_lake import FrozenLake
from actors.experience.guide import ServiceGuide
from actors.experience.pool import Item
from actors.experience.service import open_pool
from actors.formats.chat import Chat
from actors.progress import TicketProgress
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from evolver_async.config import (
    ActorsConfig,
    Config,
    EnvConfig,
    ExperienceConfig,
    LatencyConfig,
    RolloutConfig,
    StageConfig,
)
from evolver_async.config.load import dump
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import Sampling, Task, Ticket, WeightId
from evolver_async.transport.dealer import DealerClient

ENTRIES = 10_000
TASKS = 2_000
ROUNDS = 500
REQUIRED_MS = 2.0
GROUPS, MEMBERS, TURNS = 24, 8, 10
LATENCY_S = 0.05
REQUIRED_SHARE = 0.02
CONFIG = Config(
    experience=ExperienceConfig(kind="contrast", similarity=0.99, per_source=ENTRIES),
    env=EnvConfig(name="frozen_lake", latency=LatencyConfig(kind="fixed", median_s=LATENCY_S)),
    rollout=RolloutConfig(group_size=MEMBERS, max_turns=TURNS, max_tokens=4),
    actors=ActorsConfig(count=1),
    stages=[StageConfig(steps=1)],
)


class Walker:
    """An engine that says "left" at once: the episodes go on to their last turn."""

    weights = WeightId(lineage=1, step=0)

    def __init__(self, chat: Chat) -> None:
        self._tokens = chat.tokens_of(" left</answer>")

    async def generate(self, request: Request) -> Generation:
        count = len(self._tokens)
        return Generation(
            tokens=self._tokens,
            logprobs=[-1.0] * count,
            weights=[self.weights] * count,
            finish="stop",
        )

    def release(self, session: str) -> None: ...


def query(number: int) -> str:
    """The first observation of a training map."""
    env = FrozenLake(size=4)
    task = Task(task_id="", env="frozen_lake", split="train", map_seed=number)
    return env.reset(task, 0)


def fill(run_dir: Path) -> list[str]:
    """A pool of `ENTRIES` about so many maps, on disk; their descriptions."""
    pool = open_pool(CONFIG.experience, run_dir)
    queries = [query(number) for number in range(TASKS)]
    moves = ("left", "down", "right", "up")
    number = 0
    while len(pool) < ENTRIES:
        place = number // TASKS
        state = f"row {place // 4} column {place % 4}"
        text = f"{state} {moves[number % 4]} not {moves[number % 4 - 1]}"
        when = queries[number % TASKS]
        pool.add([Item(when, text, 1.0, state)], "bench", [str(number)])
        number += 1
    pool.close()
    return queries


def show(name: str, seconds: list[float]) -> float:
    median, slow = np.quantile(seconds, [0.5, 0.99]) * 1e3
    print(f"{name}: median {median:.2f} ms, 99% {slow:.2f} ms, least {min(seconds) * 1e3:.2f} ms")
    return float(median)


def inside(run_dir: Path, queries: list[str]) -> None:
    pool, section = open_pool(CONFIG.experience, run_dir), CONFIG.experience
    seconds = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        found = pool.retrieve(queries[number], section.top_k, section.similarity)
        seconds.append(time.perf_counter() - start)
        assert found
    median = show(f"retrieval among {len(pool)} entries", seconds)
    print(f"  required {REQUIRED_MS:g} ms: {'reached' if median <= REQUIRED_MS else 'MISSED'}")
    pool.close()


async def asked(guide: ServiceGuide, queries: list[str]) -> None:
    while not (await guide.advise(queries[-1])).text:
        await asyncio.sleep(0.1)
    seconds = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        await guide.advise(queries[-number - 2])
        seconds.append(time.perf_counter() - start)
    show("as an actor sees it, one at a time", seconds)


async def roll(number: int, guide: ServiceGuide | None) -> float:
    """Seconds of one group."""
    chat = Chat(make_tokenizer(512))
    task = Task(
        task_id=f"frozen_lake/train/{TASKS + number}",
        env="frozen_lake",
        split="train",
        map_seed=TASKS + number,
    )
    ticket = Ticket(
        group_id=number,
        task=task,
        kind="rollout",
        stage=0,
        members=[*range(MEMBERS)],
        guided=[] if guide is None else [*range(MEMBERS)],
        dynamics_seed=0,
        attempt=0,
        weights=None,
        lease_s=30.0,
        sampling=Sampling(temperature=1.0, max_tokens=4),
    )
    finished: list[Finished] = []
    setting = setting_of(CONFIG, chat, "actor-0", 0)
    start = time.perf_counter()
    await run_group(ticket, setting, Walker(chat), TicketProgress(), finished.append, guide)  # pyright: ignore
    seconds = time.perf_counter() - start
    if guide is not None:
        guide.contribute(task, finished[0].query, [one.transcript for one in finished])
    return seconds


async def compared(guide: ServiceGuide) -> None:
    """Groups with and without the service by turns, so that both meet the same machine."""
    without, within = [], []
    for number in range(GROUPS):
        without.append(await roll(number, None))
        within.append(await roll(number, guide))
    print(f"a group of {MEMBERS} under {LATENCY_S * 1e3:.0f} ms a step, {GROUPS} of each")
    shares = {}
    for name, share in (("median", 0.5), ("fastest quarter", 0.25)):
        off, on = np.quantile(without, share), np.quantile(within, share)
        shares[name] = on / off - 1
        print(f"  {name}: without the service {off:.4f} s, with it {on:.4f} s: {shares[name]:+.2%}")
    share = shares["median"]
    print(f"  required {REQUIRED_SHARE:.0%}: {'reached' if share <= REQUIRED_SHARE else 'MISSED'}")


async def outside(address: str, queries: list[str]) -> None:
    client = DealerClient(f"{address}.experience", "run", "actor-0")
    guide = ServiceGuide(client, CONFIG.experience)
    await asked(guide, queries)
    await compared(guide)
    print("the guide counted", guide.counters())
    await guide.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        run_dir.mkdir(mode=0o700)
        dump(CONFIG, run_dir / "config.yaml")
        queries = fill(run_dir)
        inside(run_dir, queries)
        address = f"ipc://{run_dir}/b"
        command = [sys.executable, "-m", "evolver_async.cli", "experience", "--connect", address]
        process = subprocess.Popen([*command, "--run", str(run_dir), "--name", "experience"])
        try:
            asyncio.run(outside(address, queries))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
