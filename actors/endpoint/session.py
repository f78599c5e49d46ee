"""Calls of one episode: limits, generation and recording."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from actors.endpoint.outcome import AgentOutcome, paid
from actors.endpoint.recorder import PendingCall, Recorder, StoredThread
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused
from actors.endpoint.template import Template
from actors.endpoint.tools import CALL_END, ParsedTurn
from actors.engines.engine import Engine, Generation, Request
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished, assembled
from actors.ticket_progress import TicketProgress
from evolver_async.metrics.activity import GENERATING
from evolver_async.model.grammar import GrammarError
from evolver_async.randomness import key
from evolver_async.schema import FAILED_CALL, Grammar, Ticket, TurnFlag
from evolver_async.wire.transcripts import Turn

MODEL_UNKNOWN = "model_not_found"  # as OpenAI's API says it
MAX_GRAMMARS = 32 << 10  # characters of an episode's; the header of a trajectory has twice that


class Completion(NamedTuple):
    """Answer to a call. `finish` is a finish reason of OpenAI's API."""

    turn: ParsedTurn
    finish: str
    stop: str  # the stop string that ended it; "" for none
    prompt_tokens: int
    completion_tokens: int
    name: str  # unique in the run
    weights: str
    temperature: float
    logprobs: list[tuple[str, float]]  # of the sampled tokens, if the request wants them

    def call_id(self, index: int) -> str:
        """Return the id of a tool call."""
        return f"call-{self.name}-{index}"


class StoredSession(NamedTuple):
    """A session between calls, apart from its `conversations`. `started`: calls, `ruled`: turns by
    their grammar."""

    ticket: Ticket
    threads: list[StoredThread]
    players: list[str]
    merged: int
    flags: list[int]
    turns: list[Turn]
    limited: bool
    generated_s: float
    ruled: dict[str, list[int]]
    started: int


@dataclass(eq=False)
class EndpointSession:
    """One member's episode.

    `limited`: True if a call was refused because the episode had reached a limit, or if the agent
    was ended. `late`: True once `env.episode_timeout_s` has passed. `failure`: the exception that
    the engine raised, for which the agent is not to blame. `conversations`: messages by the name of
    their last answer, without those that were of one call alone.
    """

    ticket: Ticket
    member: int
    setting: Setting
    engine: Engine
    template: Template
    progress: TicketProgress
    limited: bool = False
    late: bool = False
    failure: Exception | None = None
    flags: list[TurnFlag] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    conversations: dict[str, tuple[ChatMessage, ...]] = field(default_factory=dict)
    _generated_s: float = 0.0
    _ruled: dict[str, list[int]] = field(default_factory=dict)  # turns by their grammar
    _started: int = 0  # calls, each with a seed of its own
    _busy_since: float = 0.0
    _calls: set[asyncio.Task[None] | None] = field(default_factory=set)
    _threads: set[str] = field(default_factory=set)  # names that the engine holds a cache for

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.template)
        self._name = f"{self.ticket.group_id}/{self.member}/{self.ticket.attempt}"
        self._began = asyncio.get_running_loop().time()

    @property
    def worked_s(self) -> float:
        """Return the seconds since the beginning during which no call was being answered."""
        until = self._busy_since if self._calls else asyncio.get_running_loop().time()
        return until - self._began - self._generated_s

    @property
    def generate_s(self) -> float:
        """Return the seconds during which at least one call was being answered."""
        running_s = asyncio.get_running_loop().time() - self._busy_since if self._calls else 0.0
        return self._generated_s + running_s

    async def complete(self, request: ChatRequest) -> list[Completion]:
        """Answer and record one call. Raise RequestRefused. A cancelled call is not recorded.

        Each of several choices counts and is recorded as a call of its own.
        """
        if request.choices == 1:
            return [await self._complete(request)]
        if self.recorder.turns + len(self._calls) + request.choices > self.setting.max_turns:
            self.limited = True
            most = self.setting.max_turns
            raise RequestRefused(f"n: an episode has at most {most} answers", "max_turns")
        one = request._replace(choices=1)
        answers = await asyncio.gather(
            *(self._complete(one) for _ in range(request.choices)), return_exceptions=True
        )
        completed = list[Completion]()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            completed.append(answer)
        return completed

    async def _complete(self, request: ChatRequest) -> Completion:
        if self.late:
            self.limited = True
            text = f"an episode lasts {self.setting.episode_timeout_s:g} s at most"
            raise RequestRefused(text, "episode_timeout_s")
        if self.recorder.turns + len(self._calls) >= self.setting.max_turns:
            self.limited = True
            text = f"an episode has at most {self.setting.max_turns} calls"
            raise RequestRefused(text, "max_turns")
        player = self._player(request)
        grammar = self._grammar(request)
        pending = self.recorder.begin(request, player)
        try:
            generation = await self._generate(pending, grammar)
            answer = self._record(pending, generation, grammar)
        except BaseException:
            self.recorder.abandon(pending)
            raise
        self.progress.count += len(generation.tokens)
        return answer

    def _player(self, request: ChatRequest) -> str:
        """Return the player of a call, "" where there is one alone. Raise RequestRefused."""
        players = self.setting.players
        if not players:
            return ""
        if request.model not in players:
            known = f"none of the players {', '.join(players)} (rollout.players)"
            raise RequestRefused(f"model: {request.model[:100]!r} is {known}", MODEL_UNKNOWN, 404)
        return request.model

    def stored(self) -> StoredSession:
        """Return what `restore` continues from."""
        return StoredSession(
            ticket=self.ticket,
            threads=self.recorder.stored(),
            players=self.recorder.players,
            merged=self.recorder.merged,
            flags=[int(flag) for flag in self.flags],
            turns=self.turns,
            limited=self.limited,
            generated_s=self._generated_s,
            ruled=self._ruled,
            started=self._started,
        )

    def restore(self, stored: StoredSession) -> None:
        """Continue a session of the same ticket that another process had."""
        self.recorder.restore(stored.threads, stored.players, stored.merged)
        self.flags, self.turns = [TurnFlag(flag) for flag in stored.flags], stored.turns
        self.limited, self._generated_s = stored.limited, stored.generated_s
        self._ruled, self._started = stored.ruled, stored.started

    async def answered(self, timeout_s: float) -> None:
        """Wait until no call is being answered, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while calls := [call for call in self._calls if call is not None]:
                    await asyncio.wait(calls)

    @property
    def busy(self) -> bool:
        """True while a call is being answered."""
        return bool(self._calls)

    def rest(self) -> None:
        """Release the engine's caches unless a call is being answered."""
        if not self._calls:
            for name in self._threads:
                self.engine.release(name)

    def close(self) -> None:
        """Cancel the calls in flight and release the engine's caches."""
        for call in self._calls:
            if call is not None:
                call.cancel()
        for name in self._threads:
            self.engine.release(name)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return rewards float32[K] (only format penalties) and flags uint8[K] of the turns."""
        penalty = self.setting.format_penalty
        rewards = [penalty if flag & TurnFlag.FORMAT_ERROR else 0.0 for flag in self.flags]
        flags = np.array(self.flags, np.uint8)
        if self.late and self.limited:
            flags[self._lasts()] |= np.uint8(TurnFlag.LATE)
        return np.array(rewards, np.float32), flags

    def _lasts(self) -> list[int]:
        """Return the last turn of each player."""
        return list({player: turn for turn, player in enumerate(self.recorder.players)}.values())

    def finished(self, outcome: AgentOutcome, total_s: float) -> Finished:
        """Return the episode, which took `total_s`, with its outcome. Raise RewardTooLarge."""
        rewards, flags = self.arrays()
        bonus = self.setting.truncated_reward if self.limited else 0.0
        players = paid(outcome, self.setting.players, self.recorder.players, rewards, bonus)
        history, task = self.recorder.histories()[0], self.ticket.task
        first = next((m.content for m in history if m.role == "user"), "")
        return assembled(
            *(self.ticket, self.member, self.setting, "learned", self.recorder.sequences()),
            rewards=rewards,
            flags=flags,
            outcome=(outcome.success, not self.limited),
            seconds=(max(0.0, total_s - self.generate_s), self.generate_s, total_s),
            turns=self.turns,
            query=task.query or first,
            content=f"{task.query}\n{first}",
            instructions="",
            ending=history[-1].content,
            acted=[],
            tools=[],
            experience_ids=[],
            scores=[],
            metrics=outcome.metrics,
            grammars=self.grammars,
            players=players,
        )

    @property
    def grammars(self) -> list[Grammar]:
        """Return the grammars of the turns that obeyed one."""
        stops = sorted(self.setting.chat.stop_tokens)
        ruled = self._ruled.items()
        return [Grammar(text=text, stops=stops, turns=turns) for text, turns in ruled]

    def _grammar(self, request: ChatRequest) -> str:
        """Return the grammar of an answer, "" for none. Raise RequestRefused.

        Where the engine obeys none, strict tools have no effect: clients make them so by default.
        """
        text, form = self.template.grammar(request), request.structure
        if text and not self.engine.obeys_grammars:
            if form is not None and request.forced is None:
                needs = (
                    "xgrammar (pip install 'evolver-async[grammar]'), and no speculative decoding"
                )
                raise RequestRefused(f"{form.key}: needs {needs}")
            return ""
        if sum(map(len, {text, *self._ruled})) > MAX_GRAMMARS:
            key = "tools" if form is None else form.key
            problem = f"the schemas of an episode have more than {MAX_GRAMMARS} characters"
            raise RequestRefused(f"{key}: {problem}")
        return text

    async def _generate(self, pending: PendingCall, grammar: str) -> Generation:
        context = pending.context
        room = min(self.ticket.sampling.max_tokens, self.setting.max_length - len(context))
        if room < 1:
            self.limited = True
            players, player = self.recorder.players, pending.thread.player
            if player in players:
                self.flags[-1 - players[::-1].index(player)] |= TurnFlag.FULL
            limit = self.setting.max_length
            text = f"a conversation of {len(context)} tokens leaves no room in {limit}"
            raise RequestRefused(text, "context_length_exceeded")
        number, self._started = self._started, self._started + 1
        name = f"{self._name}/{pending.thread.number}"
        self._threads.add(name)
        call = Request(
            tokens=context,
            max_tokens=min(room, pending.request.max_tokens or room),
            temperature=self.ticket.sampling.temperature,
            stop_tokens=self.setting.chat.stop_tokens,
            stop_strings=pending.request.stop + ((CALL_END,) if pending.request.once else ()),
            session=name,
            seed=key(self.setting.seed, "sample", self._name, number),
            grammar=grammar,
        )
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if not self._calls:
            self._busy_since = loop.time()
        self._calls.add(task)
        self.progress.generating += 1
        self.progress.restart(self.member)
        try:
            with self.progress.clock.during(GENERATING):
                return await self.engine.generate(call)
        except GrammarError as error:
            form = pending.request.structure
            raise RequestRefused(f"{'tools' if form is None else form.key}: {error}") from None
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.progress.generating -= 1
            self.progress.restart(self.member)
            self._calls.discard(task)
            if not self._calls:
                self._generated_s += loop.time() - self._busy_since

    def _record(self, pending: PendingCall, generation: Generation, grammar: str) -> Completion:
        request, turn = pending.request, self.recorder.turns
        text = self.setting.chat.text_of(generation.tokens)
        visible, stopped = text, ""
        for stop in request.stop:
            shorter, found, _ = visible.partition(stop)
            visible, stopped = shorter, found or stopped
        # A thought that was closed for a structured answer is no part of it.
        begun = pending.given if request.structure is None or request.forced is not None else ""
        said = begun + visible
        parsed, ids = ParsedTurn(said, (), True), tuple[str, ...]()
        if request.calling:
            parsed, ids = self.template.parse(said, request.tools)
        prompt_tokens = len(pending.context)
        message = ChatMessage("assistant", parsed.content.strip(), parsed.calls)
        self.recorder.finish(pending, generation, message, ids)
        if grammar and generation.tokens:
            self._ruled.setdefault(grammar, []).append(turn)
        name = f"{self._name}/{turn}".replace("/", "-")
        self.conversations[name] = (*request.messages[request.instructed :], message)
        called = TurnFlag.TOOL_CALL if parsed.calls else TurnFlag(0)
        flags = called if parsed.readable else TurnFlag.FORMAT_ERROR | FAILED_CALL
        self.flags.append(flags | (TurnFlag.CUT if generation.finish == "length" else 0))
        if self.setting.recorded:
            observation = request.messages[-1].content
            action = " ".join(f"{name}({arguments})" for name, arguments in parsed.calls)
            action = action or (parsed.content if parsed.readable else "")
            turn_record = Turn(observation=observation, state=observation, action=action, text=text)
            self.turns.append(turn_record)
        known = zip(generation.tokens, generation.logprobs, strict=True) if request.logprobs else ()
        return Completion(
            turn=parsed._replace(
                content=parsed.content.removeprefix(self.setting.chat.plain(request.prefill))
            ),
            finish="tool_calls" if parsed.calls else generation.finish,
            stop=stopped,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(generation.tokens),
            name=name,
            weights=str(generation.weights[-1]) if generation.weights else "",
            temperature=self.ticket.sampling.temperature,
            logprobs=[(self.setting.chat.decoded([token]), logprob) for token, logprob in known],
        )
