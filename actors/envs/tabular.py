"""Finite decision processes as tables: best values, exact values within a number of moves, and
tabular Q-learning.

Pure and general: a process is a function from a state (anything hashable) and the number of an
action to its possible outcomes, in the form of gymnasium's `P[state][action]`. S is the number of
states, A that of actions, N that of outcomes.
"""

import random
from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from evolver_async.env import Exact
from evolver_async.randomness import key, uniform

Outcome = tuple[float, Hashable, float, bool]  # probability, next state, reward, terminated
Model = Callable[[Hashable, int], Iterable[Outcome]]
MAX_STATES = 200_000
MAX_SWEEPS = 100_000


class Process(NamedTuple):
    """All transitions from the initial states, as flat arrays over the N outcomes.

    `states` are in the order in which they were found, those given first. Outcomes are sorted by
    `pairs` (state · A + action); of one that terminates, the next state counts for nothing.
    """

    states: list[Hashable]
    actions: int
    pairs_N: np.ndarray
    chances_N: np.ndarray
    nexts_N: np.ndarray
    rewards_N: np.ndarray
    ends_N: np.ndarray

    def backup(self, values_S: np.ndarray, payoffs_N: np.ndarray, discount: float) -> np.ndarray:
        """Compute Q[S, A] = Σ p · (payoff + discount · V(next)), with V = 0 after an end."""
        later_N = np.where(self.ends_N, 0.0, values_S[self.nexts_N])
        size = len(self.states) * self.actions
        weights = self.chances_N * (payoffs_N + discount * later_N)
        return np.bincount(self.pairs_N, weights, size).reshape(len(self.states), self.actions)


def happening(chances: Iterable[float], seed: int, *parts: int) -> int:
    """Draw the index of an outcome by its probability; the draw belongs to `seed` and `parts`."""
    return int((np.cumsum(list(chances)) > uniform(seed, *parts)).argmax())


def tabulate(
    starts: Iterable[Hashable], actions: int, model: Model, depth: int | None = None
) -> Process:
    """Tabulate everything that can be reached from `starts`, or within `depth` actions: the states
    at that distance then have no outcomes. ValueError: more than MAX_STATES states."""
    numbers = {state: number for number, state in enumerate(dict.fromkeys(starts))}
    states = list(numbers)
    far = [0] * len(states)
    pairs, chances, nexts, rewards, ends = [], [], [], [], []
    for number, state in enumerate(states):  # grows while it is walked: breadth first
        if far[number] == depth:
            break
        for action in range(actions):
            for chance, reached, reward, ended in model(state, action):
                if not ended and reached not in numbers:
                    if len(states) == MAX_STATES:
                        raise ValueError(f"more than {MAX_STATES} states can be reached")
                    numbers[reached] = len(states)
                    states.append(reached)
                    far.append(far[number] + 1)
                pairs.append(number * actions + action)
                chances.append(chance)
                nexts.append(0 if ended else numbers[reached])
                rewards.append(reward)
                ends.append(ended)
    return Process(
        states=states,
        actions=actions,
        pairs_N=np.array(pairs, np.int64),
        chances_N=np.array(chances, np.float64),
        nexts_N=np.array(nexts, np.int64),
        rewards_N=np.array(rewards, np.float64),
        ends_N=np.array(ends, np.bool_),
    )


def best_values(process: Process, discount: float, tolerance: float = 1e-9) -> np.ndarray:
    """Compute Q*[S, A] by value iteration until no value changes by more than `tolerance`.

    ValueError where that does not come to rest, as with discount 1 and rewards without end.
    """
    values_S = np.zeros(len(process.states))
    for _ in range(MAX_SWEEPS):
        table_SA = process.backup(values_S, process.rewards_N, discount)
        new_S = table_SA.max(axis=1)
        if np.abs(new_S - values_S).max() <= tolerance:
            return table_SA
        values_S = new_S
    raise ValueError(f"discount: with {discount} the values do not come to rest")


def within(
    process: Process, moves: int, payoffs_N: np.ndarray, policy: Literal["random", "best"]
) -> np.ndarray:
    """Compute V[S], the expected sum of payoffs within `moves` actions, by backward induction.

    `random` acts uniformly, `best` as well as is possible with the moves that are left.
    """
    values_S = np.zeros(len(process.states))
    for _ in range(moves):
        table_SA = process.backup(values_S, payoffs_N, 1.0)
        values_S = table_SA.mean(axis=1) if policy == "random" else table_SA.max(axis=1)
    return values_S


def learn(
    process: Process,
    *,
    episodes: int,
    moves: int,
    rate: float,
    discount: float,
    explore: float,
    seed: int,
) -> np.ndarray:
    """Train a tabular Q-learning agent (Watkins) that starts in the first state; return its Q[S,
    A].

    It acts ε-greedily with ε = `explore`, for `episodes` of at most `moves` actions: Q(s, a) +=
    rate · (r + discount · max Q(s', ·) − Q(s, a)). Ties go to the first action.
    """
    rng = random.Random(key(seed, "q_learning"))
    actions = process.actions
    table = [[0.0] * actions for _ in process.states]
    bounds = np.searchsorted(process.pairs_N, np.arange(len(table) * actions + 1)).tolist()
    spans = list(pairwise(bounds))
    parts = process.chances_N, process.nexts_N, process.rewards_N, process.ends_N
    outcomes = list(zip(*(part.tolist() for part in parts), strict=True))
    for _ in range(episodes):
        state = 0
        for _ in range(moves):
            row = table[state]
            greedy = rng.random() >= explore
            action = row.index(max(row)) if greedy else rng.randrange(actions)
            first, last = spans[state * actions + action]
            _, reached, reward, ended = _drawn(outcomes[first:last], rng.random())
            target = reward if ended else reward + discount * max(table[reached])
            row[action] += rate * (target - row[action])
            if ended:
                break
            state = reached
    return np.array(table)


def _drawn(
    outcomes: list[tuple[float, int, float, bool]], luck: float
) -> tuple[float, int, float, bool]:
    """Return the outcome that `luck`, uniform in [0, 1), falls on."""
    for outcome in outcomes:
        luck -= outcome[0]
        if luck < 0:
            return outcome
    return outcomes[-1]


def exact_of(process: Process, moves: int, wins_N: np.ndarray) -> Exact:
    """Compute the values of the first state for a random and for the best policy within `moves`
    actions: the probability of an outcome in `wins_N`, and the return. The best policy differs
    between the two."""

    def worth(payoffs_N: np.ndarray, policy: Literal["random", "best"]) -> float:
        return float(within(process, moves, payoffs_N, policy)[0])

    return Exact(
        random=worth(wins_N, "random"),
        optimal=worth(wins_N, "best"),
        random_return=worth(process.rewards_N, "random"),
        optimal_return=worth(process.rewards_N, "best"),
    )
