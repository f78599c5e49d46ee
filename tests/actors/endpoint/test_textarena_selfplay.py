"""Self-play of real games of textarena at the endpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_agents import CHAT, Client, Ran, Scripted, run

from actors.adapters.textarena_env import PLAYERS, TextArena
from actors.checks.config import check
from actors.endpoint.textarena_selfplay import play
from actors.envs.base import make_env
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.schema import Role, Task, Trajectory

pytest.importorskip("textarena")

RECIPE = Path(__file__).parents[3] / "configs" / "self_play.yaml"
NIM: dict[str, Any] = {"id": "Nim-v0", "kwargs": {"piles": [5]}, "seats": 2, "held_out": "seed"}


class Obedient(Scripted):
    """A script that obeys every grammar."""

    obeys_grammars = True


def played(engine: Scripted, **params: Any) -> Ran:
    task = Task(task_id="t", env="textarena", split="train", map_seed=3, params=NIM | params)

    async def player(client: Client) -> Any:
        key = client.api_key
        return await play(base_url=str(client.base_url), api_key=key, task=task, seed=0)

    return run(player, engine, players=PLAYERS, max_length=4096, format_penalty=0.0)


def outcomes(trajectory: Trajectory) -> dict[str, tuple[float, list[int]]]:
    return {one.name: (one.reward, one.turns) for one in trajectory.players}


def test_both_seats_play_and_each_reads_what_the_game_tells_it() -> None:
    trajectory = played(Scripted("I take [0 1]", "0 3", "0 1")).one
    first, second = PLAYERS
    assert outcomes(trajectory) == {first: (1.0, [0, 2]), second: (-1.0, [1])}
    assert (trajectory.reward, trajectory.success) == (0.0, True)
    assert trajectory.metrics == {"moves": 3.0, "refused": 0.0}
    texts = []
    for sequence, name in zip(trajectory.sequences, PLAYERS, strict=True):
        assert trajectory.player_of(sequence) == name
        texts.append(CHAT.text_of(sequence.tokens.tolist()))
    assert "to Nim, Player 0!" in texts[0] and "to Nim, Player 1!" in texts[1]
    assert texts[0].count("Welcome") == texts[1].count("Welcome") == 1
    assert "Player 1 removes 3" in texts[0] and "Player 0 removes 1" in texts[1]
    assert "I take" in texts[0] and "I take" in texts[1], "moves are public in this game"


def test_a_player_that_does_not_write_a_move_loses() -> None:
    trajectory = played(Scripted("0 2", "what?", "no")).one
    first, second = PLAYERS
    assert outcomes(trajectory) == {first: (1.0, [0]), second: (-1.0, [1, 2])}
    assert not trajectory.success and trajectory.metrics["refused"] == 2.0


def test_moves_are_structured_output() -> None:
    moves = ["0 1", "0 3"]
    trajectory = played(Obedient('"0 1"', '"0 3"', '"0 1"'), moves=moves).one
    assert [reward for reward, _ in outcomes(trajectory).values()] == [1.0, -1.0]
    (grammar,) = trajectory.grammars
    assert grammar.turns == [0, 1, 2] and json.dumps(moves) in grammar.text
    said = [
        CHAT.text_of(one.tokens[one.roles == Role.ACTION].tolist()) for one in trajectory.sequences
    ]
    assert said == ['"0 1"<|im_end|>"0 1"', '"0 3"']


def test_the_game_has_its_own_chance() -> None:
    def deal(seed: int) -> list[str]:
        env = make_env("textarena", {"id": "KuhnPoker-v0-short", "seats": 2, "held_out": "seed"})
        assert isinstance(env, TextArena)
        task = Task(task_id="t", env="textarena", split="train", map_seed=seed)
        seen = [env.reset(task, 0), str(env.seat)]
        env.act("check")
        return [*seen, env.news(), str(env.seat)]

    assert deal(1) == deal(1)
    assert len({tuple(deal(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["rollout.players=[a,b]"], "rollout.players"),
        (["rollout.agent=tests.support.arm_agent:puller"], "rollout.agent"),
        (["env.params.seats=1", "env.params.moves=null"], "env.params.id"),
        (["env.params.seats=1"], "moves"),
        (["env.params.seats=3"], "seats"),
        (["env.params.id=2048-v0", "env.params.kwargs=null"], "env.params.id"),
    ],
)
def test_a_recipe_that_cannot_be_played_is_named(options: list[str], named: str) -> None:
    check(load(RECIPE, []))
    with pytest.raises((ConfigError, ValueError), match=named):
        check(load(RECIPE, options))
