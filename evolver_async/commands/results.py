"""`eval`, `export` and `wandb`: results of a run."""

import argparse
import sys

from evolver_async.commands.checked import as_config_errors, run_directory
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.launch.registry import resolve
from evolver_async.metrics import wandb_upload
from evolver_async.metrics.wandb_process import online
from evolver_async.process.setup import die_with


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a checkpoint on held-out tasks and print the result."""
    run_dir = run_directory(args.run_dir)
    with as_config_errors():
        episodes = args.episodes or load(run_dir / "config.yaml").eval.final_episodes
        print(resolve("eval")(run_dir, episodes, args.step))
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a checkpoint as a Hugging Face directory."""
    run_dir = run_directory(args.run_dir)
    with as_config_errors():
        print(resolve("export")(run_dir, args.out, args.step))
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
        print(wandb_upload.send(run_dir, online(args.mode)))
    except wandb_upload.UploadError as error:
        print(f"evolver-async: W&B: {error}", file=sys.stderr)
        return 1
    return 0
