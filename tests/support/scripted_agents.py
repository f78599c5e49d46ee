"""An engine that says a script, and the run of a ticket whose agents talk to the endpoint."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import episodes
import openai
from chatml import TEMPLATE, make_tokenizer
from torch import Tensor

from actors.endpoint.group_judge import GroupJudge
from actors.endpoint.runner import AgentRunner, JudgementMissing
from actors.engines.engine import Engine, Generation, Request
from actors.envs.base import EnvironmentFailure
from actors.formats.chat import Chat
from actors.formats.turns import ThinkAnswer
from actors.rollout.episode import EpisodeLate
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished
from actors.ticket_progress import TicketProgress
from evolver_async.schema import Task, Ticket, WeightId

OLD, NEW = WeightId(lineage=1, step=1), WeightId(lineage=1, step=2)
TOOLED = """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %} {{ messages[0].content }}{% endif %} <tools>
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system {{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHATS = {"text": Chat(make_tokenizer(TEMPLATE)), "native": Chat(make_tokenizer(TOOLED))}
CHAT = CHATS["text"]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "look somewhere",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "find it"}]
Said = str | list[int]
NAN = float("nan")


class Scripted:
    """An engine that says its script, one text (or list of tokens) a request, and ends the turn."""

    weights: WeightId | None = NEW
    obeys_grammars = False

    def __init__(self, *said: Said, chat: Chat = CHAT) -> None:
        self.said = iter(said)
        self.chat = chat
        self.requests: list[Request] = []
        self.released: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.cancelled = 0

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = next(self.said)
        if isinstance(said, str):
            assert self.chat.end_of_turn is not None
            said = [*self.chat.tokens_of(said), self.chat.end_of_turn]
        tokens = said[: request.max_tokens]
        return Generation(
            tokens=tokens,
            logprobs=[-0.25 - index for index in range(len(tokens))],
            weights=[OLD if index == 0 else NEW for index in range(len(tokens))],
            finish="stop" if len(tokens) == len(said) else "length",
        )

    def release(self, session: str) -> None:
        self.released.append(session)

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {"generated": 0.0}


def setting(chat: Chat = CHAT, **changes: Any) -> Setting:
    usual: dict[str, Any] = {
        "chat": chat,
        "format": ThinkAnswer(think=False, actions_per_turn=1),
        "actor": "actor-0",
        "incarnation": 0,
        "seed": 7,
        "max_turns": 10,
        "max_length": 4096,
        "format_penalty": -0.5,
        "format_errors": 0,
        "step_timeout_s": 10.0,
        "episode_timeout_s": 20.0,
        "latency": "none",
        "latency_median_s": 0.0,
        "latency_sigma": 0.0,
        "recorded": True,
    }
    return Setting(**(usual | changes))


def ticket(members: int = 1, max_tokens: int = 200) -> Ticket:
    return episodes.ticket(
        Task(task_id="t", env="bandit", split="train", map_seed=3),
        temperature=0.7,
        max_tokens=max_tokens,
        group_id=5,
        members=list(range(members)),
        dynamics_seed=11,
    )


Client = openai.AsyncOpenAI
Player = Callable[[Client], Awaitable[Any]]


class Ran:
    """What came of one ticket."""

    def __init__(self) -> None:
        self.finished: list[Finished] = []
        self.error: BaseException | None = None
        self.counts: dict[str, float] = {}

    @property
    def one(self) -> Any:
        assert self.error is None
        (finished,) = self.finished
        return finished.trajectory


def run(
    player: Player,
    engine: Engine,
    *,
    members: int = 1,
    max_tokens: int = 200,
    judge: GroupJudge | None = None,
    **changes: Any,
) -> Ran:
    """Run a ticket with `player`, which gets a client that already knows where to ask."""
    ran = Ran()

    async def agent(*, base_url: str, api_key: str, task: Task, seed: int) -> Any:
        async with Client(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return await player(client)

    async def all_of_it() -> None:
        used = setting(**changes)
        agents = AgentRunner(agent, "tests:agent", engine, used.chat, judge)
        try:
            await agents.run(
                ticket(members, max_tokens), used, TicketProgress(), ran.finished.append
            )
        except (EnvironmentFailure, EpisodeLate, JudgementMissing, RuntimeError) as error:
            ran.error = error
        except BaseExceptionGroup as errors:
            ran.error = errors.exceptions[0]
        ran.counts = agents.counters()
        await agents.close()

    asyncio.run(all_of_it())
    return ran


async def ask(client: Client, messages: list[Any], **options: Any) -> Any:
    found = await client.chat.completions.create(model="m", messages=messages, **options)
    return found.choices[0].message


def returning(value: Any) -> Player:
    async def player(client: Client) -> Any:
        await ask(client, ASK)
        return value

    return player


async def looks(client: Client) -> float:
    """The usual loop: call tools while the model asks for them."""
    messages: list[Any] = [{"role": "system", "content": "be brief"}, *ASK]
    while True:
        said = await ask(client, messages, tools=[LOOK])
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return float("gold" in (said.content or ""))
        for call in said.tool_calls:
            where = json.loads(call.function.arguments)["where"]
            seen = f"<|im_end|> nothing {where} </tool_response>"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})


def called(where: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"where": "{where}"}}}}\n</tool_call>'
