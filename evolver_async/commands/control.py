"""`purge`, `keys`, `scale`, `unpause` and `rm`: changes of a run by hand, and its deletion."""

import argparse
import asyncio
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

from evolver_async.commands.checked import as_config_errors, run_directory
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load_written
from evolver_async.file_formats import RUN
from evolver_async.files import remove
from evolver_async.launch import run_directory as directory
from evolver_async.launch.registry import resolve
from evolver_async.launch.scaling import AUTO, running_actors
from evolver_async.memory.gpu_needs import check_gpu_memory
from evolver_async.memory.host_memory import check_more_actors
from evolver_async.process.rendezvous import experience_address, keys_of
from evolver_async.terminal import say
from evolver_async.wire.client import Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.keys import make
from evolver_async.wire.messages import Purge

PURGE_S = 30.0  # for the answer of an experience service that may be restarting


def purge(args: argparse.Namespace) -> int:
    """Delete what a source has contributed to a run's experience."""

    async def ask(address: str, keys: Path | None) -> int:
        name = f"purge-{os.getpid()}"
        with contextlib.closing(DealerClient(address, run_dir.name, name, keys=keys)) as client:
            return (await client.request(Purge(source=args.source), PURGE_S)).count

    run_dir = run_directory(args.run_dir)
    config = load_written(run_dir)
    if not config.experience.pooled:
        kind = config.experience.kind
        raise ConfigError(f"{run_dir}: has no pool to purge (experience.kind={kind})")
    with contextlib.ExitStack() as held, as_config_errors():
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
                say(
                    f"evolver-async: no experience service answers at {address};"
                    " see the run's logs/experience.log",
                    file=sys.stderr,
                )
                return 1
    say(f"entries of {args.source} deleted: {count}")
    return 0


def make_keys(args: argparse.Namespace) -> int:
    """Make the keys of a run and of clients on other hosts."""
    with as_config_errors():
        for made in make(args.directory, args.names):
            say(f"copy {made} to its host, for: evolver-async actor --connect ADDRESS --keys DIR")
    say(f"train with security.keys={args.directory}; its allowed/ lists the clients")
    return 0


def unpause(args: argparse.Namespace) -> int:
    """Let a paused learner continue."""
    reason = directory.unpause(run_directory(args.run_dir))
    say(f"the run continues; it was paused because: {reason}")
    return 0


def rm(args: argparse.Namespace) -> int:
    """Delete a run that is not running. Links in it are unlinked and never followed."""
    if args.run_dir.is_symlink():
        raise ConfigError(f"{args.run_dir}: is a link; name the directory of the run itself")
    run_dir = run_directory(args.run_dir)
    with as_config_errors(), directory.locked(run_dir):
        # what makes it a run goes last, so that a deletion that was interrupted can be repeated
        last = [run_dir / "config.yaml", run_dir / directory.LOCK]
        for path in (*(one for one in run_dir.iterdir() if one not in last), *last):
            remove(path)
        run_dir.rmdir()
    say(f"deleted {run_dir}")
    return 0


def scale(args: argparse.Namespace) -> int:
    """Change the number of actors of a running job."""
    run_dir = run_directory(args.run_dir)
    config = load_written(run_dir)
    wanted = args.actors.removeprefix("actors=")
    if config.launch.kind == "serial":
        raise ConfigError("launch.kind: serial has a fixed number of actors")
    if wanted != AUTO:
        _check_count(config, wanted)
    with as_config_errors():
        with contextlib.ExitStack() as held, contextlib.suppress(directory.Locked):
            held.enter_context(directory.locked(run_dir))
            raise ConfigError(f"{run_dir}: is not running; set actors.count when you resume it")
        _check_room(config, run_dir, wanted)
        directory.scale(run_dir, wanted)
    if wanted == AUTO and config.actors.adjustable:
        say(f"{run_dir}: the controller chooses the number of actors")
    elif wanted == AUTO:
        count = config.actors.count
        say(f"{run_dir}: {count} actors again (actors.count): no actors.min or actors.max is set")
    else:
        say(f"{run_dir}: {wanted} actors")
    return 0


def _check_room(config: Config, run_dir: Path, wanted: str) -> None:
    """Raise ConfigError if this host, or its GPUs, have no memory for actors that are to be added.

    The start has checked the most to which the controller can grow.
    """
    if wanted != AUTO or not config.actors.adjustable:
        count = config.actors.count if wanted == AUTO else int(wanted)
        pid = (directory.facts_of(run_dir / RUN) or {}).get("pid", 0)
        check_more_actors(config, count - running_actors(pid))
        check_gpu_memory(replace(config, actors=replace(config.actors, count=count)))


def _check_count(config: Config, wanted: str) -> None:
    """Raise ConfigError for a number of actors that this run cannot have."""
    actors, gpus = config.actors, config.launch.gpus.actors
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ConfigError(f"actors: must be a number from 1 or {AUTO}, is {wanted!r}")
    low, high = (actors.min or 1), (actors.max or int(wanted))
    if not low <= int(wanted) <= high:
        raise ConfigError(f"actors: must be within actors.min and actors.max ({low} to {high})")
    if gpus and int(wanted) * config.engine.tensor_parallel > len(gpus):
        raise ConfigError(
            f"launch.gpus.actors: names {len(gpus)} GPUs, too few for {wanted} actors"
        )
