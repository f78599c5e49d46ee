"""Explorations: long episodes without a task, by the policy or by a language model.

The policy samples at the ticket's temperature. A language model first explores broadly and sees all
steps; then it explores in depth and sees only the last ones.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import msgspec

from actors.engines.base import Generation
from actors.envs.base import env_class, makes_goals
from actors.formats.chat import Chat
from actors.formats.turns import TurnFormat
from actors.llm.client import Unavailable
from actors.llm.json_client import JsonClient, as_json, decode_json, step_records
from actors.progress import TicketProgress
from actors.questioning.prompts import BREADTH, DEPTH, EXPLORE
from actors.rollout.conversation import plain_instructions
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode_config import Setting
from actors.rollout.policy import EpisodePolicy
from evolver_async.config import QuestioningConfig
from evolver_async.schema import Task, Ticket

ACTION_CHARS = 200


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer of a language model with its next action."""

    action: Annotated[str, msgspec.Meta(max_length=ACTION_CHARS, pattern=r"^[^\n]*$")]


def has_goals(env: str) -> bool:
    """Return True if states of the environment can be goals. Raise EnvError if it is unknown."""
    return makes_goals(env_class(env))


def unbound(task: Task) -> Task:
    """Remove the goal from a task if the environment supports that."""
    if not has_goals(task.env):
        return task
    return msgspec.structs.replace(task, params=task.params | {"free": True})


def exploring(
    ticket: Ticket, setting: Setting, config: QuestioningConfig
) -> tuple[Ticket, Setting]:
    """Derive ticket and setting of an exploration's episodes.

    With a language model the context is `full` and the first unreadable turn ends the episode.
    """
    setting = replace(
        setting,
        max_turns=config.max_turns,
        context="full" if config.kind == "llm" else setting.context,
        recorded=True,
        scored=0.0,
        format_errors=1 if config.kind == "llm" else setting.format_errors,
    )
    return msgspec.structs.replace(ticket, task=unbound(ticket.task)), setting


@dataclass(eq=False)
class Explorer(EpisodePolicy):
    """Policy that lets a language model act in one exploration, in the turn format.

    Without an answer it waits once, for `pause_s`, and asks again; without a second one it writes
    an empty turn, which ends the episode. Each of these is progress of the ticket: none takes
    longer than a question. `profile`: describes the environment; without it the environment's
    instructions after `reset` do.
    """

    kind: ClassVar[Literal["learned", "scripted"]] = "scripted"

    client: JsonClient
    profile: str
    config: QuestioningConfig
    chat: Chat
    format: TurnFormat
    max_tokens: int
    pause_s: float
    progress: TicketProgress
    _read: int = 0  # tokens of the context that were processed
    _described: str = ""
    _beginning: str = ""
    _steps: list[tuple[str, str]] = field(default_factory=list)  # action, observation after it
    _action: str = ""

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        text = self.chat.said(context[self._read :], self.format.prefix)
        if turn == 0:
            worded = plain_instructions, world.env
            self._described = self.profile or await world.call("instructions", *worded)
            self._beginning = text
        else:
            self._steps.append((self._action, text))
        self._action = await self._choose(turn) or ""
        tokens: list[int] = []
        if self._action:
            text = self.format.render_actions([self._action])
            tokens = self.chat.tokens_of(text)[: self.max_tokens]
        self._read = len(context) + len(tokens)
        return Generation(tokens=tokens, logprobs=[0.0] * len(tokens), weights=[], finish="stop")

    def question(self, turn: int) -> str:
        """Write the question of a turn."""
        broad = turn < self.config.breadth
        steps = self._steps if broad else self._steps[-self.config.depth :]
        record = {"beginning": self._beginning, "steps": step_records(steps)}
        if not broad and len(steps) < len(self._steps):
            del record["beginning"]  # it does not precede these steps directly
        return f"{self._described}\n\n{BREADTH if broad else DEPTH}\n\n{as_json(record)}"

    async def _choose(self, turn: int) -> str | None:
        temperature = self.config.temperature
        for pause_s in (self.pause_s, 0.0):
            try:
                question = self.question(turn)
                choice = await self.client.ask(EXPLORE, question, parse_choice, temperature)
            except Unavailable:
                self.progress.count += 1
                await asyncio.sleep(pause_s)
                self.progress.count += 1
            else:
                return None if choice is None else choice.action.strip()
        return None


def parse_choice(answer: str) -> Choice:
    """Parse one action on one line. Raise ValueError for anything else."""
    return decode_json(answer, Choice)
