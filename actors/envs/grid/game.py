"""Games on a grid of cells: what the environments here share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from actors.envs.base import Env
from actors.envs.grid.squares import bearing, place, rows_of
from evolver_async.env import Info, Step
from evolver_async.schema import Task
from evolver_async.splits import Split, checked_split

PLAYER, WALL = "P", "wall"


@dataclass(kw_only=True, eq=False)
class GridGame(Env):
    """Game of moves on a drawn board. `board.moved(now, number)` leads from one state to the next;
    `max_moves` truncates an episode, 0 leaves that to the rollout."""

    names: ClassVar[tuple[str, ...]]  # of the moves

    max_moves: int = 0

    def __post_init__(self) -> None:
        if self.max_moves < 0:
            raise ValueError(f"max_moves: {self.max_moves} is negative")

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.board, self.now = self._drawn(task, checked_split(task.split))
        self.dynamics_seed = dynamics_seed
        self.moves = 0
        return self._observe(first=True)

    def step(self, action: str) -> Step:
        name = action.strip().lower()
        if name not in self.names:
            return Step(self._observe(), 0.0, False, False, Info(valid=False))
        reward, ended, won = self._move(self.names.index(name))
        self.moves += 1
        truncated = not ended and self.moves == self.max_moves
        return Step(self._observe(), reward, ended, truncated, Info(success=won))

    def actions(self) -> list[str]:
        """Return the moves that change the state; others are legal and have no effect."""
        reached = (self.board.moved(self.now, number) for number in range(len(self.names)))
        return [name for name, state in zip(self.names, reached, strict=True) if state != self.now]

    def content(self) -> str:
        return f"{self.board} {self.now}"

    def snapshot(self) -> tuple[Any, int]:
        return self.now, self.moves

    def restore(self, snapshot: tuple[Any, int]) -> None:
        self.now, self.moves = snapshot

    def _drawn(self, task: Task, split: Split) -> tuple[Any, Any]:
        """Return the board of a task of this split and the state that it starts in."""
        raise NotImplementedError

    def _move(self, number: int) -> tuple[float, bool, bool]:
        """Make a move; return its reward, and whether it ended the episode and won."""
        raise NotImplementedError

    def _observe(self, first: bool = False) -> str:
        raise NotImplementedError

    def _within(self, max_turns: int) -> int:
        """Return the number of moves in an episode of `max_turns` actions."""
        return min(max_turns, self.max_moves or max_turns)


@dataclass(kw_only=True, eq=False)
class MapWalk(GridGame):
    """MapWalk over the cells of a map to its goal; the state is the player's cell.

    `grid` chooses the turns in which the map is shown; `hints` describes the four neighbours and
    the offset of the goal, until the episode ends.
    """

    stands: ClassVar[Mapping[str, str]]  # glyph of the player by that of the ground
    words: ClassVar[Mapping[str, str]]  # for the ground of a neighbour

    grid: Literal["every", "first", "never"] = "every"
    hints: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid == "never" and not self.hints:
            raise ValueError("grid: never leaves nothing to see without hints")

    def state(self) -> str:
        return place(self.now, self.board.columns)

    def _observe(self, first: bool = False) -> str:
        board, cell, columns = self.board, self.now, self.board.columns
        text, player = self.state(), self.stands[board.cells[cell]]
        if self.hints and player == PLAYER:
            if board.goal >= 0:
                text += f" goal {bearing(cell, board.goal, columns)}"
            for action, name in enumerate(self.names):
                reached = board.moved(cell, action)
                text += f" {name} {WALL if reached == cell else self.words[board.cells[reached]]}"
        if self.grid == "every" or (first and self.grid == "first"):
            cells = board.cells[:cell] + player + board.cells[cell + 1 :]
            text = "\n".join([*rows_of(cells, columns), text])
        return text
