"""Tokens that one episode's policy has read and written, in the contexts that its turns saw.

Every context is a stream of tokens that only grows, and becomes one Sequence. `full`: one context
holds everything. `window`: a turn sees the first prompt and the last turns before it, token for
token as they were. `single`: a turn sees only what is to be seen now. A turn is trained in the
context it was written in and nowhere else: what a later one repeats of it is PROMPT there.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from actors.engines.engine import Generation
from actors.envs.base import Described, Env, Tooled, settled
from actors.envs.return_checks import Opening, checked_tools
from actors.formats.chat import Stream
from actors.formats.native_turns import NativeTurns
from actors.formats.turns import callable_tools
from actors.rollout.episode_config import Setting
from evolver_async.schema import Role, Sequence

LEFT_OUT = "..."  # between the first message and a later one, where those between are not shown


class _Past(NamedTuple):
    """A finished turn: the observation before it, its tokens, and the tokens that followed."""

    observation: str
    written: list[int]
    after: list[int]


class Conversation:
    """Contexts of one episode. `room`: tokens that may precede a turn.

    `task`: what is asked for, in every context; `opening`: the first messages. `full`: True once
    there was no room for a next turn. `withheld`: EXPERIENCE is recorded, and hidden from the
    policy.
    """

    def __init__(
        self,
        setting: Setting,
        system: str,
        task: str,
        opening: Opening,
        room: int,
        *,
        withheld: bool = False,
    ) -> None:
        self._setting = setting
        self._system = opening.under(system)
        self._before = opening.before
        self._task = task
        self._room = room
        self.withheld = withheld
        self._guidance: list[int] = []  # of every context
        self._shown: list[list[int]] = []  # guidance of single turns in the present context
        self._observation = opening.user
        self._first = self._asked(opening.user)
        self._turns: list[_Past] = []
        self._closed: list[Sequence] = []
        self._stream = self._context(self._first, [])
        self._written: list[int] = []
        self.full = False

    @property
    def tokens(self) -> list[int]:
        """Tokens that the policy sees next."""
        return self._stream.seen(withheld=self.withheld)

    def guide(self, guidance: list[int]) -> bool:
        """Show EXPERIENCE tokens at the head of the user's newest message: to one turn (`stepwise`)
        or, before the first turn, in every context. False, and nothing is shown, if they leave no
        room for a turn."""
        if len(self._stream.tokens) + len(guidance) > self._room:
            return False
        if not self._setting.stepwise:
            self._guidance = guidance
            self._stream = self._context(self._first, [])
        elif guidance not in self._shown:
            self._stream.insert(self._place(), guidance, Role.EXPERIENCE)
            self._shown.append(guidance)
        return True

    def write(self, generation: Generation, turn: int) -> None:
        """Append tokens that the policy sampled."""
        self._stream.write(generation, turn)
        self._written = generation.tokens

    def tell(self, text: str) -> bool:
        """Append the outcome of the turn to the context of the next; False if there is no next.

        `full`: there is no room, or the message that holds everything is over. `window`: there is
        no room even without a turn before it. `single`: there is no room.
        """
        over = bool(self._written) and self._written[-1] in self._setting.chat.stop_tokens
        if over and self._setting.format.inline:
            return False
        self.full = not self._told_within(text)
        return not self.full

    def _told_within(self, text: str) -> bool:
        """Append the outcome of a turn; False if there is no room for the next."""
        setting, chat = self._setting, self._setting.chat
        inline = setting.format.inline
        if setting.context == "single":
            self._before = ()
            return self._turn_to([self._context(self._asked(text), [])])
        last = self._written[-1] if self._written else None
        if inline:
            after = chat.tokens_of(chat.plain(text))
        elif isinstance(setting.format, NativeTurns):  # which has rendered all of it
            after = chat.behind(last, chat.tokens_of(text))
        else:
            after = chat.next(text, setting.format.prefix, last)
        self._turns.append(_Past(self._observation, self._written, after))
        self._observation = text
        whole = setting.context == "full" or len(self._turns) <= setting.window
        if whole and len(self._stream.tokens) + len(after) <= self._room:
            self._stream.read(after, Role.OBSERVATION)
            self._place = partial(self._place_behind, self._turns[-1], len(self._stream.tokens))
            return True
        if setting.context == "full":
            return False
        most = min(setting.window, len(self._turns) - 1)
        return self._turn_to(self._recent(count) for count in range(most, -1, -1))

    def sequences(self) -> list[Sequence]:
        return [*self._closed, self._stream.sequence()]

    def _turn_to(self, contexts: Iterable[Stream]) -> bool:
        """Continue in the first of these contexts that leaves room for a turn."""
        for context in contexts:
            if len(context.tokens) <= self._room:
                self._closed.append(self._stream.sequence())
                self._stream, self._shown = context, []
                return True
        return False

    def _recent(self, count: int) -> Stream:
        """Return the context of the next turn, with the last `count` turns, but not all, before
        it."""
        kept = self._turns[len(self._turns) - count :]
        observation = kept[0].observation if kept else self._observation
        return self._context(f"{self._first}\n{LEFT_OUT}\n{observation}", kept)

    def _context(self, user: str, kept: list[_Past]) -> Stream:
        chat, stream = self._setting.chat, Stream()
        style, tools = self._setting.format, listed_tools(self._setting)
        prompt = chat.first(self._system, user, style.prefix, self._before, tools)
        self._place = partial(chat.place_of_user, self._system, user, self._before, tools)
        place = self._place() if self._guidance else 0
        stream.read(prompt[:place], Role.PROMPT)
        stream.read(self._guidance, Role.EXPERIENCE)
        stream.read(prompt[place:], Role.PROMPT)
        for turn in kept:
            stream.read(turn.written + turn.after, Role.PROMPT)
        if kept:
            self._place = partial(self._place_behind, kept[-1], len(stream.tokens))
        return stream

    def _place_behind(self, turn: _Past, end: int) -> int:
        """Return the place in a context of `end` tokens where the message that ends it, behind this
        turn, has its text."""
        start, chat = end - len(turn.after), self._setting.chat
        if self._setting.format.inline:
            return start
        return start + chat.place_in_next(self._observation, (turn.written or [None])[-1])

    def _asked(self, seen: str) -> str:
        return f"{self._task}\n{seen}" if self._task else seen


def first_prompt(
    setting: Setting, env: Env, opening: Opening, specs: Iterable[dict[str, Any]] = ()
) -> list[int]:
    """Return the tokens that an episode with these tools begins with, the forced prefix of the
    first turn included."""
    system = opening.under(system_message(setting, env, specs))
    tools = listed_tools(with_tools(setting, specs))
    return setting.chat.first(system, opening.user, setting.format.prefix, opening.before, tools)


async def tools_of(setting: Setting, env: Env) -> list[dict[str, Any]]:
    """Return the tools that turns can call in the task that `env` has begun; [] if they call none.
    Raise TypeError or ValueError for what is no spec."""
    if not setting.format.tools:
        return []
    own = checked_tools(await settled(env.tools())) if isinstance(env, Tooled) else []
    served = await setting.server.tools() if setting.server else []
    return callable_tools(setting.format, checked_tools([*own, *served]))


def with_tools(setting: Setting, specs: Iterable[dict[str, Any]]) -> Setting:
    """Return the settings of one episode, in whose turns these tools are called."""
    if not isinstance(setting.format, NativeTurns):
        return setting
    return replace(setting, format=setting.format.listed(specs))


def listed_tools(setting: Setting) -> str:
    """Return the tools that the chat template lists, in JSON; "" if it lists none."""
    style = setting.format
    return json.dumps(style.specs) if isinstance(style, NativeTurns) and style.specs else ""


def system_message(setting: Setting, env: Env, specs: Iterable[dict[str, Any]] = ()) -> str:
    """Return the task's instructions, those of the turn format, and the tools `specs` if a turn
    calls some; "" if there is nothing to say.

    `env.prompt` decides the wording; an environment without plain instructions has one wording.
    """
    style = setting.format
    if setting.wording == "plain":
        parts, joint = (plain_instructions(env), style.plain_instructions), "\n\n"
    else:
        parts, joint = (env.instructions, style.instructions), " "
    described, turns = parts
    text = joint.join(part for part in (described, setting.system_prompt or turns) if part)
    if not style.tools or style.inline or isinstance(style, NativeTurns):
        return text
    listed = "\n".join(json.dumps(spec, ensure_ascii=False) for spec in specs)
    return f"{text}\n<tools>\n{listed}\n</tools>"


def plain_instructions(env: Env) -> str:
    """Return the instructions in plain English if the environment has them, else its only ones."""
    return env.plain_instructions if isinstance(env, Described) else env.instructions
