"""Terms of a user's own that are added to the reward of a finished episode."""

import math
from collections.abc import Callable, Sequence

from actors.judge.judge import JudgedEpisode
from actors.rollout.finished import RewardTooLarge, refuse_large
from evolver_async.extension import implementation
from evolver_async.schema import Trajectory

RewardTerm = Callable[[JudgedEpisode], float]


class UnusableTerm(ValueError):
    """Failure of a reward term: it raised, or returned no finite number."""


def nothing(episode: JudgedEpisode) -> float:
    """Return 0: the signature that a term has."""
    return 0.0


def reward_terms(names: Sequence[str]) -> dict[str, RewardTerm]:
    """Import the functions of `rollout.reward_terms`. Raises ValueError for an unfit one."""
    builtin = {"nothing": nothing}
    return {name: implementation("rollout.reward_terms", name, builtin) for name in names}


def add_terms(
    trajectory: Trajectory, episode: JudgedEpisode, terms: dict[str, RewardTerm], largest: float
) -> None:
    """Add the sum of all terms to the outcome and to the reward of the last turn.

    Raises UnusableTerm, which names the term, or a reward beyond `largest`, and leaves the
    trajectory as it was.
    """
    total = 0.0
    for name, term in terms.items():
        try:
            value = float(term(episode))
        except Exception as error:  # a user's code, which can raise anything
            problem = f"{type(error).__name__}: {error}"
            raise UnusableTerm(f"rollout.reward_terms: {name} failed: {problem}") from error
        if not math.isfinite(value):
            raise UnusableTerm(f"rollout.reward_terms: {name} returned {value}")
        total += value
    reward, turn_rewards = trajectory.reward + total, trajectory.turn_rewards.copy()
    turn_rewards[-1:] += total
    try:
        refuse_large(largest, reward, turn_rewards)
    except RewardTooLarge as error:
        raise UnusableTerm(f"rollout.reward_terms: {', '.join(terms)} led to {error}") from error
    trajectory.reward, trajectory.turn_rewards = reward, turn_rewards
