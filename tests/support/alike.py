"""Comparison of what ranks hold."""

import numpy as np

from learner.ranks.layer_times import FACTOR, LOST_S, SLOWEST

TOLERANCE = 1e-5
PACE = {SLOWEST, FACTOR, LOST_S}  # of several ranks, and never the same


def assert_alike(
    found: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float = TOLERANCE
) -> None:
    assert len(found) == len(wanted) > 0
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.keys() - PACE == theirs.keys() - PACE
        for name in ours.keys() - PACE:
            close = np.isclose(ours[name], theirs[name], atol=tolerance, rtol=tolerance)
            assert close, f"step {step}, {name}: {ours[name]}, alone {theirs[name]}"
