"""Sokoban with gym-sokoban's rules and RAGEN's rewards, on generated levels that can be solved.

Every action costs 0.1, also one that moves nothing; the event of more boxes being on targets than
before gives 1, that of fewer takes 1, and the last one gives 10 and ends the episode. What levels
are and how they are drawn lives in `sokoban_level.py`.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, cast

from actors.envs.grid import sokoban_level as levels
from actors.envs.grid.game import GridGame
from actors.envs.grid.sokoban_level import Room, State
from actors.envs.grid.squares import bearing, place
from actors.envs.tabular import Outcome, exact_of, tabulate
from evolver_async.env import Exact
from evolver_async.schema import Task
from evolver_async.splits import Split

INSTRUCTIONS = (
    "push each {box} on to an {target} . {player} is you and {on_target} is you on {target} and"
    " {placed} is {box} on {target} and {wall} is a wall . actions up down left right ."
)
PLAIN_INSTRUCTIONS = (
    "You are playing Sokoban. Push every box onto a target in as few moves as you can. In the room,"
    " {player} is you, {box} is a box, {target} is a target, {placed} is a box on a target,"
    " {on_target} is you on a target, {wall} is a wall and {floor} is free floor. Rows and columns"
    " are counted from 0 at the top left. The actions are: up, down, left, right. You push a box by"
    " walking into it; you cannot pull a box, nor push it into a wall or another box."
)
NAMED = ("wall", "floor", "target", "box", "placed", "player", "on_target")  # as in SYMBOLS
FORBIDDEN = set(" 0123456789<>|")  # as symbols: coordinates and turn formats use them
COST, PLACED, DONE = -0.1, 1.0, 10.0


@dataclass(kw_only=True, eq=False)
class Sokoban(GridGame):
    """Sokoban environment. A `walled` room of `size` has a wall around it and walls in it, an
    `open` one is all floor; `max_solution` bounds the moves that solve a level.

    `view`: the room as glyphs, the places of player, boxes and targets as coordinates, or both;
    `hints` add how far boxes and targets are from the player and what lies around, until it is
    solved. `symbols` draw, in this order, a wall, floor, a target, a box, a box on a target, the
    player, and the player on a target; levels do not depend on them. `max_moves` truncates an
    episode; 0 leaves that to the rollout. ValueError names the parameter that is out of range.
    """

    names = levels.ACTIONS

    size: int = 6
    boxes: int = 1
    layout: Literal["walled", "open"] = "walled"
    max_solution: int = 10
    view: Literal["grid", "coordinates", "both"] = "grid"
    hints: bool = False
    symbols: str = levels.SYMBOLS

    def __post_init__(self) -> None:
        least = 5 if self.layout == "walled" else 3
        if not least <= self.size <= 8:
            sizes = f"{least}..8, the sizes of a room {self.layout}"
            raise ValueError(f"size: {self.size} is not in {sizes}")
        if not 1 <= self.boxes <= 2:
            raise ValueError(f"boxes: {self.boxes} is neither 1 nor 2")
        if not 1 <= self.max_solution <= 200:
            raise ValueError(f"max_solution: {self.max_solution} is not in 1..200")
        if len(set(self.symbols)) != len(self.symbols) or len(self.symbols) != len(NAMED):
            kinds = ", ".join(NAMED)
            raise ValueError(f"symbols: {self.symbols!r} is not {len(NAMED)} symbols, for {kinds}")
        if not self.symbols.isprintable() or set(self.symbols) & FORBIDDEN:
            raise ValueError(f"symbols: {self.symbols!r} has a space, a digit or one of < > |")
        super().__post_init__()
        named = dict(zip(NAMED, self.symbols, strict=True))
        self.instructions = INSTRUCTIONS.format(**named)
        self.plain_instructions = PLAIN_INSTRUCTIONS.format(**named)
        self.drawn = str.maketrans(levels.SYMBOLS, self.symbols)

    def solve(self) -> list[str]:
        """Return the fewest moves to a solution; any one move if a box is stuck for good."""
        path = [levels.ACTIONS[action] for action in levels.way(self.board, self.now)]
        return path or self.actions()[:1]

    def score(self) -> float:
        """Return minus the moves left to the solution, or less than any of these if there is
        none."""
        distances = levels.all_distances(self.board)
        distance = distances.get(self.now)
        return -float(max(distances.values()) + 1 if distance is None else distance)

    def state(self) -> str:
        player, boxes = self.now
        return self._places([(levels.PLAYER, player), *((levels.BOX, box) for box in boxes)])

    def exact(self, max_turns: int) -> Exact:
        """Compute values from the current state, by backward induction over `max_turns` moves."""
        moves = self._within(max_turns)

        def model(state: Hashable, action: int) -> Iterable[Outcome]:
            return [self._outcome(cast(State, state), action)]

        process = tabulate([self.now], len(levels.ACTIONS), model, depth=moves)
        return exact_of(process, moves, process.ends_N)

    def _drawn(self, task: Task, split: Split) -> tuple[Room, State]:
        sizes = self.size, self.boxes, self.layout, self.max_solution
        level = levels.draw_level(*sizes, split, task.map_seed)
        return level.room, level.start

    def _move(self, number: int) -> tuple[float, bool, bool]:
        _, self.now, reward, solved = self._outcome(self.now, number)
        return reward, solved, solved

    def _outcome(self, state: State, action: int) -> tuple[float, State, float, bool]:
        """Apply gym-sokoban's rules; the certain outcome in the form of `tabular.Outcome`."""
        room: Room = self.board
        reached = room.moved(state, action)
        gained = room.placed(reached) - room.placed(state)
        reward = COST + (PLACED if gained > 0 else -PLACED if gained < 0 else 0.0)
        solved = room.solved(reached)
        return 1.0, reached, reward + (DONE if solved else 0.0), solved

    def _places(self, seen: list[tuple[str, int]]) -> str:
        return " ".join(f"{what} {place(cell, self.size)}" for what, cell in seen)

    def _seen(self, symbol: str) -> str:
        """Return the symbol that the policy sees for one of `levels.SYMBOLS`."""
        return symbol.translate(self.drawn)

    def _observe(self, first: bool = False) -> str:
        lines = []
        if self.view != "coordinates":
            lines = [self._seen(row) for row in self.board.render(self.now)]
        if self.view != "grid":
            player, boxes = self.now
            cells = [(levels.PLAYER, player), *((levels.BOX, box) for box in boxes)]
            cells += [(levels.TARGET, target) for target in self.board.targets]
            lines.append(self._places([(self._seen(what), cell) for what, cell in cells]))
        if self.hints and not self.board.solved(self.now):
            lines.append(self._hints())
        return "\n".join(lines)

    def _hints(self) -> str:
        """Describe what a move in each direction meets and what is behind a box, then the offset of
        each box and target."""
        room: Room = self.board
        glyphs = self._seen("".join(room.render(self.now)))
        wall = self._seen(levels.WALL)
        player, boxes = self.now
        text = ""
        for action, name in enumerate(levels.ACTIONS):
            text += f" {name}"
            cell: int | None = player
            while True:
                cell = room.neighbours[cell][action]
                text += f" {wall if cell is None else glyphs[cell]}"
                if cell not in boxes or cell is None:
                    break
        for what, cells in ((levels.BOX, boxes), (levels.TARGET, room.targets)):
            for there in cells:
                text += f" {self._seen(what)} {bearing(player, there, self.size)}"
        return text[1:]
