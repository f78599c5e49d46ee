"""What a real engine sampled, as the learner sees it, in every turn format and context."""

import numpy as np
import pytest
import torch
from micro_batches import actions
from parity import (
    CASES,
    TEMPERATURE,
    Taught,
    taught,
    test_the_learner_gives_every_token_the_log_prob_it_was_sampled_with,
)

from evolver_async.config import CorrectionConfig, LossConfig
from evolver_async.config.sections.learner import by_kind
from evolver_async.model import policy
from evolver_async.schema import Role
from learner.data.batch import Batch, LogProbs
from learner.loss.accounting import Accounting
from learner.loss.objective import Objective
from learner.loss.terms import sft_loss

__all__ = ["taught", "test_the_learner_gives_every_token_the_log_prob_it_was_sampled_with"]

CPU = torch.device("cpu")


def loss_and_gradient(
    taught: Taught, batch: Batch, advantage_N: np.ndarray, labels_BT: torch.Tensor | None
) -> tuple[list[float], list[torch.Tensor]]:
    """Supervised and rl loss of one micro-batch, whose hidden states are those of its own tokens,
    and its gradients; the tokens to be predicted may be others."""
    minibatch = batch.whole()
    (micro,) = minibatch.micro_batches(1 << 20, CPU)
    hidden_BTD = policy.hidden_states(taught.model, micro.tokens_BT)
    theta_BT, entropy_BT = policy.token_logprobs(
        taught.model,
        micro.tokens_BT if labels_BT is None else labels_BT,
        micro.attention_BT,
        TEMPERATURE,
        select_BT=actions(micro),
        hidden_BTD=hidden_BTD,
    )
    theta_N, entropy_N = theta_BT[actions(micro)], entropy_BT[actions(micro)]
    settings = by_kind(CorrectionConfig(kind="ppo"), LossConfig(kl_coef=0))
    logprobs = LogProbs(batch.mu_N, batch.mu_N, batch.mu_N)
    objective = Objective(*settings, batch, logprobs, advantage_N, interpolates=False, boosts=False)
    rl, _ = objective(theta_N, entropy_N, micro, minibatch, Accounting())
    supervised = sft_loss(theta_N, tokens=minibatch.tokens)
    gradients = torch.autograd.grad(rl + supervised, list(taught.model.parameters()))
    return [rl.item(), supervised.item()], list(gradients)


@pytest.mark.parametrize(
    "taught",
    [CASES[1], CASES[3], CASES[6]],
    ids=str,
    indirect=True,
)
def test_the_label_of_an_environment_token_never_reaches_the_loss(taught: Taught) -> None:
    trajectories, _ = taught.play()
    batch = taught.batch(trajectories)
    advantage_N = np.linspace(-1, 1, len(batch.turn_reward_U))[batch.turn_at_N].astype(np.float32)
    (micro,) = batch.whole().micro_batches(1 << 20, CPU)
    random_BT = torch.randint(
        len(taught.tokenizer), micro.tokens_BT.shape, generator=torch.Generator().manual_seed(0)
    )
    theirs_BT = torch.where(actions(micro), micro.tokens_BT, random_BT)
    assert (theirs_BT != micro.tokens_BT).any()
    losses, gradients = loss_and_gradient(taught, batch, advantage_N, None)
    again, others = loss_and_gradient(taught, batch, advantage_N, theirs_BT)
    assert losses == again
    assert all(map(torch.equal, gradients, others))
    own_BT = torch.where(actions(micro), random_BT, micro.tokens_BT)
    changed, _ = loss_and_gradient(taught, batch, advantage_N, own_BT)
    assert changed[0] != losses[0] and changed[1] != losses[1]


@pytest.mark.parametrize("taught", [CASES[6]], ids=str, indirect=True)
def test_code_that_was_run_costs_no_second_reading(taught: Taught) -> None:
    """The stream only grows, so what was read or written before a pause is never read again: new
    are the output and the token that completed the closing tag."""
    paused = 0
    for member in range(8):
        (trajectory,), counted = taught.play(member)
        (sequence,) = trajectory.sequences
        turns = len(trajectory.turn_rewards)
        read = int((sequence.roles != Role.ACTION).sum())
        assert counted["prefilled"] <= read + turns
        assert counted["generated"] == trajectory.action_tokens
        paused += turns > 1
    assert paused > 0
