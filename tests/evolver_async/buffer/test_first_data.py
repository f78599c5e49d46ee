"""The first data of a stage: one sentence if nothing can be learned, and none if something can."""

from collections.abc import Iterable
from typing import Any

import episodes
import numpy as np
import pytest
from critic_groups import sequence

from evolver_async.buffer.monitor.first_data import ENOUGH, FirstData
from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.schema import Trajectory, TurnFlag

CUT, UNREAD = TurnFlag.CUT, TurnFlag.FORMAT_ERROR


def config(*changes: str, groups: int = 4, members: int = 8) -> Config:
    return load(
        None,
        [
            f"learner.groups_per_step={groups}",
            f"rollout.group_size={members}",
            "stages=[{kind: rl, steps: 9}]",
            "learner.minibatches=1",
            *changes,
        ],
    )


def played(reward: float, success: bool = False, flag: int = 0, **facts: Any) -> Trajectory:
    flags = np.array([flag], np.uint8)
    made = episodes.episode(sequence("PA", [0], 0), **facts)
    made.reward, made.success, made.turn_flags = reward, success, flags
    return made


def told(settings: Config, groups: Iterable[list[Trajectory]]) -> list[str]:
    """The sentences about these groups, one after the other, as they arrive."""
    judge = FirstData([settings])
    found = []
    for group in groups:
        rewards = [one.reward for one in group]
        for number, one in enumerate(group, 1):
            spread = float(np.std(rewards)) if number == len(group) else None
            found.append(judge.arrive(0, one, spread))
    return [text for text in found if text]


def groups_of(*members: Trajectory, count: int = 8) -> list[list[Trajectory]]:
    return [[*members]] * count


GOOD, BAD = played(1.0, True), played(0.0)


@pytest.mark.parametrize(
    ("group", "named"),
    [
        ([BAD] * 8, ["no reply was rewarded", "the reward 0"]),
        ([BAD] * 7 + [played(-0.1, flag=UNREAD)], ["no reply was rewarded", "format_penalty"]),
        ([GOOD] * 8, ["nothing left to learn", "env.params"]),
        ([played(0.5, flag=CUT)] * 5 + [BAD] * 3, ["62% of the replies", "rollout.max_tokens="]),
        ([played(1, True, CUT)] * 8, ["100% of the replies", "rollout.max_tokens="]),
        ([played(-0.1, flag=UNREAD)] * 8, ["100% of the turns cannot be read", "rollout.format="]),
        ([played(0.25 * n) for n in range(8)], ["up to 1.75", "none of the first"]),
    ],
)
def test_what_teaches_nothing_is_said_once_with_the_key_that_helps(
    group: list[Trajectory], named: list[str]
) -> None:
    (sentence,) = told(config(), groups_of(*group))
    assert all(text in sentence for text in named), sentence


def test_rewards_that_differ_only_between_groups_teach_a_group_relative_estimator_nothing() -> None:
    data = [[GOOD] * 8, [BAD] * 8] * 4
    (sentence,) = told(config(), data)
    assert "rollout.temperature" in sentence
    assert told(config("advantage.kind=gae"), data) == []
    assert told(config("advantage.kind=reinforce"), data) == []


@pytest.mark.parametrize(
    "group",
    [
        [GOOD] + [BAD] * 7,
        [GOOD] + [played(-0.1, flag=UNREAD)] * 7,
        [GOOD] + [played(0.0, flag=CUT)] * 6 + [BAD],
        [played(-0.1 * n) for n in range(8)],  # costs of steps differ, before any success
    ],
)
def test_data_that_teach_something_are_no_alarm(group: list[Trajectory]) -> None:
    assert told(config(), groups_of(*group)) == []


def test_a_judges_labels_teach_where_rewards_are_equal() -> None:
    labelled = ["advantage.kind=adca", "judge.kind=self"]
    assert told(config(*labelled), groups_of(*[BAD] * 8)) == []


def test_it_speaks_within_two_steps_data_and_sooner_if_there_are_many_episodes() -> None:
    judge, few = FirstData([config(groups=2, members=2)]), 0
    while not judge.arrive(0, BAD, None if few % 2 == 0 else 0.0):
        few += 1
        assert few < 8
    assert few + 1 == 2 * 2 * 2
    assert len(told(config(groups=2, members=ENOUGH // 2), groups_of(*[BAD] * 16, count=2))) == 1


def test_later_failures_are_not_first_data_and_every_stage_has_its_own() -> None:
    settings = config(groups=2, members=2)
    judge = FirstData([settings, settings])
    for stage, data in ((0, [GOOD, BAD]), (0, [BAD, BAD])):
        for number, one in enumerate(data * 20):
            assert judge.arrive(stage, one, 0.5 if number % 2 else None) == ""
    assert any(judge.arrive(1, BAD, 0.0) for _ in range(4))
    resumed = FirstData([settings, settings], begun=0)
    assert not any(resumed.arrive(0, BAD, 0.0) for _ in range(20))


def test_refills_are_told_at_half_of_their_limit_once() -> None:
    judge = FirstData([config()])
    judge.arrive(0, BAD, None)
    assert [bool(judge.refill(0, count, 40)) for count in (5, 19, 20, 21, 40)] == [
        False,
        False,
        True,
        False,
        False,
    ]
