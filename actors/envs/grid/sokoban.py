"""Sokoban with gym-sokoban's rules and RAGEN's rewards, on generated levels that can be solved.

Every action costs 0.1, also one that moves nothing; the event of more boxes being on targets than
before gives 1, that of fewer takes 1, and the last one gives 10 and ends the episode. What levels
are and how they are drawn lives in `sokoban_level.py`.
"""

from collections.abc import Hashable, Iterable
from typing import Literal, cast

from actors.envs.base import Exact, Info, Step
from actors.envs.grid.cells import bearing, place
from actors.envs.grid.sokoban_level import (
    ACTIONS,
    BOX,
    PLAYER,
    TARGET,
    WALL,
    State,
    all_distances,
    draw_level,
    way,
)
from actors.envs.tabular import Outcome, exact_of, tabulate
from evolver_async.schema import Task

INSTRUCTIONS = (
    "push each X on to an O . P is you and S is you on O and √ is X on O and # is a wall ."
    " actions up down left right ."
)
PLAIN_INSTRUCTIONS = (
    "You are playing Sokoban. Push every box onto a target in as few moves as you can. In the room,"
    " P is you, X is a box, O is a target, √ is a box on a target, S is you on a target, # is a"
    " wall and _ is free floor. Rows and columns are counted from 0 at the top left. The actions"
    " are: up, down, left, right. You push a box by walking into it; you cannot pull a box, nor"
    " push it into a wall or another box."
)
COST, PLACED, DONE = -0.1, 1.0, 10.0


class Sokoban:
    """Sokoban environment. A `walled` room of `size` has a wall around it and walls in it, an
    `open` one is all floor; `max_solution` bounds the moves that solve a level.

    `view`: the room as glyphs, the places of player, boxes and targets as coordinates, or both;
    `hints` add how far boxes and targets are from the player and what lies around, until it is
    solved. `max_moves` truncates an episode; 0 leaves that to the rollout. ValueError names the
    parameter that is out of range.
    """

    instructions = INSTRUCTIONS
    plain_instructions = PLAIN_INSTRUCTIONS

    def __init__(
        self,
        *,
        size: int = 6,
        boxes: int = 1,
        layout: Literal["walled", "open"] = "walled",
        max_solution: int = 10,
        view: Literal["grid", "coordinates", "both"] = "grid",
        hints: bool = False,
        max_moves: int = 0,
    ) -> None:
        least = 5 if layout == "walled" else 3
        if not least <= size <= 8:
            raise ValueError(f"size: {size} is not in {least}..8, the sizes of a room {layout}")
        if not 1 <= boxes <= 2:
            raise ValueError(f"boxes: {boxes} is neither 1 nor 2")
        if not 1 <= max_solution <= 200:
            raise ValueError(f"max_solution: {max_solution} is not in 1..200")
        if max_moves < 0:
            raise ValueError(f"max_moves: {max_moves} is negative")
        self.size = size
        self.boxes = boxes
        self.layout: Literal["walled", "open"] = layout
        self.max_solution = max_solution
        self.view = view
        self.hints = hints
        self.max_moves = max_moves

    def reset(self, task: Task, dynamics_seed: int) -> str:
        if task.split not in ("train", "test"):
            raise ValueError(f"split: {task.split!r} is neither train nor test")
        level = draw_level(
            self.size, self.boxes, self.layout, self.max_solution, task.split, task.map_seed
        )
        self.room = level.room
        self.now = level.start
        self.moves = 0
        return self._observe()

    def step(self, action: str) -> Step:
        name = action.strip().lower()
        if name not in ACTIONS:
            return Step(self._observe(), 0.0, False, False, Info(valid=False))
        _, reached, reward, solved = self._outcome(self.now, ACTIONS.index(name))
        self.now = reached
        self.moves += 1
        truncated = not solved and self.moves == self.max_moves
        return Step(self._observe(), reward, solved, truncated, Info(success=solved))

    def close(self) -> None:
        pass

    def actions(self) -> list[str]:
        """Return the moves that change something; there is always one back."""
        room, now = self.room, self.now
        return [name for number, name in enumerate(ACTIONS) if room.moved(now, number) != now]

    def solve(self) -> list[str]:
        """Return the fewest moves to a solution; any one move if a box is stuck for good."""
        return [ACTIONS[action] for action in way(self.room, self.now)] or self.actions()[:1]

    def score(self) -> float:
        """Return minus the moves left to the solution, or less than any of these if there is
        none."""
        distances = all_distances(self.room)
        distance = distances.get(self.now)
        return -float(max(distances.values()) + 1 if distance is None else distance)

    def state(self) -> str:
        player, boxes = self.now
        return self._places([(PLAYER, player), *((BOX, box) for box in boxes)])

    def snapshot(self) -> tuple[State, int]:
        return self.now, self.moves

    def restore(self, snapshot: tuple[State, int]) -> None:
        self.now, self.moves = snapshot

    def exact(self, max_turns: int) -> Exact:
        """Compute values from the current state, by backward induction over `max_turns` moves."""
        moves = min(max_turns, self.max_moves or max_turns)

        def model(state: Hashable, action: int) -> Iterable[Outcome]:
            return [self._outcome(cast(State, state), action)]

        process = tabulate([self.now], len(ACTIONS), model, depth=moves)
        return exact_of(process, moves, process.ends_N)

    def _outcome(self, state: State, action: int) -> tuple[float, State, float, bool]:
        """Apply gym-sokoban's rules; the certain outcome in the form of `tabular.Outcome`."""
        room = self.room
        reached = room.moved(state, action)
        gained = room.placed(reached) - room.placed(state)
        reward = COST + (PLACED if gained > 0 else -PLACED if gained < 0 else 0.0)
        solved = room.solved(reached)
        return 1.0, reached, reward + (DONE if solved else 0.0), solved

    def _places(self, seen: list[tuple[str, int]]) -> str:
        return " ".join(f"{what} {place(cell, self.size)}" for what, cell in seen)

    def _observe(self) -> str:
        lines = [] if self.view == "coordinates" else self.room.render(self.now)
        if self.view != "grid":
            targets = self._places([(TARGET, target) for target in self.room.targets])
            lines.append(f"{self.state()} {targets}")
        if self.hints and not self.room.solved(self.now):
            lines.append(self._hints())
        return "\n".join(lines)

    def _hints(self) -> str:
        """Describe what a move in each direction meets and what is behind a box, then the offset of
        each box and target."""
        glyphs = "".join(self.room.render(self.now))
        player, boxes = self.now
        text = ""
        for action, name in enumerate(ACTIONS):
            text += f" {name}"
            cell: int | None = player
            while True:
                cell = self.room.neighbours[cell][action]
                text += f" {WALL if cell is None else glyphs[cell]}"
                if cell not in boxes or cell is None:
                    break
        for what, cells in ((BOX, boxes), (TARGET, self.room.targets)):
            for cell in cells:
                text += f" {what} {bearing(player, cell, self.size)}"
        return text[1:]
