"""Calls of one episode: limits, generation and recording."""

import asyncio
from typing import NamedTuple

import numpy as np

from actors.endpoint.recorder import PendingCall, Recorder
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused
from actors.endpoint.template import Template
from actors.endpoint.tools import ParsedTurn, parse
from actors.engines.base import Engine, Generation, Request
from actors.progress import TicketProgress
from actors.rollout.episode_config import Setting
from evolver_async.protocol.transcripts import Turn
from evolver_async.randomness import key
from evolver_async.schema import Ticket, TurnFlag


class Completion(NamedTuple):
    """Answer to a call. `finish` is a finish reason of OpenAI's API."""

    turn: ParsedTurn
    finish: str
    prompt_tokens: int
    completion_tokens: int
    name: str  # unique in the run
    weights: str


class EndpointSession:
    """One member's episode.

    `limited`: True if a call was refused because the episode had reached a limit. `failure`: the
    exception that the engine raised, for which the agent is not to blame.
    """

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
        self._started = 0  # calls, each with a seed of its own
        self._busy_since = 0.0
        self._calls: set[asyncio.Task[None] | None] = set()
        self._threads: set[str] = set()  # session names that the engine holds a cache for

    @property
    def generate_s(self) -> float:
        """Return the seconds during which at least one call was being answered."""
        running_s = asyncio.get_running_loop().time() - self._busy_since if self._calls else 0.0
        return self._generated_s + running_s

    async def complete(self, request: ChatRequest) -> Completion:
        """Answer and record one call. Raise RequestRefused. A cancelled call is not recorded."""
        if self.recorder.turns + len(self._calls) >= self._setting.max_turns:
            self.limited = True
            text = f"an episode has at most {self._setting.max_turns} calls"
            raise RequestRefused(text, "max_turns")
        pending = self.recorder.begin(request)
        try:
            generation = await self._generate(pending)
            answer = self._record(pending, generation)
        except BaseException:
            self.recorder.abandon(pending)
            raise
        self._progress.count += len(generation.tokens)
        return answer

    def close(self) -> None:
        """Cancel the calls in flight and release the engine's caches."""
        for call in self._calls:
            if call is not None:
                call.cancel()
        for name in self._threads:
            self._engine.release(name)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return rewards float32[K] (only format penalties) and flags uint8[K] of the turns."""
        penalty = self._setting.format_penalty
        rewards = [penalty if flag & TurnFlag.FORMAT_ERROR else 0.0 for flag in self.flags]
        return np.array(rewards, np.float32), np.array(self.flags, np.uint8)

    async def _generate(self, pending: PendingCall) -> Generation:
        context = pending.context
        room = min(self._sampling.max_tokens, self._setting.max_length - len(context))
        if room < 1:
            self.limited = True
            limit = self._setting.max_length
            text = f"a conversation of {len(context)} tokens leaves no room in {limit}"
            raise RequestRefused(text, "context_length_exceeded")
        number, self._started = self._started, self._started + 1
        name = f"{self._name}/{pending.thread.number}"
        self._threads.add(name)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if not self._calls:
            self._busy_since = loop.time()
        self._calls.add(task)
        try:
            return await self._engine.generate(
                Request(
                    tokens=context,
                    max_tokens=min(room, pending.request.max_tokens or room),
                    temperature=self._sampling.temperature,
                    stop_tokens=self._setting.chat.stop_tokens,
                    stop_strings=pending.request.stop,
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
                self._generated_s += loop.time() - self._busy_since

    def _record(self, pending: PendingCall, generation: Generation) -> Completion:
        request, turn = pending.request, self.recorder.turns
        text = self._setting.chat.text_of(generation.tokens)
        visible = text
        for stop in request.stop:
            visible = visible.partition(stop)[0]
        parsed = parse(visible) if request.calling else ParsedTurn(visible, (), True)
        prompt_tokens = len(pending.context)
        message = ChatMessage("assistant", parsed.content.strip(), parsed.calls)
        self.recorder.finish(pending, generation, message)
        self.flags.append(TurnFlag(0) if parsed.readable else TurnFlag.FORMAT_ERROR)
        if self._setting.recorded:
            observation = request.messages[-1].content
            action = " ".join(f"{name}({arguments})" for name, arguments in parsed.calls)
            action = action or (parsed.content if parsed.readable else "")
            turn_record = Turn(observation=observation, state=observation, action=action, text=text)
            self.turns.append(turn_record)
        finish = "tool_calls" if parsed.calls else generation.finish
        return Completion(
            turn=parsed,
            finish=finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(generation.tokens),
            name=f"{self._name}/{turn}",
            weights=str(generation.weights[-1]) if generation.weights else "",
        )
