"""Signals of a step's groups that the alarms watch. Pure."""

import numpy as np

from evolver_async.schema import Array, Group, Role, Trajectory
from learner.data.selection import reward_spread


def group_signals(groups: list[Group]) -> dict[str, float]:
    """Return signals of the groups before selection; only those with several members count.

    reward_spread: mean over groups of the population std of the rewards. zero_groups: share of
    groups in which it is 0. input_dependence: see there.
    """
    several = [group for group in groups if len(group.trajectories) > 1]
    if not several:
        return {}
    spreads = np.array([reward_spread(group) for group in several])
    signals = {"reward_spread": float(spreads.mean()), "zero_groups": float((spreads == 0).mean())}
    turns = [[x for x in map(_first_turn, group.trajectories) if len(x)] for group in several]
    turns = [group for group in turns if len(group) > 1]
    if len(turns) > 1:
        signals["input_dependence"] = input_dependence(turns)
    return signals


def input_dependence(turns: list[list[Array]]) -> float:
    """Return the share of first turns' variation that lies between prompts, about 0 to 1.

    `turns`: by group (at least two, each of one prompt), by member (at least two), the tokens that
    it wrote. With h_i the histogram of member i's tokens, as shares,

        same  = mean of h_i·h_j over pairs of members of one group, averaged over groups
        cross = mean of m_x·m_y over pairs of groups, m_x the mean histogram of group x
        own   = mean of h_i·h_i, averaged over groups
        dependence = (same - cross) / (own - cross)

    the intraclass correlation (Fisher) of token histograms; the terms are unbiased, because no pair
    holds the same member twice. It stands for the mutual information of prompt and action; RAGEN-2
    scores actions under each other's prompts: that takes forward passes, and a plug-in
    estimate out of a group's few members would be mostly bias. 0: members of a group resemble each
    other no more than those of others, or everybody writes the same; 1: the prompt decides all.
    """
    members_G = np.array([len(group) for group in turns])
    group_M = np.repeat(np.arange(len(turns)), members_G)
    lengths_M = np.array([len(tokens) for group in turns for tokens in group])
    vocabulary, flat = np.unique(
        np.concatenate([tokens for group in turns for tokens in group]), return_inverse=True
    )
    kinds = len(vocabulary)
    pairs, counts = np.unique(  # (member, token), so that no array is members times tokens
        np.repeat(np.arange(len(group_M)), lengths_M) * kinds + flat, return_counts=True
    )
    member, kind = np.divmod(pairs, kinds)
    shares = counts / lengths_M[member]
    own_G = np.bincount(group_M[member], weights=shares**2, minlength=len(turns))
    sums_GV = np.bincount(
        group_M[member] * kinds + kind, weights=shares, minlength=len(turns) * kinds
    ).reshape(len(turns), kinds)
    same = ((sums_GV**2).sum(1) - own_G) / (members_G * (members_G - 1))
    own = own_G / members_G
    means_GV = sums_GV / members_G[:, None]
    groups = len(turns)
    squares = (means_GV**2).sum()
    cross = float((means_GV.sum(0) ** 2).sum() - squares) / (groups * (groups - 1))
    varies = float(np.mean(own)) - cross
    return (float(np.mean(same)) - cross) / varies if varies > 1e-9 else 0.0


def _first_turn(trajectory: Trajectory) -> Array:
    """Return the ACTION tokens of the first turn."""
    sequence = trajectory.sequences[0]
    return sequence.tokens[(sequence.roles == Role.ACTION) & (sequence.turns == 0)]
