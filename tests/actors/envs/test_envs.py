"""The environments: gymnasium's dynamics, disjoint splits, exact values, errors that name keys."""

import functools
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checks.config import check
from actors.envs.bandit import Bandit
from actors.envs.base import EnvError, Goals, Located, Scored, Solvable, make_env
from actors.envs.exact import exact
from actors.envs.grid.frozen_lake import FrozenLake
from actors.envs.grid.frozen_lake_map import ACTIONS, Lake, draw_lake
from evolver_async.config import Config, StageConfig
from evolver_async.env import Exact, Info, Step
from evolver_async.randomness import key, uniform
from evolver_async.schema import Task
from evolver_async.splits import SPLITS


def task(map_seed: int = 0, split: str = "train", env: str = "frozen_lake", **params: Any) -> Task:
    return Task(
        task_id=f"{env}/{split}/{map_seed}", env=env, split=split, map_seed=map_seed, params=params
    )


def lake_env(map_seed: int = 0, split: str = "train", seed: int = 0, **params: Any) -> FrozenLake:
    env = FrozenLake(**params)
    env.reset(task(map_seed, split), seed)
    return env


def in_gymnasium(lake: Lake, slippery: bool, success_rate: float) -> Any:
    cells = lake.cells.replace("_", "F").replace("O", "H")
    cells = cells[: lake.start] + "S" + cells[lake.start + 1 :]
    desc = [cells[row : row + lake.columns] for row in range(0, len(cells), lake.columns)]
    env = gymnasium.make(
        "FrozenLake-v1", desc=desc, is_slippery=slippery, success_rate=success_rate
    )
    return env.unwrapped


class Luck:
    """Stands where gymnasium keeps its generator, and draws what our environment draws."""

    def __init__(self, seed: int) -> None:
        self.draws = (uniform(seed, move) for move in itertools.count())

    def random(self) -> float:
        return next(self.draws)


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("slippery", [False, True])
def test_steps_agree_with_gymnasium(size: int, slippery: bool) -> None:
    choices = random.Random(size)
    for map_seed in range(10):
        env = lake_env(map_seed, seed=map_seed, size=size, slippery=slippery, success_rate=0.6)
        other = in_gymnasium(env.board, slippery, 0.6)
        other.reset()
        other.np_random = Luck(map_seed)
        for _ in range(100):
            action = choices.randrange(4)
            step = env.step(ACTIONS[action])
            cell, reward, terminated, _, _ = other.step(action)
            assert (env.now, step.reward, step.terminated) == (cell, reward, terminated)
            assert step.info.valid and step.info.success == (reward == 1)
            if terminated:
                break


@pytest.mark.parametrize("success_rate", [1.0, 1 / 3, 0.8])
def test_process_agrees_with_gymnasium(success_rate: float) -> None:
    for map_seed in range(5):
        lake = draw_lake(4, 0.8, "random", "train", map_seed)
        table = in_gymnasium(lake, True, success_rate).P
        process = lake.process(success_rate)
        found = iter(
            zip(process.pairs_N, process.chances_N, process.rewards_N, process.ends_N, strict=True)
        )
        assert process.states[0] == lake.start
        for number, cell in enumerate(process.states):
            assert lake.cells[cell] == "_"
            for action in range(4):
                for probability, _, reward, ended in table[cell][action]:
                    pair, chance, paid, over = next(found)
                    assert (pair, paid, over) == (4 * number + action, reward, ended)
                    assert chance == pytest.approx(probability)
        assert next(found, None) is None


def test_max_moves_truncates() -> None:
    env = lake_env(max_moves=2)
    assert [env.step(action).truncated for action in ("jump", "up", "up")] == [False, False, True]
    short, long = lake_env(max_moves=2).exact(9), lake_env().exact(2)
    assert short == long


@pytest.mark.parametrize("placement", ["random", "corners"])
def test_splits_do_not_intersect(placement: str) -> None:
    grounds = [
        {draw_lake(3, 0.8, placement, split, seed).ground for seed in range(400)}
        for split in SPLITS
    ]
    assert sum(map(len, grounds)) == len(set().union(*grounds)) and min(map(len, grounds)) > 4
    assert [9 * "_" in one for one in grounds] == [True, False, False], "no hole: training alone"


def test_same_task_gives_the_same_map() -> None:
    first = draw_lake.__wrapped__(4, 0.8, "random", "test", 7)
    assert draw_lake.__wrapped__(4, 0.8, "random", "test", 7) == first
    assert draw_lake.__wrapped__(4, 0.8, "random", "test", 8) != first


@settings(max_examples=examples(50))
@given(
    st.integers(3, 8), st.integers(0, 1000), st.sampled_from(["random", "corners"]), st.booleans()
)
def test_solve_reaches_the_goal_in_the_fewest_moves(
    size: int, map_seed: int, placement: str, test: bool
) -> None:
    env = lake_env(map_seed, "test" if test else "train", size=size, placement=placement)
    path = env.solve()
    assert env.score() == -len(path)
    steps = [env.step(action) for action in path]
    assert [step.terminated for step in steps] == [False] * (len(path) - 1) + [True]
    assert steps[-1].info.success and steps[-1].reward == 1.0
    if placement == "corners":
        assert (env.board.start, env.board.goal) == (0, size * size - 1)
    assert env.exact(len(path)).optimal == 1.0
    assert env.exact(len(path) - 1).optimal == 0.0


def test_observation_describes_the_state() -> None:
    env = FrozenLake()
    env.board, env.now, env.moves = Lake(rows=("__O_", "____", "_O_G", "____"), start=1), 1, 0
    sight = "row 0 column 1 goal down 2 right 2 left ice down ice right hole up wall"
    assert env.step("jump").observation == f"_PO_\n____\n_O_G\n____\n{sight}"
    sight = "row 1 column 1 goal down 1 right 2 left ice down hole right ice up ice"
    assert env.step(" Down ").observation == f"__O_\n_P__\n_O_G\n____\n{sight}"


@pytest.mark.parametrize("grid, lines", [("every", slice(None)), ("never", slice(3, None))])
def test_the_last_observation_says_how_it_ended(grid: Any, lines: slice) -> None:
    """In RAGEN's glyphs, and without the hints: there is nothing left to decide."""
    ends = {
        ("right", False): ["_X_", "G__", "___", "row 0 column 1"],
        ("down", True): ["_O_", "√__", "___", "row 1 column 0"],
    }
    for (action, won), seen in ends.items():
        env = FrozenLake(size=3, grid=grid, max_moves=1)
        env.board, env.now, env.moves = Lake(rows=("_O_", "G__", "___"), start=0), 0, 0
        step = env.step(action)
        assert step.observation.splitlines() == seen[lines]
        assert (step.terminated, step.truncated, step.info.success) == (True, False, won)


def test_grid_and_hints_can_be_left_out() -> None:
    def lines(**params: Any) -> list[int]:
        env = FrozenLake(**params)
        first = env.reset(task(), 0)
        return [len(text.splitlines()) for text in (first, env.step("jump").observation)]

    assert lines() == [5, 5]
    assert lines(grid="first") == [5, 1]
    assert lines(grid="never") == [1, 1]
    assert "goal" not in FrozenLake(hints=False).reset(task(), 0)


def test_restored_snapshot_replays_the_same_slips() -> None:
    env = lake_env(3, size=8, slippery=True)
    snapshot = env.snapshot()
    actions = ["right", "down", "left", "up"] * 3
    first = [env.step(action) for action in actions if env.score() > -64]
    env.restore(snapshot)
    assert [env.step(action) for action in actions if env.score() > -64] == first


@pytest.mark.parametrize("slippery", [False, True])
def test_exact_values_agree_with_recursion_over_gymnasium(slippery: bool) -> None:
    for map_seed in range(5):
        env = lake_env(map_seed, slippery=slippery, success_rate=0.8)
        table = in_gymnasium(env.board, slippery, 0.8).P

        @functools.cache
        def value(cell: int, moves: int, best: bool, table: Any = table) -> float:
            if moves == 0:
                return 0.0
            values = [
                sum(
                    chance * (reward if over else value(reached, moves - 1, best))
                    for chance, reached, reward, over in table[cell][action]
                )
                for action in range(4)
            ]
            return max(values) if best else sum(values) / 4

        found = env.exact(7)
        assert found.random == pytest.approx(value(env.board.start, 7, False))
        assert found.optimal == pytest.approx(value(env.board.start, 7, True))


def test_slippery_expert_comes_close_to_the_optimum() -> None:
    params = {"slippery": True, "success_rate": 0.8, "size": 3}
    wins = []
    for map_seed, seed in itertools.product(range(20), range(50)):
        env = lake_env(map_seed, seed=key(map_seed, seed), **params)
        steps = (env.step(env.solve()[0]) for _ in range(12))
        wins.append(next((step.info.success for step in steps if step.terminated), False))
    values = exact([task(map_seed, **params) for map_seed in range(20)], 12)
    assert values is not None
    assert values.optimal - 0.06 < np.mean(wins) < values.optimal + 0.02


def test_random_policy_on_corner_maps_is_as_weak_as_known() -> None:
    """The exact values of this task are .015 and 1.0 within 10 moves."""
    values = exact([task(seed, "test", placement="corners") for seed in range(300)], 10)
    assert values is not None
    assert values.random == pytest.approx(0.015, abs=0.008)
    assert values.optimal > 0.98


@settings(max_examples=examples(30))
@given(st.integers(3, 6), st.integers(0, 500), st.booleans(), st.integers(0, 99))
def test_what_exploration_reaches_can_be_made_the_goal(
    size: int, map_seed: int, test: bool, walk: int
) -> None:
    """Every goal offered is one that the same moves reach, on ground of the same split."""
    split = "test" if test else "train"
    params = {"size": size, "free": True}
    env = lake_env(map_seed, split, **params)
    drawn = draw_lake(size, 0.8, "random", split, map_seed)
    choices, path = random.Random(walk), []
    for _ in range(10):
        path.append(choices.choice(ACTIONS))
        step = env.step(path[-1])
        assert "goal" not in step.observation and not step.info.success
        goal = env.goal()
        hole = env.board.cells[env.now] == "O"
        assert step.terminated == hole
        if hole or env.now == drawn.start:
            assert goal is None
        if goal is not None:
            goals = lake_env(map_seed, split, **(params | goal))
            assert goals.board.cells.count("G") == 1 and goals.board.goal == env.now
            assert goals.board.ground == drawn.ground and goals.board.split == split
            assert goals.content() != lake_env(map_seed, split, size=size).content() or (
                env.now == drawn.goal
            )
            reached = [goals.step(action) for action in path]
            assert any(step.info.success for step in reached)
        if hole:
            break


def test_a_goal_that_cannot_be_reached_is_refused() -> None:
    refused = taken = 0
    for map_seed in range(60):
        lake = draw_lake(3, 0.8, "random", "train", map_seed)
        for cell in range(9):
            cells = lake.cells.replace("G", "_")
            moved = cells[:cell] + "G" + cells[cell + 1 :]
            rows = tuple(moved[i : i + 3] for i in (0, 3, 6))
            if cells[cell] == "O" or Lake(rows, lake.start).distances[lake.start] < 1:
                refused += 1
                with pytest.raises(ValueError, match="goal_cell"):
                    lake_env(map_seed, size=3, goal_cell=cell)
            else:
                taken += 1
                assert lake_env(map_seed, size=3, goal_cell=cell).board.cells == moved
    assert refused > 60 and taken > 60


def test_states_have_short_names() -> None:
    env = lake_env()
    names = set()
    for cell in range(16):
        env.now = cell
        names.add(env.state())
    assert len(names) == 16 and "row 1 column 2" in names
    assert isinstance(env, Located) and isinstance(env, Scored) and isinstance(env, Goals)
    assert not isinstance(make_env("bandit", {}), Goals)


def test_dragon_pays_rarely_and_more() -> None:
    env = make_env("bandit", {"low": 0.1})
    bandit = task(env="bandit")
    env.reset(bandit, 0)
    assert env.step("phoenix")[1:4] == (0.1, True, False)
    rewards = []
    for seed in range(2000):
        env.reset(bandit, key(seed))
        step = env.step("Dragon")
        assert step.info.success
        rewards.append(step.reward)
    assert set(rewards) == {0.0, 1.0}
    assert np.mean(rewards) == pytest.approx(0.25, abs=0.04)
    assert isinstance(env, Solvable) and env.solve() == ["dragon"]
    assert exact([bandit], 1) == Exact(random=0.5, optimal=1.0)


def test_arm_order_belongs_to_the_task() -> None:
    env = make_env("bandit", {})
    texts = [env.reset(task(seed, env="bandit"), 0) for seed in range(30)]
    assert set(texts) == {"arms phoenix dragon", "arms dragon phoenix"}
    assert texts == [env.reset(task(seed, env="bandit"), 1) for seed in range(30)]
    step = env.step("griffin")
    assert (step.terminated, step.info.valid, step.observation) == (False, False, texts[-1])


def test_swapped_arms_of_the_bandit_have_each_other_s_names() -> None:
    plain = make_env("bandit", {})
    swapped = make_env("bandit", {"low_arm": "dragon", "high_arm": "phoenix"})
    assert isinstance(plain, Bandit) and isinstance(swapped, Bandit)
    assert plain.plain_instructions == swapped.plain_instructions, "nothing tells the better arm"
    exchanged = {"phoenix": "dragon", "dragon": "phoenix"}
    for seed in range(20):
        seen = plain.reset(task(seed, env="bandit"), seed)
        other = swapped.reset(task(seed, env="bandit"), seed)
        assert other.split() == [exchanged.get(word, word) for word in seen.split()]
        for arm, name in exchanged.items():
            assert swapped.step(name) == plain.step(arm)
    assert swapped.solve() == ["phoenix"] and swapped.step("phoenix").info.success
    named = make_env("bandit", {"low_arm": "teacher", "high_arm": "engineer"})
    assert isinstance(named, Bandit) and "arms, teacher and engineer." in named.plain_instructions


class Unlicensed(Bandit):
    """Environment whose constructor finds no file."""

    def __init__(self) -> None:
        Path("/no/licence").read_text()


@pytest.mark.parametrize(
    ("name", "params", "named"),
    [
        ("frozen_pond", {}, "env.name"),
        (f"{__name__}:Unlicensed", {}, r"env.name: .*:Unlicensed' cannot be made: FileNotFound"),
        ("nowhere.module:Env", {}, "env.name"),
        ("actors.envs.base:Exact", {}, "env.name"),
        ("frozen_lake", {"depth": 3}, "env.params.depth"),
        ("frozen_lake", {"size": "big"}, "env.params.size"),
        ("frozen_lake", {"size": 2}, "env.params.size"),
        ("frozen_lake", {"size": True}, "env.params.size"),
        ("frozen_lake", {"slippery": 1}, "env.params.slippery"),
        ("frozen_lake", {"grid": "often"}, "env.params.grid"),
        ("frozen_lake", {"grid": "never", "hints": False}, "env.params.grid"),
        ("frozen_lake", {"goal_cell": 16}, "env.params.goal_cell"),
        ("frozen_lake", {"frozen_prob": float("nan")}, "env.params.frozen_prob"),
        ("bandit", {"low": 0.5}, "env.params.high_probability"),
        ("bandit", {"low_arm": "dragon"}, "env.params.high_arm"),
        ("bandit", {"high_arm": "two words"}, "env.params.high_arm"),
    ],
)
def test_bad_environment_is_named_before_anything_starts(
    name: str, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(EnvError, match=named):
        make_env(name, params)
    config = Config(stages=[StageConfig(steps=1)])
    config.env.name, config.env.params = name, params
    with pytest.raises(ValueError, match=named):
        check(config)


def test_environment_by_import_path() -> None:
    env = make_env("actors.envs.grid.frozen_lake:FrozenLake", {"size": 3})
    assert isinstance(env, FrozenLake) and env.size == 3


def test_unsolvable_parameters_end_in_an_error() -> None:
    with pytest.raises(ValueError, match="frozen_prob"):
        lake_env(size=8, frozen_prob=0.01, placement="corners")


def test_check_names_format_and_too_few_tokens() -> None:
    config = Config(stages=[StageConfig(steps=1)])
    check(config)
    config.rollout.format = "haiku"
    with pytest.raises(ValueError, match=r"rollout\.format"):
        check(config)
    config.rollout.format = "think_answer"
    config.rollout.max_tokens = 3
    config.rollout.think = True
    with pytest.raises(ValueError, match=r"rollout\.max_tokens"):
        check(config)


def test_check_names_a_stage_that_cannot_demonstrate() -> None:
    config = Config(stages=[StageConfig(kind="sft", steps=1)])
    config.env.name = f"{__name__}:Mute"
    with pytest.raises(ValueError, match=r"stages\[0\]\.kind"):
        check(config)


class Mute:
    """An environment without a solver."""

    instructions = ""
    reset = step = close = None


@pytest.mark.process
def test_check_loads_no_torch() -> None:
    code = "import actors.checks.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Waiting:
    """An environment whose calls are awaited."""

    instructions = "wait"

    async def reset(self, task: Task, dynamics_seed: int) -> str:
        return "here"

    async def step(self, action: str) -> Step:
        return Step("there", 0.0, True, False, Info())

    async def close(self) -> None: ...

    def actions(self) -> list[str]:
        return ["go"]

    def solve(self) -> list[str]:
        return ["go"]


class WaitingScore(Waiting):
    async def score(self) -> float:
        return 0.0


def test_an_async_environment_begins_a_task_and_is_refused_where_nobody_waits() -> None:
    def made(name: str, kind: str = "sft", launch: str = "local") -> Config:
        config = Config(stages=[StageConfig(kind=kind, steps=1)])
        config.env.name, config.launch.kind = f"{__name__}:{name}", launch
        return config

    check(made("Waiting"))
    for config, words in (
        (made("Waiting", launch="serial"), r"is async, which needs real time"),
        (made("Waiting", "world_model"), r"is async, and stages\[0\] \(world_model\)"),
        (made("WaitingScore"), "has an async score: only reset, step, close, tools may be async"),
    ):
        with pytest.raises(ValueError, match=f"env.name: .*{words}"):
            check(config)


class Mismeasured(Bandit):
    """Environment whose exact values are those of its parameter's name."""

    def __init__(self, *, returns: str = "") -> None:
        super().__init__()
        self.returns = returns

    def exact(self, max_turns: int) -> Any:
        values = {"pair": (0.5, 1.0), "text": Exact("half", 1.0), "missing": Exact(0.5, None)}  # type: ignore[arg-type]
        values["unknown"], values["endless"] = Exact(math.nan, 1.0), Exact(0.5, 1.0, math.inf)
        return values.get(self.returns, Exact(np.float32(0.5), 1, None, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ("pair", "exact must return an Exact, returned a tuple"),
        ("text", "random of the Exact must be a number, is a str"),
        ("missing", "optimal of the Exact must be a number, is None"),
        ("unknown", "ValueError: random of the Exact must be finite, is nan"),
        ("endless", "ValueError: random_return of the Exact must be finite, is inf"),
    ],
)
def test_exact_values_of_another_type_are_named(returns: str, said: str) -> None:
    name = f"{__name__}:Mismeasured"
    assert exact([task(env=name)], 1) == Exact(0.5, 1.0, None, 2.0)
    with pytest.raises(EnvError, match=rf"^env\.name: .*Mismeasured' cannot measure .*: {said}"):
        exact([task(env=name, returns=returns)], 1)
