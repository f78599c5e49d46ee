"""`eval` and `export`: what came out of a run."""

import argparse

from evolver_async.commands.checked import run_directory, user_mistakes
from evolver_async.config.load import load
from evolver_async.launch.roles import resolve


def evaluate(args: argparse.Namespace) -> int:
    """Print how well a checkpoint does on held-out tasks."""
    run_dir = run_directory(args.run_dir)
    with user_mistakes():
        episodes = args.episodes or load(run_dir / "config.yaml").eval.final_episodes
        print(resolve("eval")(run_dir, episodes, args.step))
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a Hugging Face directory out of a checkpoint."""
    run_dir = run_directory(args.run_dir)
    with user_mistakes():
        print(resolve("export")(run_dir, args.out, args.step))
    return 0
