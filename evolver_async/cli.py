"""The command line. The module of a command is imported when it runs, so that `--help` is fast.

A mistake of the user is one sentence on stderr and exit code 2, before anything is started.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # of the working directory, whose files would hide any module

import argparse
import difflib
import os
import select
import signal
from pathlib import Path
from typing import TypeAlias

from evolver_async.errors import TRAINING_ERROR, USER_ERROR, TrainingError, Unrecoverable
from evolver_async.extension import find_modules
from evolver_async.launch.registry import PROCESSES, resolve
from evolver_async.process.stopping import StopSignal
from evolver_async.splits import SPLITS
from evolver_async.terminal import say
from evolver_async.version import VERSION

# Commands that run functions of the user's own; others import nothing of the working directory.
OWN_CODE = ("train", "serve", "study", "rerun", "doctor", "config", "eval", "export", *PROCESSES)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser, public = _parser()
    first = next(iter(sys.argv[1:] if arguments is None else arguments), "-")
    if not first.startswith("-") and first not in (*public, *PROCESSES):
        close = difflib.get_close_matches(first, public, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        parser.error(f"{first}: unknown command{hint}")
    args, rest = parser.parse_known_args(arguments)
    takes_changes = args.command in ("train", "serve", "study", "rerun", "doctor", "config", "eval")
    changes = [text for text in rest if takes_changes and not text.startswith("-")]
    if changes != rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if takes_changes:
        args.positional += changes  # those after an option
    find_modules(own=args.command in OWN_CODE)
    try:
        code = resolve(f"evolver_async.commands.{args.function}")(args)
        sys.stdout.flush()
        return code
    except (Unrecoverable, TrainingError) as error:
        say(f"evolver-async: {error}", file=sys.stderr)
        return USER_ERROR if isinstance(error, Unrecoverable) else TRAINING_ERROR
    except KeyboardInterrupt as stop:
        return stop.code if isinstance(stop, StopSignal) else 130
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return 128 + signal.SIGPIPE


def _reader_has_gone() -> bool:
    """True if stdout is a pipe without a reader, as behind `| head`; then it becomes /dev/null."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors alone
    gone = bool(poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser and the names of the commands that it lists."""
    parser = argparse.ArgumentParser(
        prog="evolver-async",
        description="Asynchronous actor-learner reinforcement learning for language-model agents.",
    )
    parser.add_argument("--version", action="version", version=f"evolver-async {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_recipes(commands)
    _add_process_options(
        _add(commands, "actor", "processes:role", "add an actor to a running job"), "actor"
    )  # the one process of a run that people start themselves too
    command = _add(commands, "ranks", "processes:ranks", "add a host to the learner of a run")
    _add_run(command, "directory of the run, which this host sees as the launcher's does")
    about = "its number among learner.hosts, from 1"
    command.add_argument("--host", type=int, default=1, metavar="N", help=about)
    _add_results(commands)
    _add_control(commands)
    _add_views(commands)
    public = list(commands.choices)
    for name in PROCESSES:
        if name != "actor":
            _add_process_options(_add(commands, name, "processes:role", None), name)
    return parser, public


def _add_recipes(commands: Commands) -> None:
    """Add the commands that take a recipe, and the list of recipes."""
    command = _add(commands, "train", "training:train", "train a recipe, or continue a run")
    _add_recipe(command, "not with --resume")
    about = "the run to continue; auto: the recipe's run.name if it has begun, else begin it"
    command.add_argument("--resume", type=Path, metavar="RUN_DIR|auto", help=about)
    _add_step(command, "with --resume: go back to the checkpoint of this step")
    command.add_argument("--fork", metavar="NAME", help="with --resume: continue as a new run")
    command.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # of a study

    about = "train a recipe on the conversations of people who use its policy meanwhile"
    command = _add(commands, "serve", "training:serve", about)
    _add_recipe(command, "not with --resume")
    about = "the run to continue; auto: the recipe's run.name if it has begun, else begin it"
    command.add_argument("--resume", type=Path, metavar="RUN_DIR|auto", help=about)
    command.set_defaults(step=None, fork=None, parent=None)

    _add_study(commands)
    _add_rerun(commands)

    _add(commands, "recipes", "recipes:list_recipes", "list the recipes that are shipped")

    about = "print a recipe with all its keys, and the processes and steps that it would run"
    command = _add(commands, "config", "examination:show", about)
    _add_recipe(command, "or the config.yaml of a run; nothing is started")

    about = "check what this machine can run, or whether it can run a recipe"
    command = _add(commands, "doctor", "examination:examine", about)
    _add_recipe(command, "exit code 1 if it cannot run here")


def _add_study(commands: Commands) -> None:
    """Add the command that runs a grid of a recipe."""
    about = "run a grid of a recipe over seeds, and compare the cells"
    command = _add(commands, "study", "studying:study", about)
    command.add_argument(
        "positional",
        nargs="*",
        metavar="STUDY|RECIPE key=value,value …",
        help="a study or recipe, its name or YAML file, then keys: several values are swept",
    )
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the study"
    )
    command.add_argument(
        "--seeds", metavar="0..4", help="also 0,2,5; default: the study's, or 0..2"
    )
    command.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time")
    about = "give a key the value of a swept key in every cell"
    command.add_argument("--tie", action="append", default=[], metavar="KEY=SWEPT", help=about)
    about = "the value to reach; default: eval/success=0.8"
    command.add_argument("--threshold", metavar="METRIC=VALUE", help=about)
    about = "margin within which cells count as equivalent to the baseline"
    command.add_argument("--equivalence", metavar="MARGIN", help=about)
    about = "the cell that others are compared with; default: the first"
    command.add_argument("--baseline", metavar="CELL", help=about)
    about = "train the first supervised stages once a seed, and fork the cells from them"
    command.add_argument("--cold-start", action="store_true", help=about)
    command.add_argument("--retry", action="store_true", help="try failed runs again")
    about = "print the cells and the estimate, and start nothing"
    command.add_argument("--dry-run", action="store_true", help=about)
    about = "write tables and plots of an existing study again, and start nothing"
    command.add_argument("--summary", action="store_true", help=about)


def _add_rerun(commands: Commands) -> None:
    """Add the command that trains the steps of a run again."""
    about = "train the steps of a run again on its own data, exactly or with other settings"
    command = _add(commands, "rerun", "rerunning:rerun", about)
    _add_run(command)
    about = "changes like correction.kind=none; without any the result is compared with the run"
    command.add_argument("positional", nargs="*", metavar="key=value", help=about)
    about = "first and last step; changes act from A on; default: all complete steps"
    command.add_argument("--steps", metavar="A..B", help=about)
    about = "run directory to write, with changes; default: beside RUN_DIR"
    command.add_argument("--out", type=Path, metavar="DIR", help=about)


def _add(
    commands: Commands, name: str, function: str, about: str | None
) -> argparse.ArgumentParser:
    """Add a command that runs `function` of `commands/`; without a help text it is not listed."""
    # argparse lists a command if its help is given at all, even as None.
    command = commands.add_parser(name, help=about) if about else commands.add_parser(name)
    command.set_defaults(function=function)
    return command


def _add_recipe(command: argparse.ArgumentParser, note: str) -> None:
    """Add the recipe and its changes as positional arguments."""
    command.add_argument(
        "positional",
        nargs="*",
        metavar="RECIPE key=value …",
        help=f"a recipe's name or YAML file ({note}), then changes like learner.lr=3e-4",
    )


def _add_run(command: argparse.ArgumentParser, about: str = "directory of the run") -> None:
    """Add the run directory as a positional argument."""
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=about)


def _add_step(command: argparse.ArgumentParser, about: str) -> None:
    """Add the option that names a checkpoint by its step, or the best evaluated one."""

    def step(text: str) -> int | str:
        return text if text == "best" else int(text)

    command.add_argument("--step", type=step, metavar="N|best", help=about)


def _add_process_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options of every process of a run; only the launcher sets those without a help."""
    command.add_argument(
        "--connect",
        metavar="ADDRESS",
        required=name != "prepare",
        default="",
        help="address of the buffer, as evolver-async status RUN_DIR uses it",
    )
    command.add_argument("--name", default="", help="unique within the run")
    command.add_argument("--keys", type=Path, metavar="DIR", help="directory of this client's keys")
    hidden = argparse.SUPPRESS
    command.add_argument("--run", type=Path, required=name != "actor", help=hidden)
    command.add_argument("--incarnation", type=int, default=0, help=hidden)
    command.add_argument("--parent", type=int, help=hidden)  # pid with which this process ends
    command.add_argument("--rank", type=int, default=0, help=hidden)  # of a learner of several
    command.add_argument("--meeting", type=Path, help=hidden)  # file by which ranks find each other


def _add_results(commands: Commands) -> None:
    """Add the commands that take results out of a run."""
    about = "evaluate a checkpoint, or a recipe's untouched model, on held-out tasks"
    command = _add(commands, "eval", "results:evaluate", about)
    command.add_argument(
        "positional",
        nargs="+",
        metavar="RUN_DIR | RECIPE key=value … | A.jsonl B.jsonl",
        help="directory of the run; or a recipe whose policy.path is the model; or two files of"
        " --save, which are shown side by side by task",
    )
    command.add_argument("--episodes", type=int, metavar="N", help="default: eval.episodes")
    command.add_argument("--split", choices=SPLITS, help="default: eval.split")
    _add_step(command, "default: the newest")
    about = "write a line an episode: task, prompt, reply, reward, success"
    command.add_argument("--save", type=Path, metavar="FILE.jsonl", help=about)

    command = _add(commands, "export", "results:export", "write a checkpoint as a model directory")
    _add_run(command)
    command.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    _add_step(command, "default: the newest")
    about = "show one row of tasks.path an environment in the README; by default it has none"
    command.add_argument("--examples", action="store_true", help=about)
    about = "write the newest reward model of the run instead, or with --step that of a checkpoint"
    command.add_argument("--reward-model", action="store_true", help=about)

    about = "write a run, several or a study as an HTML page: curves, tables, trajectories"
    command = _add(commands, "report", "results:report", about)
    about = "directory of the run, or of a study; several runs are compared as a study's cells are"
    command.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help=about)
    about = (
        "a .html file, or a folder for any number of trajectories of one run; default: in RUN_DIR,"
        " or in the directory that holds several"
    )
    command.add_argument("--out", type=Path, metavar="FILE.html|DIR", help=about)

    command = _add(commands, "wandb", "results:wandb", "send a run's metrics to Weights & Biases")
    _add_run(command)
    command.add_argument(
        "--mode",
        choices=("auto", "online", "offline"),
        default="auto",
        help="auto: online with a key (WANDB_API_KEY or ~/.netrc); offline: for `wandb sync`",
    )
    command.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    command.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)


def _add_control(commands: Commands) -> None:
    """Add the commands that change a run or prepare one for other hosts."""
    about = "let a run continue that an alarm has paused"
    _add_run(_add(commands, "unpause", "control:unpause", about))

    about = "change the number of actors of a running job"
    command = _add(commands, "scale", "control:scale", about)
    _add_run(command)
    command.add_argument("actors", metavar="actors=N|auto", help="auto: by actors.min and max")

    about = "delete what one contributor put into the experience"
    command = _add(commands, "purge", "control:purge", about)
    _add_run(command)
    command.add_argument("source", metavar="SOURCE", help="name of the contributor, like actor-0")
    command.add_argument("--keys", type=Path, metavar="DIR", help="default: security.keys")

    about = "turn logs with outcomes, or runs, into rows that stages learn from"
    command = _add(commands, "ingest", "ingesting:ingest_logs", about)
    command.add_argument("out", type=Path, metavar="OUT", help="directory to write, a new one")
    about = "files or directories of JSON lines or Parquet; run directories, for trajectories"
    command.add_argument("files", type=Path, nargs="+", metavar="FILES", help=about)
    about = "column with a number, true or false, or a word like up; default: reward, score, …"
    command.add_argument("--outcome", default="", metavar="COLUMN", help=about)
    about = "outcome from which on a conversation went well; default: 0.5"
    command.add_argument("--threshold", type=float, default=0.5, metavar="X", help=about)
    about = "column that names who wrote a conversation, which every row keeps"
    command.add_argument("--by", default="", metavar="COLUMN", help=about)
    about = "names of columns, as data.columns has them: prompt=question completion=answer"
    command.add_argument("--columns", nargs="+", default=[], metavar="NAME=COLUMN", help=about)

    about = "delete a run that is not running"
    _add_run(_add(commands, "rm", "control:rm", about))

    about = "make the keys with which actors on other hosts connect"
    command = _add(commands, "keys", "control:make_keys", about)
    command.add_argument("directory", type=Path, metavar="DIR", help="new, or to add clients to")
    command.add_argument("--names", nargs="+", default=[], metavar="NAME", help="one per client")


def _add_views(commands: Commands) -> None:
    """Add the commands that show runs and change nothing."""
    command = _add(commands, "runs", "viewing:list_runs", "list the runs of a directory")
    command.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path("runs"),
        metavar="DIR",
        help="default: runs",
    )

    command = _add(commands, "watch", "viewing:watch_run", "show the progress of a run")
    _add_run(command)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print the present state and exit")
    about = "show the panel of `train`, or lines if there is no terminal, not the full screen"
    form.add_argument("--plain", action="store_true", help=about)

    about = "print what a run's experience says of a task, for a prompt to its policy"
    command = _add(commands, "guidance", "results:guidance", about)
    _add_run(command)
    about = "first message of the user; - reads it from stdin"
    command.add_argument("task", metavar="TASK", help=about)

    about = "show the buffer's groups, actors, waiting processes and failures"
    command = _add(commands, "status", "viewing:status", about)
    command.add_argument("where", metavar="ADDRESS|RUN_DIR", help="of a running job")
    command.add_argument("--keys", type=Path, metavar="DIR", help="for an ADDRESS that needs keys")
    command.add_argument("--json", action="store_true", help="print all of it, for programs")


if __name__ == "__main__":
    sys.exit(main())
