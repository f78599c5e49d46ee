"""FrozenLake with gymnasium's dynamics on generated, solvable maps, described in words.

Reward is 1 on reaching the goal; a hole ends the episode. `frozen_lake_map.py` holds the maps and
how they are drawn.
"""

from typing import Any, Literal

from actors.envs.base import Exact, Info, Step
from actors.envs.grid.cells import ARRIVED, bearing, place, rows_of
from actors.envs.grid.frozen_lake_map import (
    ACTIONS,
    GOAL,
    HOLE,
    ICE,
    best_actions,
    can_be_goal,
    draw_lake,
    slips,
    with_goal,
)
from actors.envs.tabular import exact_of, happening
from evolver_async.schema import Task

INSTRUCTIONS = "walk over the ice from P to the goal G . O is a hole . actions left down right up ."
PLAIN_INSTRUCTIONS = (
    "You are walking over a frozen lake. Reach the goal without falling into a hole. On the map, P"
    " is you, G is the goal, O is a hole and _ is safe ice. A line of text says in which row and"
    " column you are, counted from 0 at the top left; it may add how far away the goal is and what"
    " lies next to you in each direction. The actions are: left, down, right, up. Each moves you by"
    " one cell; at the edge of the map you stay where you are. A hole ends the episode."
)
PLAIN_SLIPPERY = " The ice is slippery: you may slide to one side of where you wanted to go."
PLAYER = "P"
STANDS = {ICE: PLAYER, HOLE: "X", GOAL: ARRIVED}  # the player on each, as in RAGEN
WORDS = {ICE: "ice", HOLE: "hole", GOAL: "goal"}
WALL = "wall"


class FrozenLake:
    """FrozenLake environment. `success_rate` is used only if `slippery`; `grid` chooses the turns
    in which the map is shown; `hints` describes the four neighbours and the offset of the goal
    while the player stands on ice. `goal_cell` moves the goal there (-1 leaves it where it was
    drawn); `free` removes it. `max_moves` truncates an episode; 0 leaves that to the rollout.

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
            if not can_be_goal(lake, self.goal_cell, task.split):
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
        """Return the moves that lead to another cell; a move against the edge is legal and has no
        effect."""
        neighbours = self.lake.neighbours[self.cell]
        return [name for name, cell in zip(ACTIONS, neighbours, strict=True) if cell is not None]

    def solve(self) -> list[str]:
        """Return the shortest path; on a slippery lake only the next best action. ValueError: no
        goal."""
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
        """Return minus the moves left to the goal, or less than any of these if no path leads
        there."""
        distance = self.lake.distances[self.cell]
        return -float(distance if distance >= 0 else self.size**2)

    def state(self) -> str:
        return place(self.cell, self.size)

    def goal(self) -> dict[str, Any] | None:
        if not can_be_goal(self.lake, self.cell, self.split):
            return None
        return {"free": False, "goal_cell": self.cell}

    def snapshot(self) -> tuple[int, int]:
        return self.cell, self.moves

    def restore(self, snapshot: tuple[int, int]) -> None:
        self.cell, self.moves = snapshot

    def exact(self, max_turns: int) -> Exact:
        """Compute values from the start, by backward induction over `max_turns` moves."""
        if self.lake.goal < 0:
            return Exact(0.0, 0.0)
        process = self.lake.process(self.success_rate)
        moves = min(max_turns, self.max_moves or max_turns)
        worth = exact_of(process, moves, process.rewards_N)
        return Exact(worth.random, worth.optimal)  # returns would say the same again

    def _slide(self, action: int) -> int:
        """Return the action that happens on this ice; the draw belongs to the move's number."""
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
