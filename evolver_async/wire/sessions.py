"""Sessions of processes: the holder of every name, and the replies that it got.

A process is identified by incarnation (rises with each restart by a supervisor) and nonce (random,
drawn with its client). A name belongs to one process at a time:

- a higher incarnation takes the name over at once, and a lower one is fenced;
- another process of the same incarnation gets the name only once its holder has left, is
  disconnected, or has been silent for `silent_s`; until then HELLO is refused and all else fenced.
  A process whose HELLO the service refuses has left.

A message is identified by its number. A repeated message gets the same reply and has no second
effect. Three kinds are exempt: by their contents they change nothing when repeated. STATUS and BEAT
claim no name either.
PUSH is one of them, also from a process that lost its name: a granted member is always accepted.

Pure: time and connections are arguments. Bounded: by names, and by answers of each.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from evolver_async.wire.envelope import Envelope
from evolver_async.wire.messages import (
    Beat,
    Contribute,
    Fenced,
    GroupReply,
    Hello,
    Lease,
    Ok,
    Push,
    Pushes,
    Reject,
    Reply,
    Request,
    Retrieve,
    Retry,
    Sample,
    StatusRequest,
    Tickets,
    Wait,
)

NAMES = 4096  # past it the name that was silent for longest is forgotten
ANSWERS = 512  # remembered of each process; older messages are refused as repeated
EXPIRY_S = 3600.0  # a name that was silent for so long is forgotten
# One object for all: RENEW, COUNTERS and RELEASE have no other answer. With one for each, those to
# a thousand actors took 230 MB after an hour.
PLAIN: list[Reply] = [Ok()]
EXEMPT = Push | Pushes | Retrieve | Contribute


@dataclass
class PeerSession:
    """Session of the process that holds a name. `host`, `pid`: from its HELLO, "" and 0 before.

    `floor`: the highest number of a message whose answer is forgotten. `granted`: the number of the
    LEASE that got tickets last. `asked`: of the LEASE or SAMPLE that is not answered yet, which may
    be parked while later messages are answered.
    """

    incarnation: int
    nonce: str
    route: Any
    since: float
    heard: float
    host: str = ""
    pid: int = 0
    left: bool = False
    floor: int = -1
    granted: int = -1
    asked: int = -1
    answers: dict[int, list[Reply]] = field(default_factory=dict)

    def recall(self, number: int) -> list[Reply] | None:
        """The answer to the message of this number; None if it is new."""
        if number in self.answers or number > self.floor or number == self.asked:
            return self.answers.get(number)
        return [Reject(reason=f"message {number} was answered before")]

    def remember(self, number: int, replies: list[Reply]) -> None:
        if number == self.asked:
            self.asked = -1
        if type(replies[0]) is Tickets:
            # tickets are large, and a LEASE is sent only after the reply to the one before
            if self.granted in self.answers:
                self.answers[self.granted] = [Wait(reason="these tickets were granted before")]
            self.granted = number
        self.answers[number] = PLAIN if _plain(replies[0]) else replies
        if len(self.answers) > ANSWERS:
            oldest = next(iter(self.answers))
            del self.answers[oldest]
            self.floor = max(self.floor, oldest)


class Sessions:
    """Sessions by name. `connected`: True if a route still leads to a client."""

    def __init__(self, connected: Callable[[Any], bool], silent_s: float) -> None:
        self._connected = connected
        self._silent_s = silent_s
        self._by_name: OrderedDict[str, PeerSession] = OrderedDict()  # the longest silent first

    def __len__(self) -> int:
        return len(self._by_name)

    def enter(self, envelope: Envelope, route: Any, now: float) -> list[Reply] | None:
        """Return the replies to a message without effect, None if the service is to handle it."""
        request, name = envelope.message, envelope.sender
        session = self._by_name.get(name)
        if isinstance(request, StatusRequest | Beat) or (
            isinstance(request, EXEMPT) and not (session and _same(session, envelope))
        ):
            return None
        if session is None or not _same(session, envelope):
            refusal = None if session is None else self._refusal(session, envelope, now)
            if refusal is not None:
                return [refusal]
            session = PeerSession(envelope.incarnation, envelope.nonce, route, now, now)
            self._by_name[name] = session
        session.route, session.heard = route, now
        self._by_name.move_to_end(name)
        if len(self._by_name) > NAMES:
            self._by_name.popitem(last=False)
        if isinstance(request, Hello):
            session.host, session.pid = request.host, request.pid
        if isinstance(request, Lease | Hello):
            session.left = isinstance(request, Lease) and request.credit == 0
        if isinstance(request, EXEMPT):
            return None
        answer = session.recall(envelope.message_id)
        if answer is not None:
            # The refused process ends. Its successor gets the name at once and need not wait until
            # the connection is closed.
            session.left |= _refused(request, answer)
        elif isinstance(request, Lease | Sample):
            session.asked = envelope.message_id
        return answer

    def remember(self, envelope: Envelope, replies: list[Reply]) -> None:
        """Keep these replies for copies of this message.

        Groups are not kept: the same take gets the same groups. RETRY asks for the message again.
        """
        session = self._by_name.get(envelope.sender)
        if (
            session is not None
            and _same(session, envelope)
            and not isinstance(envelope.message, EXEMPT | StatusRequest | Beat)
            and not isinstance(replies[0], GroupReply | Retry)
        ):
            session.remember(envelope.message_id, replies)
            session.left |= _refused(envelope.message, replies)

    def holds(self, envelope: Envelope) -> bool:
        """False if another process has got the sender's name since."""
        session = self._by_name.get(envelope.sender)
        return session is None or _same(session, envelope)

    def expire(self, now: float) -> None:
        """Forget the names that have been silent for long."""
        while self._by_name:
            name, session = next(iter(self._by_name.items()))
            if now - session.heard <= EXPIRY_S:
                return
            del self._by_name[name]

    def _refusal(self, session: PeerSession, envelope: Envelope, now: float) -> Reply | None:
        """The reply to another process than the holder, if it cannot have the name; else None."""
        if envelope.incarnation > session.incarnation:
            return None
        if envelope.incarnation == session.incarnation and (
            session.left
            or now - session.heard > self._silent_s
            or not self._connected(session.route)
        ):
            return None
        whom = f"process {session.pid} on {session.host}" if session.host else "another process"
        reason = (
            f"the name {envelope.sender} is held by {whom} (incarnation {session.incarnation}, "
            f"joined {now - session.since:.0f} s ago, last heard {now - session.heard:.1f} s ago)"
        )
        if isinstance(envelope.message, Hello):
            return Reject(reason=reason)
        return Fenced(reason=reason)


def _same(session: PeerSession, envelope: Envelope) -> bool:
    return (session.incarnation, session.nonce) == (envelope.incarnation, envelope.nonce)


def _refused(request: Request | Reply, replies: list[Reply]) -> bool:
    return isinstance(request, Hello) and isinstance(replies[0], Reject)


def _plain(reply: Reply) -> bool:
    """True for an OK that says nothing else."""
    return type(reply) is Ok and not any(structs.astuple(reply))
