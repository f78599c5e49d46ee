"""Correction of one's own: stale tokens lose weight as a Gaussian of their log ratio."""

import torch

from evolver_async.config import CorrectionConfig
from learner.loss.correction import ActionTokens, Corrected, correction


@correction(reads_anchor=True, clips=True)
def gaussian(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """w exp(-(log w)² / 2 sigma²) L(r); `correction.params.sigma` is the width."""
    log_w_N = tokens.anchor_N - tokens.old_N
    w_N = log_w_N.clamp(-20, 20).exp()
    weight_N = w_N * torch.exp(-(log_w_N**2) / (2 * settings.params["sigma"] ** 2))
    ratio_N = (tokens.theta_N - tokens.anchor_N).clamp(-20, 20).exp()
    return Corrected(ratio_N, weight_N, w_N, ratio_N.detach())
