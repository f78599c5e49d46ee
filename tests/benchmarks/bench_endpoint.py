"""What the endpoint adds to a call, beyond the engine's own work.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_endpoint.py [profile]

`AGENTS` agents at once, a third of them in each API form, play conversations with tools of `TURNS`
calls, against an engine that answers at once. They start and finish their episodes by HTTP from
another process. Between two calls an agent pauses, for a mean of `PAUSE_S`: the time in which an
engine would generate and an agent would work. An answer's time is measured where the agent is: from
the first byte written to the last one read, the wait behind other calls and the ends of other
episodes included. Prints it by API form and by length of the conversation, with the processor time
of this process a call, which is the server's alone; fails over `REQUIRED` ms.

    profile    print where this process spends its time
"""

import asyncio
import cProfile
import json
import math
import multiprocessing
import os
import pstats
import random
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from actors.endpoint.runner import AgentRunner
from actors.engines.engine import Generation, Request
from actors.formats.chat import Chat
from actors.formats.turns import ThinkAnswer
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished
from actors.ticket_progress import TicketProgress
from evolver_async.config.sections.rollout import EndpointConfig
from evolver_async.model.tiny import make_tokenizer
from evolver_async.process.garbage import collect_rarely
from evolver_async.schema import Sampling, Task, Ticket, WeightId

REQUIRED = {"processor": 3.0, "p99": 10.0}  # ms a call, at most
AGENTS, TURNS, EPISODES, PAUSE_S = 100, 10, 2, 1.0
LENGTHS = (20, 200, 1000)  # words of what a tool returns
FORMS = ("chat/completions", "responses", "messages")
KEY, VARIABLE = "key-of-the-benchmark", "BENCH_ENDPOINT_KEY"
CHAT = Chat(make_tokenizer(1 << 16))
WEIGHTS = WeightId(lineage=1, step=0)
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "left"}}\n</tool_call>'
SAID = [*CHAT.tokens_of(CALL), *filter(None, [CHAT.end_of_turn])]
SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}}}
LOOK = {"name": "look", "description": "look somewhere"}
ASKED = {"role": "user", "content": "walk the frozen lake"}


class Parrot:
    """An engine that says the same call of a tool, at once."""

    weights: WeightId | None = WEIGHTS
    obeys_grammars = False

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


class Connection:
    """A kept connection with plain HTTP on it."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def post(self, path: str, key: str, value: Any) -> tuple[Any, float]:
        """The answer, and the seconds that it took."""
        body = json.dumps(value).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        began = time.perf_counter()
        self.writer.write(request)
        answered = await self.reader.readuntil(b"\r\n\r\n")
        length = int(answered.lower().partition(b"content-length:")[2].split()[0])
        content = await self.reader.readexactly(length)
        took_s = time.perf_counter() - began
        assert answered.startswith(b"HTTP/1.1 200"), content
        return json.loads(content), took_s

    async def open(self) -> None:
        while True:
            with suppress(ConnectionRefusedError):  # it does not listen yet
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
                return
            await asyncio.sleep(0.05)


def continued(form: str, answer: Any, seen: str) -> list[Any]:
    """What an answer and the result of its call add to a conversation."""
    if form == "chat/completions":
        said = answer["choices"][0]["message"]
        (call,) = said["tool_calls"]
        return [said, {"role": "tool", "tool_call_id": call["id"], "content": seen}]
    if form == "responses":
        *_, call = answer["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": seen}
        return [*answer["output"], output]
    *_, call = answer["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": seen}
    said = {"role": "assistant", "content": answer["content"]}
    return [said, {"role": "user", "content": [result]}]


def body_of(form: str, messages: list[Any]) -> dict[str, Any]:
    if form == "responses":
        tool = {"type": "function", **LOOK, "parameters": SCHEMA, "strict": False}
        return {"model": "m", "input": messages, "tools": [tool]}
    if form == "messages":
        tools = [{**LOOK, "input_schema": SCHEMA}]
        return {"model": "m", "messages": messages, "tools": tools, "max_tokens": 64}
    tools = [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}]
    return {"model": "m", "messages": messages, "tools": tools}


async def agent(port: int, number: int, words: int, took: dict[str, list[float]]) -> None:
    form, rng = FORMS[number % len(FORMS)], random.Random(number)
    seen = " ".join(["left right"] * (words // 2))
    connection = Connection(port)
    await connection.open()
    for _ in range(EPISODES):
        episode, _ = await connection.post("/episodes/start", KEY, {})
        path = f"{urlsplit(episode['base_url']).path}/{form}"
        messages: list[Any] = [ASKED]
        for _ in range(TURNS):
            await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
            body = body_of(form, messages)
            answer, took_s = await connection.post(path, episode["api_key"], body)
            took[form].append(took_s)
            messages += continued(form, answer, seen)
        await connection.post(f"/episodes/{episode['episode']}/finish", KEY, {"reward": 1})
    connection.writer.close()


def agents(port: int, words: int, results: Any) -> None:
    """All agents; in a process of their own."""
    collect_rarely()
    took: dict[str, list[float]] = {form: [] for form in FORMS}

    async def all_of_them() -> None:
        await asyncio.gather(*(agent(port, number, words, took) for number in range(AGENTS)))

    asyncio.run(all_of_them())
    results.send(took)


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
        members=[0],
        guided=[],
        dynamics_seed=5,
        attempt=0,
        weights=None,
        lease_s=30.0,
        sampling=Sampling(temperature=1.0, max_tokens=64),
    )


async def measure(words: int) -> tuple[float, dict[str, list[float]]]:
    """Milliseconds of processor time a call, and the seconds of the calls by API form."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    endpoint = EndpointConfig(port=port, key_env=VARIABLE)
    runner = AgentRunner(None, "bench:agent", Parrot(), CHAT, settings=endpoint)
    finished: list[Finished] = []
    receiving, sending = multiprocessing.Pipe(duplex=False)
    playing = multiprocessing.get_context("fork").Process(
        target=agents, args=(port, words, sending)
    )
    playing.start()
    began = time.process_time()

    async def lane(number: int) -> None:
        for episode in range(EPISODES):
            group_id = number * EPISODES + episode
            await runner.run(ticket(group_id), setting(), TicketProgress(), finished.append)

    await asyncio.gather(*map(lane, range(AGENTS)))
    processor_ms = 1e3 * (time.process_time() - began) / (AGENTS * EPISODES * TURNS)
    took = await asyncio.to_thread(receiving.recv)
    playing.join()
    assert all(len(one.trajectory.sequences) == 1 for one in finished)
    assert len(finished) == AGENTS * EPISODES
    await runner.close()
    return processor_ms, took


def quantile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return 1e3 * sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> int:
    os.environ[VARIABLE] = KEY
    collect_rarely()
    pace = f"{AGENTS / PAUSE_S:g} calls a second at most"
    print(f"{os.cpu_count()} cores; {AGENTS} agents, {TURNS} calls a conversation, {pace}")
    worst = dict.fromkeys(REQUIRED, 0.0)
    for words in LENGTHS:
        processor_ms, took = asyncio.run(measure(words))
        every = [one for form in took.values() for one in form]
        p99 = quantile(every, 0.99)
        worst = {
            "processor": max(worst["processor"], processor_ms),
            "p99": max(worst["p99"], p99),
        }
        forms = ", ".join(f"{form} {quantile(one, 0.99):.1f}" for form, one in took.items())
        print(
            f"tool results of {words:4d} words: {processor_ms:.2f} ms of processor a call;"
            f" answered in {quantile(every, 0.5):.1f} ms, p99 {p99:.1f} ({forms})"
        )
    print(", ".join(f"{name} {worst[name]:.2f} ms, at most {REQUIRED[name]:g}" for name in worst))
    return int(any(worst[name] > REQUIRED[name] for name in REQUIRED))


if __name__ == "__main__":
    if sys.argv[1:] == ["profile"]:
        with cProfile.Profile() as profile:
            code = main()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        sys.exit(code)
    sys.exit(main())
