"""Divergences from a teacher against loops over tokens and vocabulary, and against TRL's."""

import json
import math
from pathlib import Path

import pytest
import torch

from learner.loss.divergence import chunk_gaps, divergence, listed, with_rest

KINDS = [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.1), ("jsd", 0.7)]
# written by tests/benchmarks/peers/trl_distances.py, in TRL's own environment
GKD = json.loads((Path(__file__).parents[2] / "data" / "trl_gkd.json").read_text())


def softmax(logits_V: list[float]) -> list[float]:
    total = sum(map(math.exp, logits_V))
    return [math.exp(x) / total for x in logits_V]


def kl(a_V: list[float], b_V: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(a_V, b_V, strict=True))


def looped(p_V: list[float], q_V: list[float], kind: str, beta: float) -> float:
    """The divergence of one token in the notation of its definition."""
    if kind == "forward":
        return kl(p_V, q_V)
    if kind == "reverse":
        return kl(q_V, p_V)
    m_V = [beta * p + (1 - beta) * q for p, q in zip(p_V, q_V, strict=True)]
    return beta * kl(p_V, m_V) + (1 - beta) * kl(q_V, m_V)


def logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(7, 11, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_divergence_of_every_token_matches_the_loop(kind, beta):
    teacher_NV, student_NV = logits(0), logits(1)
    rows = zip(teacher_NV.tolist(), student_NV.tolist(), strict=True)
    expected = [looped(softmax(p_V), softmax(q_V), kind, beta) for p_V, q_V in rows]
    log_p_NV, log_q_NV = teacher_NV.log_softmax(-1), student_NV.log_softmax(-1)
    assert divergence(log_p_NV, log_q_NV, kind, beta).tolist() == pytest.approx(expected, rel=1e-9)
    assert divergence(log_p_NV, log_p_NV, kind, beta).abs().max() < 1e-12


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_no_gradient_reaches_the_teacher_and_a_masked_token_has_none(kind, beta):
    teacher_NV, student_NV = logits(2).requires_grad_(), logits(3).requires_grad_()
    allowed_V = torch.arange(11) < 8
    masked = [one.where(allowed_V, -1e30).log_softmax(-1) for one in (teacher_NV, student_NV)]
    divergence(masked[0], masked[1], kind, beta).sum().backward()
    assert teacher_NV.grad is None and student_NV.grad is not None
    assert student_NV.grad.isfinite().all() and not student_NV.grad[:, 8:].any()
    assert student_NV.grad[:, :8].abs().min() > 0


def test_the_gradient_of_the_forward_kl_is_q_minus_p():
    teacher_NV, student_NV = logits(2), logits(3).requires_grad_()
    divergence(teacher_NV.log_softmax(-1), student_NV.log_softmax(-1), "forward").sum().backward()
    expected_NV = student_NV.softmax(-1) - teacher_NV.softmax(-1)
    torch.testing.assert_close(student_NV.grad, expected_NV.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_tokens_that_are_not_listed_count_as_one(kind, beta):
    teacher_NV, student_NV = logits(4), logits(5).requires_grad_()
    log_p_NV = teacher_NV.log_softmax(-1)
    log_p_NK, token_NK = log_p_NV.topk(3)
    found_N = divergence(with_rest(log_p_NK), listed(student_NV, token_NK), kind, beta)
    for row, found in enumerate(found_N.tolist()):
        kept = token_NK[row].tolist()
        pair = []
        for logits_NV in (teacher_NV, student_NV):
            of_V = softmax(logits_NV[row].tolist())
            pair.append([*(of_V[token] for token in kept)])
            pair[-1].append(1 - sum(pair[-1]))
        assert found == pytest.approx(looped(*pair, kind, beta), rel=1e-6)
        whole = looped(
            *(softmax(one[row].tolist()) for one in (teacher_NV, student_NV)), kind, beta
        )
        assert found <= whole, "merging tokens loses differences"
    found_N.sum().backward()
    assert student_NV.grad is not None and student_NV.grad.isfinite().all()


def test_a_list_of_all_tokens_leaves_no_rest():
    student_NV = logits(6).requires_grad_()
    log_p_NK, token_NK = logits(7).log_softmax(-1).topk(11)
    found_N = divergence(with_rest(log_p_NK), listed(student_NV, token_NK), "forward")
    log_q_NV = student_NV.log_softmax(-1)
    whole_N = divergence(logits(7).log_softmax(-1), log_q_NV, "forward")
    torch.testing.assert_close(found_N, whole_N, rtol=0, atol=1e-5)
    found_N.sum().backward()
    assert student_NV.grad is not None and student_NV.grad.isfinite().all()


def test_chunks_are_compared_by_the_sums_of_their_tokens():
    theta_N = torch.tensor([-1.0, -2.0, -0.5, -4.0, -3.0, -0.25])
    chunk_N = torch.tensor([3, 3, -1, 4, 0, 0])  # rows can be in another order
    teacher_C = torch.tensor([-1.0, 9.0, 9.0, -2.5, -4.5])
    gap_M, first_M = chunk_gaps(theta_N, chunk_N, teacher_C)
    assert gap_M.tolist() == [-3.0 + 2.5, -4.0 + 4.5, -3.25 + 1.0]
    assert first_M.tolist() == [0, 3, 4]
    nothing, _ = chunk_gaps(theta_N, torch.full((6,), -1), teacher_C[:0])
    assert not len(nothing)


@pytest.mark.parametrize("case", GKD["cases"], ids=lambda case: f"{case['beta']}")
def test_the_loss_is_that_of_trl(case):
    """TRL's beta is 0 for the forward KL, 1 for the reverse one."""
    student_BTV, teacher_BTV = (torch.tensor(GKD[name]) for name in ("student", "teacher"))
    counts_BT = torch.tensor(GKD["labels"]) != -100
    heat, beta = case["temperature"], case["beta"]
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    log_p, log_q = ((one[counts_BT] / heat).log_softmax(-1) for one in (teacher_BTV, student_BTV))
    found = float(divergence(log_p, log_q, kind, beta).mean())
    assert found == pytest.approx(case["loss"], abs=1e-5)
