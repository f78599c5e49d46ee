"""What tests of Self-Questioning share: explorers, tickets, and the way from a ticket to tasks."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from chatml import make_tokenizer
from openai_server import OpenAIServer
from torch import Tensor

from actors.engines.engine import Generation, Request
from actors.formats.chat import Chat
from actors.questioning.questioner import Questioner, make_questioner
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Finished
from actors.ticket_progress import TicketProgress
from evolver_async.config import Config, LlmConfig, QuestioningConfig, StageConfig
from evolver_async.randomness import key
from evolver_async.schema import Sampling, Task, Ticket, WeightId

CHAT = Chat(make_tokenizer())
HEAD = WeightId(lineage=1, step=0)
MOVES = ("left", "down", "right", "up")


class Wanderer:
    """An engine that writes random moves."""

    weights: WeightId | None = HEAD

    def __init__(
        self, moves: tuple[str, ...] = MOVES, written: str = " {}</answer>", chat: Chat = CHAT
    ) -> None:
        self.moves, self.written, self.chat = moves, written, chat
        self.texts: list[str] = []
        self.temperatures: set[float] = set()

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(0)
        self.texts.append(self.chat.text_of(request.tokens))
        self.temperatures.add(request.temperature)
        move = random.Random(request.seed).choice(self.moves)
        tokens = self.chat.tokens_of(self.written.replace("{}", move))
        return Generation(
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            weights=[HEAD] * len(tokens),
            finish="stop",
        )

    def release(self, session: str) -> None: ...

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}


def config_of(
    env: str = "frozen_lake", params: dict[str, Any] | None = None, **keys: Any
) -> Config:
    config = Config(stages=[StageConfig(steps=1)])
    config.env.name, config.env.params = env, params or {}
    config.policy.max_length = 8192
    config.rollout.max_tokens = 64
    config.questioning = QuestioningConfig(**{"kind": "goals", "max_turns": 12, **keys})
    return config


def llm(server: OpenAIServer, **keys: Any) -> LlmConfig:
    return LlmConfig(**{"url": server.url, "model": "m", "retries": 0, "breaker_s": 0.05, **keys})


def explore_ticket(
    config: Config, map_seed: int = 0, members: int = 4, group_id: int = 0
) -> Ticket:
    task = Task(
        task_id=f"{config.env.name}/train/{map_seed}",
        env=config.env.name,
        split="train",
        map_seed=map_seed,
        params=config.env.params,
    )
    return Ticket(
        group_id=group_id,
        task=task,
        kind="explore",
        stage=0,
        members=list(range(members)),
        guided=[],
        dynamics_seed=key(7, group_id),
        attempt=0,
        weights=HEAD,
        lease_s=30.0,
        sampling=Sampling(temperature=1.5, max_tokens=config.rollout.max_tokens),
    )


async def explored(
    questioner: Questioner,
    config: Config,
    ticket: Ticket,
    engine: Wanderer,
    chat: Chat = CHAT,
) -> list[Finished]:
    finished: list[Finished] = []
    setting = setting_of(config, chat, "actor-0", 0)
    await questioner.explore(ticket, setting, engine, TicketProgress(), finished.append)
    return finished


def run(
    config: Config, tickets: list[Ticket], engine: Wanderer | None = None, chat: Chat = CHAT
) -> tuple[list[list[Task]], dict[str, float]]:
    """The tasks that each ticket leads to, one after the other, and what was counted."""

    async def go() -> tuple[list[list[Task]], dict[str, float]]:
        questioner = make_questioner(config)
        assert questioner is not None
        found = []
        for ticket in tickets:
            finished = await explored(questioner, config, ticket, engine or Wanderer(), chat)
            assert len(finished) == len(ticket.members)
            found.append(await questioner.questions(ticket, finished, TicketProgress()))
        counted = questioner.counters()
        await questioner.close()
        return found, counted

    return asyncio.run(go())


def proposal(query: str, actions: Sequence[Any], confidence: float = 0.9) -> dict[str, Any]:
    return {"query": query, "confidence": confidence, "action_sequence": [*actions]}


def verdict(score: float, achieved: bool | None = None, relevant: bool = True) -> str:
    achieved = score >= 60 if achieved is None else achieved
    return json.dumps({"relevant": relevant, "achieved": achieved, "score": score})
