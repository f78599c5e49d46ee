"""Times of layers, by which a slow rank is told from those that wait for it."""

from types import SimpleNamespace

import pytest
import torch

from evolver_async.schema import Array
from learner.diagnostics.stop_rules import SLOW_STEPS, Guard
from learner.ranks.layer_times import FACTOR, LOST_S, SLOWEST, LayerTimes, slowest

TOKENS = (2, 300, 1000, 40, 700, 2, 500, 64, 900, 2)


def of_rank(factor: float, tokens: tuple[int, ...] = TOKENS, steps: int = 3) -> Array:
    """What a rank gathers whose passes cost 1 ms and 10 µs a token, times `factor`."""
    times = LayerTimes()
    for step in range(steps):
        for count in tokens:
            times.add(count, factor * (1e-3 + 1e-5 * count))
        if step + 1 < steps:
            times.drain()
    return times.drain()


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slow_rank_is_found_whatever_its_share_of_the_tokens(slow: int) -> None:
    shares = [TOKENS, TOKENS[:9], tuple(1 + count // 3 for count in TOKENS)]
    found = slowest([of_rank(2.0 if r == slow else 1.0, shares[r]) for r in range(3)])
    assert found[SLOWEST] == slow and found[FACTOR] == pytest.approx(2.0, rel=1e-3)
    assert found[LOST_S] == pytest.approx(sum(1e-3 + 1e-5 * count for count in shares[slow]))


def test_ranks_that_are_alike_have_a_factor_of_one() -> None:
    found = slowest([of_rank(1.0), of_rank(1.0, tuple(count // 2 for count in TOKENS))])
    assert found[FACTOR] == pytest.approx(1.0, rel=1e-3)
    assert slowest([of_rank(1.0), of_rank(9.0, steps=1, tokens=TOKENS[:3])]) == {}


def test_layers_are_measured_between_the_hooks_that_were_there() -> None:
    layer, times, now = torch.nn.Linear(4, 4), LayerTimes(), []
    layer.register_forward_pre_hook(lambda *_: now.append("gathered"))
    layer.register_forward_hook(lambda *_: now.append("dropped"))
    times.watch(layer)
    layer(torch.ones(2, 3, 4))
    sums_K = times.drain()
    assert now == ["gathered", "dropped"] and list(sums_K[:3]) == [1.0, 1.0, 6.0] and sums_K[3] > 0


def test_a_slow_rank_is_told_once_until_it_is_fast_again(tmp_path) -> None:
    titles: list[str] = []
    told = SimpleNamespace(alert=lambda title, *_, **__: titles.append(title))
    guard = Guard(tmp_path, told)  # type: ignore[arg-type]
    slow = {SLOWEST: 3.0, FACTOR: 2.0, LOST_S: 1.0}
    for take in range(2 * SLOW_STEPS):
        assert len(titles) == (take >= SLOW_STEPS)
        guard.tell_slow_rank(take, slow, passed=10.0)
    assert titles == ["slow rank 3"]
    guard.tell_slow_rank(0, {}, passed=10.0)
    for cheap in (slow | {LOST_S: 0.01}, slow | {FACTOR: 1.2}):
        for take in range(2 * SLOW_STEPS):
            guard.tell_slow_rank(take, cheap, passed=10.0)
    assert len(titles) == 1
    for take in range(SLOW_STEPS):
        guard.tell_slow_rank(take, slow, passed=10.0)
    assert len(titles) == 2
