"""Sokoban: gym-sokoban's rules step by step, levels that can be solved, exact values, views."""

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.envs.base import (
    EnvError,
    Exact,
    Measurable,
    Rewindable,
    Scored,
    make_env,
)
from actors.envs.exact import exact
from actors.envs.grid.sokoban import Sokoban
from actors.envs.grid.sokoban_level import (
    ACTIONS,
    Level,
    Room,
    all_distances,
    draw_level,
    moves_to_solve,
)
from evolver_async.buffer.stages import source_of
from evolver_async.buffer.tasks.task_source import held_out_task
from evolver_async.config import Config, StageConfig
from evolver_async.launch.creation import create
from evolver_async.schema import Task
from evolver_async.splits import SPLITS, split_of

OPEN: dict[str, Any] = {"size": 4, "layout": "open", "max_solution": 3}
GLYPHS = "#_O√XPS"
SHIFTS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def task(map_seed: int = 0, split: str = "train", **params: Any) -> Task:
    return Task(
        task_id=f"sokoban/{split}/{map_seed}",
        env="sokoban",
        split=split,
        map_seed=map_seed,
        params=params,
    )


def sokoban(map_seed: int = 0, split: str = "train", **params: Any) -> Sokoban:
    env = Sokoban(**params)
    env.reset(task(map_seed, split), 0)
    return env


def placed(rows: list[str], **params: Any) -> Sokoban:
    """An environment in a state given by its glyphs."""
    env = Sokoban(size=max(len(rows), 5), **params)
    env.size = len(rows)
    glyphs = "".join(rows)
    ground = {"P": "_", "X": "_", "√": "O", "S": "O"}
    room = Room(size=len(rows), cells="".join(ground.get(glyph, glyph) for glyph in glyphs))
    player = next(cell for cell, glyph in enumerate(glyphs) if glyph in "PS")
    boxes = tuple(cell for cell, glyph in enumerate(glyphs) if glyph in "X√")
    env.board, env.now, env.moves = room, (player, boxes), 0
    return env


class Oracle:
    """The rules of gym-sokoban as it keeps them: one array of what is fixed (0 wall, 1 floor,
    2 target), one of what is seen (3 box on target, 4 box, 5 player), recounted in every step."""

    def __init__(self, rows: list[str]) -> None:
        seen = np.array([[GLYPHS.index(glyph) for glyph in row] for row in rows])
        self.fixed = np.where(np.isin(seen, (3, 6)), 2, np.where(seen > 3, 1, seen))
        self.fixed = np.pad(self.fixed, 1)  # an open room has its walls outside
        self.seen = np.pad(np.where(seen == 6, 5, seen), 1)
        self.boxes = int(np.isin(self.seen, (3, 4)).sum())
        self.on_target = int((self.seen == 3).sum())

    def step(self, action: str) -> tuple[float, bool]:
        shift = np.array(SHIFTS[action])
        player = np.argwhere(self.seen == 5)[0]
        ahead, beyond = tuple(player + shift), tuple(player + 2 * shift)
        if self.seen[ahead] in (3, 4) and self.seen[beyond] in (1, 2):
            self.seen[beyond] = 3 if self.fixed[beyond] == 2 else 4
            self.seen[ahead] = 1
        if self.seen[ahead] in (1, 2):
            self.seen[ahead] = 5
            self.seen[tuple(player)] = self.fixed[tuple(player)]
        missing = int(((self.seen == 2) | ((self.fixed == 2) & (self.seen == 5))).sum())
        now = self.boxes - missing
        reward = -0.1
        if now > self.on_target:
            reward += 1
        elif now < self.on_target:
            reward -= 1
        if missing == 0:
            reward += 10
        self.on_target = now
        return reward, missing == 0

    def rows(self) -> list[str]:
        seen = np.where((self.seen == 5) & (self.fixed == 2), 6, self.seen)[1:-1, 1:-1]
        return ["".join(GLYPHS[glyph] for glyph in row) for row in seen]


@settings(max_examples=examples(60))
@given(
    st.integers(0, 2000),
    st.sampled_from(["walled", "open"]),
    st.integers(5, 8),
    st.integers(1, 2),
    st.integers(0, 10_000),
)
def test_steps_agree_with_the_rules_of_gym_sokoban(
    map_seed: int, layout: str, size: int, boxes: int, walk: int
) -> None:
    env = sokoban(map_seed, layout=layout, size=size, boxes=boxes, max_solution=8)
    oracle, choices = Oracle(env.board.render(env.now)), random.Random(walk)
    for _ in range(60):
        expert = choices.random() < 0.5
        action = env.solve()[0] if expert else choices.choice(ACTIONS)
        step = env.step(action.upper())
        reward, solved = oracle.step(action)
        assert step.reward == pytest.approx(reward)
        assert env.board.render(env.now) == oracle.rows()
        assert step.terminated == step.info.success == solved
        assert step.info.valid and not step.truncated
        if solved:
            assert env.score() == 0
            break


def test_rewards_are_given_on_events() -> None:
    """Pushing on gives 1 once, standing there nothing, pushing off takes 1 again."""
    env = placed(["______", "_PX_O_", "______", "__XO__", "______", "______"])
    rewards = [env.step(action).reward for action in ("right", "right", "up", "down")]
    assert rewards == pytest.approx([-0.1, 0.9, -0.1, -0.1])
    assert env.step("right").reward == pytest.approx(-1.1)
    solved = placed(["_____", "_PXO_", "_____", "_____", "_____"], hints=True).step("right")
    assert solved.reward == pytest.approx(10.9)
    assert (solved.terminated, solved.truncated) == (True, False)
    assert solved.observation == "_____\n__P√_\n_____\n_____\n_____"


def test_pushing_from_target_to_target_is_no_event() -> None:
    env = placed(["_____", "P√O__", "_____", "_XO__", "_____"])
    assert env.step("right").reward == pytest.approx(-0.1)


def test_nothing_moves_against_walls_and_boxes() -> None:
    for rows in (["PXX__", *["_____"] * 4], ["PX#__", *["_____"] * 4], ["_____"] * 4 + ["___PX"]):
        env = placed(rows)
        before = env.now
        step = env.step("right")
        assert (env.now, step.reward, step.info.valid) == (before, -0.1, True)
        assert "right" not in env.actions()


def slow_distance(rows: list[str], limit: int) -> int | None:
    """Breadth first and forwards with the oracle, remembering what was seen."""
    seen, frontier = {tuple(rows)}, deque([(rows, 0)])
    while frontier:
        here, distance = frontier.popleft()
        if distance == limit:
            return None
        for action in ACTIONS:
            oracle = Oracle(here)
            _, solved = oracle.step(action)
            if solved:
                return distance + 1
            if tuple(oracle.rows()) not in seen:
                seen.add(tuple(oracle.rows()))
                frontier.append((oracle.rows(), distance + 1))
    return None


@settings(max_examples=examples(15))
@given(st.integers(0, 500), st.sampled_from(["walled", "open"]), st.integers(1, 2))
def test_solutions_are_the_shortest(map_seed: int, layout: str, boxes: int) -> None:
    env = sokoban(map_seed, layout=layout, size=5, boxes=boxes, max_solution=5)
    path = env.solve()
    assert len(path) == -env.score() == slow_distance(env.board.render(env.now), 5)
    steps = [env.step(action) for action in path]
    assert [step.terminated for step in steps] == [False] * (len(path) - 1) + [True]


def test_every_state_that_can_be_solved_is_found_backwards() -> None:
    """All states of a small room, against breadth first search forwards from each."""
    room = Room(size=3, cells="__O_____#")
    distances = moves_to_solve(room)
    floor = [cell for cell in range(9) if room.cells[cell] != "#"]
    for player in floor:
        for box in floor:
            if player != box and not room.solved((player, (box,))):
                slow = slow_distance(room.render((player, (box,))), 50)
                assert distances.get((player, (box,))) == slow
    assert moves_to_solve(room, 4) == {s: d for s, d in distances.items() if d <= 4}


@pytest.mark.parametrize("params", [OPEN, {}, {"size": 8, "boxes": 2, "max_solution": 15}])
def test_levels_keep_their_promises(params: dict[str, Any]) -> None:
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    lengths = []
    for split in seen:
        for map_seed in range(60):
            env = sokoban(map_seed, split, **params)
            glyphs = "\n".join(env.board.render(env.now))
            ground = f"{env.board.cells}/{env.now[1]}"
            assert split_of(ground) == split
            seen[split].add(ground)
            assert glyphs.count("X") == glyphs.count("O") + glyphs.count("S")
            assert glyphs.count("X") == env.boxes and "√" not in glyphs
            lengths.append(len(env.solve()))
            if env.layout == "walled":
                rows = glyphs.splitlines()
                edges = [rows[0], rows[-1], *(row[0] + row[-1] for row in rows)]
                assert set("".join(edges)) == {"#"}
            else:
                assert "#" not in glyphs
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))
    assert min(lengths) >= 1 and max(lengths) <= env.max_solution
    assert len(seen["train"]) > 20 and len(seen["test"]) > 5


def test_same_task_gives_the_same_level() -> None:
    parameters = 6, 1, "walled", 10, "test"
    again = draw_level.__wrapped__(*parameters, 7)
    assert isinstance(again, Level) and draw_level.__wrapped__(*parameters, 7) == again
    assert draw_level.__wrapped__(*parameters, 8) != again


def test_stuck_box_scores_worst_and_still_has_moves() -> None:
    env = placed(["_____", "__X__", "__P__", "_O___", "_____"])
    worst_solvable = -max(all_distances(env.board).values())
    assert env.score() >= worst_solvable
    stuck = env.step("up")
    assert not stuck.terminated and env.score() < worst_solvable
    assert env.solve() == [env.actions()[0]]


def test_exact_values_agree_with_recursion_over_the_oracle() -> None:
    def value(rows: list[str], moves: int, best: bool, won: bool) -> float:
        if moves == 0:
            return 0.0
        worths = []
        for action in ACTIONS:
            oracle = Oracle(rows)
            reward, solved = oracle.step(action)
            later = 0.0 if solved else value(oracle.rows(), moves - 1, best, won)
            worths.append((solved if won else reward) + later)
        return max(worths) if best else sum(worths) / 4

    for map_seed, params in ((0, OPEN), (1, {}), (2, {"boxes": 2, "max_solution": 4})):
        env = sokoban(map_seed, **params)
        rows, found = env.board.render(env.now), env.exact(4)
        assert found.random == pytest.approx(value(rows, 4, False, True))
        assert found.optimal == pytest.approx(value(rows, 4, True, True))
        assert found.random_return == pytest.approx(value(rows, 4, False, False))
        assert found.optimal_return == pytest.approx(value(rows, 4, True, False))


def test_values_of_the_smallest_recipe() -> None:
    """4x4, open, at most 3 moves to solve, 6 actions: what a cold start has to beat."""
    values = exact([task(map_seed, "test", **OPEN) for map_seed in range(100)], 6)
    assert values is not None and values.optimal == 1.0
    assert 0.1 < values.random < 0.25
    limited = sokoban(**OPEN, max_moves=1).exact(6)
    assert limited == sokoban(**OPEN).exact(1) != Exact(0.0, 0.0)


def test_max_moves_truncates() -> None:
    env = sokoban(max_moves=3, max_solution=10)
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}
    first = env.actions()[0]
    flags = [env.step(action)[2:4] for action in ("jump", first, back[first], first)]
    assert flags == [(False, False), (False, False), (False, False), (False, True)]


def test_views_show_the_same_state() -> None:
    rows = ["_____", "_#_X_", "__P_O", "_XO__", "_____"]
    env = placed(rows, boxes=2)
    state = "P row 2 column 2 X row 1 column 3 X row 3 column 1"
    assert env.state() == state
    coordinates = f"{state} O row 2 column 4 O row 3 column 2"
    grid = "\n".join(rows)
    assert env.step("jump").observation == grid
    for view, expected in (("coordinates", coordinates), ("both", f"{grid}\n{coordinates}")):
        env.view = view
        step = env.step("jump")
        assert step.observation == expected and not step.info.valid and step.reward == 0
    env.view, env.hints = "coordinates", True
    sight = "up _ down O left _ right _ X up 1 right 1 X down 1 left 1"
    targets = "O up 0 right 2 O down 1 right 0".replace("up 0", "down 0")
    assert env.step("jump").observation == f"{coordinates}\n{sight} {targets}"
    edge = placed(["PX#__", "X____", "_____", "_____", "_OO__"], boxes=2, hints=True)
    assert "up # down X _ left # right X #" in edge.step("jump").observation


def test_states_can_be_left_and_come_back_to() -> None:
    env = sokoban(3)
    assert isinstance(env, Rewindable) and isinstance(env, Scored) and isinstance(env, Measurable)
    snapshot, state = env.snapshot(), env.state()
    first = [env.step(action) for action in env.solve()]
    env.restore(snapshot)
    assert env.state() == state
    assert [env.step(action) for action in env.solve()] == first


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"size": 4}, "size"),
        ({"size": 9}, "size"),
        ({"size": 2, "layout": "open"}, "size"),
        ({"boxes": 3}, "boxes"),
        ({"layout": "round"}, "layout"),
        ({"max_solution": 0}, "max_solution"),
        ({"view": "pixels"}, "view"),
        ({"max_moves": -1}, "max_moves"),
        ({"symbols": "abc"}, "symbols"),
        ({"symbols": "W.GBCAA"}, "symbols"),
        ({"symbols": "W.GBC @"}, "symbols"),
        ({"symbols": "W.GBCA1"}, "symbols"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvError, match=rf"env\.params\.{named}"):
        make_env("sokoban", params)


@pytest.mark.parametrize("view", ["grid", "coordinates", "both"])
def test_other_symbols_draw_the_same_levels(view: str) -> None:
    table = str.maketrans("#_OX√PS", "W.GBCA@")
    params = {**OPEN, "view": view, "hints": True}
    plain, other = make_env("sokoban", params), make_env("sokoban", params | {"symbols": "W.GBCA@"})
    assert isinstance(plain, Sokoban) and isinstance(other, Sokoban)
    for seed in range(8):
        task = Task(task_id="t", env="sokoban", split="test", map_seed=seed)
        assert other.reset(task, 0) == plain.reset(task, 0).translate(table)
        for action in plain.solve():
            assert other.state() == plain.state()
            mine, theirs = plain.step(action), other.step(action)
            assert theirs == mine._replace(observation=mine.observation.translate(table))
        assert mine.info.success
    assert "B is a box, G is a target, C is a box on a target" in other.plain_instructions
    assert "push each B on to an G . A is you" in other.instructions


def test_no_solvable_level_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.envs.grid.sokoban_level.MAX_DRAWS", 0)
    with pytest.raises(ValueError, match="max_solution"):
        sokoban(12345)


@pytest.mark.process
def test_a_run_compares_with_all_actions_of_its_turns(tmp_path: Path) -> None:
    """Three turns of two actions are six moves, in `exact.json` as in what `exact` says."""
    config = Config(stages=[StageConfig(steps=1)])
    config.run.dir = str(tmp_path)
    config.env.name, config.env.params = "sokoban", OPEN
    config.rollout.max_turns, config.rollout.actions_per_turn = 3, 2
    config.rollout.max_tokens = 8
    config.eval.episodes = 8
    _, made = create(config, None)
    exact_of = {
        one["episodes"]: one for one in json.loads((made / "exact.json").read_text())["values"]
    }
    found = exact_of[8]
    source = source_of(config)
    values = exact([held_out_task(source, number) for number in range(8)], 6)
    assert values is not None
    assert found["random"] == values.random and found["random_return"] == values.random_return
    assert found["optimal"] == 1.0 and found["optimal_return"] == values.optimal_return
