"""Which groups are kept, against the rule said in loops."""

import numpy as np
from episodes import episode
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.schema import Group, Role, Sequence, Task
from learner.selection import reward_spread, select

SEQUENCE = Sequence(
    tokens=np.zeros(1, np.int32),
    roles=np.full(1, Role.PROMPT, np.uint8),
    turns=np.full(1, -1, np.int16),
    logprobs=np.zeros(1, np.float32),
    versions=[],
)


def make_group(group_id: int, rewards: list[float]) -> Group:
    trajectories = [
        episode(SEQUENCE, group_id=group_id, member=member, reward=reward)
        for member, reward in enumerate(rewards)
    ]
    task = Task(task_id="t", env="bandit", split="train", map_seed=0)
    return Group(
        group_id=group_id, task=task, kind="rollout", stage=0, use=0, trajectories=trajectories
    )


groups_of_rewards = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=8
)


@given(groups_of_rewards, st.sampled_from([0.25, 0.5, 1.0]), st.booleans())
def test_spread_keeps_the_groups_with_the_largest_std(rewards, keep, drop_zero):
    groups = [make_group(100 + i, member_rewards) for i, member_rewards in enumerate(rewards)]
    selected = select(groups, "spread", keep=keep, drop_zero=drop_zero)

    kept_ids = [group.group_id for group in selected.groups]
    left_out = [group_id for ids in selected.filtered.values() for group_id in ids]
    assert sorted(kept_ids + left_out) == [group.group_id for group in groups]
    assert kept_ids == sorted(kept_ids)  # in the order they came
    spread = {group.group_id: reward_spread(group) for group in groups}
    nonzero = sum(value > 0 for value in spread.values())
    count = max(1, round(keep * len(groups)))
    assert len(kept_ids) == (min(count, nonzero) if drop_zero else count)
    assert all(spread[a] >= spread[b] for a in kept_ids for b in left_out)
    if drop_zero:
        assert all(spread[group_id] > 0 for group_id in kept_ids)
        zeros = [group_id for group_id, value in spread.items() if value == 0]
        assert selected.filtered.get("zero_spread", []) == zeros


def test_equal_rewards_have_exactly_zero_spread():
    assert reward_spread(make_group(0, [0.1, 0.1, 0.1])) == 0


def test_all_keeps_everything():
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [0.0, 1.0])]
    selected = select(groups, "all", keep=0.5, drop_zero=True)
    assert selected.groups == groups and selected.filtered == {}


def test_nothing_is_left_of_a_step_without_spread():
    selected = select([make_group(7, [1.0, 1.0])], "spread", keep=0.5, drop_zero=True)
    assert selected.groups == [] and selected.filtered == {"zero_spread": [7]}
