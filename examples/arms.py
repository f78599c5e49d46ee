"""Agent with OpenAI's client: it pulls one of two arms with a tool and is paid for it."""

import json
import random
from functools import cache
from typing import Any

from openai import AsyncOpenAI

from actors.endpoint.outcome import AgentOutcome
from evolver_async.schema import Task

MOST_CALLS = 3
CHANCES = {"phoenix": 0.2, "dragon": 0.9}
PULL: Any = {
    "type": "function",
    "function": {
        "name": "pull",
        "description": "pull an arm",
        "parameters": {"type": "object", "properties": {"arm": {"type": "string"}}},
    },
}


@cache
def shared_client() -> AsyncOpenAI:
    """Make one client for all episodes, because a new client takes longer than a call."""
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


async def play(*, base_url: str, api_key: str, task: Task, seed: int) -> AgentOutcome:
    """Play one episode. `seed` determines all its chance."""
    rng = random.Random(seed)
    client = shared_client().with_options(base_url=base_url, api_key=api_key)
    arms = rng.sample(sorted(CHANCES), 2)
    messages: list[Any] = [{"role": "user", "content": f"arms {arms[0]} {arms[1]}"}]
    paid: float | None = None
    for _ in range(MOST_CALLS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[PULL]
        )
        message: Any = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            content = "over"
            if paid is None:
                chance = CHANCES.get(str(json.loads(call.function.arguments).get("arm")), 0.0)
                paid = float(rng.random() < chance)
                content = f"paid {paid:g}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return AgentOutcome(reward=paid or 0.0, success=paid == 1.0)
