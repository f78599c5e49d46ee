"""Sampling of tokens from logits. Shapes: `B` rows, `V` vocabulary."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Draws:
    """Uniform random numbers by seed: those of `Generator(Philox(key=seed))`.

    Making such a generator takes five times as long as giving one another key.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._fresh = self._philox.state

    def of(self, seed: int, count: int) -> list[float]:
        """Return the first `count` numbers in [0, 1) of a seed below 2^64."""
        self._fresh["state"]["key"][0] = seed
        self._philox.state = self._fresh
        return self._generator.random(count).tolist()


def sample(
    logits_BV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverse CDF of a uniform number in [0, 1); return log-probs too.

    Temperature 0 takes the most likely token, with its log-prob at temperature 1.
    """
    device = logits_BV.device
    greedy = 0.0 in temperatures
    if greedy or set(temperatures) != {1.0}:
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits_BV = logits_BV / torch.tensor(divisors, device=device)[:, None]
    probs_BV = logits_BV.softmax(-1)
    cdf_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    uniforms_B = torch.from_numpy(np.array(uniforms)).to(device)
    targets_B1 = uniforms_B[:, None] * cdf_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cdf_BV, targets_B1, right=True).clamp_(max=cdf_BV.shape[1] - 1)
    if greedy:
        greedy_B1 = torch.tensor(temperatures, device=device)[:, None] == 0
        tokens_B1 = torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), tokens_B1)
    return tokens_B1[:, 0], probs_BV.gather(-1, tokens_B1)[:, 0].log()
