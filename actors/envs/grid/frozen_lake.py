"""FrozenLake with gymnasium's dynamics on generated, solvable maps, described in words.

Maps are drawn from `(split, map_seed)` until one is solvable and its content hashes into the split,
so no map is in two splits. Reward is 1 on reaching the goal; a hole ends the episode. Cells are
numbered row by row. The goal of a drawn map can be moved, as far as its content stays in the split,
or be left out.
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from actors.envs.base import Exact, Info, Step, split_of
from actors.envs.grid.cells import ARRIVED, bearing, place, rows_of
from actors.envs.tabular import Outcome, Process, best_values, exact_of, happening, tabulate
from evolver_async.schema import Task, key

INSTRUCTIONS = "walk over the ice from P to the goal G . O is a hole . actions left down right up ."
PLAIN_INSTRUCTIONS = (
    "You are walking over a frozen lake. Reach the goal without falling into a hole. On the map, P"
    " is you, G is the goal, O is a hole and _ is safe ice. A line of text says in which row and"
    " column you are, counted from 0 at the top left; it may add how far away the goal is and what"
    " lies next to you in each direction. The actions are: left, down, right, up. Each moves you by"
    " one cell; at the edge of the map you stay where you are. A hole ends the episode."
)
PLAIN_SLIPPERY = " The ice is slippery: you may slide to one side of where you wanted to go."
PLAYER, ICE, HOLE, GOAL = "P", "_", "O", "G"
STANDS = {ICE: PLAYER, HOLE: "X", GOAL: ARRIVED}  # the player on each, as in RAGEN
WORDS = {ICE: "ice", HOLE: "hole", GOAL: "goal"}
WALL = "wall"

ACTIONS = ("left", "down", "right", "up")  # gymnasium's order: a slip goes to a neighbour in it
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
MAX_DRAWS = 20_000
DISCOUNT = 0.95  # of the slippery solver: moves are limited, so a safe way must not be too long


@dataclass(frozen=True)
class Lake:
    """A map, as rows of `_`, `O` and at most one `G`, and where the player starts."""

    rows: tuple[str, ...]
    start: int

    @property
    def size(self) -> int:
        return len(self.rows)

    @cached_property
    def cells(self) -> str:
        return "".join(self.rows)

    @cached_property
    def goal(self) -> int:
        """Its cell; -1 where there is none."""
        return self.cells.find(GOAL)

    @cached_property
    def split(self) -> str:
        return split_of(f"{self.cells}/{self.start}".encode())

    @cached_property
    def neighbours(self) -> list[list[int | None]]:
        """For each cell the cell in each direction, None beyond the edge."""
        size = self.size
        return [
            [
                (row + down) * size + column + right
                if 0 <= row + down < size and 0 <= column + right < size
                else None
                for down, right in MOVES
            ]
            for row in range(size)
            for column in range(size)
        ]

    def moved(self, cell: int, action: int) -> int:
        """Where a move ends; the edge holds the player."""
        neighbour = self.neighbours[cell][action]
        return cell if neighbour is None else neighbour

    @cached_property
    def distances(self) -> list[int]:
        """Moves to the goal from every cell without slipping; -1 where no way leads there."""
        distances = [-1] * len(self.cells)
        if self.goal < 0:
            return distances
        distances[self.goal] = 0
        frontier = [self.goal]
        for cell in frontier:  # grows while it is walked: breadth first
            for neighbour in self.neighbours[cell]:
                if (
                    neighbour is not None
                    and distances[neighbour] < 0
                    and self.cells[neighbour] == ICE
                ):
                    distances[neighbour] = distances[cell] + 1
                    frontier.append(neighbour)
        return distances

    def process(self, success_rate: float) -> Process:
        """All that can happen from the start on, which is the first state; reaching the goal gives
        1."""

        def outcomes(cell: Hashable, action: int) -> list[Outcome]:
            assert isinstance(cell, int)
            found: list[Outcome] = []
            for probability, slid in slips(action, success_rate):
                reached = self.moved(cell, slid)
                ground = self.cells[reached]
                found.append((probability, reached, float(ground == GOAL), ground != ICE))
            return found

        return tabulate([self.start], len(ACTIONS), outcomes)


def slips(action: int, success_rate: float) -> list[tuple[float, int]]:
    """The actions that may happen when `action` is tried, in gymnasium's order."""
    fail_rate = (1.0 - success_rate) / 2.0
    return [(fail_rate, (action - 1) % 4), (success_rate, action), (fail_rate, (action + 1) % 4)]


@lru_cache(maxsize=4096)
def draw_lake(size: int, frozen_prob: float, placement: str, split: str, map_seed: int) -> Lake:
    """The map of (split, map_seed): the first solvable draw that hashes into the split."""
    rng = random.Random(key(map_seed, "frozen_lake", split))
    count = size * size
    for _ in range(MAX_DRAWS):
        cells = [ICE if rng.random() < frozen_prob else HOLE for _ in range(count)]
        start, goal = (0, count - 1) if placement == "corners" else rng.sample(range(count), 2)
        cells[start], cells[goal] = ICE, GOAL
        lake = _lake("".join(cells), size, start)
        if lake.split == split and lake.distances[start] > 0:
            return lake
    raise ValueError(f"frozen_prob: {frozen_prob} leaves no solvable {split} map of size {size}")


@lru_cache(maxsize=4096)
def with_goal(lake: Lake, cell: int) -> Lake:
    """The same map with its goal at `cell`, which must be ice, or nowhere for -1."""
    cells = lake.cells.replace(GOAL, ICE)
    if cell >= 0:
        cells = cells[:cell] + GOAL + cells[cell + 1 :]
    return _lake(cells, lake.size, lake.start)


def _lake(cells: str, size: int, start: int) -> Lake:
    return Lake(rows=tuple(rows_of(cells, size)), start=start)


@lru_cache(maxsize=256)
def best_actions(lake: Lake, success_rate: float) -> dict[Hashable, int]:
    """The best action in every cell that can be reached on a slippery lake."""
    process = lake.process(success_rate)
    best_S = best_values(process, DISCOUNT).argmax(axis=1)
    return dict(zip(process.states, best_S.tolist(), strict=True))


class FrozenLake:
    """The environment. `success_rate` is used only where `slippery`; `grid` says in which turns the
    map is shown; `hints` describes the four neighbours and where the goal lies, as long as the
    player stands on ice. `goal_cell` moves the goal there (-1 leaves it where it was drawn); `free`
    leaves it out. `max_moves` truncates an episode; 0 leaves that to the rollout.

    ValueError names the parameter that is out of range.
    """

    instructions = INSTRUCTIONS
    plain_instructions = PLAIN_INSTRUCTIONS

    def __init__(
        self,
        *,
        size: int = 4,
        frozen_prob: float = 0.8,
        placement: Literal["random", "corners"] = "random",
        slippery: bool = False,
        success_rate: float = 1.0 / 3.0,
        grid: Literal["every", "first", "never"] = "every",
        hints: bool = True,
        goal_cell: int = -1,
        free: bool = False,
        max_moves: int = 0,
    ) -> None:
        if not 3 <= size <= 8:
            raise ValueError(f"size: {size} is not in 3..8")
        if not -1 <= goal_cell < size**2:
            raise ValueError(f"goal_cell: {goal_cell} is not in -1..{size**2 - 1}")
        if not 0 < frozen_prob < 1:
            raise ValueError(f"frozen_prob: {frozen_prob} is not between 0 and 1")
        if not 0 < success_rate <= 1:
            raise ValueError(f"success_rate: {success_rate} is not in (0, 1]")
        if max_moves < 0:
            raise ValueError(f"max_moves: {max_moves} is negative")
        if grid == "never" and not hints:
            raise ValueError("grid: never leaves nothing to see without hints")
        self.size = size
        self.frozen_prob = frozen_prob
        self.placement = placement
        self.success_rate = success_rate if slippery else 1.0
        if slippery:
            self.plain_instructions += PLAIN_SLIPPERY
        self.grid = grid
        self.hints = hints
        self.goal_cell = goal_cell
        self.free = free
        self.max_moves = max_moves

    def reset(self, task: Task, dynamics_seed: int) -> str:
        if task.split not in ("train", "test"):
            raise ValueError(f"split: {task.split!r} is neither train nor test")
        lake = draw_lake(self.size, self.frozen_prob, self.placement, task.split, task.map_seed)
        if self.free:
            lake = with_goal(lake, -1)
        elif self.goal_cell >= 0:
            if not _may_be_goal(lake, self.goal_cell, task.split):
                raise ValueError(f"goal_cell: {self.goal_cell} is no goal of {task.task_id}")
            lake = with_goal(lake, self.goal_cell)
        self.lake = lake
        self.split = task.split
        self.dynamics_seed = dynamics_seed
        self.cell = self.lake.start
        self.moves = 0
        return self._observe(self.grid != "never")

    def step(self, action: str) -> Step:
        name = action.strip().lower()
        if name not in ACTIONS:
            return Step(self._observe(self.grid == "every"), 0.0, False, False, Info(valid=False))
        self.cell = self.lake.moved(self.cell, self._slide(ACTIONS.index(name)))
        self.moves += 1
        ground = self.lake.cells[self.cell]
        ended, won = ground != ICE, ground == GOAL
        truncated = not ended and self.moves == self.max_moves
        seen = self._observe(self.grid == "every")
        return Step(seen, float(won), ended, truncated, Info(success=won))

    def close(self) -> None:
        pass

    def actions(self) -> list[str]:
        """The moves that lead somewhere; one against the edge is legal and does nothing."""
        neighbours = self.lake.neighbours[self.cell]
        return [name for name, cell in zip(ACTIONS, neighbours, strict=True) if cell is not None]

    def solve(self) -> list[str]:
        """The shortest path; on a slippery lake only the next best action. ValueError: no goal."""
        if self.lake.goal < 0:
            raise ValueError("free: without a goal there is nothing to solve")
        if self.success_rate < 1.0:
            return [ACTIONS[best_actions(self.lake, self.success_rate)[self.cell]]]
        path, cell = [], self.cell
        while cell != self.lake.goal:
            action = next(
                action
                for action in range(4)
                if self.lake.distances[self.lake.moved(cell, action)]
                == self.lake.distances[cell] - 1
            )
            path.append(ACTIONS[action])
            cell = self.lake.moved(cell, action)
        return path

    def score(self) -> float:
        """Minus the moves that are left to the goal; where no way leads there, worse than that."""
        distance = self.lake.distances[self.cell]
        return -float(distance if distance >= 0 else self.size**2)

    def state(self) -> str:
        return place(self.cell, self.size)

    def goal(self) -> dict[str, Any] | None:
        if not _may_be_goal(self.lake, self.cell, self.split):
            return None
        return {"free": False, "goal_cell": self.cell}

    def snapshot(self) -> tuple[int, int]:
        return self.cell, self.moves

    def restore(self, snapshot: tuple[int, int]) -> None:
        self.cell, self.moves = snapshot

    def exact(self, max_turns: int) -> Exact:
        """From the start, by backward induction over `max_turns` moves."""
        if self.lake.goal < 0:
            return Exact(0.0, 0.0)
        process = self.lake.process(self.success_rate)
        moves = min(max_turns, self.max_moves or max_turns)
        worth = exact_of(process, moves, process.rewards_N)
        return Exact(worth.random, worth.optimal)  # returns would say the same again

    def _slide(self, action: int) -> int:
        """What becomes of an action on this ice; the draw belongs to the move's number."""
        if self.success_rate == 1.0:
            return action
        outcomes = slips(action, self.success_rate)
        chances = (probability for probability, _ in outcomes)
        return outcomes[happening(chances, self.dynamics_seed, self.moves)][1]

    def _observe(self, grid: bool) -> str:
        lake, cell, size = self.lake, self.cell, self.size
        text, ground = self.state(), lake.cells[cell]
        if self.hints and ground == ICE:
            if lake.goal >= 0:
                text += f" goal {bearing(cell, lake.goal, size)}"
            for action, neighbour in zip(ACTIONS, lake.neighbours[cell], strict=True):
                text += f" {action} {WALL if neighbour is None else WORDS[lake.cells[neighbour]]}"
        if grid:
            cells = lake.cells[:cell] + STANDS[ground] + lake.cells[cell + 1 :]
            text = "\n".join([*rows_of(cells, size), text])
        return text


def _may_be_goal(lake: Lake, cell: int, split: str) -> bool:
    """Whether the goal can be moved there: onto ice that is not the start, can be reached, and
    leaves the map in its split."""
    if lake.cells[cell] == HOLE or cell == lake.start:
        return False
    moved = with_goal(lake, cell)
    return moved.split == split and moved.distances[moved.start] > 0
