"""The adapter against the real gymnasium: same steps, two seeds, names, experts, refusals."""

import asyncio
import itertools
import random
from typing import Any

import gymnasium
import numpy as np
import pytest
from episodes import ticket
from gymnasium import spaces
from virtual_time import virtually

from actors.adapters.gymnasium_env import Gymnasium, GymnasiumTable, text_of, uncoloured
from actors.envs.base import EnvError, Measurable, Rewindable, Solvable, make_env
from actors.envs.exact import exact
from actors.envs.grid.cliff_walking import CliffWalking
from actors.rollout.environment import TimedEnvironment
from actors.ticket_progress import TicketProgress
from evolver_async.schema import Task
from evolver_async.splits import SPLITS, split_of

TAXI = ["south", "north", "east", "west", "pickup", "dropoff"]
CLIFF: dict[str, Any] = {
    "id": "CliffWalking-v1",
    "actions": ["up", "right", "down", "left"],
    "success_above": -2.0,
    "held_out": "seed",
}


def task(map_seed: int = 0, split: str = "train", **params: Any) -> Task:
    return Task(
        task_id=f"gymnasium/{split}/{map_seed}",
        env="gymnasium_table",
        split=split,
        map_seed=map_seed,
        params=params,
    )


class Echo(gymnasium.Env[str, str]):
    """Text in, text out: the word must be said back; three tries, then it is cut off."""

    observation_space = spaces.Text(max_length=20)
    action_space = spaces.Text(min_length=1, max_length=20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 4))
        self.tries = 0
        return self.word, {}

    def step(self, action: str) -> Any:
        self.tries += 1
        solved = action == self.word
        hint = "".join(self.np_random.choice(list("xyz"), 12))
        return hint, -1.0, solved, self.tries == 3, {"is_success": solved}


gymnasium.register("Echo-v0", entry_point=Echo)


def test_taxi_agrees_with_gymnasium_step_by_step() -> None:
    choices = random.Random(0)
    solved = invalid = 0
    for map_seed in range(8):
        env = GymnasiumTable(id="Taxi-v4", actions=TAXI)
        first = env.reset(task(map_seed), 0)
        other: Any = gymnasium.make("Taxi-v4")
        other.reset()
        other.unwrapped.s = int(first)
        for _ in range(250):
            if choices.random() < 0.1:
                assert not env.step("fly").info.valid
                invalid += 1
            action = env.solve()[0] if choices.random() < 0.7 else choices.choice(TAXI)
            step = env.step(f" {action.title()} ")
            observation, reward, terminated, truncated, _ = other.step(TAXI.index(action))
            assert step.observation == str(observation) and step.reward == reward
            assert (step.terminated, step.truncated) == (terminated, truncated)
            assert step.info.success == (reward == 20)
            if terminated or truncated:
                break
        solved += step.info.success
    assert solved >= 6 and invalid > 10


def test_its_own_limit_truncates_and_does_not_terminate() -> None:
    for limit, moves in ((0, 200), (5, 5)):
        env = Gymnasium(id="Taxi-v4", actions=TAXI, max_moves=limit)
        env.reset(task(), 0)
        steps = [env.step("pickup") for _ in range(moves)]
        assert [step.truncated for step in steps] == [False] * (moves - 1) + [True]
        assert not any(step.terminated or step.info.success for step in steps)


def test_starts_belong_to_the_task_and_chance_to_the_episode() -> None:
    def play(map_seed: int, dynamics_seed: int) -> list[str]:
        env = Gymnasium(id="Blackjack-v1", actions=["stick", "hit"])
        texts = [env.reset(task(map_seed), dynamics_seed)]
        for _ in range(3):
            step = env.step("hit")
            texts.append(f"{step.observation} {step.reward}")
            if step.terminated:
                break
        return texts

    plays = {(m, d): play(m, d) for m, d in itertools.product(range(6), range(6))}
    assert plays == {(m, d): play(m, d) for m, d in plays}
    for map_seed in range(6):
        assert len({plays[map_seed, seed][0] for seed in range(6)}) == 1
        assert len({tuple(plays[map_seed, seed]) for seed in range(6)}) > 1
    assert len({plays[map_seed, 0][0] for map_seed in range(6)}) > 1
    assert all(len(texts[0].split()) == 3 for texts in plays.values())


def test_starts_are_split_by_their_content() -> None:
    starts: dict[str, set[str]] = {}
    env = Gymnasium(id="Taxi-v4")
    for split, map_seed in itertools.product(SPLITS, range(40)):
        text = env.reset(task(map_seed, split), 0)
        assert split_of(text) == split
        starts.setdefault(split, set()).add(text)
    assert sum(map(len, starts.values())) == len(set().union(*starts.values()))
    assert all(len(found) > 10 for found in starts.values())
    lonely = Gymnasium(id="CliffWalking-v1")  # always starts in the same cell
    with pytest.raises(ValueError, match="held_out"):
        for split in ("train", "test"):
            lonely.reset(task(0, split), 0)


def test_table_agrees_with_our_own_cliff() -> None:
    env, own = GymnasiumTable(**CLIFF), CliffWalking()
    env.reset(task(), 0)
    own.reset(task(), 0)
    assert isinstance(env, Rewindable) and isinstance(env, Measurable)
    assert env.solve() == own.solve()
    assert env.exact(13) == own.exact(13)
    assert env.exact(30).random_return == pytest.approx(own.exact(30).random_return)
    snapshot, state = env.snapshot(), env.state()
    first = [env.step(action) for action in env.solve()]
    assert first[-1].terminated and first[-1].info.success
    env.restore(snapshot)
    assert env.state() == state
    assert [env.step(action) for action in env.solve()] == first
    assert not isinstance(Gymnasium(id="Blackjack-v1"), Solvable)


def test_slippery_lake_repeats_after_a_restored_snapshot() -> None:
    params: dict[str, Any] = {"id": "FrozenLake-v1", "held_out": "seed", "kwargs": {"desc": None}}
    env = GymnasiumTable(**params)
    assert env.reset(task(), 5) == "0" and env.names == ["0", "1", "2", "3"]
    assert len(env.solve()) == 1 and env.instructions == "act in FrozenLake-v1 . actions 0 1 2 3 ."
    snapshot = env.snapshot()
    first = [env.step("2").observation for _ in range(3)]
    env.restore(snapshot)
    assert [env.step("2").observation for _ in range(3)] == first
    values = exact([task(**params)], 100)
    assert values is not None and values.optimal == values.optimal_return
    assert 0.6 < values.optimal < 0.83 and values.random < 0.03  # .8235 without any limit


def test_text_goes_in_and_out() -> None:
    env = Gymnasium(id="Echo-v0", instructions="say it back .")
    word = env.reset(task(), 1)
    assert env.instructions == "say it back ." and set(word) <= set("abc")
    assert not env.step("").info.valid and not env.step("no such letters!").info.valid
    wrong = env.step("abcabc")
    assert (wrong.terminated, wrong.info.success, wrong.reward) == (False, False, -1.0)
    right = env.step(word)
    assert right.terminated and right.info.success  # says `is_success`, whatever the reward
    env.reset(task(), 1)
    again = env.step("abcabc")
    assert again.observation == wrong.observation
    assert [env.step("abc")[2:4] for _ in range(2)] == [(False, False), (False, True)]
    env.reset(task(), 2)
    assert env.step("abcabc").observation != wrong.observation


def test_rendered_text_says_its_colours() -> None:
    env = Gymnasium(id="FrozenLake-v1", view="both", held_out="seed")
    assert env.reset(task(), 0).splitlines() == ["[red S]FFF", "FHFH", "FFFH", "HFFG", "0"]
    assert (
        uncoloured("|\x1b[34;1mR\x1b[0m:\x1b[43m \x1b[0m\x1b[1mx\x1b[0m") == "|(blue R):[yellow  ]x"
    )
    taxi = Gymnasium(id="Taxi-v4", actions=TAXI, view="render").reset(task(), 0)
    assert "(magenta " in taxi and "[yellow " in taxi and "\x1b" not in taxi


def test_every_discrete_space_has_words() -> None:
    space = spaces.Dict(
        {
            "cards": spaces.Tuple([spaces.Discrete(9), spaces.MultiBinary(2)]),
            "grid": spaces.MultiDiscrete([[3, 3], [3, 3]]),
            "said": spaces.Text(9),
        }
    )
    value = {
        "said": "hi",
        "cards": (np.int64(4), np.array([0, 1], np.int8)),
        "grid": np.array([[1, 2], [0, 1]]),
    }
    assert text_of(space, value) == "cards 4 0 1 grid 1 2 0 1 said hi"


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, "id"),
        ({"id": "Nowhere-v0"}, "id"),
        ({"id": "no_module:Nowhere-v0"}, "id"),
        ({"id": "CartPole-v1"}, "id"),
        ({"id": "Taxi-v4", "actions": ["north"]}, "actions"),
        ({"id": "Taxi-v4", "actions": ["a", "b", "c", "d", "e", "A"]}, "actions"),
        ({"id": "Echo-v0", "actions": ["a"]}, "actions"),
        ({"id": "Echo-v0", "view": "render"}, "view"),
        ({"id": "Taxi-v4", "kwargs": {"speed": 3}}, "kwargs"),
        ({"id": "Taxi-v4", "max_moves": -1}, "max_moves"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_bad_parameters_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvError, match=rf"^env\.params\.{named}:"):
        make_env("gymnasium", params)


def test_table_is_asked_for() -> None:
    with pytest.raises(EnvError, match=r"env\.params\.id: Blackjack-v1 keeps no table"):
        make_env("gymnasium_table", {"id": "Blackjack-v1"})


def test_blocking_environment_plays_under_a_virtual_clock() -> None:
    """A serial run's clock jumps while a thread works; the environment is called directly then."""
    asked = ticket(task(**CLIFF))

    async def play() -> bool:
        world = TimedEnvironment(asked, 0, 30.0, TicketProgress())
        await world.open()
        await world.call("reset", world.env.reset, asked.task, 0)
        for action in await world.call("solve", world.env.solve):
            step = await world.call("step", world.env.step, action, latency_s=1.0)
        await world.close()
        return step.info.success and asyncio.get_running_loop().time() >= 13

    assert virtually(play())
