"""Groups of the players of episodes: every player's part is a trajectory of its own. Pure.

All that compares the members of a group (selection, advantages, preferences) works on these groups
as on any other. SPIRAL (arXiv 2506.24119) conditions its advantages on the role of a player: here a
player's group is its baseline. The groups that the buffer counts are those of the episodes.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from msgspec.structs import replace

from evolver_async.schema import Grammar, Group, Player, Role, Trajectory


def groups_by_player(groups: list[Group], baseline: str) -> list[Group]:
    """Return one group for each player that has turns in a group, in the order of the groups.

    `baseline` shared: one group of all players' parts. A group without players stays as it is.
    """
    found: list[Group] = []
    for group in groups:
        names = dict.fromkeys(
            player.name for one in group.trajectories for player in one.players if player.turns
        )
        if not names:
            found.append(group)
            continue
        parts = [
            _part(one, player)
            for one in group.trajectories
            for player in one.players
            if player.turns
        ]
        if baseline == "shared":
            found.append(replace(group, trajectories=parts))
            continue
        assert baseline == "player", baseline
        for name in names:
            mine = [one for one in parts if one.part == name]
            found.append(replace(group, trajectories=mine))
    return found


def _part(whole: Trajectory, player: Player) -> Trajectory:
    """Return a player's part of an episode; its turns are numbered anew, from 0."""
    if len(whole.players) == 1:
        return whole
    number_K = np.full(len(whole.turn_rewards), -1, np.int16)
    number_K[player.turns] = np.arange(len(player.turns))
    sequences = []
    for sequence in whole.sequences:
        acting = sequence.turns[sequence.roles == Role.ACTION]
        # One without ACTION tokens is no player's; it trains nothing.
        if not len(acting) or number_K[acting[0]] >= 0:
            turns = np.where(sequence.turns >= 0, number_K[sequence.turns], np.int16(-1))
            sequences.append(replace(sequence, turns=turns))
    return replace(
        whole,
        sequences=sequences,
        reward=player.reward,
        success=player.success,
        turn_rewards=whole.turn_rewards[player.turns],
        turn_flags=whole.turn_flags[player.turns],
        labels=whole.labels[player.turns],
        grammars=[*_grammars(whole.grammars, number_K.tolist())],
        players=[replace(player, turns=[*range(len(player.turns))])],
    )


def fates(
    trained: Collection[int], filtered: Mapping[str, Collection[int]]
) -> tuple[list[int], dict[str, list[int]]]:
    """Return the ids of the groups of which some part trained, and of the others by reason.

    Both name the groups that parts are of; the result names every group once.
    """
    found, left = dict.fromkeys(trained), dict[str, list[int]]()
    known = set(found)
    for reason, ids in filtered.items():
        if new := [one for one in dict.fromkeys(ids) if one not in known]:
            left[reason] = new
            known.update(new)
    return [*found], left


def _grammars(grammars: list[Grammar], number_K: list[int]) -> Iterator[Grammar]:
    """Yield the grammars of the turns that have a number, by their numbers."""
    for grammar in grammars:
        if turns := [number_K[turn] for turn in grammar.turns if number_K[turn] >= 0]:
            yield replace(grammar, turns=turns)
