"""Games of textarena for one player; and for two, which an agent plays by both sides
(`actors/endpoint/textarena_selfplay.py`).

The package draws everything from Python's one generator, which is why a game has it to itself while
it is called: its calls exclude one another, and the generator is put back afterwards. The game's
own messages are told as they come; textarena's wrappers, which say all of them again every time,
are left off.
"""

import contextlib
import importlib
import importlib.util
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from actors.adapters import required
from actors.envs.base import Env
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import split_of

MAX_DRAWS = 200  # of games, until one belongs to the split
AGENT = "actors.endpoint.textarena_selfplay:play"
PLAYERS: tuple[str, ...] = ("player_0", "player_1")  # of a game for two, by their seats
PLAYER = 0  # of a game for one
UNPLAYABLE = (AssertionError, ImportError, LookupError, OSError, SyntaxError, ValueError)
BARE = re.compile(r"[^\[\]]+")
_generator = threading.Lock()


@dataclass(kw_only=True, eq=False)
class TextArena(Env):
    """The game `id` with its `kwargs`, for one player or for `seats` = 2.

    An action without brackets is put into them, as the games read their moves. The reward is the
    game's at its end and `success` a reward of at least `success_at`; a game that ended without it
    at its own limit of turns was truncated. `kwargs` replace the registered ones. `held_out`: a
    task's start belongs to the split of its opening words, or, for games that always open with the
    same, to that of its seed. `moves`: the moves of which a game for two lets its players write one
    alone, as structured output. ValueError names the parameter that cannot be.
    """

    isolation = "thread"

    id: str = ""
    kwargs: dict[str, Any] | None = None
    success_at: float = 1.0
    held_out: Literal["opening", "seed"] = "opening"
    seats: Literal[1, 2] = 1
    moves: list[str] | None = None
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
        self.agent, self.players = (AGENT, PLAYERS) if self.seats == 2 else ("", ())
        if self.moves is not None and self.seats == 1:
            raise ValueError("moves: are those of a game with seats: 2")

    def probe(self) -> None:
        try:
            with self._chance():
                self._make()
        except TypeError as error:
            raise ValueError(f"env.params.kwargs: {error}") from error
        except UNPLAYABLE as error:
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"env.params.id: {self.id} cannot be played here: {said}") from error
        kinds = {1: self.package.SinglePlayerState, 2: self.package.TwoPlayerState}
        if not isinstance(self.game.state, kinds[self.seats]):
            number = "one player" if self.seats == 1 else "two players"
            raise ValueError(f"env.params.id: {self.id} is not for {number}, as env.params.seats")
        if self.moves is not None and importlib.util.find_spec("xgrammar") is None:
            needs = "xgrammar, which is not installed: pip install 'evolver-async[grammar]'"
            raise ValueError(f"env.params.moves: needs {needs}")

    def reset(self, task: Task, dynamics_seed: int) -> str:
        for draw in range(MAX_DRAWS):
            seed = key(task.map_seed, "textarena", self.id, task.split, draw)
            self.generator = random.Random(seed).getstate()
            with self._chance():
                self._make(seed)
            opening = self.news()
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
        errors, turn = state.error_count, state.turn
        done, news = self.act(action), self.news()
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

    @property
    def seat(self) -> int:
        """The seat whose turn it is."""
        return self.game.state.current_player_id

    @property
    def rewards(self) -> list[float]:
        """The rewards of the seats of a game that is over."""
        found = self.game.state.rewards or {}
        return [float(found.get(seat, 0.0)) for seat in range(self.seats)]

    @property
    def refused(self) -> bool:
        """True if the game has refused the last move of one of two players."""
        state = self.game.state
        lost = any(facts["invalid_move"] for facts in state.game_info.values())
        return lost or state.error_count > 0

    def act(self, action: str) -> bool:
        """Make a move of the present seat; return True if the game is over."""
        with self._chance():
            done, _ = self.game.step(f"[{action}]" if BARE.fullmatch(action) else action)
        return bool(done)

    def news(self) -> str:
        """Return the game's messages since the last call to the present seat, without its own."""
        with self._chance():
            seat, messages = self.game.get_observation()
        return "\n".join(text.strip() for sender, text, _ in messages if sender != seat)

    def close(self) -> None:
        self.game: Any = None

    def _make(self, seed: int | None = None) -> None:
        """Make the game and reset it with the seed."""
        self.game = self.package.make(f"{self.id}-raw", **(self.kwargs or {}))
        self.game.reset(num_players=self.seats, seed=seed)

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
