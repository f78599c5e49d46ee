"""Preparation of a run's policy directory, before any other process is started."""

import torch

from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.launch.registry import resolve
from evolver_async.model import policy
from evolver_async.process.setup import RoleArgs
from learner.optimize import model


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
    directory = args.run_dir / "policy"
    if config.policy.path == str(directory) and not directory.exists():
        policy.make_tiny(
            directory,
            seed=config.run.seed,
            hidden_size=config.policy.hidden_size,
            layers=config.policy.layers,
            heads=config.policy.heads,
            intermediate_size=config.policy.intermediate_size,
            max_length=config.policy.max_length,
        )
    policy.load_tokenizer(config.policy.path)
    model.load(config, "cpu")
    resolve("check_prompts")(config)
    return 0
