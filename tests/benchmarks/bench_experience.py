"""What experience costs: retrieval among 100,000 entries, rollouts with and without the service.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_experience.py [DISTINCT]

The entries are about DISTINCT tasks (10,000 by default), 100,000 / DISTINCT each. 64 questions come
together, none of them asked before or all of them asked before a change of the pool. They are timed
inside the service (embedding, search, ranking), at two least similarities: one that nothing reaches
and the default, at which every question finds entries; then as actors see them: each from its
sending to its answer, over the service's socket. Beside the time that passes stands the processor's
time, which other programs on the machine change less. Rollouts are FrozenLake groups under a fixed
latency of 50 ms a step with an engine that answers at once; every member asks for guidance, every
group is contributed, and nothing that is found fits, so that the episodes are the same.
"""

import asyncio
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from actors.engines.engine import Generation, Request
from actors.envs.grid.frozen_lake import FrozenLake
from actors.experience.experience_service import build, open_pool
from actors.experience.guide import ExperienceGuide, ServiceBackend
from actors.experience.pool import Item
from actors.experience.pool_file import ExperienceEntry
from actors.formats.chat import Chat
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.ticket_progress import TicketProgress
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
from evolver_async.process.garbage import collect_rarely
from evolver_async.schema import Sampling, Task, Ticket, WeightId
from evolver_async.wire import messages
from evolver_async.wire.dealer import DealerClient

ENTRIES = 100_000
TASKS = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
TOGETHER = 64
ROUNDS = 300  # so that the slowest percent is more than the single slowest round
AGAIN = 60  # of them are asked again, as many as the service remembers
REQUIRED_MS = 5.0
GROUPS, MEMBERS, TURNS = 24, 8, 10
LATENCY_S = 0.05
REQUIRED_SHARE = 0.01
CONFIG = Config(
    experience=ExperienceConfig(
        kind="contrast", similarity=0.99, per_source=ENTRIES, capacity=2 * ENTRIES
    ),
    env=EnvConfig(name="frozen_lake", latency=LatencyConfig(kind="fixed", median_s=LATENCY_S)),
    rollout=RolloutConfig(group_size=MEMBERS, max_turns=TURNS, max_tokens=4),
    actors=ActorsConfig(count=1),
    stages=[StageConfig(steps=1)],
)


class Walker:
    """An engine that says "left" at once: the episodes go on to their last turn."""

    weights = WeightId(lineage=1, step=0)
    obeys_grammars = False

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


def query(number: int, size: int = 8) -> str:
    """The first observation of a training map."""
    env = FrozenLake(size=size)
    task = Task(task_id="", env="frozen_lake", split="train", map_seed=number)
    return env.reset(task, 0)


def fill(run_dir: Path) -> None:
    """Write a pool of `ENTRIES` about `TASKS` maps."""
    pool = open_pool(CONFIG.experience, run_dir)
    queries = [query(number) for number in range(TASKS)]
    whens = pool.embedder.embed(queries)
    moves = ("left", "down", "right", "up")
    for number in range(ENTRIES):
        place = number // TASKS
        state = f"row {place // 4} column {place % 4}"
        text = f"{state} {moves[number % 4]} not {moves[number % 4 - 1]}"
        pool.store.add(
            ExperienceEntry(
                when_to_use=queries[number % TASKS],
                content=text,
                state=state,
                score=1.0,
                source="bench",
                trajectories=[str(number)],
                created=0,
                when_vector=whens[number % TASKS],
                content_vector=whens[0],
            )
        )
    pool.commit()
    pool.close()


def show(name: str, seconds: list[float], required_ms: float = math.inf) -> None:
    median, slow = np.quantile(seconds, [0.5, 0.99]) * 1e3
    text = f"{name}: median {median:.2f} ms, 99% {slow:.2f} ms, least {min(seconds) * 1e3:.2f} ms"
    if required_ms < math.inf:
        text += f"; required {required_ms:g} ms: {'reached' if slow <= required_ms else 'MISSED'}"
    print(text)


def show_both(name: str, both: list[tuple[float, float]]) -> None:
    """Show the time that passed and the processor's."""
    show(name, [passed for passed, _ in both], REQUIRED_MS)
    show(f"  {name}, processor", [used for _, used in both], REQUIRED_MS)


def batches(first: int) -> list[list[str]]:
    """Questions of `ROUNDS` rounds: maps that no entry is about and that were not asked before."""
    start = TASKS + first * ROUNDS * TOGETHER
    return [
        [query(start + TOGETHER * number + one) for one in range(TOGETHER)]
        for number in range(ROUNDS)
    ]


def inside(run_dir: Path, similarity: float) -> None:
    config = replace(CONFIG, experience=replace(CONFIG.experience, similarity=similarity))
    service = build(config, run_dir, lambda counters: None)
    collect_rarely()  # as the service's process does

    def ask(questions: list[str]) -> tuple[float, float]:
        start, used = time.perf_counter(), time.thread_time()
        for question in questions:
            service.handle("actor-0", messages.Retrieve(query=question), 0.0)
        service.commit()
        return time.perf_counter() - start, time.thread_time() - used

    print(f"{len(service.pool)} entries about {TASKS} tasks, least similarity {similarity}")
    one, rounds = batches(0), batches(1)
    show_both("one question at a time, new", [ask([question]) for question in one[0]])
    show_both(f"{TOGETHER} new questions, all", [ask(questions) for questions in rounds])
    again = []
    for number, questions in enumerate(rounds[-AGAIN:]):
        item = Item(f"another task {similarity} {number}", f"go there {number}", 1.0)
        service.pool.add([item], "bench", [f"again {similarity} {number}"])
        again.append(ask(questions))
    show_both(f"{TOGETHER} questions asked before, all", again)
    service.close()


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def asked(guide: ExperienceGuide, pid: int) -> None:
    while not (await guide.advise(query(0))).text:
        await asyncio.sleep(0.1)

    async def ask(question: str) -> float:
        start = time.perf_counter()
        await guide.advise(question)
        return time.perf_counter() - start

    rounds = batches(2)
    for name, part in (("new", rounds), ("asked before", rounds[-AGAIN:])):
        seconds, used, served = [], time.process_time(), processor_s(pid)
        for questions in part:
            seconds += await asyncio.gather(*map(ask, questions))
        show(f"as actors see each of {TOGETHER} questions, {name}", seconds, REQUIRED_MS)
        used, served = time.process_time() - used, processor_s(pid) - served
        per_round_ms = 1e3 / len(part)
        each = f"{per_round_ms * served:.2f} ms in the service, {per_round_ms * used:.2f} ms here"
        print(f"  processor, {TOGETHER} questions: {each}")
    show("as an actor sees a single question", [await ask(question) for question in rounds[0]])


async def roll(number: int, guide: ExperienceGuide | None) -> float:
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


async def compared(guide: ExperienceGuide) -> None:
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


async def outside(address: str, pid: int) -> None:
    client = DealerClient(f"{address}.experience", "run", "actor-0")
    guide = ExperienceGuide(ServiceBackend(client), CONFIG.experience)
    await asked(guide, pid)
    await compared(guide)
    print("the guide counted", guide.counters())
    await guide.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        run_dir.mkdir(mode=0o700)
        dump(CONFIG, run_dir / "config.yaml")
        fill(run_dir)
        for similarity in (CONFIG.experience.similarity, ExperienceConfig().similarity):
            inside(run_dir, similarity)
        address = f"ipc://{run_dir}/b"
        command = [sys.executable, "-m", "evolver_async.cli", "experience", "--connect", address]
        process = subprocess.Popen([*command, "--run", str(run_dir), "--name", "experience"])
        try:
            asyncio.run(outside(address, process.pid))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
