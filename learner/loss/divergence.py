"""Divergences of a student's distributions from a teacher's, token by token. Pure.

p is the teacher's and constant, q the student's. Formulas: docs/algorithms.md, Teachers.

Shapes: `N` tokens, `V` vocabulary, `K` tokens that a teacher lists, `C` chunks of text.
"""

import math

import torch

# In place of a masked logit. Not -inf, whose gradient is no number where all tokens are listed.
NEVER = -1e30
LEAST = math.log(1e-7)  # of the tokens that are not listed: float32 knows no less of 1 - sum(p)


def divergence(
    log_p_NV: torch.Tensor, log_q_NV: torch.Tensor, kind: str, beta: float = 0.5
) -> torch.Tensor:
    """Return D(p, q) of each token, float32[N], from log-probs.

    `forward` KL(p || q), whose gradient by the student's logits is q - p; `reverse` KL(q || p);
    `jsd` beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.
    """
    log_p_NV = log_p_NV.detach()
    if kind == "forward":
        return _kl(log_p_NV, log_q_NV)
    if kind == "reverse":
        return _kl(log_q_NV, log_p_NV)
    assert kind == "jsd", kind
    log_m_NV = torch.logaddexp(log_p_NV + math.log(beta), log_q_NV + math.log1p(-beta))
    return beta * _kl(log_p_NV, log_m_NV) + (1 - beta) * _kl(log_q_NV, log_m_NV)


def _kl(log_a_NV: torch.Tensor, log_b_NV: torch.Tensor) -> torch.Tensor:
    return (log_a_NV.exp() * (log_a_NV - log_b_NV)).sum(-1)


def with_rest(log_p_NK: torch.Tensor) -> torch.Tensor:
    """Append the log-prob of all tokens that are not listed, log(1 - sum p), float32[N, K + 1]."""
    rest_N = torch.log1p(-log_p_NK.exp().sum(-1).clamp(max=1 - math.exp(LEAST)))
    return torch.cat([log_p_NK, rest_N[:, None]], -1)


def listed(logits_NV: torch.Tensor, token_NK: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the listed tokens and of all others together, float32[N, K + 1]."""
    log_q_NV = logits_NV.log_softmax(-1)
    rest_N = log_q_NV.scatter(-1, token_NK, NEVER).logsumexp(-1).clamp(min=LEAST)
    return torch.cat([log_q_NV.gather(-1, token_NK), rest_N[:, None]], -1)


def chunk_gaps(
    theta_N: torch.Tensor, chunk_N: torch.Tensor, teacher_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log q - log p of whole chunks, and the places of their first tokens.

    chunk_N int64: the chunk of each token, ascending, -1 without one; teacher_C: log p of a chunk.
    """
    places = (chunk_N >= 0).nonzero().squeeze(-1)
    chunk_M, of_M = chunk_N[places].unique_consecutive(return_inverse=True)
    sums_M = torch.zeros_like(theta_N[: len(chunk_M)]).index_add(0, of_M, theta_N[places])
    first_M = torch.full_like(chunk_M, len(chunk_N)).scatter_reduce(0, of_M, places, "amin")
    return sums_M - teacher_C[chunk_M], first_M
