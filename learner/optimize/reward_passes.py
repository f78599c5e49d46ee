"""Forward and backward passes of a reward model over a minibatch of pairs."""

import torch

from evolver_async.config import Config
from evolver_async.model.rows.borders import Borders
from learner.data.batch import MicroBatch, Minibatch
from learner.data.packing import Layout
from learner.loss.accounting import Accounting
from learner.optimize.critic import Critic, CriticTraining
from learner.optimize.reward_model import RewardModel
from learner.optimize.step_passes import MicroLoss, StepPasses
from learner.optimize.teaching import Teaching


class RewardPasses(StepPasses):
    """Passes of `models.reward_model`. A loss gets the scores behind rows for log-probs."""

    name = "reward model"

    @property
    def reward_model(self) -> RewardModel:
        found = self.models.reward_model
        assert found is not None, "a reward_model stage was entered without its model"
        return found

    @property
    def model(self) -> torch.nn.Module:
        return self.reward_model.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.reward_model.optimizer

    @property
    def layout(self) -> Layout:
        return self.reward_model.layout

    def _loss(
        self,
        stage: Config,
        micro: MicroBatch,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: CriticTraining | None,
        teaching: Teaching | None,
        known: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        score_K = self.reward_model(micro.tokens_BT, micro.borders, micro.read_K)
        score_B = score_K.index_select(0, micro.end_B)
        return loss(score_B, score_B, micro, minibatch, accounting)

    def _idle(
        self, critic: CriticTraining | None, packed: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        borders = Borders.of([2], self.device) if packed else None
        return 0 * self.reward_model(tokens_BT, borders).sum(), {}

    def _computed(
        self,
        stage: Config,
        critic: Critic | None,
        tokens_BT: torch.Tensor,
        borders: Borders | None,
        known_ND: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.reward_model(tokens_BT, borders).sum()
