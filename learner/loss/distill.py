"""Distillation of a context: the policy with experience teaches the policy without it. Pure.

After OPCD, arXiv 2602.12275: one model is teacher and student, the teacher's context alone holds
the experience, and every token is compared over the whole vocabulary. There the student samples
and the reverse KL is taken. Here the teacher has sampled the tokens, so the forward KL is: the sum
of KL(guided || bare) over the tokens of guided answers estimates the KL between both distributions
of whole answers without bias. It also has a gradient where the bare policy never finds the answer.
"""

import torch


def forward_kl(teacher_NV: torch.Tensor, student_NV: torch.Tensor) -> torch.Tensor:
    """Return Σ_v p_v (log p_v - log q_v) of each token, from the logits of p and q, float32[N].

    p, the teacher, is constant; the gradient by the student's logits is q - p.
    """
    log_p_NV = teacher_NV.detach().log_softmax(-1)
    log_q_NV = student_NV.log_softmax(-1)
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)
