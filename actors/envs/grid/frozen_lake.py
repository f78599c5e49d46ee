"""FrozenLake with gymnasium's dynamics on generated, solvable maps, described in words.

Reward is 1 on reaching the goal; a hole ends the episode. `frozen_lake_map.py` holds the maps and
how they are drawn.
"""

from dataclasses import dataclass
from typing import Any, Literal

from actors.envs.grid import frozen_lake_map as maps
from actors.envs.grid.game import PLAYER, MapWalk
from actors.envs.grid.squares import ARRIVED
from actors.envs.tabular import exact_of, happening
from evolver_async.env import Exact
from evolver_async.schema import Task
from evolver_async.splits import Split

INSTRUCTIONS = "walk over the ice from P to the goal G . O is a hole . actions left down right up ."
PLAIN_INSTRUCTIONS = (
    "You are walking over a frozen lake. Reach the goal without falling into a hole. On the map, P"
    " is you, G is the goal, O is a hole and _ is safe ice. A line of text says in which row and"
    " column you are, counted from 0 at the top left; it may add how far away the goal is and what"
    " lies next to you in each direction. The actions are: left, down, right, up. Each moves you by"
    " one cell; at the edge of the map you stay where you are. A hole ends the episode."
)
PLAIN_SLIPPERY = " The ice is slippery: you may slide to one side of where you wanted to go."
STANDS = {maps.ICE: PLAYER, maps.HOLE: "X", maps.GOAL: ARRIVED}  # the player on each, as in RAGEN
WORDS = {maps.ICE: "ice", maps.HOLE: "hole", maps.GOAL: "goal"}


@dataclass(kw_only=True, eq=False)
class FrozenLake(MapWalk):
    """FrozenLake environment. `success_rate` is used only if `slippery`. `goal_cell` moves the goal
    there (-1 leaves it where it was drawn); `free` removes it. See `MapWalk` for `grid`, `hints`
    and `max_moves`.

    ValueError names the parameter that is out of range.
    """

    instructions = INSTRUCTIONS
    plain_instructions = PLAIN_INSTRUCTIONS
    names = maps.ACTIONS
    stands = STANDS
    words = WORDS

    size: int = 4
    frozen_prob: float = 0.8
    placement: Literal["random", "corners"] = "random"
    slippery: bool = False
    success_rate: float = 1.0 / 3.0
    goal_cell: int = -1
    free: bool = False

    def __post_init__(self) -> None:
        if not 3 <= self.size <= 8:
            raise ValueError(f"size: {self.size} is not in 3..8")
        if not -1 <= self.goal_cell < self.size**2:
            raise ValueError(f"goal_cell: {self.goal_cell} is not in -1..{self.size**2 - 1}")
        if not 0 < self.frozen_prob < 1:
            raise ValueError(f"frozen_prob: {self.frozen_prob} is not between 0 and 1")
        if not 0 < self.success_rate <= 1:
            raise ValueError(f"success_rate: {self.success_rate} is not in (0, 1]")
        super().__post_init__()
        if self.slippery:
            self.plain_instructions += PLAIN_SLIPPERY
        else:
            self.success_rate = 1.0

    def solve(self) -> list[str]:
        """Return the shortest path; on a slippery lake only the next best action. ValueError: no
        goal."""
        lake, cell, path = self.board, self.now, list[str]()
        if lake.goal < 0:
            raise ValueError("free: without a goal there is nothing to solve")
        if self.success_rate < 1.0:
            return [maps.ACTIONS[maps.best_actions(lake, self.success_rate)[cell]]]
        while cell != lake.goal:
            nearer, reached = lake.distances[cell] - 1, [lake.moved(cell, n) for n in range(4)]
            action = next(n for n in range(4) if lake.distances[reached[n]] == nearer)
            path.append(maps.ACTIONS[action])
            cell = reached[action]
        return path

    def score(self) -> float:
        """Return minus the moves left to the goal, or less than any of these if no path leads
        there."""
        distance = self.board.distances[self.now]
        return -float(distance if distance >= 0 else self.size**2)

    def goal(self) -> dict[str, Any] | None:
        if not maps.can_be_goal(self.board, self.now):
            return None
        return {"free": False, "goal_cell": self.now}

    def exact(self, max_turns: int) -> Exact:
        """Compute values from the start, by backward induction over `max_turns` moves."""
        if self.board.goal < 0:
            return Exact(0.0, 0.0)
        process = self.board.process(self.success_rate)
        worth = exact_of(process, self._within(max_turns), process.rewards_N)
        return Exact(worth.random, worth.optimal)  # returns would say the same again

    def _drawn(self, task: Task, split: Split) -> tuple[maps.Lake, int]:
        kind = self.size, self.frozen_prob, self.placement
        lake = maps.draw_lake(*kind, split, task.map_seed)
        if self.free:
            lake = maps.with_goal(lake, -1)
        elif self.goal_cell >= 0:
            if not maps.can_be_goal(lake, self.goal_cell):
                raise ValueError(f"goal_cell: {self.goal_cell} is no goal of {task.task_id}")
            lake = maps.with_goal(lake, self.goal_cell)
        return lake, lake.start

    def _move(self, number: int) -> tuple[float, bool, bool]:
        if self.success_rate < 1.0:  # the draw belongs to the move's number
            outcomes = maps.slips(number, self.success_rate)
            chances = (probability for probability, _ in outcomes)
            number = outcomes[happening(chances, self.dynamics_seed, self.moves)][1]
        self.now = self.board.moved(self.now, number)
        ground = self.board.cells[self.now]
        return float(ground == maps.GOAL), ground != maps.ICE, ground == maps.GOAL
