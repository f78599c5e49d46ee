"""What the endpoint costs a call, beyond the engine's own work.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_endpoint.py

Conversations with tools of `TURNS` calls, side by side as in an actor, against an engine that
answers at once. The clients are other processes, which write plain HTTP over kept connections, so
that this process's processor time is the server's alone: HTTP, decoding, templates, tokens,
recording, the answer, and making the trajectory at the end. Prints it per call, by length of the
conversation, and fails over `REQUIRED` ms.
"""

import asyncio
import http.client
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


from actors.endpoint.runner import AgentRunner
from actors.engines.base import Generation, Request
from actors.formats.chat import Chat
from actors.formats.turns import ThinkAnswer
from actors.progress import TicketProgress
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import Sampling, Task, Ticket, WeightId

REQUIRED = 3.0  # ms of processor time a call, at most
TURNS, MEMBERS, ROUNDS = 10, 8, 5
LENGTHS = (20, 200, 1000)  # words of what a tool returns
CHAT = Chat(make_tokenizer(1 << 16))
WEIGHTS = WeightId(lineage=1, step=0)
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "left"}}\n</tool_call>'
SAID = [*CHAT.tokens_of(CALL), *filter(None, [CHAT.end_of_turn])]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "look somewhere",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}


class Parrot:
    """An engine that says the same call of a tool, at once."""

    weights: WeightId | None = WEIGHTS

    async def generate(self, request: Request) -> Generation:
        count = len(SAID)
        return Generation(
            tokens=list(SAID), logprobs=[-1.0] * count, weights=[WEIGHTS] * count, finish="stop"
        )

    def release(self, session: str) -> None: ...

    async def score(self, tokens: list[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    async def close(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}


def converse(base_url: str, words: int) -> float:
    """One conversation; in a process of its own."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.netloc)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "walk the frozen lake"}]
    for _ in range(TURNS):
        body = json.dumps({"model": "m", "messages": messages, "tools": [LOOK]})
        connection.request("POST", f"{url.path}/chat/completions", body)
        answer = json.loads(connection.getresponse().read())
        said = answer["choices"][0]["message"]
        messages.append(said)
        for call in said["tool_calls"]:
            seen = " ".join(["left right"] * (words // 2))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
    connection.close()
    return 1.0


def setting() -> Setting:
    return Setting(
        chat=CHAT,
        format=ThinkAnswer(think=False, actions_per_turn=1),
        actor="bench",
        incarnation=0,
        seed=0,
        max_turns=TURNS,
        max_length=1 << 16,
        format_penalty=-0.1,
        format_errors=0,
        step_timeout_s=10.0,
        episode_timeout_s=120.0,
        latency="none",
        latency_median_s=0.0,
        latency_sigma=0.0,
    )


def ticket(group_id: int) -> Ticket:
    return Ticket(
        group_id=group_id,
        task=Task(task_id=str(group_id), env="frozen_lake", split="train", map_seed=group_id),
        kind="rollout",
        stage=0,
        members=list(range(MEMBERS)),
        guided=[],
        dynamics_seed=5,
        attempt=0,
        weights=None,
        lease_s=30.0,
        sampling=Sampling(temperature=1.0, max_tokens=64),
    )


async def measure(words: int, pool: Any) -> tuple[float, float]:
    """Milliseconds of processor time and of wall time a call."""
    loop = asyncio.get_running_loop()

    async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> float:
        done: asyncio.Future[float] = loop.create_future()
        pool.apply_async(
            converse,
            (base_url, words),
            callback=lambda value: loop.call_soon_threadsafe(done.set_result, value),
            error_callback=lambda error: loop.call_soon_threadsafe(done.set_exception, error),
        )
        return await done

    agents = AgentRunner(agent, "bench:agent", Parrot(), CHAT)
    finished: list[Finished] = []
    await agents.run(ticket(0), setting(), TicketProgress(), finished.append)  # warm
    began_cpu, began = time.process_time(), time.perf_counter()
    for number in range(1, ROUNDS + 1):
        await agents.run(ticket(number), setting(), TicketProgress(), finished.append)
    calls = ROUNDS * MEMBERS * TURNS
    cpu_ms = 1e3 * (time.process_time() - began_cpu) / calls
    wall_ms = 1e3 * (time.perf_counter() - began) / calls
    assert all(len(one.trajectory.sequences) == 1 for one in finished)
    await agents.close()
    return cpu_ms, wall_ms


def main() -> int:
    print(f"{os.cpu_count()} cores; {TURNS} calls a conversation, {MEMBERS} side by side")
    worst = 0.0
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for words in LENGTHS:
            cpu_ms, wall_ms = asyncio.run(measure(words, pool))
            worst = max(worst, cpu_ms)
            print(f"tool results of {words:4d} words: {cpu_ms:.2f} ms a call ({wall_ms:.2f} wall)")
    print(f"at most {worst:.2f} ms a call, required {REQUIRED:g}")
    return 0 if worst <= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
