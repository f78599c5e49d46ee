"""`train` and `serve`: start or resume a run and show it."""

import argparse
import contextlib
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from evolver_async.commands.checked import as_config_errors, run_directory
from evolver_async.commands.recipes import names_file, recipe_path
from evolver_async.config import Config, ConfigError, ablation
from evolver_async.config.load import load_explained, load_written
from evolver_async.config.model_defaults import said
from evolver_async.config.paths import directory_of, with_absolute_paths
from evolver_async.config.sections.rollout import USERS
from evolver_async.errors import TRAINING_ERROR, USER_ERROR, TrainingError, Unrecoverable
from evolver_async.launch import forking, own_code, pace
from evolver_async.launch.creation import create
from evolver_async.launch.pace import Pace
from evolver_async.launch.registry import LAUNCHERS, resolve
from evolver_async.launch.resumption import FinishedRun, raised_rate, resume
from evolver_async.launch.run_directory import config_of, locked
from evolver_async.metrics import launches
from evolver_async.metrics.alerts import FAILED, alert, last_title
from evolver_async.metrics.gauges import GaugeThread
from evolver_async.metrics.wandb_process import send_rest
from evolver_async.process.package_versions import versions
from evolver_async.process.setup import die_with, prepare_process, set_up_logging
from evolver_async.process.stopping import StopSignal, handled_by, raise_stop
from evolver_async.runs.watch import live, prometheus, runs
from evolver_async.terminal import say

log = logging.getLogger(__name__)

AUTO = Path("auto")  # of --resume
# Keys whose changes --resume auto applies again: the run may be on other hosts. All others were
# part of its recipe.
PLACES = ("launch", "weights", "metrics", "security", "buffer.address", "experience.address")


def train(args: argparse.Namespace) -> int:
    """Start or resume a run and show it."""
    if args.parent is not None:
        die_with(args.parent)
    prepare_process()
    with contextlib.ExitStack() as held:
        try:
            with as_config_errors():
                config, run_dir, lines, warnings = _prepare(args, held)
        except FinishedRun as finished:
            if args.resume != AUTO:
                raise
            say(finished)
            return 0
        if config.rollout.agent == USERS:
            endpoint = config.rollout.endpoint
            url = f"http://{endpoint.public_host or endpoint.bind}:{endpoint.port}/"
            lines = [*lines, f"people talk to the policy at {url} once actor-0 has loaded it"]
        say("\n".join([str(run_dir), *lines]), flush=True)
        if config.metrics.prometheus:
            with as_config_errors():
                held.enter_context(prometheus.served(run_dir, config))
        held.enter_context(live.shown(run_dir, config, config.metrics.panel))
        set_up_logging(run_dir / "logs" / "launcher.log", logging.WARNING)
        for line in warnings:
            log.warning(line)
        with as_config_errors():
            _announce(run_dir, config, args)
        runs.begin(run_dir)
        gauges = GaugeThread(run_dir, "launcher")
        gauges.start()
        reason = ""
        try:
            with handled_by(raise_stop):  # until a launcher collects them
                code = resolve(LAUNCHERS[config.launch.kind])(config, run_dir)
        except TrainingError as error:
            code, reason = TRAINING_ERROR, str(error)
        except Unrecoverable as error:
            code, reason = USER_ERROR, str(error)
        except StopSignal as stop:
            code, reason = stop.code, str(stop)
        except Exception as error:
            _alert_of_end(config, run_dir, runs.end(run_dir, 1, f"{type(error).__name__}: {error}"))
            raise
        finally:
            gauges.stop()
        ending = runs.end(run_dir, code, reason)
        _alert_of_end(config, run_dir, ending)
    stream = sys.stderr if ending.state == "failed" else sys.stdout
    say("\n".join(runs.summary(run_dir, ending)), file=stream, flush=True)
    return code


def serve(args: argparse.Namespace) -> int:
    """Train a recipe on conversations, as `train` does with `rollout.agent=users`."""
    if args.resume in (None, AUTO):
        args.positional.append(f"rollout.agent={USERS}")
    return train(args)


def _announce(run_dir: Path, config: Config, args: argparse.Namespace) -> None:
    """Record this launch; alert of a restart, and of an earlier launch that was killed."""
    recipe, _ = _recipe_of(args)
    code, git = own_code.keep(own_code.own_code([config]), run_dir), own_code.git_state(Path())
    facts = recipe and str(recipe), sys.argv[1:], versions(), code, git and msgspec.to_builtins(git)
    before = launches.record(run_dir, *facts)
    if before and not (run_dir / runs.END).exists():
        alert(run_dir, "crash of the launcher", "the launch before this one was killed", "ERROR")
    if before:
        alert(run_dir, "restart of the run", f"launch {before + 1} of {run_dir.name}", "INFO")


def _alert_of_end(config: Config, run_dir: Path, ending: runs.Ending) -> None:
    """Alert of a failure that the learner could not report; send what its upload has left."""
    wandb = config.metrics.wandb
    try:
        if ending.state == "failed" and last_title(run_dir) != FAILED:
            alert(run_dir, FAILED, ending.reason, "ERROR")
        sent = wandb == "disabled" or send_rest(run_dir, wandb)
    except OSError as error:  # a full disk must not change the exit code
        log.warning("%s: the alert of the end is not written: %s", run_dir, error.strerror)
        return
    if not sent:
        log.warning("W&B lacks the last alerts; send them with: evolver-async wandb %s", run_dir)


def _prepare(
    args: argparse.Namespace, held: contextlib.ExitStack
) -> tuple[Config, Path, list[str], list[str]]:
    """Return the configuration and the directory of the run, which `held` keeps locked, what the
    console says of a new run's configuration, and what log and console warn of."""
    recipe, dotlist = _recipe_of(args)
    auto = args.resume == AUTO
    if args.resume is None or auto:
        given, reasons = load_explained(recipe, dotlist)
        begun = _begun(given) if auto else None
        if begun is None:
            config, run_dir = create(given, recipe)
            held.enter_context(locked(run_dir))
            texts = said(given, reasons)
            if given.policy.path:
                texts += pace.time_texts(config, Pace.read(run_dir))
                texts += pace.memory_texts(config)
            return config, run_dir, pace.lines(texts), ablation.lines(given, reasons)
        held.enter_context(locked(begun))
        places = [one for one in dotlist if _names_place(one)]
        _warn_of_ignored(begun, [one for one in dotlist if one not in places])
        return resume(begun, places), begun, [], []
    run_dir = run_directory(args.resume)
    before = config_of(run_dir, checked=False)
    if args.fork is not None:
        config, run_dir = forking.fork(run_dir, args.fork, dotlist, args.step)
        held.enter_context(locked(run_dir))
    else:
        held.enter_context(locked(run_dir))
        config = resume(run_dir, dotlist, args.step)
    warnings = ablation.lines(config, before=before)  # what was told at the start is known
    return config, run_dir, raised_rate(before, config, run_dir), warnings


def _names_place(change: str) -> bool:
    """True for a change that --resume auto applies again."""
    key = change.partition("=")[0]
    return key in PLACES or key.partition(".")[0] in PLACES


def _warn_of_ignored(run_dir: Path, changes: Sequence[str]) -> None:
    """Name the changes that a run which has begun does not have, as they have no effect."""
    run, first = load_written(run_dir, checked=False), launches.launches(run_dir)[:1]
    begun = shlex.split(first[0]["command"]) if first else []
    ignored = [one for one in changes if one not in begun and not _has(run, run_dir, one)]
    if ignored:
        say(
            f"evolver-async: {run_dir.name} has begun and keeps its recipe, without"
            f" {shlex.join(ignored)}; to change it: evolver-async train --resume"
            f" {shlex.quote(str(run_dir))} CHANGES",
            file=sys.stderr,
        )


def _has(run: Config, run_dir: Path, change: str) -> bool:
    """True if a run's configuration stays the same under a change."""
    if change.startswith(("run.name=", "run.dir=")):
        return True  # by which the run was found
    try:
        changed = load_written(run_dir, [change], checked=False)
    except ConfigError:  # as for a stage that the run does not have
        return False
    return with_absolute_paths(changed) == with_absolute_paths(run)


def _begun(config: Config) -> Path | None:
    """Return the directory of the run that a configuration names, None if it has not begun."""
    if not config.run.name:
        raise ConfigError(f"--resume {AUTO}: needs run.name, by which it finds the run to continue")
    run_dir = directory_of(config, config.run.name)
    return run_dir if (run_dir / "config.yaml").exists() else None


def _recipe_of(args: argparse.Namespace) -> tuple[Path | None, Sequence[str]]:
    """Return the recipe, None with --resume, and the changes. ConfigError for a wrong mixture."""
    resumes, first = args.resume not in (None, AUTO), next(iter(args.positional), "=")
    named = names_file(first)
    if resumes and named:
        raise ConfigError(f"{first}: --resume continues the run's own recipe; leave this one out")
    for option in ("step", "fork"):
        if args.resume == AUTO and getattr(args, option) is not None:
            raise ConfigError(f"--{option}: needs a run directory, not --resume {AUTO}")
        if not resumes and getattr(args, option) is not None:
            raise ConfigError(f"--{option}: needs the run to start from; add --resume RUN_DIR")
    if not resumes and not named:
        raise ConfigError(
            "train: needs a recipe (evolver-async recipes lists them) or --resume RUN_DIR"
        )
    return (recipe_path(first), args.positional[1:]) if named else (None, args.positional)
