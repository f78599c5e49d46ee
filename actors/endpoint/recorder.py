"""The calls of one episode as token streams: a conversation that goes on stays one stream.

A call continues a stream only where its context begins with all of the stream's tokens, exactly.
That holds by construction where its messages continue what was said (they are not tokenised again,
whatever the client made of them), and is looked up where they do not. Everything else, a second
call from the same point too, begins a stream of its own, in which nothing that was sampled before
is trained again: it is PROMPT there.
"""

from dataclasses import dataclass, field

from actors.endpoint.request import Asked, Message
from actors.endpoint.template import Template
from actors.engines.base import Generation
from actors.formats.chat import Stream
from evolver_async.schema import Role, Sequence


@dataclass(frozen=True)
class Point:
    """The end of a turn: so many messages and so many tokens of its thread."""

    messages: int
    tokens: int
    ended: bool  # by the template's end of a turn


@dataclass(eq=False)
class Thread:
    """A stream and what was said in it. `busy`: a call is about to continue it."""

    number: int
    tools: str = ""
    stream: Stream = field(default_factory=Stream)
    history: tuple[Message, ...] = ()
    points: list[Point] = field(default_factory=list)
    busy: bool = True


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A call whose answer is still to be sampled: its context is the thread's tokens, then these.

    `merged`: the thread has turns already.
    """

    asked: Asked
    thread: Thread
    tokens: list[int]
    merged: bool

    @property
    def context(self) -> list[int]:
        return self.thread.stream.tokens + self.tokens


class Recorder:
    """The threads of one episode. `merged`: calls that continued one."""

    def __init__(self, template: Template, end_of_turn: int | None) -> None:
        self.merged = 0
        self.turns = 0
        self._template = template
        self._end_of_turn = end_of_turn
        self._threads: list[Thread] = []
        self._numbers = 0

    def begin(self, asked: Asked) -> Pending:
        """The context of a call. It must be followed by `finish` or `abandon`. Raises Refused."""
        thread, point = self._said_before(asked)
        if thread is None or point is None:
            return self._afresh(asked)
        delta = self._template.next(asked.messages[point.messages :], point.ended)
        if point is thread.points[-1] and not thread.busy:
            thread.busy = True
            return Pending(asked=asked, thread=thread, tokens=delta, merged=True)
        return self._new(asked, thread.stream.tokens[: point.tokens] + delta)

    def finish(self, pending: Pending, generation: Generation, said: Message) -> None:
        """Record what was sampled, and what the client was told it says."""
        thread = pending.thread
        thread.stream.read(pending.tokens, Role.OBSERVATION if pending.merged else Role.PROMPT)
        thread.stream.write(generation, self.turns)
        thread.history = (*pending.asked.messages, said)
        thread.tools = pending.asked.tools_text
        ended = generation.tokens[-1:] == [self._end_of_turn]
        thread.points.append(Point(len(thread.history), len(thread.stream.tokens), ended))
        thread.busy = False
        self.turns += 1
        self.merged += pending.merged
        if not pending.merged:
            self._threads.append(thread)

    def abandon(self, pending: Pending) -> None:
        """The call has come to nothing."""
        pending.thread.busy = False

    def sequences(self) -> list[Sequence]:
        """One per thread, in the order of their first answers."""
        return [thread.stream.sequence() for thread in self._threads]

    def histories(self) -> list[tuple[Message, ...]]:
        """What was said in each thread."""
        return [thread.history for thread in self._threads]

    def _said_before(self, asked: Asked) -> tuple[Thread | None, Point | None]:
        """The longest of our turns that the messages begin with, preferably one to continue."""
        best: tuple[int, bool] = (0, False)
        found: tuple[Thread | None, Point | None] = (None, None)
        for thread in self._threads:
            if thread.tools != asked.tools_text:
                continue
            common = 0
            for ours, theirs in zip(thread.history, asked.messages, strict=False):
                if ours != theirs:
                    break
                common += 1
            for point in reversed(thread.points):
                if point.messages <= common and point.messages < len(asked.messages):
                    open_end = point is thread.points[-1] and not thread.busy
                    if (point.messages, open_end) > best:
                        best, found = (point.messages, open_end), (thread, point)
                    break
        return found

    def _afresh(self, asked: Asked) -> Pending:
        """A conversation as the template writes it; it may happen to continue a stream."""
        tokens = self._template.first(asked)
        for thread in self._threads:
            known = thread.stream.tokens
            if not thread.busy and len(known) < len(tokens) and tokens[: len(known)] == known:
                thread.busy = True
                rest = tokens[len(known) :]
                return Pending(asked=asked, thread=thread, tokens=rest, merged=True)
        return self._new(asked, tokens)

    def _new(self, asked: Asked, tokens: list[int]) -> Pending:
        self._numbers += 1
        thread = Thread(number=self._numbers - 1)
        return Pending(asked=asked, thread=thread, tokens=tokens, merged=False)
