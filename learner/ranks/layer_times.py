"""Times of the decoder's layers on each rank, which distinguish a slow rank from those that it
delays.

All ranks wait in the collectives of every layer, so their steps take equally long. Between these
collectives each computes alone: hooks inside those of FSDP2 measure that. Ranks that compute rows
together also wait for one another within a layer, so that these times tell rows apart.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from evolver_async.schema import Array

SLOWEST, FACTOR = "learner/slowest_rank", "learner/slowest_factor"  # metrics
LOST_S = "learner/slowest_s"
KEPT = 0.9  # share of the sums that is left after a step
LEAST_TIMES = 8  # of layers, until a rank is compared
SPREAD = 0.1  # of the tokens around their mean, below which they tell no slope


class LayerTimes:
    """Sums over steps and the forward passes of layers in them.

    The sums are of 1 a step and of 1, T, S, T² and TS a pass. T: its tokens; S: its seconds.
    """

    def __init__(self) -> None:
        self.sums_K = np.zeros(6)
        self._begun: tuple[Any, int] | None = None
        self._events: list[tuple[Any, Any, int]] = []  # of a GPU, which are read later

    def watch(self, layer: torch.nn.Module) -> None:
        """Measure a layer that is sharded already, so that its weights are there."""
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        layer.register_forward_hook(self._end, prepend=True)

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._begun = _now(hidden), hidden.numel() // hidden.shape[-1]

    def _end(self, _: torch.nn.Module, args: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if self._begun is None:
            return
        (start, tokens), self._begun = self._begun, None
        if isinstance(start, float):
            self.add(tokens, time.perf_counter() - start)
        else:
            self._events.append((start, _now(hidden), tokens))

    def add(self, tokens: int, seconds: float) -> None:
        """Count a forward pass of a layer."""
        self.sums_K[1:] += (1, tokens, seconds, tokens * tokens, tokens * seconds)

    def drain(self) -> Array:
        """Return the sums after a step, in which earlier ones count less. Waits for a GPU."""
        events, self._events = self._events, []
        for start, end, tokens in events:
            end.synchronize()
            self.add(tokens, start.elapsed_time(end) / 1e3)
        self.sums_K[0] += 1
        sums_K, self.sums_K = self.sums_K, KEPT * self.sums_K
        return sums_K


def _now(tensor: torch.Tensor) -> Any:
    """Return the time in seconds, or an event of the stream of a GPU."""
    if not tensor.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def slowest(sums_RK: Sequence[Array]) -> dict[str, float]:
    """Return metrics of the rank with the slowest layers: its number, its time as a multiple of the
    time that the others need for as many tokens, and the excess in seconds a step.

    None as long as a rank has computed too few. Backward passes are not in these seconds.
    """
    if any(passes < LEAST_TIMES for _, passes, *_ in sums_RK):
        return {}
    found = []
    for rank, (steps, passes, tokens, seconds, *_) in enumerate(sums_RK):
        others = sum(other for index, other in enumerate(sums_RK) if index != rank)
        start, slope = _line(np.asarray(others))
        expected = max(start * passes + slope * tokens, 1e-9)
        found.append((seconds / expected, rank, (seconds - expected) / steps))
    factor, rank, lost_s = max(found)
    return {SLOWEST: float(rank), FACTOR: float(factor), LOST_S: float(lost_s)}


def _line(sums_K: Array) -> tuple[float, float]:
    """Fit seconds = start + slope * tokens, neither negative."""
    mean_t, mean_s, mean_tt, mean_ts = sums_K[2:] / sums_K[1]
    variance = mean_tt - mean_t**2
    if variance < (SPREAD * mean_t) ** 2:
        return mean_s, 0.0  # all passes are of about this size
    slope = min(max((mean_ts - mean_t * mean_s) / variance, 0.0), mean_s / mean_t)
    return mean_s - slope * mean_t, slope
