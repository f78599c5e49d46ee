"""`eval`, `export`, `guidance`, `report` and `wandb`: results of a run."""

import argparse
import importlib.util
import sys
from pathlib import Path

from evolver_async.commands.checked import as_config_errors, run_directory
from evolver_async.commands.recipes import recipe_path
from evolver_async.config import ConfigError
from evolver_async.config.load import load, load_written
from evolver_async.config.paths import check_paths, with_absolute_paths
from evolver_async.launch.creation import with_snapshot
from evolver_async.launch.registry import check_wings, resolve
from evolver_async.metrics import wandb_upload
from evolver_async.metrics.replies import check_writable, compared
from evolver_async.metrics.wandb_process import online
from evolver_async.process.setup import die_with, prepare_process
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.runs.results.reading_progress import ProgressLines
from evolver_async.study.directory import Study, existing
from evolver_async.terminal import say


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a checkpoint, or the model of a recipe, on held-out tasks and print the result.

    Two files of --save are compared instead.
    """
    first, *changes = args.positional
    if Path(first).is_file() and Path(first).suffix == ".jsonl":
        return _compare(Path(first), changes)
    prepare_process()
    if args.save is not None:
        check_writable(args.save)
    if args.episodes is not None and args.episodes < 1:
        raise ConfigError(f"--episodes: must be at least 1, is {args.episodes}")
    recipe = None if (Path(first) / "config.yaml").is_file() else _recipe(first)
    if recipe is None:
        run_dir = run_directory(Path(first))
        if changes:
            raise ConfigError(f"{changes[0]}: a run is evaluated as it is; changes need a recipe")
        with as_config_errors():
            episodes = args.episodes or load_written(run_dir).eval.episodes
            say(resolve("eval")(run_dir, episodes, args.step, args.split, args.save))
        return 0
    if args.step is not None:
        raise ConfigError("--step: needs the directory of a run; a recipe has no checkpoints")
    with as_config_errors():
        changes += [f"eval.split={args.split}"] if args.split else []
        config = with_absolute_paths(load(recipe, changes))
        if not config.policy.path:
            raise ConfigError("policy.path: is empty; name the model that is to be evaluated")
        check_paths(config)
        check_wings(config)
        config = with_snapshot(config)
        episodes = args.episodes or config.eval.episodes
        say(resolve("eval_model")(config, episodes, args.save))
    return 0


def _compare(first: Path, others: list[str]) -> int:
    """Print two files of `eval --save` side by side."""
    if len(others) != 1:
        raise ConfigError(f"{first}: is compared with one other file, got {len(others)}")
    say("\n".join(compared(first, Path(others[0]))))
    return 0


def _recipe(text: str) -> Path | None:
    """Return the file of a recipe; None for a text that names none."""
    try:
        path = recipe_path(text)
    except ConfigError:
        return None
    return path if path.suffix in (".yaml", ".yml") else None


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint as a Hugging Face directory."""
    run_dir = run_directory(args.run_dir)
    with as_config_errors():
        if args.reward_model:
            say(resolve("export_reward_model")(run_dir, args.out, args.step))
        else:
            say(resolve("export")(run_dir, args.out, args.step, args.examples))
    return 0


def guidance(args: argparse.Namespace) -> int:
    """Print what a run's experience says of a task."""
    prepare_process()
    run_dir = run_directory(args.run_dir)
    with as_config_errors():
        text = resolve("guidance")(run_dir, sys.stdin.read() if args.task == "-" else args.task)
    if not text:
        say(f"evolver-async: {run_dir}: no entry is like this task", file=sys.stderr)
        return 1
    say(text.removesuffix("\n"))
    return 0


def wandb(args: argparse.Namespace) -> int:
    """Send the metrics of a run to W&B, or write them for `wandb sync`."""
    if args.follow:
        die_with(args.parent)
        wandb_upload.follow(args.run_dir, args.mode, args.parent)
        return 0
    run_dir = run_directory(args.run_dir)
    if not (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{run_dir}: has no metrics yet (metrics.jsonl is missing)")
    try:
        say(wandb_upload.send(run_dir, online(args.mode)))
    except wandb_upload.UploadError as error:
        say(f"evolver-async: W&B: {error}", file=sys.stderr)
        return 1
    return 0


def report(args: argparse.Namespace) -> int:
    """Write the report of a run, of several or of a study, and print its page."""
    if importlib.util.find_spec("bokeh") is None:
        raise ConfigError("report: needs Bokeh: pip install 'evolver-async[report]'")
    first, *others = args.run_dirs
    if others:
        from evolver_async.study.given import compared

        with as_config_errors():
            return _study_report(compared([*map(run_directory, args.run_dirs)]), args.out)
    with as_config_errors():
        study = existing(first)
    if study is not None:
        return _study_report(study, args.out)
    from evolver_async.runs.report.write import write

    progress = ProgressLines(lambda line: say(line, file=sys.stderr))
    written = write(load_run(run_directory(first), progress=progress), args.out)
    say(written.page)
    count = f"{written.shown:,} of {written.total:,} trajectories"
    say(f"{count}, {written.page.stat().st_size / 1e6:.1f} MB")
    if written.missing:
        say(written.missing)
    return 0


def _study_report(study: Study, page: Path | None) -> int:
    """Write the page of a study and print its path."""
    if importlib.util.find_spec("mpmath") is None:
        raise ConfigError("report: a comparison needs mpmath: pip install 'evolver-async[study]'")
    if page is not None and page.suffix not in (".html", ".htm"):
        raise ConfigError(f"{page}: the report of a study is one page; name a .html file")
    from evolver_async.study.study_page import write_study

    with as_config_errors():
        written = write_study(study, page)
    say(written)
    say(f"{written.stat().st_size / 1e6:.1f} MB")
    return 0
