"""Preparation of a run's policy directory, before any other process is started."""

import re
from pathlib import Path

import torch

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load
from evolver_async.launch.registry import resolve
from evolver_async.model import policy
from evolver_async.process.setup import RoleArgs
from learner.optimize import model

NAMES_KEY = re.compile(r"(policy|learner)\.[a-z_.]+: ")


def main(args: RoleArgs) -> int:
    """Write the tiny preset if the run has no policy directory; refuse a broken one.

    ConfigError if the context is too short for the environment's prompts, or if the token budget
    is to be measured and there is no GPU.
    """
    config = load(args.run_dir / "config.yaml", [])
    if config.learner.token_budget == 0 and not torch.cuda.is_available():
        raise ConfigError(
            "learner.token_budget: there is no GPU to measure; set a number of tokens"
        )
    try:
        _make(config, args.run_dir / "policy")
        _load(config)
    except policy.ModelError as error:
        said = " ".join(str(error).split())
        named = NAMES_KEY.match(said)
        raise ConfigError(said if named else f"policy.path: {said}") from error
    resolve("check_prompts")(config)
    return 0


def _make(config: Config, directory: Path) -> None:
    """Write the tiny preset to the run's own policy directory, unless it is there."""
    if config.policy.path == str(directory) and not directory.exists():
        policy.make_tiny(
            directory,
            seed=config.run.seed,
            hidden_size=config.policy.hidden_size,
            layers=config.policy.layers,
            heads=config.policy.heads,
            intermediate_size=config.policy.intermediate_size,
            max_length=config.policy.max_length,
            words=_vocabulary(config),
        )


def _vocabulary(config: Config) -> list[str]:
    """Return the words of the environments; ConfigError if they cannot name them."""
    try:
        return resolve("vocabulary")(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _load(config: Config) -> None:
    """Load tokenizer and model once. ModelError whatever a library raises meanwhile."""
    try:
        policy.load_tokenizer(config.policy.path)
        model.load(config, "cpu")
    except policy.ModelError:
        raise
    except Exception as error:
        raise policy.ModelError(f"{type(error).__name__}: {error}") from error
