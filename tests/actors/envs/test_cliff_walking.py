"""CliffWalking: gymnasium's dynamics, drawn maps, experts, exact values, errors that name keys."""

import itertools
import random
from typing import Any

import gymnasium
import numpy as np
import pytest

from actors.envs.base import EnvError, Measurable, Rewindable, Scored, make_env
from actors.envs.exact import exact
from actors.envs.grid.cliff_walking import (
    ACTIONS,
    CliffWalking,
    classic_cliff,
    draw_cliff,
    expert_values,
)
from evolver_async.randomness import uniform
from evolver_async.schema import Task
from evolver_async.splits import SPLITS, split_of

SMALL: dict[str, Any] = {"rows": 4, "columns": 5, "layout": "drawn"}


def task(map_seed: int = 0, split: str = "train", **params: Any) -> Task:
    return Task(
        task_id=f"cliff_walking/{split}/{map_seed}",
        env="cliff_walking",
        split=split,
        map_seed=map_seed,
        params=params,
    )


def cliff_env(
    map_seed: int = 0, split: str = "train", seed: int = 0, **params: Any
) -> CliffWalking:
    env = CliffWalking(**params)
    env.reset(task(map_seed, split), seed)
    return env


class Luck:
    """Stands where gymnasium keeps its generator, and draws what our environment draws."""

    def __init__(self, seed: int) -> None:
        self.draws = (uniform(seed, move) for move in itertools.count())

    def random(self) -> float:
        return next(self.draws)


@pytest.mark.parametrize("slippery", [False, True])
def test_steps_agree_with_gymnasium(slippery: bool) -> None:
    choices = random.Random(1)
    other: Any = gymnasium.make("CliffWalking-v1", is_slippery=slippery).unwrapped
    falls = wins = 0
    for seed in range(30):
        env = cliff_env(seed=seed, slippery=slippery)
        other.reset()
        other.np_random = Luck(seed)
        for _ in range(200):
            expert = choices.random() < 0.5
            name = env.solve()[0] if expert else choices.choice(ACTIONS)
            step = env.step(name)
            cell, reward, terminated, truncated, _ = other.step(ACTIONS.index(name))
            assert (env.now, step.reward, step.terminated) == (cell, reward, terminated)
            assert not truncated and not step.truncated and step.info.success == terminated
            falls += reward == -100
            if terminated:
                wins += 1
                break
    assert falls > 20 and wins > 10


@pytest.mark.parametrize("slippery", [False, True])
def test_outcomes_agree_with_gymnasium_in_every_state(slippery: bool) -> None:
    table = gymnasium.make("CliffWalking-v1", is_slippery=slippery).unwrapped.P  # type: ignore[attr-defined]
    cliff = classic_cliff(4, 12, -100.0, slippery)
    for cell, action in itertools.product(range(48), range(4)):
        if cliff.cells[cell] == "_":
            assert cliff.outcomes(cell, action) == [
                (pytest.approx(chance), reached, reward, over)
                for chance, reached, reward, over in table[cell][action]
            ]


def test_the_classic_map_takes_thirteen_moves() -> None:
    """Sutton and Barto, example 6.6: along the edge of the cliff, for a return of -13."""
    env = cliff_env()
    assert env.solve() == ["up", *["right"] * 11, "down"]
    assert env.score() == -13
    values = env.exact(13)
    assert (values.optimal, values.optimal_return) == (1.0, -13.0)
    assert env.exact(12).optimal == 0.0
    steps = [env.step(action) for action in env.solve()]
    assert sum(step.reward for step in steps) == -13
    assert steps[-1].terminated and steps[-1].info.success and env.score() == 0


def test_exact_values_agree_with_many_random_episodes() -> None:
    values = cliff_env(**SMALL).exact(12)
    choices, returns, wins = random.Random(0), [], []
    for _ in range(4000):
        env = cliff_env(**SMALL)
        steps = []
        for _ in range(12):
            steps.append(env.step(choices.choice(ACTIONS)))
            if steps[-1].terminated:
                break
        returns.append(sum(step.reward for step in steps))
        wins.append(steps[-1].info.success)
    assert values.random == pytest.approx(np.mean(wins), abs=0.03)
    assert values.random_return == pytest.approx(
        np.mean(returns), abs=4 * np.std(returns) / 4000**0.5
    )


@pytest.mark.parametrize("slippery", [False, True])
def test_drawn_maps_can_be_solved_and_splits_do_not_intersect(slippery: bool) -> None:
    seen: dict[str, set[str]] = {}
    for split, map_seed in itertools.product(SPLITS, range(60)):
        env = cliff_env(map_seed, split, slippery=slippery, **SMALL)
        assert split_of(env.board.ground) == split
        assert set(env.board.ground.removeprefix("5/")) <= {"_", "O"}, "no goal, no start"
        seen.setdefault(split, set()).add(env.board.ground)
        if slippery:
            assert len(env.solve()) == 1 and env.score() <= -1
            continue
        path = env.solve()
        assert env.score() == -len(path)
        steps = [env.step(action) for action in path]
        assert steps[-1].info.success and all(step.reward == -1 for step in steps)
    assert len(seen["train"]) > 50
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))


def test_same_task_gives_the_same_map() -> None:
    again = draw_cliff.__wrapped__(4, 5, 0.3, -100.0, False, "train", 7)
    assert draw_cliff.__wrapped__(4, 5, 0.3, -100.0, False, "train", 7) == again
    assert draw_cliff.__wrapped__(4, 5, 0.3, -100.0, False, "train", 8) != again


def test_q_learning_agent_walks_along_the_cliff() -> None:
    """Q-learning learns the values of the greedy policy, so it too takes the shortest way."""
    env = cliff_env(expert="q_learning")
    assert env.solve() == cliff_env().solve()
    best, learned = (expert_values(env.board, kind) for kind in ("values", "q_learning"))
    for cell in range(24, 36):  # the row along the cliff
        assert max(learned[cell]) == pytest.approx(max(best[cell]), abs=1e-3)
    solved = 0
    for map_seed in range(30):
        env = cliff_env(map_seed, expert="q_learning", **SMALL)
        assert len(env.solve()) >= 1
        steps = [env.step(action) for action in env.solve()]
        solved += steps[-1].info.success
    assert solved == 30


def test_q_learning_expert_stops_before_it_goes_in_circles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.envs.grid.cliff_walking.EPISODES", 0)  # knows nothing: always up
    env = cliff_env(1, expert="q_learning", fall_reward=-50.0)
    assert env.solve() == ["up"] * 4


def test_observation_describes_the_state() -> None:
    env = CliffWalking(rows=3, columns=4)
    sight = "row 2 column 0 goal down 0 right 3 up safe right hole down wall left wall"
    assert env.reset(task(), 0) == f"____\n____\nPOOG\n{sight}"
    fallen = env.step(" Right ")
    assert fallen.reward == -100 and not fallen.terminated and env.state() == "row 2 column 0"
    assert fallen.observation == f"____\n____\nPOOG\n{sight}"
    assert env.actions() == ["up", "right"]
    invalid = env.step("jump")
    assert not invalid.info.valid and invalid.reward == 0 and invalid.observation.endswith(sight)
    bare = CliffWalking(rows=3, columns=4, hints=False, grid="first")
    assert bare.reset(task(), 0) == "____\n____\nPOOG\nrow 2 column 0"
    assert bare.step("up").observation == "row 1 column 0"
    *_, last = [env.step(action) for action in ("up", "right", "right", "right", "down")]
    assert last.terminated and last.observation == "____\n____\n_OO√\nrow 2 column 3"


def test_restored_snapshot_replays_the_same_slips() -> None:
    env = cliff_env(slippery=True, max_moves=6)
    assert isinstance(env, Rewindable) and isinstance(env, Scored) and isinstance(env, Measurable)
    snapshot = env.snapshot()
    first = [env.step("right") for _ in range(6)]
    assert [step.truncated for step in first] == [False] * 5 + [True]
    env.restore(snapshot)
    assert [env.step("right") for _ in range(6)] == first


def test_mean_exact_values_include_returns() -> None:
    values = exact([task(map_seed, **SMALL) for map_seed in range(20)], 10)
    assert values is not None and values.random_return is not None
    assert values.optimal_return is not None
    assert 0 < values.random < 0.4 and values.optimal == 1.0
    assert values.random_return < -50 < -10 <= values.optimal_return < -1


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"rows": 1}, "rows"),
        ({"columns": 2}, "columns"),
        ({"layout": "round"}, "layout"),
        ({"cliff_prob": 1.0}, "cliff_prob"),
        ({"fall_reward": 0.0}, "fall_reward"),
        ({"grid": "never", "hints": False}, "grid"),
        ({"expert": "sarsa"}, "expert"),
        ({"max_moves": -1}, "max_moves"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvError, match=rf"env\.params\.{named}"):
        make_env("cliff_walking", params)


def test_no_solvable_map_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.envs.grid.cliff_walking.MAX_DRAWS", 3)
    with pytest.raises(ValueError, match="cliff_prob"):
        cliff_env(rows=20, columns=20, layout="drawn", cliff_prob=0.99)
