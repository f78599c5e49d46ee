"""Text adventures of TextWorld: made for each task, or played from files.

Threads cannot share the package, so its games are played in processes (`env.isolation`). A process
keeps the games that it has made, which takes seconds each.
"""

import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from actors.adapters import required
from actors.envs.base import Env
from evolver_async.env import Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import split_of

SEEDS = 1 << 31
PREFIX = "evolver-textworld-"


@dataclass(kw_only=True, eq=False)
class TextWorld(Env):
    """A game with so many `rooms`, `objects` and steps of its quest (`quest_length`), drawn by the
    task; or one of `games`, paths of files that TextWorld plays, whose split is that of the file's
    name.

    The reward is the share of the game's points that a step gained; a game that is won is a
    success. `commands`: what is possible is told with every observation, and anything else is an
    action that does not exist. Games of this package's own making can demonstrate themselves.
    ValueError names the parameter that cannot be.
    """

    isolation = "process"

    rooms: int = 3
    objects: int = 4
    quest_length: int = 2
    games: list[str] = field(default_factory=list)
    commands: bool = True
    instructions: str = "play the game ."

    def __post_init__(self) -> None:
        self.plain_instructions = (
            "Play a text adventure. Each of your actions is one command, such as: take the key"
        )
        for name in ("rooms", "objects", "quest_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be positive, is {getattr(self, name)}")
        for path in self.games:
            if not Path(path).is_file():
                raise ValueError(f"games: {path} is no file")
        self._session: Any = None

    def probe(self) -> None:
        _package()

    def reset(self, task: Task, dynamics_seed: int) -> str:
        self.close()
        if self.games:
            return self._begin(self._chosen(task))
        seed = key(task.map_seed, "textworld", task.split) % SEEDS
        files = _compiled(seed, self.rooms, self.objects, self.quest_length)
        with tempfile.TemporaryDirectory(prefix=PREFIX) as place:  # TextWorld reads a game whole
            for end, content in files.items():
                (Path(place) / f"game{end}").write_bytes(content)
            return self._begin(f"{place}/game.z8")

    def _begin(self, path: str) -> str:
        """Start the game of a file; return the first observation."""
        textworld = _package()
        wanted = textworld.EnvInfos(
            feedback=True,
            admissible_commands=True,
            policy_commands=not self.games,
            score=True,
            max_score=True,
            won=True,
            objective=True,
        )
        self._session = textworld.start(path, wanted)
        self._state = self._session.reset()
        self._score = 0.0
        objective = self._state.get("objective") or self._state.feedback
        return self._observed(objective.strip())

    def step(self, action: str) -> Step:
        if self.commands and action not in self.actions():
            return Step(
                self._observed("That is not possible."), 0.0, False, False, Info(valid=False)
            )
        self._state, score, over = self._session.step(action)
        gained, self._score = (score - self._score) / max(self._state.max_score or 1, 1), score
        facts = Info(success=bool(self._state.won))
        return Step(self._observed(self._state.feedback.strip()), gained, bool(over), False, facts)

    def actions(self) -> list[str]:
        return list(self._state.admissible_commands or [])

    def solve(self) -> list[str]:
        return list(self._state.get("policy_commands") or [])

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _observed(self, text: str) -> str:
        listed = ", ".join(self.actions())
        return f"{text}\nPossible: {listed}" if self.commands and listed else text

    def _chosen(self, task: Task) -> str:
        own = [path for path in sorted(self.games) if split_of(Path(path).name) == task.split]
        if not own:
            raise ValueError(f"games: none of the {len(self.games)} files belongs to {task.split}")
        return own[key(task.map_seed, "textworld", task.split) % len(own)]


@lru_cache(maxsize=1024)
def _compiled(seed: int, rooms: int, objects: int, quest_length: int) -> dict[str, bytes]:
    """Make a game; return its files by their ends. None stays on disk: processes of environments
    are killed in the end."""
    textworld = _package()
    options = textworld.GameOptions()
    options.seeds = seed
    options.nb_rooms, options.nb_objects = rooms, objects
    options.quest_length = quest_length
    with tempfile.TemporaryDirectory(prefix=PREFIX) as place:
        options.path = f"{place}/game.z8"
        textworld.generator.compile_game(textworld.generator.make_game(options), options)
        return {one.suffix: one.read_bytes() for one in Path(place).glob("game.*")}


def _package() -> Any:
    return required("textworld", "env.name", "textworld")
