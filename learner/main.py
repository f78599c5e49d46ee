"""The role `learner`: its process, or the parts of it that a serial run drives."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evolver_async.config import Config
from evolver_async.config.load import load_written
from evolver_async.errors import TrainingError
from evolver_async.metrics.alerts import FAILED
from evolver_async.metrics.writer import Metrics
from evolver_async.process.garbage import collect_rarely, give_back_memory
from evolver_async.process.rendezvous import weights_address
from evolver_async.process.setup import RoleArgs
from evolver_async.weights import ends as channel
from evolver_async.wire.client import Client
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.heartbeat import Heartbeat
from evolver_async.wire.messages import Beat
from learner.ranks.process_group import Ranks
from learner.run.rank_server import attend, meeting
from learner.train import Learner


def build(
    config: Config,
    run_dir: Path,
    client: Client,
    call: Callable[..., Any],
    ranks: Ranks | None = None,
) -> Learner:
    """Make a learner for any launcher, or the first of several ranks."""
    torch.set_num_threads(config.learner.threads)
    serial = config.launch.kind == "serial"
    publisher = channel.publisher(config, weights_address(config, run_dir), background=not serial)
    metrics = Metrics(run_dir, wandb=config.metrics.wandb, sinks=config.metrics.sinks)
    return Learner(config, run_dir, client, call, publisher, metrics, ranks)


def main(args: RoleArgs) -> int:
    """Run the role `learner`: train, or take part in it as a rank other than the first."""
    config = load_written(args.run_dir)
    torch.set_num_threads(config.learner.threads)
    with meeting(config, args) as ranks:
        if ranks is not None and ranks.rank > 0:
            return attend(config, args.run_dir, ranks)
        return lead(config, args, ranks)


def lead(config: Config, args: RoleArgs, ranks: Ranks | None) -> int:
    """Run the first rank, which alone talks to the buffer."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def connect() -> DealerClient:
        run_id = args.run_dir.name
        return DealerClient(args.address, run_id, args.name, args.incarnation, keys=args.keys)

    client = loop.run_until_complete(connect())
    learner: Learner | None = None

    def beat() -> Beat:
        return (
            Beat(role="learner", phase="load of the model") if learner is None else learner.beat()
        )

    identity = args.address, args.run_dir.name, args.name, args.incarnation, args.keys
    heartbeat = Heartbeat(*identity, warn_s=config.buffer.warn_s, read=beat)
    heartbeat.start()
    learner = build(config, args.run_dir, client, loop.run_until_complete, ranks)
    collect_rarely()
    give_back_memory()

    def stop(*_: object) -> None:
        learner.requests.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        learner.requests.greet()
        return learner.run()
    except TrainingError as error:
        learner.metrics.alert(FAILED, str(error), "ERROR")
        raise
    finally:
        heartbeat.stop()
        learner.close()
        client.close()
        loop.close()
