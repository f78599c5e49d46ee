"""The command line. A command's own module is imported when it runs, so that `--help` is quick.

A mistake of the user is one sentence on stderr and exit code 2, before anything is started.
"""

import argparse
import difflib
import os
import sys
from importlib.metadata import version
from pathlib import Path

from evolver_async.checkpoint.history import BEST
from evolver_async.errors import TRAINING_ERROR, USER_ERROR, TrainingError, Unrecoverable
from evolver_async.launch.registry import PROCESSES, resolve


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    sys.path.insert(0, os.getcwd())  # where a user's own environments are, by import path
    parser, public = _parser()
    first = next(iter(sys.argv[1:] if arguments is None else arguments), "-")
    if not first.startswith("-") and first not in (*public, *PROCESSES):
        close = difflib.get_close_matches(first, public, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        parser.error(f"{first}: unknown command{hint}")
    args, rest = parser.parse_known_args(arguments)
    takes = args.command in ("train", "doctor", "config")
    overrides = [text for text in rest if takes and not text.startswith("-")]
    if overrides != rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if takes:
        args.positional += overrides  # those after an option
    try:
        return resolve(f"evolver_async.commands.{args.function}")(args)
    except Unrecoverable as error:
        print(f"evolver-async: {error}", file=sys.stderr)
        return USER_ERROR
    except TrainingError as error:
        print(f"evolver-async: {error}", file=sys.stderr)
        return TRAINING_ERROR
    except KeyboardInterrupt:
        return 130


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of the commands that people use."""
    parser = argparse.ArgumentParser(
        prog="evolver-async",
        description="Asynchronous actor-learner reinforcement learning for language-model agents.",
    )
    parser.add_argument(
        "--version", action="version", version=f"evolver-async {version('evolver_async')}"
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
    _add_step(command, "with --resume: go back to the checkpoint of this step")
    command.add_argument("--fork", metavar="NAME", help="with --resume: go on as a new run instead")
    command.set_defaults(function="training:train")

    _add_actor(commands)
    _add_tools(commands)
    _add_looks(commands)
    public = list(commands.choices)
    for name in PROCESSES:
        if name != "actor":  # without a help text the command is not listed
            _add_process_options(commands.add_parser(name), name)
    return parser, public


def _add_step(command: argparse.ArgumentParser, about: str) -> None:
    """The option that names a checkpoint by its step, or the best evaluated one."""

    def step(text: str) -> int | str:
        return text if text == BEST else int(text)

    command.add_argument("--step", type=step, metavar=f"N|{BEST}", help=about)


def _add_actor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The one process of a run that people start too."""
    command = commands.add_parser("actor", help="one more actor for a running job")
    _add_process_options(command, "actor")


def _add_process_options(command: argparse.ArgumentParser, name: str) -> None:
    """Options of every process of a run; the launcher alone gives those without a help text."""
    command.add_argument(
        "--connect", metavar="ADDRESS", required=name != "prepare", default="", help="buffer"
    )
    command.add_argument("--name", default="", help="unique within the run")
    command.add_argument("--keys", type=Path, metavar="DIR", help="of this client")
    hidden = argparse.SUPPRESS
    command.add_argument("--run", type=Path, required=name != "actor", help=hidden)
    command.add_argument("--incarnation", type=int, default=0, help=hidden)
    command.add_argument("--parent", type=int, help=hidden)  # end when it ends
    command.add_argument("--rank", type=int, default=0, help=hidden)  # of a learner of several
    command.add_argument("--meeting", type=Path, help=hidden)  # the file where ranks meet
    command.set_defaults(function="processes:role")


def _add_tools(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """What people use beside and after a run."""
    command = commands.add_parser("eval", help="evaluate a checkpoint on held-out tasks")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("--episodes", type=int, default=0, help="default: eval.final_episodes")
    _add_step(command, "default: the newest")
    command.set_defaults(function="results:evaluate")

    command = commands.add_parser("export", help="write a checkpoint as a model directory")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("out", type=Path, metavar="OUT")
    _add_step(command, "default: the newest")
    command.set_defaults(function="results:export")

    command = commands.add_parser("wandb", help="send a run's metrics to Weights & Biases")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument(
        "--mode",
        choices=("auto", "online", "offline"),
        default="auto",
        help="auto: online with a key (WANDB_API_KEY or ~/.netrc); offline: for `wandb sync`",
    )
    command.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    command.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    command.set_defaults(function="results:wandb")

    command = commands.add_parser("config", help="print a recipe as it would be run")
    command.add_argument(
        "positional",
        nargs="*",
        metavar="CONFIG key=value …",
        help="a YAML recipe or a run's config.yaml, then changes; starts nothing",
    )
    command.set_defaults(function="recipes:show")

    command = commands.add_parser("doctor", help="what this machine can do, or what a recipe needs")
    command.add_argument(
        "positional",
        nargs="*",
        metavar="CONFIG key=value …",
        help="a YAML recipe, then changes; exit code 1 when it cannot run here",
    )
    command.set_defaults(function="recipes:examine")

    command = commands.add_parser("unpause", help="let a run go on that an alarm paused")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.set_defaults(function="control:unpause")

    command = commands.add_parser("purge", help="delete what a source put into the experience")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("source", metavar="SOURCE", help="a contributor's name, like actor-0")
    command.add_argument("--keys", type=Path, metavar="DIR", help="default: security.keys")
    command.set_defaults(function="control:purge")

    command = commands.add_parser("keys", help="make the keys that let other hosts take part")
    command.add_argument("directory", type=Path, metavar="DIR", help="new, or to add clients to")
    command.add_argument("--names", nargs="+", default=[], metavar="NAME", help="one a client")
    command.set_defaults(function="control:make_keys")


def _add_looks(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Commands that show runs and change nothing."""
    command = commands.add_parser("runs", help="list the runs of a directory")
    command.add_argument("directory", type=Path, nargs="?", default=Path("runs"), metavar="DIR")
    command.set_defaults(function="viewing:list_runs")

    command = commands.add_parser("watch", help="show a running job")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("--once", action="store_true", help="print what there is and end")
    command.set_defaults(function="viewing:watch_run")

    command = commands.add_parser("status", help="occupancy, ledger, and who waits for whom")
    command.add_argument("where", metavar="ADDRESS|RUN_DIR")
    command.add_argument("--keys", type=Path, metavar="DIR", help="for an ADDRESS that wants some")
    command.add_argument("--json", action="store_true", help="all of it, for programs")
    command.set_defaults(function="viewing:status")


if __name__ == "__main__":
    sys.exit(main())
