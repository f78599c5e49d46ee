"""A game for two as an agent of one's own: both play a card at once, and the higher one wins.

Of one player the word for the higher card is `left`, of the other `right`: who plays what the other
does loses half of the time. The rewards of the two always cancel out.
"""

from typing import Any

import httpx

from actors.endpoint.outcome import AgentOutcome
from evolver_async.schema import Task

HIGH = {"even": "left", "odd": "right"}
CARDS = {"type": "json_schema", "json_schema": {"schema": {"enum": ["left", "right"]}}}


async def play(*, base_url: str, api_key: str, task: Task, seed: int) -> AgentOutcome:
    """Play one game."""
    high: dict[str, float] = {}
    headers = {"x-api-key": api_key}
    # plain HTTP: reading the certificates of every authority takes longer than a game
    settings: dict[str, Any] = {"headers": headers, "timeout": None, "verify": False}
    async with httpx.AsyncClient(base_url=base_url, **settings) as client:
        for player, card in HIGH.items():
            asked = [{"role": "user", "content": f"you are {player} , left or right"}]
            body: dict[str, Any] = {"model": player, "messages": asked, "response_format": CARDS}
            answer = (await client.post("chat/completions", json=body)).raise_for_status()
            said = answer.json()["choices"][0]["message"]["content"]
            high[player] = float(said == f'"{card}"')
    lead = high["even"] - high["odd"]
    return AgentOutcome({"even": lead, "odd": -lead}, all(high.values()), high)
