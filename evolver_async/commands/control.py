"""`purge`, `keys` and `unpause`: what a run is told or given by hand."""

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path

from evolver_async.commands.checked import run_directory, user_mistakes
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.launch import run_directory as directory
from evolver_async.launch.registry import resolve
from evolver_async.process.addresses import experience_address, keys_of
from evolver_async.protocol.messages import Purge
from evolver_async.transport.keys import make
from evolver_async.transport.sockets import DealerClient, Rejected

PURGE_S = 30.0  # for the answer of an experience service that may just have been killed


def purge(args: argparse.Namespace) -> int:
    """Delete what a source has contributed to a run's experience."""

    async def ask(address: str, keys: Path | None) -> int:
        client = DealerClient(address, run_dir.name, f"purge-{os.getpid()}", keys=keys)
        try:
            return (await client.request(Purge(source=args.source), PURGE_S)).count
        finally:
            client.close()

    run_dir = run_directory(args.run_dir)
    config = load(run_dir / "config.yaml")
    if config.experience.kind == "none":
        raise ConfigError(f"{run_dir}: experience.kind is none, so there is nothing to purge")
    with contextlib.ExitStack() as held, user_mistakes():
        try:
            held.enter_context(directory.locked(run_dir))
            count = resolve("purge")(config, run_dir, args.source)
        except directory.Locked:
            address = experience_address(config, directory.address_of(run_dir))
            keys = args.keys or keys_of(config)
            try:
                count = asyncio.run(ask(address, keys))
            except Rejected as error:
                raise ConfigError(str(error)) from None
            except TimeoutError:
                print(f"evolver-async: nobody answers at {address}", file=sys.stderr)
                return 1
    print(f"{count} entries of {args.source} are gone")
    return 0


def make_keys(args: argparse.Namespace) -> int:
    """Make the keys of a run and of clients on other hosts."""
    with user_mistakes():
        for made in make(args.directory, args.names):
            print(f"copy {made} to its host, for: actor --connect ADDRESS --keys DIR")
    print(f"train with security.keys={args.directory}; clients are listed in its allowed/")
    return 0


def unpause(args: argparse.Namespace) -> int:
    """Let a paused learner go on."""
    print(f"goes on; it was paused: {directory.unpause(run_directory(args.run_dir))}")
    return 0
