"""The supervised loss against a loop, and its independence of micro-batches."""

import pytest
import torch

from learner.supervised import sft_loss


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
