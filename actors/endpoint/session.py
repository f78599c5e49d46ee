"""One episode's calls: how far they may go, what answers them, what is recorded of them."""

import asyncio
from dataclasses import dataclass

import numpy as np

from actors.endpoint.recorder import Pending, Recorder
from actors.endpoint.request import Asked, Message, Refused
from actors.endpoint.template import Template
from actors.endpoint.tools import Said, parse
from actors.engines.base import Engine, Generation, Request
from actors.progress import TicketProgress
from actors.rollout.episode_config import Setting
from evolver_async.protocol.transcripts import Turn
from evolver_async.randomness import key
from evolver_async.schema import Ticket, TurnFlag


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a call gets. `finish` is in OpenAI's words; the numbers are tokens."""

    said: Said
    finish: str
    read: int
    written: int
    name: str  # unique in the run
    weights: str


class Session:
    """One member. `limited`: a call was refused because the episode had come to a limit;
    `failure`: what the engine raised, which no client can mend."""

    def __init__(
        self,
        ticket: Ticket,
        member: int,
        setting: Setting,
        engine: Engine,
        template: Template,
        progress: TicketProgress,
    ) -> None:
        self.limited = False
        self.failure: Exception | None = None
        self._generated_s = 0.0
        self.flags: list[TurnFlag] = []
        self.turns: list[Turn] = []
        self.recorder = Recorder(template, setting.chat.end_of_turn)
        self._name = f"{ticket.group_id}/{member}/{ticket.attempt}"
        self._sampling = ticket.sampling
        self._setting = setting
        self._engine = engine
        self._progress = progress
        self._begun = 0  # calls with a seed of their own
        self._since = 0.0
        self._calls: set[asyncio.Task[None] | None] = set()
        self._threads: set[str] = set()  # names that the engine knows

    @property
    def generate_s(self) -> float:
        """Seconds in which at least one call was being answered."""
        since = asyncio.get_running_loop().time() - self._since if self._calls else 0.0
        return self._generated_s + since

    async def complete(self, asked: Asked) -> Answer:
        """Answer one call and record it. Raises Refused; what is cancelled is not recorded."""
        if self.recorder.turns + len(self._calls) >= self._setting.max_turns:
            self.limited = True
            raise Refused(f"an episode has at most {self._setting.max_turns} calls", "max_turns")
        pending = self.recorder.begin(asked)
        try:
            generation = await self._generate(pending)
            answer = self._record(pending, generation)
        except BaseException:
            self.recorder.abandon(pending)
            raise
        self._progress.count += len(generation.tokens)
        return answer

    def close(self) -> None:
        """No more calls: those in flight are cancelled."""
        for call in self._calls:
            if call is not None:
                call.cancel()
        for name in self._threads:
            self._engine.release(name)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Rewards float32[K] and flags uint8[K] of the turns, penalties only."""
        penalty = self._setting.format_penalty
        rewards = [penalty if flag & TurnFlag.FORMAT_ERROR else 0.0 for flag in self.flags]
        return np.array(rewards, np.float32), np.array(self.flags, np.uint8)

    async def _generate(self, pending: Pending) -> Generation:
        context = pending.context
        room = min(self._sampling.max_tokens, self._setting.max_length - len(context))
        if room < 1:
            self.limited = True
            most = self._setting.max_length
            text = f"a conversation of {len(context)} tokens leaves no room in {most}"
            raise Refused(text, "context_length_exceeded")
        number, self._begun = self._begun, self._begun + 1
        name = f"{self._name}/{pending.thread.number}"
        self._threads.add(name)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if not self._calls:
            self._since = loop.time()
        self._calls.add(task)
        try:
            return await self._engine.generate(
                Request(
                    tokens=context,
                    max_tokens=min(room, pending.asked.max_tokens or room),
                    temperature=self._sampling.temperature,
                    stop_tokens=self._setting.chat.stop_tokens,
                    stop_strings=pending.asked.stop,
                    session=name,
                    seed=key(self._setting.seed, "sample", self._name, number),
                )
            )
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._calls.discard(task)
            if not self._calls:
                self._generated_s += loop.time() - self._since

    def _record(self, pending: Pending, generation: Generation) -> Answer:
        asked, turn = pending.asked, self.recorder.turns
        text = self._setting.chat.text_of(generation.tokens)
        shown = text
        for stop in asked.stop:
            shown = shown.partition(stop)[0]
        said = parse(shown) if asked.calling else Said(shown, (), True)
        read = len(pending.context)
        message = Message("assistant", said.content.strip(), said.calls)
        self.recorder.finish(pending, generation, message)
        self.flags.append(TurnFlag(0) if said.readable else TurnFlag.FORMAT_ERROR)
        if self._setting.recorded:
            seen = asked.messages[-1].content
            action = " ".join(f"{name}({arguments})" for name, arguments in said.calls)
            did = action or (said.content if said.readable else "")
            self.turns.append(Turn(observation=seen, state=seen, action=did, text=text))
        finish = "tool_calls" if said.calls else generation.finish
        return Answer(
            said=said,
            finish=finish,
            read=read,
            written=len(generation.tokens),
            name=f"{self._name}/{turn}",
            weights=str(generation.weights[-1]) if generation.weights else "",
        )
