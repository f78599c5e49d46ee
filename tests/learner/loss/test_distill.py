"""The KL of distillation against a loop over tokens and vocabulary."""

import math

import pytest
import torch

from learner.loss.terms import forward_kl


def looped(teacher_V: list[float], student_V: list[float]) -> float:
    """KL of one token in the notation of its definition."""
    log_p = [x - math.log(sum(map(math.exp, teacher_V))) for x in teacher_V]
    log_q = [x - math.log(sum(map(math.exp, student_V))) for x in student_V]
    return sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))


def logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(7, 11, generator=torch.Generator().manual_seed(seed)).double()


def test_the_kl_of_every_token_matches_the_loop():
    teacher_NV, student_NV = logits(0), logits(1)
    expected = [
        looped(*pair) for pair in zip(teacher_NV.tolist(), student_NV.tolist(), strict=True)
    ]
    assert forward_kl(teacher_NV, student_NV).tolist() == pytest.approx(expected, rel=1e-9)
    assert forward_kl(teacher_NV, teacher_NV).abs().max() < 1e-12


def test_the_gradient_is_q_minus_p_and_none_reaches_the_teacher():
    teacher_NV, student_NV = logits(2).requires_grad_(), logits(3).requires_grad_()
    forward_kl(teacher_NV, student_NV).sum().backward()
    assert teacher_NV.grad is None
    expected_NV = student_NV.softmax(-1) - teacher_NV.softmax(-1)
    torch.testing.assert_close(student_NV.grad, expected_NV.detach(), rtol=0, atol=1e-12)
