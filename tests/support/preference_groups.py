"""Groups for preference losses."""

import numpy as np
from critic_groups import crossed, sequence
from hypothesis import strategies as st
from updates import groups

from evolver_async.schema import Group


def group_of(number: int, rewards: list[float], seed: int = 0) -> Group:
    """Members of one sequence each, of different lengths."""
    (group,) = groups(1)
    group.group_id, like = number, group.trajectories[0]
    group.trajectories = []
    for member, reward in enumerate(rewards):
        one = crossed().trajectories[1]
        actions = 1 + (member + number) % 3
        made = sequence("PP" + "A" * actions, [0] * actions, seed + 10 * number + member)
        one.group_id, one.member, one.reward = like.group_id, member, reward
        one.sequences, one.turn_rewards = [made], np.zeros(1, np.float32)
        one.turn_flags, one.labels = np.zeros(1, np.uint8), np.zeros(1, np.int8)
        group.trajectories.append(one)
    return group


number = st.integers(0, 10**6)


def data() -> list[Group]:
    return [group_of(n, [0, 1, 0.5] if n % 2 else [1, 0, 0]) for n in range(4)]
