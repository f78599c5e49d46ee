"""The supervised loss against a loop, and its independence of micro-batches."""

import pytest
import torch

from evolver_async.config import Config, StageConfig
from learner.loss.terms import sft_loss
from learner.schedule import Stages


def test_sft_is_the_mean_negative_log_prob():
    theta_N = torch.tensor([-1.0, -2.0, -6.0])
    expected = sum(-float(theta) for theta in theta_N) / 3
    assert float(sft_loss(theta_N, tokens=3)) == pytest.approx(expected)


def test_sft_losses_of_micro_batches_add_up():
    theta_N = -torch.rand(10, generator=torch.Generator().manual_seed(0))
    whole = sft_loss(theta_N, tokens=10)
    parts = sft_loss(theta_N[:3], tokens=10) + sft_loss(theta_N[3:], tokens=10)
    torch.testing.assert_close(parts, whole)


def test_sft_pulls_every_token_equally():
    theta_N = torch.tensor([-1.0, -9.0], requires_grad=True)
    sft_loss(theta_N, tokens=4).backward()
    assert theta_N.grad is not None and theta_N.grad.tolist() == [-0.25, -0.25]


def test_demonstrations_are_scored_as_written_and_rollouts_as_sampled():
    kinds = ("sft", "world_model", "reflect", "rl", "dpo", "kto", "reward_model")
    config = Config(stages=[StageConfig(kind=kind, steps=9) for kind in kinds])
    config.rollout.temperature = 0.5
    scored = Stages(config)
    found = [scored(index).rollout.temperature for index in range(len(kinds))]
    assert found == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert config.rollout.temperature == 0.5
