"""CliffWalking with gymnasium's dynamics: its own map, and drawn ones that can be solved.

A move gives -1; one into the cliff gives `fall_reward` and brings the player back to the start; the
goal ends the episode. Maps are drawn from `(split, map_seed)` until one is solvable without falling
and its ground hashes into the split: no drawn map is in two splits, not even with another start or
goal; the classic map is one and the same task in all. What to do is known from value iteration or
from a tabular Q-learning agent.
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from actors.envs.grid.game import PLAYER, MapWalk
from actors.envs.grid.squares import ARRIVED
from actors.envs.tabular import Outcome, Process, best_values, exact_of, happening, learn, tabulate
from evolver_async.env import Exact
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import Split, split_of

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
GROUND, CLIFF, GOAL = "_", "O", "G"
STANDS = {GROUND: PLAYER, GOAL: ARRIVED}
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

    @cached_property
    def ground(self) -> str:
        """Cliff and safe cells with their width, without the goal: the content that decides the
        split."""
        return f"{self.columns}/{self.cells.replace(GOAL, GROUND)}"

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
    split: Split,
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
        if split_of(cliff.ground) == split and cliff.can_be_walked():
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


@dataclass(kw_only=True, eq=False)
class CliffWalking(MapWalk):
    """CliffWalking environment. `layout: classic` is gymnasium's map in any size; in a `drawn` one
    the start, the goal and the cliff cells (of probability `cliff_prob`) are anywhere.

    `expert`: the demonstrator; see `MapWalk` for `grid`, `hints` and `max_moves`. ValueError names
    the parameter that is out of range.
    """

    instructions = INSTRUCTIONS.format(" ".join(ACTIONS))
    plain_instructions = PLAIN_INSTRUCTIONS
    names = ACTIONS
    stands = STANDS
    words = WORDS

    rows: int = 4
    columns: int = 12
    layout: Literal["classic", "drawn"] = "classic"
    cliff_prob: float = 0.3
    slippery: bool = False
    fall_reward: float = -100.0
    expert: Literal["values", "q_learning"] = "values"

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            if not 2 <= getattr(self, name) <= 20:
                raise ValueError(f"{name}: {getattr(self, name)} is not in 2..20")
        if self.layout == "classic" and self.columns < 3:
            raise ValueError("columns: fewer than 3 leave no cliff between start and goal")
        if not 0 < self.cliff_prob < 1:
            raise ValueError(f"cliff_prob: {self.cliff_prob} is not between 0 and 1")
        if not -1e6 <= self.fall_reward <= MOVE_REWARD:
            raise ValueError(f"fall_reward: {self.fall_reward} is not in -1e6..{MOVE_REWARD:g}")
        super().__post_init__()
        if self.slippery:
            self.plain_instructions += PLAIN_SLIPPERY

    def solve(self) -> list[str]:
        """Return the expert's best actions: up to the goal, or until they repeat a cell; on
        slippery ground only the next one."""
        values, cell = expert_values(self.board, self.expert), self.now
        path, seen = list[str](), set[int]()
        while cell != self.board.goal and cell not in seen:
            seen.add(cell)
            action = int(np.argmax(values[cell]))
            path.append(ACTIONS[action])
            (_, cell, *_), *others = self.board.outcomes(cell, action)
            if others:
                break
        return path

    def score(self) -> float:
        """Return the value of the best policy from here on: minus the moves left if the ground is
        not slippery."""
        if self.now == self.board.goal:
            return 0.0
        return max(expert_values(self.board, "values")[self.now])

    def exact(self, max_turns: int) -> Exact:
        """Compute values from the start, by backward induction over `max_turns` moves."""
        process = self.board.process
        return exact_of(process, self._within(max_turns), process.ends_N)

    def _drawn(self, task: Task, split: Split) -> tuple[Cliff, int]:
        sizes, dynamics = (self.rows, self.columns), (self.fall_reward, self.slippery)
        if self.layout == "classic":
            cliff = classic_cliff(*sizes, *dynamics)
        else:
            cliff = draw_cliff(*sizes, self.cliff_prob, *dynamics, split, task.map_seed)
        return cliff, cliff.start

    def _move(self, number: int) -> tuple[float, bool, bool]:
        outcomes = self.board.outcomes(self.now, number)
        chances = (chance for chance, *_ in outcomes)
        happens = happening(chances, self.dynamics_seed, self.moves)
        _, self.now, reward, ended = outcomes[happens]
        return reward, ended, ended
