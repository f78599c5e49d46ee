"""Single-player games of textarena.

The package draws everything from Python's one generator, which is why a game has it to itself while
it is called: its calls exclude one another, and the generator is put back afterwards. The game's
own messages are told as they come; textarena's wrappers, which say all of them again every time,
are left off.
"""

import contextlib
import importlib
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from actors.envs.adapters import required
from actors.envs.base import Env
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import split_of

MAX_DRAWS = 200  # of games, until one belongs to the split
PLAYER = 0
UNPLAYABLE = (AssertionError, ImportError, LookupError, OSError, SyntaxError, ValueError)
BARE = re.compile(r"[^\[\]]+")
_generator = threading.Lock()


@dataclass(kw_only=True, eq=False)
class TextArena(Env):
    """The game `id` with its `kwargs`, for one player.

    An action without brackets is put into them, as the games read their moves. The reward is the
    game's at its end and `success` a reward of at least `success_at`; a game that ended without it
    at its own limit of turns was truncated. `kwargs` replace the registered ones. `held_out`: a
    task's start belongs to the split of its opening words, or, for games that always open with the
    same, to that of its seed. ValueError names the parameter that cannot be.
    """

    isolation = "thread"

    id: str = ""
    kwargs: dict[str, Any] | None = None
    success_at: float = 1.0
    held_out: Literal["opening", "seed"] = "opening"
    instructions: str = ""

    def __post_init__(self) -> None:
        self.package = required("textarena", "id", "textarena")
        words = self.instructions
        self.plain_instructions = words  # the game's first message states its rules
        self.instructions = words or "play the game ."
        registration = importlib.import_module("textarena.envs.registration")
        if f"{self.id}-raw" not in registration.ENV_REGISTRY:
            raise ValueError(f"id: textarena has no game {self.id!r}")
        self.generator: Any = random.Random(0).getstate()

    def probe(self) -> None:
        try:
            with self._chance():
                self._make()
        except TypeError as error:
            raise ValueError(f"env.params.kwargs: {error}") from error
        except UNPLAYABLE as error:
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"env.params.id: {self.id} cannot be played here: {said}") from error
        if not isinstance(self.game.state, self.package.SinglePlayerState):
            raise ValueError(f"env.params.id: {self.id} is not for one player")

    def reset(self, task: Task, dynamics_seed: int) -> str:
        for draw in range(MAX_DRAWS):
            seed = key(task.map_seed, "textarena", self.id, task.split, draw)
            self.generator = random.Random(seed).getstate()
            with self._chance():
                self._make(seed)
                opening = self._news()
            if self.held_out == "seed" or split_of(opening) == task.split:
                break
        else:
            raise ValueError(
                f"held_out: no opening of {self.id} belongs to {task.split} in {MAX_DRAWS} draws;"
                " `seed` keeps the splits apart by their seeds alone"
            )
        self.begun = opening if self.held_out == "opening" else f"{seed} {opening}"
        self.generator = random.Random(dynamics_seed).getstate()
        return opening

    def content(self) -> str:
        return self.begun

    def step(self, action: str) -> Step:
        """Act; a move that the game refuses costs one of its allowed errors in a row."""
        state = self.game.state
        move = f"[{action}]" if BARE.fullmatch(action) else action
        errors, turn = state.error_count, state.turn
        with self._chance():
            done, _ = self.game.step(move)
            news = self._news()
        facts = state.game_info[PLAYER]
        valid = not facts["invalid_move"] and state.error_count <= errors
        if not done:
            return Step(news, 0.0, False, False, Info(valid=valid))
        reward = float(state.rewards[PLAYER])
        success = reward >= self.success_at
        limit = state.max_turns is not None and turn >= state.max_turns and not success
        told = "\n".join(part for part in (news, str(facts.get("reason") or "")) if part)
        info = Info(valid=valid, success=success)
        return Step(told, reward, not limit, limit, info)

    def close(self) -> None:
        self.game: Any = None

    def _make(self, seed: int | None = None) -> None:
        """Make the game and reset it with the seed."""
        self.game = self.package.make(f"{self.id}-raw", **(self.kwargs or {}))
        self.game.reset(num_players=1, seed=seed)

    def _news(self) -> str:
        """Return the game's messages since the last call, without the player's own."""
        _, messages = self.game.get_observation()
        return "\n".join(text.strip() for sender, text, _ in messages if sender != PLAYER)

    @contextlib.contextmanager
    def _chance(self) -> Iterator[None]:
        """Replace Python's global random generator by this game's while the context lasts."""
        with _generator:
            before = random.getstate()
            random.setstate(self.generator)
            try:
                yield
            finally:
                self.generator = random.getstate()
                random.setstate(before)
