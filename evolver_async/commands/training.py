"""`train`: start or resume a run and show it."""

import argparse
import contextlib
import logging
import signal
import sys
from pathlib import Path

from evolver_async.commands.checked import run_directory, user_mistakes
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.errors import TRAINING_ERROR, USER_ERROR, TrainingError, Unrecoverable
from evolver_async.launch import forking
from evolver_async.launch import run_directory as directory
from evolver_async.launch.registry import resolve
from evolver_async.process.setup import set_up_logging
from evolver_async.watch import runs, view


def train(args: argparse.Namespace) -> int:
    """Start or resume a run and show it."""
    recipe, dotlist = None, args.positional
    if dotlist and "=" not in dotlist[0]:
        recipe, dotlist = Path(dotlist[0]), dotlist[1:]
    if args.resume is not None and recipe is not None:
        raise ConfigError(f"{recipe}: --resume goes on with the run's own recipe; leave this out")
    for option in ("step", "fork"):
        if args.resume is None and getattr(args, option) is not None:
            raise ConfigError(f"--{option} needs the run that it is about: --resume RUN_DIR")
    if args.resume is None and recipe is None:
        raise ConfigError("train needs a recipe (configs/….yaml) or --resume RUN_DIR")
    with contextlib.ExitStack() as held:
        with user_mistakes():
            if args.resume is not None:
                run_dir = run_directory(args.resume)
                if args.fork is not None:
                    config, run_dir = forking.fork(run_dir, args.fork, dotlist, args.step)
                held.enter_context(directory.locked(run_dir))
                if args.fork is None:
                    config = directory.resume(run_dir, dotlist, args.step)
            else:
                config, run_dir = directory.create(load(recipe, dotlist), recipe)
                held.enter_context(directory.locked(run_dir))
        print(run_dir, flush=True)
        held.enter_context(view.shown(run_dir, config, config.metrics.panel))
        set_up_logging(run_dir / "logs" / "launcher.log", logging.WARNING)
        runs.begin(run_dir)
        reason = ""
        try:
            code = resolve(f"evolver_async.launch.{config.launch.kind}:run")(config, run_dir)
        except TrainingError as error:
            code, reason = TRAINING_ERROR, str(error)
        except Unrecoverable as error:
            code, reason = USER_ERROR, str(error)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except Exception as error:
            runs.end(run_dir, 1, f"{type(error).__name__}: {error}")
            raise
        ending = runs.end(run_dir, code, reason)
    stream = sys.stderr if ending.state == "failed" else sys.stdout
    print("\n".join(runs.last_words(run_dir, ending)), file=stream, flush=True)
    return code
