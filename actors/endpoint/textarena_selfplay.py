"""Agent that plays a textarena game for two against itself.

`rollout.agent=actors.endpoint.textarena_selfplay:play` plays env.name=textarena with seats 2, for
rollout.players [player_0, player_1]. Each seat has a conversation of its own, in which it
reads what the game tells this seat alone. The game's rewards are the players'; its success is an
end by the rules, without a move that the game refused.
"""

import asyncio
from typing import Any

import httpx

from actors.adapters.textarena_env import PLAYERS, TextArena
from actors.endpoint.outcome import AgentOutcome
from actors.envs.base import EnvError, make_env
from evolver_async.files import parsed
from evolver_async.schema import Task


async def play(*, base_url: str, api_key: str, task: Task, seed: int) -> AgentOutcome:
    """Play one game. Raise EnvError for an environment that is no game for two, RuntimeError for
    a call that the endpoint refuses."""
    game = make_env(task.env, task.params)
    if not isinstance(game, TextArena) or game.seats != 2:
        raise EnvError("env.params.seats: this agent plays env.name=textarena with 2")
    told = await asyncio.to_thread(game.reset, task, seed)
    messages: list[list[dict[str, str]]] = [[] for _ in PLAYERS]
    moves, refused, over = 0, 0, False
    headers = {"x-api-key": api_key}
    # No certificates are read: the endpoint speaks HTTP. Its own limits end a call.
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, verify=False, trust_env=False, timeout=None
    ) as client:
        while not over:
            seat = game.seat
            messages[seat].append({"role": "user", "content": told})
            said = await _ask(client, PLAYERS[seat], messages[seat], game.moves)
            messages[seat].append({"role": "assistant", "content": said})
            over = await asyncio.to_thread(game.act, _move(said, game.moves))
            moves, refused = moves + 1, refused + game.refused
            told = await asyncio.to_thread(game.news)
    rewards = dict(zip(PLAYERS, game.rewards, strict=True))
    metrics = {"moves": float(moves), "refused": float(refused)}
    return AgentOutcome(rewards, not refused, metrics)


async def _ask(
    client: httpx.AsyncClient, player: str, messages: list[Any], moves: list[str] | None
) -> str:
    """Return a player's reply; one of `moves`, in JSON, if they are given."""
    body: dict[str, Any] = {"model": player, "messages": messages}
    if moves is not None:
        schema = {"name": "move", "schema": {"enum": moves}}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    answer = await client.post("chat/completions", json=body)
    if answer.is_error:
        raise RuntimeError(f"a call of {player} is refused: {answer.text[:500]}")
    return parsed(answer.content)["choices"][0]["message"]["content"] or ""


def _move(said: str, moves: list[str] | None) -> str:
    """Return the move of a reply; as it stands if it is no JSON, as of one that was cut."""
    if moves is None:
        return said
    try:
        return str(parsed(said))
    except ValueError:
        return said
