"""Maps of FrozenLake: drawing, dynamics and best actions.

Maps are drawn from `(split, map_seed)` until one is solvable and its ground hashes into the split:
no map is in two splits, not even with another start or goal. The map without a hole is for training
alone, as it is so frequent in small sizes that it would fill another split. Cells are numbered row
by row. The goal of a drawn map can be moved or be left out.
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from actors.envs.grid.squares import neighbours, rows_of
from actors.envs.tabular import Outcome, Process, best_values, tabulate
from evolver_async.randomness import key
from evolver_async.splits import Split, split_of

ICE, HOLE, GOAL = "_", "O", "G"
ACTIONS = ("left", "down", "right", "up")  # gymnasium's order: a slip goes to a neighbour in it
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
MAX_DRAWS = 20_000
DISCOUNT = 0.95  # of the slippery solver: moves are limited, so a safe way must not be too long


@dataclass(frozen=True)
class Lake:
    """Map as rows of `_`, `O` and at most one `G`, with the player's start."""

    rows: tuple[str, ...]
    start: int

    @property
    def columns(self) -> int:
        return len(self.rows)

    @cached_property
    def cells(self) -> str:
        return "".join(self.rows)

    @cached_property
    def goal(self) -> int:
        """Cell of the goal; -1 if there is none."""
        return self.cells.find(GOAL)

    @cached_property
    def ground(self) -> str:
        """Ice and holes, without the goal: the content that decides the split."""
        return self.cells.replace(GOAL, ICE)

    @cached_property
    def split(self) -> Split:
        return split_of(self.ground) if HOLE in self.ground else "train"

    @cached_property
    def neighbours(self) -> list[list[int | None]]:
        """For each cell the cell in each direction, None beyond the edge."""
        return neighbours(self.columns, MOVES)

    def moved(self, cell: int, action: int) -> int:
        """Return the cell where a move ends; the edge holds the player."""
        neighbour = self.neighbours[cell][action]
        return cell if neighbour is None else neighbour

    @cached_property
    def distances(self) -> list[int]:
        """Moves to the goal from every cell without slipping; -1 if no path leads there."""
        distances = [-1] * len(self.cells)
        if self.goal < 0:
            return distances
        distances[self.goal] = 0
        frontier = [self.goal]
        for cell in frontier:  # grows while it is walked: breadth first
            for neighbour in self.neighbours[cell]:
                if neighbour is None or distances[neighbour] >= 0:
                    continue
                if self.cells[neighbour] == ICE:
                    distances[neighbour] = distances[cell] + 1
                    frontier.append(neighbour)
        return distances

    def process(self, success_rate: float) -> Process:
        """Tabulate all transitions from the start, the first state; reaching the goal gives 1."""

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
    """Return the actions that may happen when `action` is tried, in gymnasium's order."""
    fail_rate = (1.0 - success_rate) / 2.0
    return [(fail_rate, (action - 1) % 4), (success_rate, action), (fail_rate, (action + 1) % 4)]


@lru_cache(maxsize=4096)
def draw_lake(size: int, frozen_prob: float, placement: str, split: Split, map_seed: int) -> Lake:
    """Return the map of (split, map_seed): the first solvable draw that hashes into the split."""
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
    """Return the same map with its goal at `cell`, which must be ice, or without a goal for -1."""
    cells = lake.ground
    if cell >= 0:
        cells = cells[:cell] + GOAL + cells[cell + 1 :]
    return _lake(cells, lake.columns, lake.start)


def _lake(cells: str, size: int, start: int) -> Lake:
    return Lake(rows=tuple(rows_of(cells, size)), start=start)


@lru_cache(maxsize=256)
def best_actions(lake: Lake, success_rate: float) -> dict[Hashable, int]:
    """Compute the best action in every reachable cell of a slippery lake."""
    process = lake.process(success_rate)
    best_S = best_values(process, DISCOUNT).argmax(axis=1)
    return dict(zip(process.states, best_S.tolist(), strict=True))


def can_be_goal(lake: Lake, cell: int) -> bool:
    """Return True if the goal can be moved there: onto ice that is not the start and can be
    reached."""
    if lake.cells[cell] == HOLE or cell == lake.start:
        return False
    return with_goal(lake, cell).distances[lake.start] > 0
