"""Comparison of what ranks hold."""

import numpy as np

TOLERANCE = 1e-5


def assert_alike(
    found: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float = TOLERANCE
) -> None:
    assert len(found) == len(wanted) > 0
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            close = np.isclose(ours[name], theirs[name], atol=tolerance, rtol=tolerance)
            assert close, f"step {step}, {name}: {ours[name]}, alone {theirs[name]}"
