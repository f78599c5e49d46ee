"""`doctor`: what a recipe needs, and what this machine has; nothing is started."""

import argparse
from pathlib import Path

from evolver_async.config.check import ConfigError
from evolver_async.config.load import load
from evolver_async.study import doctor


def examine(args: argparse.Namespace) -> int:
    """Print what this machine can do, or what a recipe needs; 0 when it can run here, else 1."""
    if not args.positional:
        return 0 if doctor.examined(doctor.screen()) else 1
    recipe, dotlist = Path(args.positional[0]), args.positional[1:]
    if "=" in args.positional[0]:
        raise ConfigError("doctor needs a recipe (configs/….yaml) before its changes")
    config = load(recipe, dotlist)
    return 0 if doctor.recipe_examined(doctor.screen(), config, recipe, dotlist) else 1
