"""The supervised stages: next tokens of demonstrations. Pure."""

import torch

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.config.stages import SUPERVISED


def sft_loss(theta_N: torch.Tensor, *, tokens: int) -> torch.Tensor:
    """-Σ theta / tokens over ACTION tokens: the token mean of the whole optimizer update.

    theta_N: log-probs of a micro-batch's ACTION tokens; `tokens`: how many the update has in all.
    """
    return -theta_N.sum() / tokens


def scored_stages(config: Config) -> list[Config]:
    """The configuration of every stage as the learner scores with it.

    Demonstrations were written, not sampled: their log-probs are those of temperature 1.
    """
    stages = [stage_config(config, index) for index in range(len(config.stages))]
    for stage, limits in zip(stages, config.stages, strict=True):
        if limits.kind in SUPERVISED:
            stage.rollout.temperature = 1.0
    return stages
