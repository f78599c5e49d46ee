"""What an exploration is: a long episode without a task, by the policy or by a language model.

The policy plays at the ticket's own temperature. A language model looks around for some turns and
sees everything; then it goes deep and sees only what was last.
"""

import asyncio
import dataclasses
from typing import Annotated, Literal

import msgspec

from actors.engines.base import Generation
from actors.envs.base import env_class
from actors.formats.chat import Chat
from actors.formats.turns import TurnFormat
from actors.llm.asking import Asker, convert, shown, steps_shown
from actors.llm.client import Unavailable
from actors.questioning.prompts import BREADTH, DEPTH, EXPLORE
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode_config import Setting
from actors.rollout.policy import Advice
from evolver_async.config import Questioning
from evolver_async.schema import Task, Ticket

ACTION_CHARS = 200


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a language model is asked for when it acts."""

    action: Annotated[str, msgspec.Meta(max_length=ACTION_CHARS, pattern=r"^[^\n]*$")]


def has_goals(env: str) -> bool:
    """Whether states of this environment can be made goals; EnvError where there is none such."""
    return hasattr(env_class(env), "goal")


def unbound(task: Task) -> Task:
    """The same beginning without any goal, where the environment can leave it out."""
    if not has_goals(task.env):
        return task
    return msgspec.structs.replace(task, params=task.params | {"free": True})


def exploring(ticket: Ticket, setting: Setting, config: Questioning) -> tuple[Ticket, Setting]:
    """Ticket and setting of an exploration's episodes. One that a language model cannot go on with
    ends at once, and reads what is new behind what it has read."""
    setting = dataclasses.replace(
        setting,
        max_turns=config.max_turns,
        context="full" if config.kind == "llm" else setting.context,
        recorded=True,
        scored=False,
        format_errors=1 if config.kind == "llm" else setting.format_errors,
    )
    return msgspec.structs.replace(ticket, task=unbound(ticket.task)), setting


class Explorer:
    """A language model that plays one exploration, in the words of the turn format.

    Where there is no answer it waits for `pause_s` and asks once more; without one it writes
    nothing, which ends the episode.
    """

    kind: Literal["learned", "scripted"] = "scripted"

    def __init__(
        self,
        asker: Asker,
        described: str,
        config: Questioning,
        chat: Chat,
        style: TurnFormat,
        max_tokens: int,
    ) -> None:
        self._asker = asker
        self._described = described
        self._config = config
        self._chat = chat
        self._format = style
        self._max_tokens = max_tokens
        self._read = 0  # tokens of the context that are known
        self._beginning = ""
        self._steps: list[tuple[str, str]] = []  # what it did, what it saw
        self._action = ""

    async def advise(self, world: TimedEnvironment, query: str) -> Advice:
        return Advice()

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        text = self._chat.said(context[self._read :], self._format.prefix)
        if turn == 0:
            self._beginning = text
        else:
            self._steps.append((self._action, text))
        self._action = await self._choose(turn) or ""
        tokens: list[int] = []
        if self._action:
            text = self._format.render_actions([self._action])
            tokens = self._chat.tokens_of(text)[: self._max_tokens]
        self._read = len(context) + len(tokens)
        return Generation(tokens=tokens, logprobs=[0.0] * len(tokens), weights=[], finish="stop")

    def question(self, turn: int) -> str:
        """What it is asked in a turn."""
        broad = turn < self._config.breadth
        steps = self._steps if broad else self._steps[-self._config.depth :]
        record = {"beginning": self._beginning, "steps": steps_shown(steps)}
        if not broad and len(steps) < len(self._steps):
            del record["beginning"]  # it is out of sight
        return f"{self._described}\n\n{BREADTH if broad else DEPTH}\n\n{shown(record)}"

    async def _choose(self, turn: int) -> str | None:
        temperature = self._config.temperature
        for pause_s in (self._config.llm.breaker_s, 0.0):
            try:
                choice = await self._asker.ask(
                    EXPLORE, self.question(turn), parse_choice, temperature
                )
            except Unavailable:
                await asyncio.sleep(pause_s)
            else:
                return None if choice is None else choice.action.strip()
        return None

    def close(self) -> None:
        pass


def parse_choice(answer: str) -> Choice:
    """One action on one line, else ValueError."""
    return convert(answer, Choice)
