"""Files of skipped steps: the newest are there, and a long run does not fill its disk with them."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from learner.diagnostics.stop_rules import write_bad_step


def test_the_newest_batches_are_kept_with_their_arrays(tmp_path: Path) -> None:
    for number, take in enumerate((7, 9, 30, 8)):  # the run has gone back before the last
        path = tmp_path / "bad" / f"take_{take:06d}.npz"
        batch = SimpleNamespace(mu_N=np.full(3, take), names=["no array"])
        write_bad_step(path, [batch, SimpleNamespace(loss_N=np.ones(2))], keep=2)
        os.utime(path, (number, number))
    assert {path.name for path in path.parent.iterdir()} == {"take_000030.npz", "take_000008.npz"}
    with np.load(path) as arrays:
        assert set(arrays) == {"mu_N", "loss_N"} and arrays["mu_N"].tolist() == [8, 8, 8]


def test_a_batch_is_kept_after_the_clock_was_set_back(tmp_path: Path) -> None:
    before, path = tmp_path / "bad" / "take_000007.npz", tmp_path / "bad" / "take_000008.npz"
    write_bad_step(before, [], keep=1)
    os.utime(before, (2**32, 2**32))
    write_bad_step(path, [], keep=1)
    assert list(path.parent.iterdir()) == [path]
