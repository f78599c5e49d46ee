"""The supervised stages: next tokens of demonstrations. Pure."""

import torch

from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.config.sections.run import SUPERVISED


def sft_loss(theta_N: torch.Tensor, *, tokens: int) -> torch.Tensor:
    """-Σ theta / tokens over ACTION tokens: the token mean of the whole optimizer update.

    theta_N: log-probs of a micro-batch's ACTION tokens; `tokens`: how many the update has in all.
    """
    return -theta_N.sum() / tokens


class Stages:
    """The configuration of every stage as the learner scores with it, also after rollbacks.

    Demonstrations were written, not sampled: their log-probs are those of temperature 1.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._made: dict[tuple[int, int], Config] = {}

    def __call__(self, index: int, rollbacks: int = 0) -> Config:
        """That of stage `index` after so many rollbacks."""
        if (index, rollbacks) not in self._made:
            stage = stage_config(self.config, index, rollbacks)
            if self.config.stages[index].kind in SUPERVISED:
                stage.rollout.temperature = 1.0
            self._made[index, rollbacks] = stage
        return self._made[index, rollbacks]
