"""The estimators with a critic against loops over one trajectory in the notation of the algorithms
page, and cases in closed form."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import WITH_CRITIC, Episode

from evolver_async.config import AdvantageConfig
from evolver_async.schema import Array
from learner.advantage.assign import BY_CRITIC
from learner.advantage.gae import (
    Tokens,
    backwards,
    gae,
    gae_bilevel,
    place_rewards,
    vtrace,
    whitened,
)

number = st.floats(-3, 3, allow_subnormal=False).map(lambda x: round(x, 3))
share = st.floats(0, 1, allow_subnormal=False).map(lambda x: round(x, 2))


token = st.tuples(number, number, st.floats(0, 4).map(lambda x: round(x, 2)))
turns = st.lists(st.lists(token, min_size=1, max_size=4), max_size=4)
episodes = st.lists(
    st.builds(Episode, turns, st.one_of(st.just(0.0), number)), min_size=1, max_size=5
)


def flat(given: list[Episode]) -> tuple[Tokens, Array]:
    tokens = [token for episode in given for token in episode.tokens]
    reward_N, value_N, w_N = np.array(tokens, float).reshape(-1, 3).T
    lengths = [len(turn) for episode in given for turn in episode.turns]
    start_P = np.cumsum([0, *(len(episode.tokens) for episode in given)])
    turn_N = np.repeat(np.arange(len(lengths)), lengths)
    after_P = np.array([episode.after for episode in given])
    return Tokens(reward_N, value_N, turn_N, start_P, after_P), w_N


@pytest.mark.parametrize("kind", WITH_CRITIC)
@given(episodes, share, share, share, st.floats(0.1, 3), st.floats(0.1, 3))
def test_every_estimator_matches_the_loop(kind, given_, gamma, lam, gamma_turn, rho_max, c_max):
    c = AdvantageConfig(kind, gamma=gamma, lam=lam, gamma_turn=gamma_turn)
    c = replace(c, rho_max=rho_max, c_max=c_max)
    found, expected = BY_CRITIC[kind](*flat(given_), c), [WITH_CRITIC[kind](x, c) for x in given_]
    for x_N, index in ((found.advantage_N, 0), (found.return_N, 1)):
        np.testing.assert_allclose(x_N, [x for one in expected for x in one[index]], atol=1e-9)


def test_gae_by_hand():
    # two tokens, reward 1 at the end, V = .5, .25; then one that was cut off with V = 2 behind it
    episode = Episode([[(0.0, 0.5, 1.0), (1.0, 0.25, 1.0)]], 0.0)
    cut = Episode([[(0.0, 1.0, 1.0)]], 2.0)
    found = gae(flat([episode, cut])[0], gamma=0.5, lam=0.5)
    # δ = .5·.25 - .5 = -.375, 1 - .25 = .75, and .5·2 - 1 = 0
    assert found.advantage_N.tolist() == [-0.375 + 0.25 * 0.75, 0.75, 0.0]
    assert found.return_N.tolist() == [0.5 - 0.1875, 1.0, 1.0]


def test_bilevel_by_hand():
    turns = [[(0.0, 0.1, 1.0), (1.0, 0.2, 1.0)], [(2.0, 0.4, 1.0)]]
    found = gae_bilevel(flat([Episode(turns, 0.0)])[0], gamma=1.0, lam=1.0, gamma_turn=0.5)
    # A_2 = 2 - .4; A_1 = 1 + .5·.4 - .2 + .5 A_2 = 1.8; G = 2, 2
    np.testing.assert_allclose(found.return_N, [2.0, 2.0, 2.0])
    np.testing.assert_allclose(found.advantage_N, [1.9, 1.8, 1.6])


@given(episodes)
def test_without_discount_and_values_the_advantage_is_the_reward_to_come(given_):
    tokens, _ = flat(given_)
    blind = Tokens(
        tokens.reward_N,
        np.zeros_like(tokens.value_N),
        tokens.turn_N,
        tokens.start_P,
        np.zeros_like(tokens.after_P),
    )
    expected = [
        sum(r for r, _, _ in one.tokens[t:]) for one in given_ for t in range(len(one.tokens))
    ]
    np.testing.assert_allclose(gae(blind, gamma=1, lam=1).advantage_N, expected, atol=1e-9)


@given(episodes, share)
def test_on_policy_vtrace_is_gae_with_lambda_one_and_its_returns(given_, gamma):
    tokens, _ = flat(given_)
    usual = gae(tokens, gamma=gamma, lam=1.0)
    on_policy = vtrace(
        tokens, np.ones_like(tokens.value_N), gamma=gamma, lam=1.0, rho_max=1, c_max=1
    )
    np.testing.assert_allclose(on_policy.return_N, usual.return_N, atol=1e-9)
    np.testing.assert_allclose(on_policy.advantage_N, usual.advantage_N, atol=1e-9)


@given(episodes, share, share)
def test_episodes_do_not_touch_each_other(given_, gamma, lam):
    tokens, w_N = flat(given_)
    together = vtrace(tokens, w_N, gamma=gamma, lam=lam, rho_max=1, c_max=1).return_N
    apart = []
    for one in given_:
        alone, w = flat([one])
        apart += vtrace(alone, w, gamma=gamma, lam=lam, rho_max=1, c_max=1).return_N.tolist()
    np.testing.assert_array_equal(together, apart)


def test_a_number_that_is_not_finite_stays_in_its_episode():
    spoilt = Episode([[(np.nan, 0.0, 1.0), (0.0, 0.0, 1.0)]], 0.0)
    whole = Episode([[(1.0, 0.0, 1.0)] * 3], 0.0)
    found = gae(flat([whole, spoilt, whole])[0], gamma=1, lam=1).advantage_N
    assert np.isfinite(found).tolist() == [True] * 3 + [False, True] + [True] * 3


def test_whitened_advantages_have_mean_0_and_std_1_over_tokens():
    found = whitened(np.array([1.0, 2.0, 6.0]))
    assert found.mean() == pytest.approx(0) and found.std() == pytest.approx(1, abs=1e-5)
    assert whitened(np.full(3, 0.1)).tolist() == [0, 0, 0]
    assert whitened(np.zeros(0)).tolist() == []


def test_rewards_go_to_the_last_token_of_their_turn():
    # turns 0..2 of the first trajectory, of which 1 has no tokens; 3, 4 of the second, of which 3
    # has none; the third wrote nothing
    reward_N = place_rewards(
        np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
        turn_N=np.array([0, 0, 2, 4, 4]),
        start_P=np.array([0, 3, 5, 5]),
        turn_start_P=np.array([0, 3, 5, 6]),
    )
    assert reward_N.tolist() == [0, 1 + 2, 4, 8, 16]


def test_a_recursion_over_no_segments_is_empty():
    nothing = np.zeros(0)
    assert backwards(nothing, nothing, np.array([0])).tolist() == []
    assert backwards(nothing, nothing, np.array([0, 0, 0])).tolist() == []
