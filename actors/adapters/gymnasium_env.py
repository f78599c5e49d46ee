"""Environments of gymnasium with text or discrete observations and actions, and minigrid's.

`terminated` and `truncated` stay what gymnasium says. An environment gets two seeds where gymnasium
has one: its reset is seeded by the task, so that a group shares its start, and what happens by
chance afterwards by the episode. What can be demonstrated and measured are those that keep their
transitions in a table `P`, as gymnasium's toy texts do.
"""

import copy
import re
from collections.abc import Hashable, Iterable
from typing import Any, Literal, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from actors.adapters.minigrid_text import ACTIONS, grid_text, is_grid
from actors.envs.tabular import Outcome, Process, best_values, exact_of, tabulate
from evolver_async.env import Exact, Info, Step
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import split_of

COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
MAX_DRAWS = 500  # of starts, until one belongs to the split
DISCOUNT = 0.99  # of the expert: of two ways that both succeed, the shorter


class Gymnasium:
    """The environment that `gymnasium.make(id, **kwargs)` makes.

    `actions` names a discrete environment's actions in their order (else they are called by their
    numbers); `instructions` say what the task is. `view`: the observation, the text that the
    environment renders itself as, or both. An episode is a success where `info["is_success"]` says
    so, or else where its last reward is more than `success_above`. `max_moves` truncates an
    episode; 0 leaves that to the environment. `held_out`: a task's start belongs to the split of
    its observation's content, or, where there are too few different ones, to that of its seed.
    ValueError names the parameter that cannot be.
    """

    isolation = "thread"
    needs_table = False

    def __init__(
        self,
        *,
        id: str = "",
        kwargs: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        instructions: str = "",
        view: Literal["observation", "render", "both"] = "observation",
        success_above: float = 0.0,
        held_out: Literal["observation", "seed"] = "observation",
        max_moves: int = 0,
    ) -> None:
        if not id:
            raise ValueError("id: name one of gymnasium's environments, such as Taxi-v4")
        if max_moves < 0:
            raise ValueError(f"max_moves: {max_moves} is negative")
        self.id = id
        self.view = view
        self.success_above = success_above
        self.held_out = held_out
        made: dict[str, Any] = dict(kwargs or {})
        if view != "observation":
            made["render_mode"] = "ansi"
        try:
            self.env: Any = gymnasium.make(
                id, max_episode_steps=max_moves or None, disable_env_checker=True, **made
            )
        except TypeError as error:
            raise ValueError(f"{'kwargs' if kwargs else 'view'}: {error}") from error
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"id: {error}") from error
        if view != "observation" and "ansi" not in self.env.metadata.get("render_modes", ()):
            raise ValueError(f"view: {id} does not render itself as text")
        if self.needs_table and not hasattr(self.env.unwrapped, "P"):
            raise ValueError(f"id: {id} keeps no table P of its transitions")
        self.is_grid = is_grid(self.env)
        if not self.is_grid:
            _require_text(id, self.env.observation_space)
        elif actions is None:
            actions = ACTIONS
        self.names = _names(id, self.env.action_space, actions)
        listed = f" actions {' '.join(self.names)} ." if self.names else ""
        self.instructions = f"{instructions or f'act in {id} .'}{listed}"
        self.plain_instructions = instructions or f"Act in the environment {id} to reach its goal."
        if self.names:
            self.plain_instructions += f" The actions are: {', '.join(self.names)}."

    def reset(self, task: Task, dynamics_seed: int) -> str:
        for draw in range(MAX_DRAWS):
            seed = key(task.map_seed, "gymnasium", self.id, task.split, draw)
            observation, _ = self.env.reset(seed=seed)
            self.text = self._text(observation)
            if self.held_out == "seed" or split_of(self.text) == task.split:
                break
        else:
            raise ValueError(
                f"held_out: no start of {self.id} belongs to {task.split} in {MAX_DRAWS} draws;"
                " `seed` keeps the splits apart by their seeds alone"
            )
        self.env.unwrapped.np_random = np.random.Generator(np.random.PCG64(dynamics_seed))
        return self._observe()

    def step(self, action: str) -> Step:
        chosen = self._chosen(action.strip())
        if chosen is None:
            return Step(self._observe(), 0.0, False, False, Info(valid=False))
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        self.text = self._text(observation)
        over = bool(terminated or truncated)
        won = bool(info["is_success"]) if "is_success" in info else reward > self.success_above
        facts = Info(success=bool(over and won))
        return Step(self._observe(), float(reward), bool(terminated), bool(truncated), facts)

    def close(self) -> None:
        self.env.close()

    def _text(self, observation: Any) -> str:
        if self.is_grid:
            return grid_text(observation)
        return text_of(self.env.observation_space, observation)

    def _chosen(self, action: str) -> Any | None:
        """Return the action in gymnasium's form; None for an unknown one."""
        space = self.env.action_space
        if isinstance(space, spaces.Text):
            return action if space.contains(action) else None
        try:
            return int(space.start) + self.names.index(action.lower())
        except ValueError:
            return None

    def _observe(self) -> str:
        if self.view == "observation":
            return self.text
        rendered = uncoloured(str(self.env.render())).strip("\n")
        return rendered if self.view == "render" else f"{rendered}\n{self.text}"


class GymnasiumTable(Gymnasium):
    """Environment with a table of transitions, so that it can demonstrate by value iteration, be
    restored from snapshots, and have exact values. Its parameters are the same."""

    needs_table = True

    def reset(self, task: Task, dynamics_seed: int) -> str:
        observation = super().reset(task, dynamics_seed)
        self.start = int(self.env.unwrapped.s)
        self.best: dict[Hashable, int] = {}
        return observation

    def actions(self) -> list[str]:
        """Return the actions that change the state."""
        table, now = self.env.unwrapped.P, int(self.env.unwrapped.s)
        return [
            name
            for number, name in enumerate(self.names)
            if any(reached != now or ended for _, reached, _, ended in table[now][number])
        ]

    def solve(self) -> list[str]:
        """Return the best actions as long as their outcomes are certain."""
        if not self.best:
            process = self._process()
            actions_S = best_values(process, DISCOUNT).argmax(axis=1)
            self.best = dict(zip(process.states, actions_S.tolist(), strict=True))
        now, path, seen = int(self.env.unwrapped.s), list[str](), set[int]()
        while now not in seen:
            seen.add(now)
            action = self.best[now]
            path.append(self.names[action])
            outcomes = self.env.unwrapped.P[now][action]
            if len(outcomes) > 1 or outcomes[0][3]:
                break
            now = int(outcomes[0][1])
        return path

    def state(self) -> str:
        return self.text

    def snapshot(self) -> tuple[Any, str]:
        return copy.deepcopy(self.env), self.text

    def restore(self, snapshot: tuple[Any, str]) -> None:
        env, self.text = snapshot
        self.env = copy.deepcopy(env)

    def exact(self, max_turns: int) -> Exact:
        """Compute values from the start, by backward induction over `max_turns` moves; gymnasium's
        own limit on moves holds as well."""
        limit = self.env.spec.max_episode_steps
        process = self._process()
        won_N = process.ends_N & (process.rewards_N > self.success_above)
        return exact_of(process, min(max_turns, limit or max_turns), won_N)

    def _process(self) -> Process:
        """Tabulate all states that can be reached from the start, the start first."""
        table = self.env.unwrapped.P

        def outcomes(state: Hashable, action: int) -> Iterable[Outcome]:
            return [
                (chance, int(reached), float(reward), bool(ended))
                for chance, reached, reward, ended in table[cast(int, state)][action]
            ]

        return tabulate([self.start], len(self.names), outcomes)


def text_of(space: spaces.Space[Any], value: Any) -> str:
    """Write an observation as text: text as it is, numbers with spaces between them, each part of a
    `Dict` after its name."""
    if isinstance(space, spaces.Text):
        return value
    if isinstance(space, spaces.Tuple):
        return " ".join(text_of(*part) for part in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return " ".join(f"{name} {text_of(part, value[name])}" for name, part in space.items())
    return " ".join(str(int(number)) for number in np.ravel(value))


def uncoloured(text: str) -> str:
    """Write terminal colours as words: `(blue R)` for a letter, `[red S]` for a background."""

    def named(found: re.Match[str]) -> str:
        codes = [int(code) for code in found[1].split(";") if code]
        for code in codes:
            if 40 <= code <= 47:
                return f"[{COLOURS[code - 40]} {found[2]}]"
        for code in codes:
            if 30 <= code <= 37:
                return f"({COLOURS[code - 30]} {found[2]})"
        return found[2]

    return COLOURED.sub(named, text)


def _require_text(id: str, space: spaces.Space[Any]) -> None:
    """Raise ValueError for an observation that cannot be written as text."""
    if isinstance(space, spaces.Tuple):
        for part in space.spaces:
            _require_text(id, part)
    elif isinstance(space, spaces.Dict):
        for part in space.values():
            _require_text(id, part)
    elif not isinstance(
        space, spaces.Text | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        raise ValueError(f"id: {id} shows {space}, which is neither text nor discrete")


def _names(id: str, space: spaces.Space[Any], actions: list[str] | None) -> list[str]:
    """Return the names of the actions in lower case; none if actions are text. ValueError if the
    names do not fit."""
    if isinstance(space, spaces.Text):
        if actions is not None:
            raise ValueError(f"actions: those of {id} are text and need no names")
        return []
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"id: {id} is acted in by {space}, which is neither text nor discrete")
    count = int(space.n)
    if actions is None:
        return [str(int(space.start) + number) for number in range(count)]
    names = [name.strip().lower() for name in actions]
    if len(set(names)) != count or len(names) != count or not all(names):
        raise ValueError(f"actions: {id} has {count} actions, which need as many different names")
    return names
