"""Makes or checks the policy directory of a run, before any other process is started."""

import torch

from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.launch.registry import resolve
from evolver_async.model import policy
from evolver_async.process.setup import RoleArgs
from learner.optimize import model


def main(args: RoleArgs) -> int:
    """Write the tiny preset where the run has no policy directory; refuse one that is broken.

    ConfigError where the context is too short for the environment's prompts, or where the token
    budget is to be measured and there is no GPU.
    """
    config = load(args.run_dir / "config.yaml", [])
    if config.learner.token_budget == 0 and not torch.cuda.is_available():
        raise ConfigError("learner.token_budget: 0 measures a GPU's memory, and there is no GPU")
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
