"""Groups of players: the parts of episodes, their advantages, and what is told of their groups."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from episodes import episode
from updates import FORKS, config, tiny, updater

from evolver_async.config import AdvantageConfig, Config, SelectionConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.schema import (
    Grammar,
    Group,
    Player,
    Role,
    Sequence,
    Task,
    Trajectory,
    VersionRun,
    WeightId,
)
from learner.data.players import fates, groups_by_player
from learner.data.selection import pairs
from learner.diagnostics.measure import StepResult
from learner.diagnostics.rollouts import group_signals, player_metrics
from learner.state import LearnerState

__all__ = ["tiny"]  # the fixture: the smallest policy there is

WEIGHTS = WeightId(lineage=1, step=0)


def stream(first: int, *turns: int) -> Sequence:
    """A sequence of a PROMPT token and two ACTION tokens for each turn."""
    roles = [x for _ in turns for x in (Role.PROMPT, Role.ACTION, Role.ACTION)]
    numbers = [x for turn in turns for x in (-1, turn, turn)]
    acted = np.array(roles) == Role.ACTION
    return Sequence(
        tokens=np.arange(first, first + len(roles), dtype=np.int32),
        roles=np.array(roles, np.uint8),
        turns=np.array(numbers, np.int16),
        logprobs=np.where(acted, -0.5, 0.0).astype(np.float32),
        versions=[VersionRun(weights=WEIGHTS, tokens=int(acted.sum()))],
    )


def game(member: int, first: float, second: float, *, moves: int = 3) -> Trajectory:
    """An episode in which `first` has the even turns and `second` the odd ones."""
    owned = {"first": [*range(0, moves, 2)], "second": [*range(1, moves, 2)]}
    rewards = np.zeros(moves, np.float32)
    players = []
    for (name, turns), reward in zip(owned.items(), (first, second), strict=True):
        rewards[turns[-1:]] = reward
        players.append(Player(name=name, reward=reward, success=reward > 0, turns=turns))
    streams = [stream(10 * place, *turns) for place, turns in enumerate(owned.values()) if turns]
    return episode(
        *streams,
        turns=moves,
        member=member,
        group_id=7,
        reward=(first + second) / 2,
        turn_rewards=rewards,
        turn_flags=np.arange(moves, dtype=np.uint8),
        labels=np.array([1, -1, 0, 1, -1][:moves], np.int8),
        players=players,
    )


def group(*members: Trajectory, group_id: int = 7) -> Group:
    task = Task(task_id="t", env="t", split="train", map_seed=0)
    return Group(
        group_id=group_id, task=task, kind="rollout", stage=0, use=0, trajectories=[*members]
    )


def test_a_part_holds_a_players_tokens_turns_and_outcome_alone() -> None:
    whole = game(0, 1.0, -1.0, moves=5)
    whole.grammars = [
        Grammar(text="x", stops=[1], turns=[1, 2]),
        Grammar(text="y", stops=[], turns=[0]),
    ]
    first, second = groups_by_player([group(whole)], "player")
    (mine,), (theirs,) = first.trajectories, second.trajectories
    assert (mine.part, theirs.part) == ("first", "second")
    assert (mine.reward, theirs.reward) == (1.0, -1.0)
    assert (mine.success, theirs.success) == (True, False)
    assert mine.turn_rewards.tolist() == [0.0, 0.0, 1.0]
    assert theirs.turn_rewards.tolist() == [0.0, -1.0]
    assert (mine.turn_flags.tolist(), theirs.turn_flags.tolist()) == ([0, 2, 4], [1, 3])
    assert (mine.labels.tolist(), theirs.labels.tolist()) == ([1, 0, -1], [-1, 1])
    assert [(one.text, one.turns) for one in mine.grammars] == [("x", [1]), ("y", [0])]
    assert [(one.text, one.turns) for one in theirs.grammars] == [("x", [0])]
    for part, sequence, turns in ((mine, 0, [0, 1, 2]), (theirs, 1, [0, 1])):
        (kept,) = part.sequences
        assert kept.tokens is whole.sequences[sequence].tokens
        assert kept.turns.tolist() == [x for turn in turns for x in (-1, turn, turn)]
        assert kept.logprobs is whole.sequences[sequence].logprobs
        assert part.trajectory_id == whole.trajectory_id


def test_groups_without_players_are_what_they_were() -> None:
    plain = group(episode(stream(0, 0), reward=1.0))
    (found,) = groups_by_player([plain], "player")
    assert found is plain


def test_who_did_not_move_has_no_part() -> None:
    moved, ended = game(0, 1.0, -1.0), game(1, 0.5, 0.0, moves=1)
    first, second = groups_by_player([group(moved, ended)], "player")
    assert [one.member for one in first.trajectories] == [0, 1]
    assert [one.member for one in second.trajectories] == [0]
    (shared,) = groups_by_player([group(moved, ended)], "shared")
    assert [(one.member, one.part) for one in shared.trajectories] == [
        (0, "first"),
        (0, "second"),
        (1, "first"),
    ]


def test_every_group_is_told_of_once() -> None:
    trained, filtered = fates([3, 4, 4], {"zero_spread": [3, 5, 5], "truncated": [5, 6]})
    assert (trained, filtered) == ([3, 4], {"zero_spread": [5], "truncated": [6]})


OUTCOMES = [(1.0, 0.25), (1.0, -1.0), (-1.0, 1.0), (0.5, 0.0)]


def games(outcomes: list[tuple[float, float]], group_id: int = 7) -> Group:
    members = [game(member, *rewards) for member, rewards in enumerate(outcomes)]
    for one in members:
        one.group_id = group_id
    return group(*members, group_id=group_id)


def settings(tiny: Path, baseline: str, kind: str = "grpo") -> Config:
    whole = config(tiny, [StageConfig(kind="rl", steps=3)])
    whole.rollout.agent, whole.rollout.players = "a.b:c", ["first", "second"]
    whole.launch.kind = "local"
    advantage = AdvantageConfig(kind=kind, std="none", baseline=baseline)
    return replace(whole, advantage=advantage)


def step(settings: Config, run_dir: Path, groups: list[Group]) -> StepResult:
    learner = updater(settings, run_dir)
    return learner.step("rl", stage_config(settings, 0), groups, LearnerState(lineage=1), FORKS, 3)


def oracle(baseline: str, kind: str, group: Group) -> dict[tuple[int, str], float]:
    """The advantage of every player in every member, by the definition."""
    rewards = {
        (one.member, player.name): player.reward
        for one in group.trajectories
        for player in one.players
    }
    found = {}
    for (member, name), reward in rewards.items():
        peers = [
            other
            for key, other in rewards.items()
            if (baseline == "shared" or key[1] == name)
            and (kind == "grpo" or key != (member, name))
        ]
        found[member, name] = reward - sum(peers) / len(peers)
    return found


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("baseline", ["player", "shared"])
def test_advantages_are_those_of_the_definition(
    tiny: Path, tmp_path: Path, baseline: str, kind: str
) -> None:
    taken = [games(OUTCOMES), games([*reversed(OUTCOMES)], group_id=8)]
    result = step(settings(tiny, baseline, kind), tmp_path, taken)
    assert result.data is not None
    data, seen = result.data, 0
    parts = [one for group in data.chosen.groups for one in group.trajectories]
    wanted = {one.group_id: oracle(baseline, kind, one) for one in taken}
    for index, part in enumerate(parts):
        advantage = wanted[part.group_id][part.member, part.part]
        got_N = data.credit.advantages.advantage_N[data.batch.trajectory_N == index]
        moves = {"first": 2, "second": 1}[part.part]
        assert len(got_N) == 2 * moves and np.allclose(got_N, advantage, atol=1e-6)
        seen += len(got_N)
    assert seen == len(data.credit.advantages.advantage_N) == result.tokens
    assert (result.trained, result.filtered) == ([7, 8], {})


def test_a_group_that_trains_one_player_alone_counts_as_trained(tiny: Path, tmp_path: Path) -> None:
    """`first` has the same reward throughout one group, and both have in the other."""
    taken = [games([(1.0, 0.0), (1.0, 1.0)]), games([(1.0, -1.0)] * 2, group_id=8)]
    assert step(settings(tiny, "player"), tmp_path, taken).trained == [7, 8]
    chosen = replace(settings(tiny, "player"), selection=SelectionConfig(kind="spread", keep=1.0))
    chosen.selection.drop_zero = True
    result = step(chosen, tmp_path, taken)
    assert (result.trained, result.filtered) == ([7], {"zero_spread": [8]})
    assert result.metrics["player/first/trained_groups"] == 0.0
    assert result.metrics["player/second/trained_groups"] == 1.0
    assert result.metrics["selection/kept_share"] == 0.25
    assert result.tokens == 4, "of `second` alone"
    chosen.advantage.baseline = "shared"  # whose rewards differ in both groups
    assert step(chosen, tmp_path, taken).trained == [7, 8]


def test_a_zero_sum_game_has_spread_and_metrics_by_player() -> None:
    zero_sum = games([(1.0, -1.0), (-1.0, 1.0)])
    split = groups_by_player([zero_sum], "player")
    assert group_signals([zero_sum])["zero_groups"] == 1.0  # the mean is 0 always
    assert group_signals(split)["zero_groups"] == 0.0
    metrics = player_metrics([zero_sum], split)
    assert metrics["train/zero_spread"] == 0.0
    assert metrics["player/first/reward"] == metrics["player/second/reward"] == 0.0
    assert metrics["player/first/success"] == 0.5
    assert metrics["player/first/turns_mean"] == 2.0 == 2 * metrics["player/second/turns_mean"]


def test_preferences_pair_members_of_the_same_player() -> None:
    chosen = pairs(groups_by_player([games(OUTCOMES)], "player"))
    assert [[one.part for one in pair.trajectories] for pair in chosen.groups] == [
        ["first"] * 2,
        ["second"] * 2,
    ]
    assert [[one.reward for one in pair.trajectories] for pair in chosen.groups] == [
        [1.0, -1.0],
        [-1.0, 1.0],
    ]
