"""`doctor` and `config`: what a recipe needs and what it would run; nothing is started."""

import argparse
from pathlib import Path

from evolver_async.config import ConfigError
from evolver_async.config.load import load, to_yaml
from evolver_async.config.plan import plan
from evolver_async.config.secrets import mask
from evolver_async.doctor import report


def examine(args: argparse.Namespace) -> int:
    """Print what this machine can do, or what a recipe needs; 0 when it can run here, else 1."""
    if not args.positional:
        return 0 if report.examined(report.screen()) else 1
    recipe, dotlist = Path(args.positional[0]), args.positional[1:]
    if "=" in args.positional[0]:
        raise ConfigError("doctor needs a recipe (configs/….yaml) before its changes")
    config = load(recipe, dotlist)
    return 0 if report.recipe_examined(report.screen(), config, recipe, dotlist) else 1


def show(args: argparse.Namespace) -> int:
    """Print the resolved recipe as YAML, and in comments what it would run."""
    if not args.positional or "=" in args.positional[0]:
        raise ConfigError("config needs a recipe (configs/….yaml) before its changes")
    config = load(Path(args.positional[0]), args.positional[1:])
    print(mask(to_yaml(config)), end="")
    for line in plan(config):
        print(f"# {mask(line)}")
    return 0
