"""Explorations: long episodes without a task, by the policy or by a language model.

The policy samples at the ticket's temperature. A language model first explores broadly and sees all
steps; then it explores in depth and sees only the last ones. It gives actions, not turns: what it
chooses is written in the turn format, and it reads what the environment said, not the context.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import msgspec

from actors.engines.engine import Generation
from actors.envs.base import env_class, makes_goals
from actors.formats.chat import Chat
from actors.formats.tool_calls import called
from actors.formats.turns import TurnFormat
from actors.llm.endpoint_client import Unavailable
from actors.llm.json_client import JsonClient, as_json, decode_json, step_records
from actors.questioning.actions import ActionForm, Surroundings, WrittenAction
from actors.questioning.questioning_prompts import BREADTH, DEPTH, EXPLORE
from actors.rollout.conversation import plain_instructions, with_tools
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode_config import Setting
from actors.rollout.episode_policy import EpisodePolicy
from actors.ticket_progress import TicketProgress
from evolver_async.config import QuestioningConfig
from evolver_async.extension import RAISED
from evolver_async.schema import Task, Ticket

ACTION_CHARS = 200  # of an action that is a text


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer of a language model with its next action."""

    action: WrittenAction


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
    longer than a question. `describe`: returns the description of an environment.
    """

    kind: ClassVar[Literal["learned", "scripted"]] = "scripted"

    client: JsonClient
    describe: Callable[[Surroundings], Awaitable[str]]
    config: QuestioningConfig
    ticket: Ticket
    setting: Setting
    pause_s: float
    progress: TicketProgress
    _format: TurnFormat = field(init=False)
    _form: ActionForm = field(init=False)
    _described: str = ""
    _beginning: str = ""
    _steps: list[tuple[str, str]] = field(default_factory=list)  # action, observation after it
    _action: str = ""

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        if turn == 0:
            await self._begin(world)
        elif self._form.tools:  # which say themselves what was wrong with a call
            self._steps.append((self._action, world.said))
        else:
            seen = self._format.shown([world.said], world.valid, world.said)
            self._steps.append((self._action, seen))
        self._action, tokens = await self._choose(turn) or ("", [])
        return Generation(tokens=tokens, logprobs=[0.0] * len(tokens), weights=[], finish="stop")

    async def _begin(self, world: TimedEnvironment) -> None:
        setting, task = self.setting, self.ticket.task
        self._beginning = f"{task.query}\n{world.said}" if task.query else world.said
        specs = await world.tools(setting.format)
        self._format, self._form = with_tools(setting, specs).format, ActionForm(specs)
        words = await world.call("instructions", plain_instructions, world.env)
        met = Surroundings(task.env, words, self._form, self._beginning)
        self._described = await self.describe(met)

    def question(self, turn: int) -> str:
        """Write the question of a turn."""
        broad = turn < self.config.breadth
        steps = self._steps if broad else self._steps[-self.config.depth :]
        record = {"beginning": self._beginning, "steps": step_records(steps)}
        if not broad and len(steps) < len(self._steps):
            del record["beginning"]  # it does not precede these steps directly
        return f"{self._described}\n\n{BREADTH if broad else DEPTH}\n\n{as_json(record)}"

    async def _choose(self, turn: int) -> tuple[str, list[int]] | None:
        """Return an action and the tokens of the turn that makes it; None without an answer."""
        system, temperature = EXPLORE.format(action=self._form.example), self.config.temperature
        for pause_s in (self.pause_s, 0.0):
            try:
                question = self.question(turn)
                return await self.client.ask(system, question, self._chosen, temperature)
            except Unavailable:
                self.progress.count += 1
                await asyncio.sleep(pause_s)
                self.progress.count += 1
        return None

    def _chosen(self, answer: str) -> tuple[str, list[int]]:
        """Parse an answer. Raise ValueError for one that is no action, or that no turn makes."""
        action = parse_choice(answer, self._form)
        if not action:
            return "", []
        self._form.check_tool(action)
        limit = self.ticket.sampling.max_tokens
        return turn_of(action, self._form, self._format, self.setting.chat, limit)


def parse_choice(answer: str, form: ActionForm) -> str:
    """Parse one action; "" for none. A text is on one line. Raise ValueError for anything else."""
    written = decode_json(answer, Choice).action
    if isinstance(written, str) and not written.strip():
        return ""
    action = form.read(written)
    if not form.tools and (len(action) > ACTION_CHARS or "\n" in action):
        raise ValueError(f"an action is one line of at most {ACTION_CHARS} characters")
    return action


def turn_of(
    action: str, form: ActionForm, style: TurnFormat, chat: Chat, limit: int
) -> tuple[str, list[int]]:
    """Return an action as it is read in a turn that makes it, and the tokens of this turn.

    Raise ValueError for an action that is read as another one or not at all, such as code with a
    closing tag in it, and for a turn of more than `limit` tokens.
    """
    try:
        text = style.render_actions([action])
        (read,) = style.parse(text) or [None]
    except RAISED as error:  # of a format or of `rollout.extract`, a user's own, too
        raise ValueError(f"the action cannot be written: {error!r}") from error
    if not isinstance(read, str) or (form.tools and called(read).name != called(action).name):
        raise ValueError("the action cannot be written in the turn format")
    tokens = chat.turn(text, style.stop_strings)
    if len(tokens) > limit:
        raise ValueError(f"the action is a turn of {len(tokens)} tokens, at most {limit} fit")
    return read, tokens
