"""The command line. Everything is imported where it is needed, so that `--help` is quick.

A mistake of the user is one sentence on stderr and exit code 2, before anything is started.
"""

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from evolver_async.buffer.journal import JournalError
from evolver_async.checkpoint import CheckpointError
from evolver_async.config.check import ConfigError
from evolver_async.launch.roles import TRAINING_ERROR, TrainingError

USER_ERROR = 2
PURGE_S = 30.0  # for the answer of an experience service that was just killed, perhaps


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    sys.path.insert(0, os.getcwd())  # where a user's own environments are, by import path
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    takes = args.command in ("train", "doctor")
    overrides = [text for text in rest if takes and not text.startswith("-")]
    if overrides != rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if takes:
        args.positional += overrides  # those after an option
    try:
        return args.function(args)
    except (ConfigError, CheckpointError, JournalError) as error:
        print(f"evolver-async: {error}", file=sys.stderr)
        return USER_ERROR
    except TrainingError as error:
        print(f"evolver-async: {error}", file=sys.stderr)
        return TRAINING_ERROR
    except KeyboardInterrupt:
        return 130


def train(args: argparse.Namespace) -> int:
    """Start or resume a run and show it."""
    from evolver_async.config.load import load
    from evolver_async.launch import directory, roles
    from evolver_async.study import watch

    recipe, dotlist = None, args.positional
    if dotlist and "=" not in dotlist[0]:
        recipe, dotlist = Path(dotlist[0]), dotlist[1:]
    if args.resume is not None and recipe is not None:
        raise ConfigError(f"{recipe}: --resume goes on with the run's own recipe; leave this out")
    if args.resume is None and recipe is None:
        raise ConfigError("train needs a recipe (configs/….yaml) or --resume RUN_DIR")
    with contextlib.ExitStack() as held:
        with _mistakes():
            if args.resume is not None:
                run_dir = _run_dir(args.resume)
                held.enter_context(directory.locked(run_dir))
                config = directory.resume(run_dir, dotlist)
            else:
                config, run_dir = directory.create(load(recipe, dotlist), recipe)
                held.enter_context(directory.locked(run_dir))
        print(run_dir, flush=True)
        held.enter_context(watch.shown(run_dir, config, config.metrics.panel))
        roles.set_up_logging(run_dir / "logs" / "launcher.log", logging.WARNING)
        return roles.resolve(f"evolver_async.launch.{config.launch.kind}:run")(config, run_dir)


def doctor(args: argparse.Namespace) -> int:
    """Print what this machine can do, or what a recipe needs; 0 when it can run here, else 1."""
    from evolver_async.config.load import load
    from evolver_async.study import doctor

    if not args.positional:
        return 0 if doctor.examined(doctor.screen()) else 1
    recipe, dotlist = Path(args.positional[0]), args.positional[1:]
    if "=" in args.positional[0]:
        raise ConfigError("doctor needs a recipe (configs/….yaml) before its changes")
    config = load(recipe, dotlist)
    return 0 if doctor.recipe_examined(doctor.screen(), config, recipe, dotlist) else 1


def role(args: argparse.Namespace) -> int:
    """Be one process of a run."""
    from evolver_async.launch.roles import RoleArgs, run_process

    name = args.name or f"{args.command}-{socket.gethostname()}-{os.getpid()}"
    role_args = RoleArgs(
        address=args.connect,
        name=name,
        incarnation=args.incarnation,
        run_dir=(args.run or Path()).resolve(),
        parent_pid=args.parent,
        keys=args.keys and args.keys.resolve(),
        rank=args.rank,
        meeting=args.meeting,
    )
    return run_process(
        args.command, role_args, args.run / "logs" / f"{name}.log" if args.run else None
    )


def evaluate(args: argparse.Namespace) -> int:
    """Print how well the newest checkpoint does on held-out tasks."""
    from evolver_async.config.load import load
    from evolver_async.launch.roles import resolve

    run_dir = _run_dir(args.run_dir)
    with _mistakes():
        episodes = args.episodes or load(run_dir / "config.yaml").eval.final_episodes
        print(resolve("eval")(run_dir, episodes))
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a Hugging Face directory out of the newest checkpoint."""
    from evolver_async.launch.roles import resolve

    run_dir = _run_dir(args.run_dir)
    with _mistakes():
        print(resolve("export")(run_dir, args.out))
    return 0


def watch_run(args: argparse.Namespace) -> int:
    """Show a run until interrupted."""
    from evolver_async.config.load import load
    from evolver_async.study.watch import watch

    run_dir = _run_dir(args.run_dir)
    watch(run_dir, load(run_dir / "config.yaml"), follow=not args.once)
    return 0


def status(args: argparse.Namespace) -> int:
    """Print the buffer's STATUS as JSON."""
    import asyncio

    from evolver_async.config.load import load
    from evolver_async.launch.directory import address_of
    from evolver_async.launch.roles import keys_of
    from evolver_async.study.watch import ask, longest_stall
    from evolver_async.transport import Rejected

    address, keys = args.where, args.keys
    if "://" not in address:
        run_dir = _run_dir(Path(address))
        address, keys = address_of(run_dir), keys or keys_of(load(run_dir / "config.yaml"))
    try:
        said = asyncio.run(ask(address, keys))
    except (ValueError, Rejected) as error:
        raise ConfigError(str(error)) from None
    except TimeoutError:
        print(f"evolver-async: nobody answers at {address}", file=sys.stderr)
        return 1
    print(json.dumps(said, indent=2))
    if said["stalled"]:
        print(longest_stall(said), file=sys.stderr)
    return 0


def purge(args: argparse.Namespace) -> int:
    """Delete what a source has contributed to a run's experience."""
    import asyncio

    from evolver_async.config.load import load
    from evolver_async.launch import directory, roles
    from evolver_async.messages import Purge
    from evolver_async.transport import DealerClient, Rejected

    async def ask(address: str, keys: Path | None) -> int:
        client = DealerClient(address, run_dir.name, f"purge-{os.getpid()}", keys=keys)
        try:
            return (await client.request(Purge(source=args.source), PURGE_S)).count
        finally:
            client.close()

    run_dir = _run_dir(args.run_dir)
    config = load(run_dir / "config.yaml")
    if config.experience.kind == "none":
        raise ConfigError(f"{run_dir}: experience.kind is none, so there is nothing to purge")
    with contextlib.ExitStack() as held, _mistakes():
        try:
            held.enter_context(directory.locked(run_dir))
            count = roles.resolve("purge")(config, run_dir, args.source)
        except directory.Locked:
            address = roles.experience_address(config, directory.address_of(run_dir))
            keys = args.keys or roles.keys_of(config)
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
    from evolver_async.keys import make

    with _mistakes():
        for directory in make(args.directory, args.names):
            print(f"copy {directory} to its host, for: actor --connect ADDRESS --keys DIR")
    print(f"train with security.keys={args.directory}; clients are listed in its allowed/")
    return 0


def unpause(args: argparse.Namespace) -> int:
    """Let a paused learner go on."""
    from evolver_async.launch import directory

    print(f"goes on; it was paused: {directory.unpause(_run_dir(args.run_dir))}")
    return 0


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """What the wings and the file system refuse is the user's to mend."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _run_dir(path: Path) -> Path:
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: is no run directory (it has no config.yaml)")
    return path.resolve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evolver-async",
        description="Asynchronous actor-learner reinforcement learning for language-model agents.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train by a recipe, or go on with an earlier run")
    command.add_argument(
        "positional",
        nargs="*",
        metavar="CONFIG key=value …",
        help="a YAML recipe (not with --resume), then changes like learner.lr=3e-4",
    )
    command.add_argument("--resume", type=Path, metavar="RUN_DIR", help="the run to go on with")
    command.set_defaults(function=train)

    _add_roles(commands)
    _add_tools(commands)
    return parser


def _add_roles(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The processes of a run, as commands."""
    for name, about in (
        ("actor", "one more actor for a running job"),
        ("learner", "the learner of a run (started by the launcher)"),
        ("buffer", "the buffer of a run (started by the launcher)"),
        ("experience", "the experience service of a run (started by the launcher)"),
        ("prepare", "make or check a run's policy (started by the launcher)"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument(
            "--connect", metavar="ADDRESS", required=name != "prepare", default="", help="buffer"
        )
        command.add_argument("--run", type=Path, metavar="RUN_DIR", required=name != "actor")
        command.add_argument("--name", default="", help="unique within the run")
        command.add_argument("--incarnation", type=int, default=0)
        command.add_argument("--parent", type=int, metavar="PID", help="end when it ends")
        command.add_argument("--keys", type=Path, metavar="DIR", help="of this client")
        command.add_argument("--rank", type=int, default=0, help="of a learner of several ranks")
        command.add_argument("--meeting", type=Path, metavar="FILE", help="where they meet")
        command.set_defaults(function=role)


def _add_tools(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """What people use beside and after a run."""
    command = commands.add_parser("eval", help="evaluate the newest checkpoint on held-out tasks")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("--episodes", type=int, default=0, help="default: eval.final_episodes")
    command.set_defaults(function=evaluate)

    command = commands.add_parser("export", help="write the newest checkpoint as a model directory")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("out", type=Path, metavar="OUT")
    command.set_defaults(function=export)

    command = commands.add_parser("doctor", help="what this machine can do, or what a recipe needs")
    command.add_argument(
        "positional",
        nargs="*",
        metavar="CONFIG key=value …",
        help="a YAML recipe, then changes; exit code 1 when it cannot run here",
    )
    command.set_defaults(function=doctor)

    command = commands.add_parser("watch", help="show a running job")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("--once", action="store_true", help="print what there is and end")
    command.set_defaults(function=watch_run)

    command = commands.add_parser("status", help="occupancy, ledger, and who waits for whom")
    command.add_argument("where", metavar="ADDRESS|RUN_DIR")
    command.add_argument("--keys", type=Path, metavar="DIR", help="for an ADDRESS that wants some")
    command.set_defaults(function=status)

    command = commands.add_parser("unpause", help="let a run go on that an alarm paused")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.set_defaults(function=unpause)

    command = commands.add_parser("purge", help="delete what a source put into the experience")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("source", metavar="SOURCE", help="a contributor's name, like actor-0")
    command.add_argument("--keys", type=Path, metavar="DIR", help="default: security.keys")
    command.set_defaults(function=purge)

    command = commands.add_parser("keys", help="make the keys that let other hosts take part")
    command.add_argument("directory", type=Path, metavar="DIR", help="new, or to add clients to")
    command.add_argument("--names", nargs="+", default=[], metavar="NAME", help="one a client")
    command.set_defaults(function=make_keys)


if __name__ == "__main__":
    sys.exit(main())
