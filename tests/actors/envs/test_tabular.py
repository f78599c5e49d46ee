"""Finite decision processes: value iteration, backward induction and Q-learning against closed
forms and slow recursion."""

import functools
import random
from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.envs import tabular
from actors.envs.tabular import best_values, exact_of, learn, tabulate, within

LENGTH = 6


def corridor(state: Any, action: int) -> list[Any]:
    """Action 1 goes on, 0 back; -1 a move, and 10 on top at the end."""
    reached = max(state - 1, 0) if action == 0 else state + 1
    won = reached == LENGTH
    return [(1.0, reached, -1.0 + 10.0 * won, won)]


def drawn(seed: int, states: int, actions: int) -> dict[tuple[int, int], list[Any]]:
    """A random process; about one outcome in six ends it."""
    rng = random.Random(seed)
    model = {}
    for state in range(states):
        for action in range(actions):
            chances = [rng.random() for _ in range(rng.randint(1, 3))]
            model[state, action] = [
                (
                    chance / sum(chances),
                    rng.randrange(states),
                    rng.uniform(-2, 2),
                    rng.random() < 0.16,
                )
                for chance in chances
            ]
    return model


def test_best_values_of_a_corridor_are_known() -> None:
    process = tabulate([0], 2, corridor)
    assert process.states == list(range(LENGTH))
    table_SA = best_values(process, 1.0)
    ahead = [10.0 - (LENGTH - state) for state in range(LENGTH)]
    np.testing.assert_allclose(table_SA.max(axis=1), ahead)
    assert table_SA[0, 0] == ahead[0] - 1  # against the wall: a move lost
    discounted = best_values(process, 0.5)
    assert discounted[LENGTH - 2, 1] == pytest.approx(-1 + 0.5 * 9)


def test_what_never_ends_has_no_values_without_discount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "MAX_SWEEPS", 500)
    process = tabulate([0], 1, lambda _state, _action: [(1.0, 0, 1.0, False)])
    with pytest.raises(ValueError, match="discount"):
        best_values(process, 1.0)
    assert best_values(process, 0.5)[0, 0] == pytest.approx(2.0)


@settings(max_examples=examples(25))
@given(st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 3), st.integers(0, 5))
def test_backward_induction_agrees_with_recursion(
    seed: int, states: int, actions: int, moves: int
) -> None:
    model = drawn(seed, states, actions)

    @functools.cache
    def value(state: int, left: int, best: bool, won: bool) -> float:
        if left == 0:
            return 0.0
        worths = [
            sum(
                chance
                * ((over if won else reward) + (0 if over else value(reached, left - 1, best, won)))
                for chance, reached, reward, over in model[state, action]
            )
            for action in range(actions)
        ]
        return max(worths) if best else sum(worths) / actions

    def outcomes(state: Any, action: int) -> list[Any]:
        return model[state, action]

    whole = tabulate([0], actions, outcomes)
    for process in (whole, tabulate([0], actions, outcomes, depth=moves)):
        found = exact_of(process, moves, process.ends_N)
        assert found.random == pytest.approx(value(0, moves, False, True))
        assert found.optimal == pytest.approx(value(0, moves, True, True))
        assert found.random_return == pytest.approx(value(0, moves, False, False))
        assert found.optimal_return == pytest.approx(value(0, moves, True, False))


@settings(max_examples=examples(25))
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 3))
def test_best_values_are_what_many_discounted_moves_are_worth(
    seed: int, states: int, actions: int
) -> None:
    """Value iteration is the fixed point: nothing changes when it is backed up once more."""
    process = tabulate(
        [0], actions, lambda state, action: drawn(seed, states, actions)[state, action]
    )  # type: ignore[index]
    table_SA = best_values(process, 0.8)
    again_SA = process.backup(table_SA.max(axis=1), process.rewards_N, 0.8)
    np.testing.assert_allclose(again_SA, table_SA, atol=1e-8)


def test_depth_leaves_out_what_is_too_far() -> None:
    assert tabulate([0], 2, corridor, depth=2).states == [0, 1, 2]


def test_too_many_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "MAX_STATES", 100)
    with pytest.raises(ValueError, match="100 states"):
        tabulate([0], 1, lambda state, _action: [(1.0, state + 1, 0.0, False)])  # type: ignore[operator]


def test_q_learning_finds_the_best_values_and_repeats_itself() -> None:
    process = tabulate([0], 2, corridor)
    settings = {"episodes": 2000, "moves": 100, "rate": 0.5, "discount": 1.0, "explore": 0.3}
    first_SA = learn(process, seed=3, **settings)
    np.testing.assert_allclose(first_SA, best_values(process, 1.0), atol=1e-6)
    assert (learn(process, seed=3, **settings) == first_SA).all()
    few = settings | {"episodes": 3}
    assert not (learn(process, seed=3, **few) == learn(process, seed=4, **few)).all()


def test_q_learning_averages_over_chance() -> None:
    """One state, two arms: the second pays 1 in a quarter of the cases, the first always .15."""

    def arms(_state: Any, action: int) -> list[Any]:
        return [(1.0, 0, 0.15, True)] if action == 0 else [(0.25, 0, 1.0, True), (0.75, 0, 0, True)]

    process = tabulate([0], 2, arms)
    table = learn(process, episodes=20_000, moves=1, rate=0.01, discount=1.0, explore=1.0, seed=0)
    assert table[0] == pytest.approx([0.15, 0.25], abs=0.06)


def test_random_policy_of_one_move_is_the_mean() -> None:
    process = tabulate([LENGTH - 1], 2, corridor)
    assert within(process, 1, process.rewards_N, "random")[0] == (-1 + 9) / 2
