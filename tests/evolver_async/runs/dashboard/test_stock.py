"""The view of the buffer: the ledger in the width of a terminal."""

import pytest

from evolver_async.runs.dashboard.stock import _ledger

WIDTH = 79  # of the text in 80 columns, beside the bar that scrolls


def amount(count: int) -> dict[str, int]:
    return {"trajectories": count}


@pytest.mark.parametrize("received", [1000, 10_000_000])
@pytest.mark.parametrize("lost", [0, 7])
def test_80_columns_tell_whether_a_large_ledger_closes(received: int, lost: int) -> None:
    part = received // 4
    ledger = {
        "received": {"rollout": amount(received)},
        "held": {"rollout": {"open": amount(part - lost), "ready": amount(0)}},
        "trained": {"rollout": {"": amount(part)}},
        "filtered": {"rollout": {"zero_spread": amount(part)}},
        "evicted": {"rollout": {"stale": amount(part)}},
    }
    lines = _ledger(ledger, "trajectories", WIDTH)
    assert all(line.cell_len <= WIDTH for line in lines)
    assert lines[-1].plain.rstrip().endswith(f"{lost:+,} off" if lost else "closes")
