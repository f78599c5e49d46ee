"""CliffWalking with gymnasium's dynamics: its own map, and drawn ones that can be solved.

A move gives -1; one into the cliff gives `fall_reward` and brings the player back to the start; the
goal ends the episode. Maps are drawn from `(split, map_seed)` until one is solvable without falling
and its content hashes into the split, so no drawn map is in two splits; the classic map is one and
the same task in both. What to do is known from value iteration or from a tabular Q-learning agent.
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from actors.envs.base import Exact, Info, Step, split_of
from actors.envs.grid.cells import ARRIVED, bearing, place, rows_of
from actors.envs.tabular import Outcome, Process, best_values, exact_of, happening, learn, tabulate
from evolver_async.randomness import key
from evolver_async.schema import Task

INSTRUCTIONS = "walk from P to the goal G . O is a cliff that you must avoid . actions {} ."
PLAIN_INSTRUCTIONS = (
    "You are walking along a cliff. Reach the goal in as few moves as you can without falling off"
    " the cliff; after a fall you are back at the start. On the map, P is you, G is the goal, O is"
    " the cliff and _ is safe ground. A line of text says in which row and column you are,"
    " counted from 0 at the top left; it may add how far away the goal is and what lies next to you"
    " in each direction, where the cliff is called hole. The actions are: up, right, down, left."
    " Each moves you by one cell; at the edge of the map you stay where you are."
)
PLAIN_SLIPPERY = " The ground is slippery: you may slide to one side of where you wanted to go."
PLAYER, GROUND, CLIFF, GOAL = "P", "_", "O", "G"
WORDS = {GROUND: "safe", CLIFF: "hole", GOAL: "goal"}

ACTIONS = ("up", "right", "down", "left")  # gymnasium's order: a slip goes to a neighbour in it
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
MOVE_REWARD = -1.0
MAX_DRAWS = 20_000
# The Q-learning agent of Sutton and Barto's example 6.6, with as many episodes.
EPISODES, EPISODE_MOVES, RATE, EXPLORE = 500, 1000, 0.5, 0.1


@dataclass(frozen=True)
class Cliff:
    """Map of `_`, `O` and one `G` in one string, `columns` a row, with the dynamics of a move."""

    columns: int
    cells: str
    start: int
    fall_reward: float
    slippery: bool

    @cached_property
    def goal(self) -> int:
        return self.cells.index(GOAL)

    def moved(self, cell: int, action: int) -> int:
        """Return the cell a move leads to, before any fall; the edge holds the player."""
        row, column = divmod(cell, self.columns)
        down, right = MOVES[action]
        row = min(max(row + down, 0), len(self.cells) // self.columns - 1)
        return row * self.columns + min(max(column + right, 0), self.columns - 1)

    def outcomes(self, cell: Hashable, action: int) -> list[Outcome]:
        """List the outcomes as gymnasium does: on slippery ground each of the action and its two
        neighbours in the order of the actions has probability 1/3."""
        assert isinstance(cell, int)
        slid = [(action - 1) % 4, action, (action + 1) % 4] if self.slippery else [action]
        found: list[Outcome] = []
        for happens in slid:
            reached = self.moved(cell, happens)
            if self.cells[reached] == CLIFF:
                found.append((1 / len(slid), self.start, self.fall_reward, False))
            else:
                found.append((1 / len(slid), reached, MOVE_REWARD, reached == self.goal))
        return found

    @cached_property
    def process(self) -> Process:
        """Transition table of all cells that can be reached, the start first."""
        return tabulate([self.start], len(ACTIONS), self.outcomes)

    def can_be_walked(self) -> bool:
        """Return True if a path without a fall leads from the start to the goal."""
        frontier = [self.start]
        for cell in frontier:  # grows while it is walked
            for action in range(4):
                reached = self.moved(cell, action)
                if reached == self.goal:
                    return True
                if self.cells[reached] == GROUND and reached not in frontier:
                    frontier.append(reached)
        return False


def classic_cliff(rows: int, columns: int, fall_reward: float, slippery: bool) -> Cliff:
    """Make the classic map: start and goal in the corners of the last row, the cliff between
    them."""
    cells = GROUND * (columns * (rows - 1) + 1) + CLIFF * (columns - 2) + GOAL
    return Cliff(columns, cells, columns * (rows - 1), fall_reward, slippery)


@lru_cache(maxsize=4096)
def draw_cliff(
    rows: int,
    columns: int,
    cliff_prob: float,
    fall_reward: float,
    slippery: bool,
    split: str,
    map_seed: int,
) -> Cliff:
    """Return the map of (split, map_seed): the first solvable draw that hashes into the split."""
    rng = random.Random(key(map_seed, "cliff_walking", split))
    count = rows * columns
    for _ in range(MAX_DRAWS):
        cells = [CLIFF if rng.random() < cliff_prob else GROUND for _ in range(count)]
        start, goal = rng.sample(range(count), 2)
        cells[start], cells[goal] = GROUND, GOAL
        cliff = Cliff(columns, "".join(cells), start, fall_reward, slippery)
        content = f"{columns}/{cliff.cells}/{start}".encode()
        if split_of(content) == split and cliff.can_be_walked():
            return cliff
    raise ValueError(f"cliff_prob: {cliff_prob} leaves no solvable {split} map")


@lru_cache(maxsize=256)
def expert_values(cliff: Cliff, expert: Literal["values", "q_learning"]) -> dict[int, list[float]]:
    """Compute Q[cell][action] by value iteration or by a Q-learning agent, both without
    discount."""
    process = cliff.process
    if expert == "values":
        table = best_values(process, 1.0)
    else:
        table = learn(
            process,
            episodes=EPISODES,
            moves=EPISODE_MOVES,
            rate=RATE,
            discount=1.0,
            explore=EXPLORE,
            seed=key(cliff.start, cliff.cells),
        )
    rows = zip(process.states, table.tolist(), strict=True)
    return {cell: row for cell, row in rows if isinstance(cell, int)}


class CliffWalking:
    """CliffWalking environment. `layout: classic` is gymnasium's map in any size; in a `drawn` one
    the start, the goal and the cliff cells (of probability `cliff_prob`) are anywhere.

    `grid` says in which turns the map is shown; `hints` describes the four neighbours and where the
    goal lies, until it is reached; `expert` is who demonstrates; `max_moves` truncates an episode,
    0 leaves that to the rollout. ValueError names the parameter that is out of range.
    """

    instructions = INSTRUCTIONS.format(" ".join(ACTIONS))
    plain_instructions = PLAIN_INSTRUCTIONS

    def __init__(
        self,
        *,
        rows: int = 4,
        columns: int = 12,
        layout: Literal["classic", "drawn"] = "classic",
        cliff_prob: float = 0.3,
        slippery: bool = False,
        fall_reward: float = -100.0,
        grid: Literal["every", "first", "never"] = "every",
        hints: bool = True,
        expert: Literal["values", "q_learning"] = "values",
        max_moves: int = 0,
    ) -> None:
        for name, number in (("rows", rows), ("columns", columns)):
            if not 2 <= number <= 20:
                raise ValueError(f"{name}: {number} is not in 2..20")
        if layout == "classic" and columns < 3:
            raise ValueError("columns: fewer than 3 leave no cliff between start and goal")
        if not 0 < cliff_prob < 1:
            raise ValueError(f"cliff_prob: {cliff_prob} is not between 0 and 1")
        if not -1e6 <= fall_reward <= MOVE_REWARD:
            raise ValueError(f"fall_reward: {fall_reward} is not in -1e6..{MOVE_REWARD:g}")
        if grid == "never" and not hints:
            raise ValueError("grid: never leaves nothing to see without hints")
        if max_moves < 0:
            raise ValueError(f"max_moves: {max_moves} is negative")
        self.rows = rows
        self.columns = columns
        self.layout = layout
        self.cliff_prob = cliff_prob
        self.slippery = slippery
        if slippery:
            self.plain_instructions += PLAIN_SLIPPERY
        self.fall_reward = fall_reward
        self.grid = grid
        self.hints = hints
        self.expert: Literal["values", "q_learning"] = expert
        self.max_moves = max_moves

    def reset(self, task: Task, dynamics_seed: int) -> str:
        if task.split not in ("train", "test"):
            raise ValueError(f"split: {task.split!r} is neither train nor test")
        sizes = self.rows, self.columns
        if self.layout == "classic":
            self.cliff = classic_cliff(*sizes, self.fall_reward, self.slippery)
        else:
            self.cliff = draw_cliff(
                *sizes,
                self.cliff_prob,
                self.fall_reward,
                self.slippery,
                task.split,
                task.map_seed,
            )
        self.dynamics_seed = dynamics_seed
        self.cell = self.cliff.start
        self.moves = 0
        return self._observe(self.grid != "never")

    def step(self, action: str) -> Step:
        name = action.strip().lower()
        if name not in ACTIONS:
            return Step(self._observe(self.grid == "every"), 0.0, False, False, Info(valid=False))
        outcomes = self.cliff.outcomes(self.cell, ACTIONS.index(name))
        chances = (chance for chance, *_ in outcomes)
        _, reached, reward, ended = outcomes[happening(chances, self.dynamics_seed, self.moves)]
        assert isinstance(reached, int)
        self.cell = reached
        self.moves += 1
        truncated = not ended and self.moves == self.max_moves
        seen = self._observe(self.grid == "every")
        return Step(seen, reward, ended, truncated, Info(success=ended))

    def close(self) -> None:
        pass

    def actions(self) -> list[str]:
        """Return the moves that lead to another cell, a fall included."""
        return [
            name
            for number, name in enumerate(ACTIONS)
            if self.cliff.moved(self.cell, number) != self.cell
        ]

    def solve(self) -> list[str]:
        """Return the expert's best actions: up to the goal, or until they repeat a cell; on
        slippery ground only the next one."""
        values, cell = expert_values(self.cliff, self.expert), self.cell
        path, seen = list[str](), set[int]()
        while cell != self.cliff.goal and cell not in seen:
            seen.add(cell)
            action = int(np.argmax(values[cell]))
            path.append(ACTIONS[action])
            (_, reached, *_), *others = self.cliff.outcomes(cell, action)
            if others:
                break
            assert isinstance(reached, int)
            cell = reached
        return path

    def score(self) -> float:
        """Return the value of the best policy from here on: minus the moves left if the ground is
        not slippery."""
        if self.cell == self.cliff.goal:
            return 0.0
        return max(expert_values(self.cliff, "values")[self.cell])

    def state(self) -> str:
        return place(self.cell, self.columns)

    def snapshot(self) -> tuple[int, int]:
        return self.cell, self.moves

    def restore(self, snapshot: tuple[int, int]) -> None:
        self.cell, self.moves = snapshot

    def exact(self, max_turns: int) -> Exact:
        """Compute values from the start, by backward induction over `max_turns` moves."""
        process = self.cliff.process
        return exact_of(process, min(max_turns, self.max_moves or max_turns), process.ends_N)

    def _observe(self, grid: bool) -> str:
        cliff, cell, columns = self.cliff, self.cell, self.columns
        text, arrived = self.state(), cell == cliff.goal
        if self.hints and not arrived:
            text += f" goal {bearing(cell, cliff.goal, columns)}"
            for action, name in enumerate(ACTIONS):
                reached = cliff.moved(cell, action)
                text += f" {name} {'wall' if reached == cell else WORDS[cliff.cells[reached]]}"
        if grid:
            player = ARRIVED if arrived else PLAYER
            cells = cliff.cells[:cell] + player + cliff.cells[cell + 1 :]
            text = "\n".join([*rows_of(cells, columns), text])
        return text
