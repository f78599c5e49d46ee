"""Where a learner step's time goes when the buffer is full.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_learner.py

The learner of the default recipe (`configs/frozen_lake.yaml`, its RL stage: model, groups of one
step, selection, minibatches, checkpoints) with the real buffer in a process of its own. All groups
of all steps are in the buffer before the first step, so the learner waits for nobody: what its wait
holds is the request, the wire and the unpacking. Time is a share of the wall time of a step.
"""

import asyncio
import json
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import psutil

from evolver_async.buffer.service import BufferService
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump, load
from evolver_async.model import policy
from evolver_async.process.garbage import collect_rarely
from evolver_async.process.rendezvous import weights_dir
from evolver_async.randomness import key
from evolver_async.schema import Role, Sequence, Ticket, Trajectory, VersionRun
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.messages import Ack, Lease, Push, Tickets
from evolver_async.wire.server import Server
from learner.main import build
from learner.stage_steps import enter_stage
from learner.train import Learner

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from producers import NEWEST, member_of

STEPS, SKIPPED = 28, 3  # the first steps warm up; a checkpoint falls into the rest
PROMPT, TURN, SAMPLED = 60, 15, 3  # tokens of the first prompt, of a turn, sampled in a turn
TURNS = range(1, 8)  # 75 to 165 tokens an episode, 120 on average
IN_FLIGHT = 64
INSIDE = ("forward", "backward", "anchor", "optimizer")
OUTSIDE = ("wait", "report", "publish", "checkpoint")  # the rest of "train" is outside too
REQUIRED_OUTSIDE, REQUIRED_PUBLISH = 0.10, 0.01
RECIPE = Path(__file__).parents[2] / "configs" / "frozen_lake.yaml"


def episode(ticket: Ticket, member: int, vocabulary: int) -> Trajectory:
    rng = np.random.Generator(np.random.Philox(key=key(0, ticket.group_id, member)))
    turns = int(rng.choice(TURNS))
    turn = np.repeat(np.array([Role.ACTION, Role.OBSERVATION], np.uint8), (SAMPLED, TURN - SAMPLED))
    roles = np.concatenate([np.full(PROMPT, Role.PROMPT, np.uint8), np.tile(turn, turns)])
    numbers = [np.full(PROMPT, -1, np.int16), np.repeat(np.arange(turns, dtype=np.int16), TURN)]
    assert ticket.weights is not None
    tokens = rng.integers(0, vocabulary, len(roles), np.int32)
    shared = np.random.Generator(np.random.Philox(key=key(0, ticket.group_id)))
    tokens[:PROMPT] = shared.integers(0, vocabulary, PROMPT, np.int32)  # of all members
    sequence = Sequence(
        tokens=tokens,
        roles=roles,
        turns=np.concatenate(numbers),
        logprobs=np.where(roles == Role.ACTION, -np.log(vocabulary), 0.0).astype(np.float32),
        versions=[VersionRun(weights=ticket.weights, tokens=SAMPLED * turns)],
    )
    return member_of(ticket, member, sequence, turns, bool(rng.random() < 0.5))


def serve(run_dir: Path, address: str, stop: Event) -> None:
    collect_rarely()
    config = load(run_dir / "config.yaml", [])
    service = BufferService.of_run(config, run_dir, None, time.monotonic())
    server = Server(service, address, run_dir.name)
    server.serve(stop.is_set)
    server.close()
    service.close()


async def fill(client: DealerClient, groups: int, size: int, vocabulary: int) -> None:
    """Leases and hands in so many groups of `size` members."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def push(ticket: Ticket, member: int) -> None:
        async with slots:
            reply = await client.request(Push(trajectory=episode(ticket, member, vocabulary)))
            assert isinstance(reply, Ack), reply

    while groups:
        reply = await client.request(Lease(credit=min(8, groups) * size, weights=NEWEST))
        assert isinstance(reply, Tickets), reply
        groups -= len(reply.tickets)
        pushes = [push(ticket, member) for ticket in reply.tickets for member in ticket.members]
        await asyncio.gather(*pushes)


def make_run(directory: Path) -> tuple[Config, Path]:
    """A run directory of the recipe's RL stage, with one evaluated episode, with room for all."""
    config = load(RECIPE, [])
    run_dir = directory / "bench"
    run_dir.mkdir()
    config = replace(
        config,
        run=replace(config.run, name="bench", dir=str(directory)),
        policy=replace(config.policy, path=str(run_dir / "policy")),
        stages=[StageConfig(kind="rl", steps=STEPS)],
        loss=replace(config.loss, target_kl=math.inf),  # made-up data would cut steps short
        buffer=replace(config.buffer, max_staleness=STEPS, max_ready=0.0),
        eval=replace(config.eval, every=0, episodes=1, final_episodes=0),
    )
    dump(config, run_dir / "config.yaml")
    policy.make_tiny(
        config.policy.path,
        seed=config.run.seed,
        hidden_size=config.policy.hidden_size,
        layers=config.policy.layers,
        heads=config.policy.heads,
        intermediate_size=config.policy.intermediate_size,
        max_length=config.policy.max_length,
    )
    return config, run_dir


def measure(learner: Learner) -> tuple[dict[str, float], float, float]:
    """Seconds by phase and wall seconds of the steps that count, and what the CPUs did besides."""
    enter_stage(learner.updater, learner.stages, learner.state)
    for _ in range(SKIPPED):
        learner.step()
    learner.timers.drain()
    busy, spent, start = machine_seconds(), time.process_time(), time.perf_counter()
    for _ in range(STEPS - SKIPPED):
        learner.step()
    wall = time.perf_counter() - start
    others = (machine_seconds() - busy - (time.process_time() - spent)) / wall
    last = learner.timers.drain()  # what ended after the last row of metrics was written
    path = learner.run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()][SKIPPED:]
    names = {name for row in (*rows, last) for name in row if name.startswith("time/")}
    seconds = {
        name.removeprefix("time/").removesuffix("_s"): sum(
            row.get(name, 0.0) for row in (*rows, last)
        )
        for name in names
    }
    return seconds, wall, others


def machine_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.system


def main() -> None:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with tempfile.TemporaryDirectory() as directory:
        config, run_dir = make_run(Path(directory))
        address = f"ipc://{directory}/buffer"
        server = context.Process(target=serve, args=(run_dir, address, stop), daemon=True)
        server.start()
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)

        async def connect(name: str) -> DealerClient:
            return DealerClient(address, "bench", name)

        client = loop.run_until_complete(connect("learner"))
        learner = build(config, run_dir, client, loop.run_until_complete)
        collect_rarely()
        learner.begin()
        actor = loop.run_until_complete(connect("actor"))
        groups = STEPS * config.learner.groups_per_step
        vocabulary = len(policy.load_tokenizer(config.policy.path))
        loop.run_until_complete(fill(actor, groups, config.rollout.group_size, vocabulary))
        actor.close()
        seconds, wall, others = measure(learner)
        learner.close()
        client.close()
        stop.set()
        server.join()
        shutil.rmtree(weights_dir(config, run_dir), ignore_errors=True)
    shares = {phase: spent / wall for phase, spent in seconds.items()}
    outside = 1 - sum(shares[phase] for phase in INSIDE)
    rest = outside - sum(shares[phase] for phase in OUTSIDE)
    print(
        f"{1000 * wall / (STEPS - SKIPPED):.0f} ms a step of {config.learner.groups_per_step} "
        f"groups of {config.rollout.group_size}: "
        + ", ".join(f"{phase} {shares[phase]:.1%}" for phase in INSIDE)
    )
    print(
        f"outside of these {outside:.1%} (required at most {REQUIRED_OUTSIDE:.0%}): "
        + ", ".join(f"{phase} {shares[phase]:.1%}" for phase in OUTSIDE)
        + f", selection, batches, metrics {rest:.1%}"
    )
    print(
        f"publishing weights {shares['publish']:.2%} (required at most {REQUIRED_PUBLISH:.0%}); "
        f"other programs and the buffer used {max(0.0, others):.2f} cores"
    )


if __name__ == "__main__":
    main()
