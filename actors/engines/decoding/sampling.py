"""Sampling of tokens from logits. Shapes: `B` rows, `V` vocabulary."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 14  # tokens of a vocabulary whose sums in float64 would take longer than its softmax
WIDTHS = (256, 128, 64)  # of the parts of which a large one is drawn first
BELOW_1 = 1 - 2**-53


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

    Of a large vocabulary a part of neighbours is drawn first, by the same number. Temperature 0
    takes the most likely token, with its log-prob at temperature 1.
    """
    device = logits_BV.device
    greedy = 0.0 in temperatures
    if greedy or set(temperatures) != {1.0}:
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits_BV = logits_BV / torch.tensor(divisors, device=device)[:, None]
    probs_BV = logits_BV.softmax(-1)
    uniforms_B1 = torch.from_numpy(np.array(uniforms)).to(device)[:, None]
    width = next((one for one in WIDTHS if probs_BV.shape[1] % one == 0), 0)
    if probs_BV.shape[1] < LARGE or not width:
        tokens_B1, _ = _drawn(probs_BV, uniforms_B1)
    else:
        parts_BPW = probs_BV.unflatten(1, (-1, width))
        part_B1, rest_B1 = _drawn(parts_BPW.sum(-1), uniforms_B1)
        part_BW = parts_BPW.gather(1, part_B1[..., None].expand(-1, -1, width))[:, 0]
        tokens_B1 = part_B1 * width + _drawn(part_BW, rest_B1)[0]
    if greedy:
        greedy_B1 = torch.tensor(temperatures, device=device)[:, None] == 0
        tokens_B1 = torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), tokens_B1)
    return tokens_B1[:, 0], probs_BV.gather(-1, tokens_B1)[:, 0].log()


def _drawn(probs_BV: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places at which the CDF of probabilities, of any sum, passes uniform numbers.

    Return also where within the probability of that place each number is: another such number.
    """
    cdf_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    targets_B1 = uniforms_B1 * cdf_BV[:, -1:]
    places_B1 = torch.searchsorted(cdf_BV, targets_B1, right=True).clamp_(max=cdf_BV.shape[1] - 1)
    found_B1 = probs_BV.gather(1, places_B1).double()
    rests_B1 = (targets_B1 - cdf_BV.gather(1, places_B1)) / found_B1 + 1
    return places_B1, rests_B1.clamp_(0, BELOW_1)
