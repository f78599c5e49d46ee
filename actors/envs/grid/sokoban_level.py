"""Rules and levels of Sokoban: rooms, moves, and the distance of every state from a solution.

A state is the player's cell and the boxes' cells, ascending; cells are numbered row by row. Levels
are drawn from `(split, map_seed)`: a room, its targets, then one of the states from which the boxes
can be brought onto them in few enough moves, found by playing backwards. So every level can be
solved. Its walls, targets and boxes hash into its split: no level is in two splits, not even with
another start of the player.
"""

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from actors.envs.grid.squares import neighbours, rows_of
from evolver_async.randomness import key
from evolver_async.splits import Split, split_of

State = tuple[int, tuple[int, ...]]  # the player's cell, the boxes' cells

WALL, FLOOR, TARGET = "#", "_", "O"
PLAYER, BOX, BOX_ON_TARGET, PLAYER_ON_TARGET = "P", "X", "√", "S"
# RAGEN's symbols, in which levels are made; `Sokoban.symbols` can draw others in this order
SYMBOLS = WALL + FLOOR + TARGET + BOX + BOX_ON_TARGET + PLAYER + PLAYER_ON_TARGET
ACTIONS = ("up", "down", "left", "right")  # gym-sokoban's order
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
BACK = (1, 0, 3, 2)  # the opposite of each action

TURNING = 0.35  # how often the walk that clears a room changes its direction
MAX_DRAWS = 5_000


@dataclass(frozen=True)
class Room:
    """Immovable part of a level: `size` rows of `#`, `_` and `O` in one string. Its edge holds the
    player and the boxes like a wall."""

    size: int
    cells: str

    @cached_property
    def targets(self) -> tuple[int, ...]:
        return tuple(cell for cell, ground in enumerate(self.cells) if ground == TARGET)

    @cached_property
    def neighbours(self) -> list[list[int | None]]:
        """For each cell the cell in each direction, None at a wall and beyond the edge."""
        walls = {cell for cell, ground in enumerate(self.cells) if ground == WALL}
        cells = neighbours(self.size, MOVES)
        return [[None if cell in walls else cell for cell in reached] for reached in cells]

    def moved(self, state: State, action: int) -> State:
        """Return the state an action leads to; the same state if nothing can move."""
        player, boxes = state
        reached = self.neighbours[player][action]
        if reached is None:
            return state
        if reached not in boxes:
            return reached, boxes
        beyond = self.neighbours[reached][action]
        if beyond is None or beyond in boxes:
            return state
        return reached, _with(boxes, reached, beyond)

    def before(self, state: State, action: int) -> list[State]:
        """Return the states that `action` brings to this one: by walking, and by having pushed a
        box."""
        player, boxes = state
        came = self.neighbours[player][BACK[action]]
        if came is None or came in boxes:
            return []
        pushed = self.neighbours[player][action]
        if pushed is None or pushed not in boxes:
            return [(came, boxes)]
        return [(came, boxes), (came, _with(boxes, pushed, player))]

    def solved(self, state: State) -> bool:
        return state[1] == self.targets

    def placed(self, state: State) -> int:
        """Count the boxes on targets."""
        return sum(self.cells[box] == TARGET for box in state[1])

    def render(self, state: State) -> list[str]:
        """Return the rows as RAGEN's glyphs."""
        player, boxes = state
        cells = list(self.cells)
        for box in boxes:
            cells[box] = BOX_ON_TARGET if cells[box] == TARGET else BOX
        cells[player] = PLAYER_ON_TARGET if cells[player] == TARGET else PLAYER
        return rows_of("".join(cells), self.size)


class Level(NamedTuple):
    """Room and initial state."""

    room: Room
    start: State

    @property
    def ground(self) -> str:
        """Walls, targets and boxes, without the player: the content that decides the split."""
        _, boxes = self.start
        return f"{self.room.cells}/{boxes}"


def _with(boxes: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    return tuple(sorted(new if box == old else box for box in boxes))


def moves_to_solve(room: Room, limit: int | None = None) -> dict[State, int]:
    """Compute the fewest moves to a solved state, for all states with at most `limit`; without a
    limit, a state that is missing has no solution.

    Breadth first, backwards from the solved states.
    """
    floor = [cell for cell, ground in enumerate(room.cells) if ground != WALL]
    distances = {(cell, room.targets): 0 for cell in floor if cell not in room.targets}
    frontier = list(distances)
    for state in frontier:  # grows while it is walked
        distance = distances[state] + 1
        if limit is not None and distance > limit:
            break
        for action in range(4):
            for earlier in room.before(state, action):
                if earlier not in distances:
                    distances[earlier] = distance
                    frontier.append(earlier)
    return distances


@lru_cache(maxsize=32)  # a group plays the same level; a large room has 100,000 states
def all_distances(room: Room) -> dict[State, int]:
    """Compute `moves_to_solve` of all states."""
    return moves_to_solve(room)


def way(room: Room, state: State) -> list[int]:
    """Return the fewest actions to a solved state; empty if it is solved or cannot be."""
    distances, path = all_distances(room), []
    while distances.get(state, 0) > 0:
        nearer = distances[state] - 1
        action = next(a for a in range(4) if distances.get(room.moved(state, a)) == nearer)
        path.append(action)
        state = room.moved(state, action)
    return path


@lru_cache(maxsize=4096)
def draw_level(
    size: int,
    boxes: int,
    layout: Literal["walled", "open"],
    max_solution: int,
    split: Split,
    map_seed: int,
) -> Level:
    """Return the level of (split, map_seed): no box is on a target, `max_solution` moves solve it,
    and its ground hashes into the split. ValueError if the parameters allow none."""
    rng = random.Random(key(map_seed, "sokoban", split))
    for _ in range(MAX_DRAWS):
        room = _room(rng, size, boxes, layout)
        if room is None:
            continue
        states = [
            state
            for state in moves_to_solve(room, max_solution)
            if not set(state[1]) & set(room.targets)
        ]
        rng.shuffle(states)
        for state in states:
            level = Level(room=room, start=state)
            if split_of(level.ground) == split:
                return level
    wanted = f"{split} level of size {size} with {boxes} boxes"
    raise ValueError(f"max_solution: {max_solution} leaves no {wanted}")


def _room(rng: random.Random, size: int, boxes: int, layout: str) -> Room | None:
    """Draw a room with its targets; None if less than half of its inside is floor."""
    cells = [FLOOR] * size**2 if layout == "open" else _cleared(rng, size)
    floor = [cell for cell, ground in enumerate(cells) if ground == FLOOR]
    if len(floor) < max(2 * boxes + 1, (size - 2) ** 2 // 2):
        return None
    for cell in rng.sample(floor, boxes):
        cells[cell] = TARGET
    return Room(size=size, cells="".join(cells))


def _cleared(rng: random.Random, size: int) -> list[str]:
    """Draw walls with the floor that a random walk clears, and some cells beside it: corridors
    alone leave no room to walk around a box."""
    cells = [WALL] * size**2
    row, column = rng.randint(1, size - 2), rng.randint(1, size - 2)
    heading = rng.choice(MOVES)
    for _ in range(round(3.4 * size)):  # gym-sokoban's number of steps: 1.7 of rows and columns
        if rng.random() < TURNING or not _inside(size, row + heading[0], column + heading[1]):
            inside = [move for move in MOVES if _inside(size, row + move[0], column + move[1])]
            heading = rng.choice(inside)
        row, column = row + heading[0], column + heading[1]
        cells[row * size + column] = FLOOR
        for down, right in rng.sample(MOVES, 2):
            if _inside(size, row + down, column + right):
                cells[(row + down) * size + column + right] = FLOOR
    return cells


def _inside(size: int, row: int, column: int) -> bool:
    return 1 <= row <= size - 2 and 1 <= column <= size - 2
