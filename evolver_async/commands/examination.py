"""`doctor` and `config`: what a recipe needs and what it would run; nothing is started."""

import argparse
import contextlib

from evolver_async.commands.recipes import names_file, recipe_path
from evolver_async.config import ablation
from evolver_async.config.load import load_explained, to_yaml
from evolver_async.config.paths import with_absolute_paths
from evolver_async.config.run_summary import plan
from evolver_async.config.secrets import mask
from evolver_async.config.values.config_error import ConfigError
from evolver_async.doctor import capabilities
from evolver_async.launch.registry import resolve
from evolver_async.terminal import say


def examine(args: argparse.Namespace) -> int:
    """Print what this machine can do, or what a recipe needs; return 1 if it cannot run here."""
    if not args.positional:
        return 0 if capabilities.show_machine(capabilities.screen()) else 1
    if not names_file(args.positional[0]):
        raise ConfigError(
            "doctor: changes need a recipe before them: evolver-async doctor RECIPE …"
        )
    recipe, dotlist = recipe_path(args.positional[0]), args.positional[1:]
    given, reasons = load_explained(recipe, dotlist)
    config = with_absolute_paths(given)
    for line in ablation.lines(given, reasons):
        say(line)
    return 0 if capabilities.show_recipe(capabilities.screen(), config, recipe, dotlist) else 1


def show(args: argparse.Namespace) -> int:
    """Print the resolved recipe as YAML, and in comments what it would run."""
    if not args.positional or not names_file(args.positional[0]):
        raise ConfigError("config: a recipe must come first: evolver-async config RECIPE …")
    config, reasons = load_explained(recipe_path(args.positional[0]), args.positional[1:])
    with contextlib.suppress(ValueError):  # an environment that this machine lacks: `doctor` tells
        config = resolve("formats")(config)
    say(mask(to_yaml(config, reasons)), end="")
    for line in (*plan(config), *ablation.lines(config, reasons)):
        say(f"# {mask(line)}")
    return 0
