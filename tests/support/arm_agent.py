"""An agent as a user would bring it, and a model that can already call its tool.

The agent is OpenAI's client in a loop; it knows of this project only what it returns.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from transformers.models.auto import AutoModelForCausalLM

from actors.endpoint.chat_form import decode
from actors.endpoint.outcome import AgentOutcome
from actors.endpoint.request import ChatMessage
from actors.endpoint.template import Template
from actors.endpoint.tools import ChatToolCall, assistant_text, canonical
from actors.envs.base import make_env
from actors.formats.chat import Chat
from evolver_async.model.policy import token_logprobs
from evolver_async.model.tiny import make_tiny, make_tokenizer
from evolver_async.schema import Task
from examples.arms import PULL

MOST_CALLS, LENGTH = 3, 192
BATCH, LR = 12, 1e-2
TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool.function.name }}<|end|>{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response>"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def shared_client() -> AsyncOpenAI:
    """One pool of connections for all episodes: to make one takes longer than a call."""
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


async def puller(*, base_url: str, api_key: str, task: Task, seed: int) -> AgentOutcome:
    """Plays one pull of the bandit by tool calls, and earns what the arm pays."""
    env = make_env(task.env, task.params)
    messages: list[Any] = [{"role": "user", "content": env.reset(task, seed)}]
    earned, success, over = 0.0, False, False
    client = shared_client().with_options(base_url=base_url, api_key=api_key)
    for _ in range(MOST_CALLS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[PULL]
        )
        said: Any = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or []:
            content = "over"
            if not over:
                step = env.step(str(json.loads(call.function.arguments).get("arm")))
                over, success = step.terminated, success or step.info.success
                earned += step.reward
                content = f"paid {step.reward:g}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not said.tool_calls:
            break
    return AgentOutcome(earned, success)


def make_policy(directory: Path, steps: int = 200) -> float:
    """A tiny model that pulls one arm or the other at random and then says so; its last loss."""
    sizes = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 64}
    make_tiny(directory, seed=0, max_length=LENGTH, **sizes)
    tokenizer = make_tokenizer(LENGTH)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    chat, rng = Chat(tokenizer), random.Random(0)
    template = Template(chat)
    assert template.native
    model = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss = torch.zeros(())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * (1 - step / steps)
        streams = [_stream(chat, template, rng) for _ in range(BATCH)]
        longest = max(len(tokens) for tokens, _ in streams)
        tokens_BT = torch.zeros(len(streams), longest, dtype=torch.long)
        real_BT, learnt_BT = torch.zeros_like(tokens_BT), torch.zeros_like(tokens_BT)
        for row, (tokens, learnt) in enumerate(streams):
            tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
            real_BT[row, : len(tokens)] = 1
            learnt_BT[row, : len(tokens)] = torch.tensor(learnt)
        logprobs_BT, _ = token_logprobs(model, tokens_BT, real_BT.bool())
        loss = -(logprobs_BT * learnt_BT).sum() / len(streams)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    return float(loss.detach())


def _stream(chat: Chat, template: Template, rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens of a whole episode, and 1 for those to be learnt."""
    arms = ["phoenix", "dragon"]
    rng.shuffle(arms)
    asked: list[Any] = [{"role": "user", "content": f"arms {arms[0]} {arms[1]}"}]
    arm, paid = rng.choice(arms), rng.choice(["0", "1", "0.15"])
    call = ChatToolCall("pull", canonical({"arm": arm}))
    assert chat.end_of_turn is not None
    request = decode(json.dumps({"messages": asked, "tools": [PULL]}).encode())
    tokens = template.first(request)
    learnt = [0] * len(tokens)
    messages = ChatMessage("assistant", "", (call,)), ChatMessage("tool", f"paid {paid}")
    following = request._replace(messages=(*request.messages, *messages))
    between = template.next(following, len(request.messages) + 1, ("",), chat.end_of_turn)
    for said, after in ((assistant_text("", (call,)), between), (f" {paid}", [])):
        sampled = [*chat.tokens_of(said), chat.end_of_turn]
        tokens += sampled + after
        learnt += [1] * len(sampled) + [0] * len(after)
    return tokens, learnt
