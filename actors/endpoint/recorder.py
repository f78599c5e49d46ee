"""Recorder of one episode's calls as token streams.

A call continues a stream only if its context begins with exactly the stream's tokens. If its
messages continue the recorded ones, this holds by construction, as recorded messages are never
tokenised again. Otherwise the tokens are compared. Every other call starts a new stream, in which
tokens sampled earlier have the role PROMPT, so that no token is trained twice. A stream is of one
player.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused
from actors.endpoint.template import Template
from actors.engines.engine import Generation
from actors.formats.chat import StoredStream, Stream
from evolver_async.schema import Role, Sequence


class TurnEnd(NamedTuple):
    """Numbers of messages and tokens of a thread at the end of a turn; `ids`: the names that its
    calls have in the sampled text."""

    messages: int
    tokens: int
    ids: tuple[str, ...]


@dataclass(eq=False)
class ChatThread:
    """A stream and its messages. `busy`: a call in flight continues it."""

    number: int
    player: str
    tools: str = ""
    stream: Stream = field(default_factory=Stream)
    history: tuple[ChatMessage, ...] = ()
    points: list[TurnEnd] = field(default_factory=list)
    busy: bool = True


class StoredThread(NamedTuple):
    """A `ChatThread` between calls."""

    number: int
    player: str
    tools: str
    stream: StoredStream
    history: tuple[ChatMessage, ...]
    points: list[TurnEnd]


class PendingCall(NamedTuple):
    """A call whose answer is being sampled. Its context is the thread's tokens, then `tokens`.

    `merged`: the thread already has turns. `given`: text of the answer that ends the context.
    """

    request: ChatRequest
    thread: ChatThread
    tokens: list[int]
    merged: bool
    given: str = ""

    @property
    def context(self) -> list[int]:
        return self.thread.stream.tokens + self.tokens


class Recorder:
    """Threads of one episode. `merged`: number of calls that continued a thread; `players`: the
    player of every turn, "" where there is one alone."""

    def __init__(self, template: Template) -> None:
        self.merged = 0
        self.players: list[str] = []
        self._template = template
        self._threads: list[ChatThread] = []
        self._numbers = 0

    @property
    def turns(self) -> int:
        """Number of finished calls."""
        return len(self.players)

    def stored(self) -> list[StoredThread]:
        return [
            StoredThread(t.number, t.player, t.tools, t.stream.stored(), t.history, t.points)
            for t in self._threads
        ]

    def restore(self, threads: list[StoredThread], players: list[str], merged: int) -> None:
        """Continue an episode that another process recorded."""
        self.players, self.merged = players, merged
        self._numbers = max((one.number for one in threads), default=-1) + 1
        for one in threads:
            thread = ChatThread(one.number, one.player, one.tools, busy=False)
            thread.stream.restore(one.stream)
            thread.history, thread.points = one.history, one.points
            self._threads.append(thread)

    def begin(self, request: ChatRequest, player: str = "") -> PendingCall:
        """Prepare the context of a player's call; `finish` or `abandon` must follow. Raise
        RequestRefused."""
        pending = self._begin(request, player)
        try:
            given = self._template.given(request, pending.context)
        except RequestRefused:
            self.abandon(pending)
            raise
        tokens = pending.tokens + self._template.tokens_of(given)
        return pending._replace(tokens=tokens, given=given)

    def _begin(self, request: ChatRequest, player: str) -> PendingCall:
        """Prepare the context up to where the answer begins."""
        thread, point = self._longest_match(request, player)
        if thread is None or point is None:
            return self._from_template(request, player)
        last = thread.stream.tokens[point.tokens - 1]
        delta = self._template.next(request, point.messages, point.ids, last)
        if point is thread.points[-1] and not thread.busy:
            thread.busy = True
            return PendingCall(request=request, thread=thread, tokens=delta, merged=True)
        return self._new(request, player, thread.stream.tokens[: point.tokens] + delta)

    def finish(
        self,
        pending: PendingCall,
        generation: Generation,
        message: ChatMessage,
        ids: tuple[str, ...],
    ) -> None:
        """Record the sampled tokens and the message that the client received. `ids`: the names of
        its calls in the sampled text."""
        thread = pending.thread
        thread.stream.read(pending.tokens, Role.OBSERVATION if pending.merged else Role.PROMPT)
        thread.stream.write(generation, self.turns)
        thread.history = (*pending.request.messages, message)
        thread.tools = pending.request.tools_text
        thread.points.append(TurnEnd(len(thread.history), len(thread.stream.tokens), ids))
        thread.busy = False
        self.players.append(thread.player)
        self.merged += pending.merged
        if not pending.merged:
            self._threads.append(thread)

    def abandon(self, pending: PendingCall) -> None:
        """Drop a call that got no answer."""
        pending.thread.busy = False

    def sequences(self) -> list[Sequence]:
        """Return one sequence per thread, in the order of the threads' first answers."""
        return [thread.stream.sequence() for thread in self._threads]

    def histories(self) -> list[tuple[ChatMessage, ...]]:
        """Return the messages of each thread."""
        return [thread.history for thread in self._threads]

    def _longest_match(
        self, request: ChatRequest, player: str
    ) -> tuple[ChatThread | None, TurnEnd | None]:
        """Find the longest recorded history of the player that the messages begin with.

        Of equally long ones a thread that can be continued is preferred.
        """
        best: tuple[int, bool] = (0, False)
        found: tuple[ChatThread | None, TurnEnd | None] = (None, None)
        for thread in self._threads:
            if thread.player != player or thread.tools != request.tools_text:
                continue
            common = 0
            for recorded, received in zip(thread.history, request.messages, strict=False):
                if recorded != received:
                    break
                common += 1
            for point in reversed(thread.points):
                if point.messages <= common and point.messages < len(request.messages):
                    open_end = point is thread.points[-1] and not thread.busy
                    if (point.messages, open_end) > best:
                        best, found = (point.messages, open_end), (thread, point)
                    break
        return found

    def _from_template(self, request: ChatRequest, player: str) -> PendingCall:
        """Render the whole conversation; continue a stream if its tokens are a prefix."""
        tokens = self._template.first(request)
        for thread in self._threads:
            known = thread.stream.tokens
            open_end = thread.player == player and not thread.busy
            if open_end and len(known) < len(tokens) and tokens[: len(known)] == known:
                thread.busy = True
                rest = tokens[len(known) :]
                return PendingCall(request=request, thread=thread, tokens=rest, merged=True)
        return self._new(request, player, tokens)

    def _new(self, request: ChatRequest, player: str, tokens: list[int]) -> PendingCall:
        self._numbers += 1
        thread = ChatThread(number=self._numbers - 1, player=player)
        return PendingCall(request=request, thread=thread, tokens=tokens, merged=False)
