"""What the actors brought, as metrics, against loops over the groups."""

import numpy as np
import pytest
from budget import examples
from collated_groups import make_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from evolver_async.schema import TurnFlag
from learner.data.collate import guided
from learner.diagnostics.rollouts import (
    env_metrics,
    experience_metrics,
    length_metrics,
    own_metrics,
    rollout_metrics,
)


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4))
def test_the_gain_of_guidance_is_that_within_groups_that_have_both_kinds(seed, count, members):
    groups = make_groups(seed, count, members, sequences=1)
    rng = np.random.default_rng(seed)
    for group in groups:
        for one in group.trajectories:
            one.success = bool(rng.random() < 0.5)
    found = experience_metrics(groups)
    everyone = [one for group in groups for one in group.trajectories]
    kinds = {
        "guided": [float(one.success) for one in everyone if guided(one)],
        "unguided": [float(one.success) for one in everyone if not guided(one)],
    }
    share = len(kinds["guided"]) / len(everyone)
    assert found.pop("experience/retrieved_share") == pytest.approx(share)
    for kind, successes in kinds.items():
        if successes:
            mean = sum(successes) / len(successes)
            assert found.pop(f"experience/{kind}_success") == pytest.approx(mean)
    gains = []
    for group in groups:
        mine = [float(one.success) for one in group.trajectories if guided(one)]
        others = [float(one.success) for one in group.trajectories if not guided(one)]
        if mine and others:
            gains.append(sum(mine) / len(mine) - sum(others) / len(others))
    if gains:
        gain = found.pop("experience/guided_gain")
        assert gain == pytest.approx(sum(gains) / len(gains))
    assert found == {}


def test_tool_errors_are_a_share_of_the_turns_that_called_a_tool():
    """Two calls and an answer, an answer alone, and two calls without an answer: 2 of 4 failed."""
    (group,) = make_groups(0, 1, 3)
    call = TurnFlag.TOOL_CALL
    tool, both = call | TurnFlag.TOOL_ERROR, call | TurnFlag.TOOL_ERROR | TurnFlag.FORMAT_ERROR
    rows = [([tool, call, 0], True), ([0], True), ([call, both], False)]
    for one, (flags, terminated) in zip(group.trajectories, rows, strict=True):
        one.turn_flags = np.array(flags, np.uint8)
        one.terminated = terminated
        one.turn_rewards = np.zeros(len(flags), np.float32)
    found = rollout_metrics([group])
    assert found["train/tool_errors"] == 0.5
    assert found["train/format_errors"] == pytest.approx(1 / 6)
    assert found["train/unreadable_calls"] == pytest.approx(1 / 6)
    group.trajectories[0].turn_flags[0] = TurnFlag.FORMAT_ERROR  # an answer that is none
    found = rollout_metrics([group])
    assert found["train/unreadable_calls"] == pytest.approx(1 / 6)


def test_the_call_that_ends_an_episode_is_one() -> None:
    """A booking that was refused and then made: one of two calls failed."""
    (group,) = make_groups(0, 1, 1)
    (one,) = group.trajectories
    refused = TurnFlag.TOOL_CALL | TurnFlag.TOOL_ERROR | TurnFlag.INVALID_ACTION
    one.turn_flags = np.array([refused, TurnFlag.TOOL_CALL], np.uint8)
    one.terminated, one.turn_rewards = True, np.zeros(2, np.float32)
    found = rollout_metrics([group])
    assert found["train/tool_errors"] == found["train/invalid_actions"] == 0.5
    assert found["train/format_errors"] == 0.0


def test_success_is_told_by_environment():
    groups = make_groups(0, 3, 2)
    for group, env, outcomes in zip(
        groups, ("maze", "pond", "maze"), ((True, False), (True, True), (False, False)), strict=True
    ):
        group.task = replace(group.task, env=env)
        for one, success in zip(group.trajectories, outcomes, strict=True):
            one.success = success
    assert env_metrics(groups) == {"train/success/maze": 0.25, "train/success/pond": 1.0}


def test_lengths_count_action_tokens_and_cuts_count_turns_or_episodes():
    (group,) = make_groups(0, 1, 4, sequences=1)
    flags = ([TurnFlag.CUT, 0], [0, TurnFlag.CUT], [TurnFlag.OBSERVATION_CUT, 0], [0, 0])
    for one, marks in zip(group.trajectories, flags, strict=True):
        one.turn_flags, one.truncated = np.array(marks, np.uint8), False
    group.trajectories[3].truncated = True
    group.trajectories[0].metrics, group.trajectories[1].metrics = {"far": 1.0}, {"far": 4.0}
    lengths = [one.action_tokens for one in group.trajectories]
    assert len(set(lengths)) > 1
    assert length_metrics([group]) == {
        "train/length": sum(lengths) / 4,
        "train/length_max": max(lengths),
        "train/truncated": 2 / 4,  # cut within its last turn; ended by a limit of turns
        "train/cut_turns": 2 / 8,
        "train/cut_observations": 1 / 8,
    }
    assert own_metrics([group]) == {"env/far": 2.5}
