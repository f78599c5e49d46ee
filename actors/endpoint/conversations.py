"""Conversations of people who use the policy while it trains, and their ratings.

GET    /                      a page for the following calls
GET    /episodes              conversations, the newest first: one's own, all with the run's key
GET    /episodes/<id>         one of them with its messages
POST   /episodes/<id>/reward  {"reward": 1.0, "success": true, "metrics": {"name": 2}}, of which a
                              reward is enough; <id> can also be that of an answer
DELETE /episodes/<id>         forgets one; says if the buffer has it
DELETE /episodes/of/<user>    forgets all of a user, and says how many the buffer has; needs the
                              run's key

No ticket stands behind a call. A conversation is recorded as an agent's episode is, and waits for
its rating, and then for a ticket: that is a permit here, whose members are rated conversations
which began with the same messages.

What is recorded and rated is in the actor's file before a call is answered; the next process of the
actor continues with it. A rated conversation stays rated until the buffer acknowledges it. One that
was sent without an answer is sent again, under any ticket, and the buffer refuses it if it has it:
so it is trained once.
"""

import asyncio
import dataclasses
import hashlib
import logging
import re
import secrets
import sqlite3
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from actors.endpoint.conversation_file import (
    ConversationFile,
    Messages,
    Prompt,
    Row,
    State,
    StoredAnswer,
    StoredConversation,
)
from actors.endpoint.external import LEAST_KEY_CHARS, End, outcome_of_end, start_key
from actors.endpoint.http_server import Caller, EndpointServer
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused
from actors.endpoint.session import Completion, EndpointSession
from actors.endpoint.template import Template
from actors.engines.engine import Engine
from actors.envs.base import EnvironmentFailure
from actors.failure_counts import FailureCounts
from actors.formats.chat import Chat
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Deliver, Finished, RewardTooLarge
from actors.ticket_progress import TicketProgress
from evolver_async.config import ConfigError
from evolver_async.config.secrets import secret
from evolver_async.config.sections.rollout import USERS, RolloutConfig
from evolver_async.schema import Ticket
from evolver_async.wire.client import Rejected
from evolver_async.wire.messages import Ack, Dup

PAGE = Path(__file__).with_name("conversations.html")
USERS_KEY = "rollout.serve.users_env"
OPERATOR = "operator"  # the holder of the run's key
COUNTED = (
    *("conversations", "calls", "rated", "delivered", "unrewarded", "undelivered", "forgotten"),
    *("opted_out", "limited"),
)
LISTED = 200  # conversations in an answer, the newest
EXCERPT = 200  # characters of a first message in the list
CURVE = 1000  # ratings in an answer, the newest
MOST_GROUPS = 1000  # of which the prompt is remembered, for tickets of their missing members
MINUTE_S, SWEEP_S = 60.0, 1.0
NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")
ANSWER = re.compile(r"(?:[a-z]+[-_])?(\d+)(?:-0-0-\d+)?")  # id of a conversation, or of an answer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveConversation:
    """One conversation. `ends`: its messages after each answer; `touched`: when it was last called
    or rated, in seconds of the loop; `rating`: None before it is rated; `episode`: what is to be
    delivered, None before its rating and after its delivery; `sent`: True while the buffer has not
    answered."""

    id: str
    user: str
    session: EndpointSession
    prompt: Prompt
    began: float
    touched: float
    ends: list[Messages] = field(default_factory=list)
    state: State = "open"
    rating: End | None = None
    episode: Finished | None = None
    sent: bool = False

    def stored(self, rating: End | None = None) -> StoredConversation:
        """Return what the file holds, with this rating."""
        lasted_s = self.touched - self.began
        return StoredConversation(self.prompt, lasted_s, rating, self.session.stored())


class Permit(NamedTuple):
    """A ticket that waits for rated conversations. `used`: done when it has them."""

    ticket: Ticket
    deliver: Deliver
    used: asyncio.Future[None]


class Rated(NamedTuple):
    """One rating, for the curve. `version`: the newest weights of the conversation."""

    seconds_ago: float
    reward: float
    version: str


@dataclass(eq=False)
class Conversations:
    """Conversations of one actor, with the interface of `AgentRunner`. Times are the loop's, and
    begin anew with the process. Raise ConfigError for keys that are not there."""

    engine: Engine
    chat: Chat
    rollout: RolloutConfig
    failures: FailureCounts = field(default_factory=FailureCounts)
    file: ConversationFile = field(default_factory=ConversationFile)
    page: bytes = field(default_factory=PAGE.read_bytes)
    counts: Counter[str] = field(default_factory=Counter)
    _known: dict[str, LiveConversation] = field(default_factory=dict)  # oldest first
    _by_end: dict[tuple[str, Messages], LiveConversation] = field(
        default_factory=dict
    )  # and by user
    _rated: dict[Prompt, deque[LiveConversation]] = field(default_factory=dict)
    _prompts: dict[int, bytes] = field(default_factory=dict)  # of groups, as hashes
    _permits: deque[Permit] = field(default_factory=deque)
    _calls: dict[str, deque[float]] = field(default_factory=dict)  # of the last minute, by user
    _curve: deque[tuple[float, Rated]] = field(default_factory=lambda: deque(maxlen=CURVE))
    _newest: tuple[Ticket, Setting, TicketProgress] | None = None
    _swept: float = 0.0

    def __post_init__(self) -> None:
        endpoint, serve = self.rollout.endpoint, self.rollout.serve
        self.keys: Mapping[bytes, str] = user_keys(endpoint.key_env, serve.users_env)
        self._template = Template(self.chat)
        self._patterns = [re.compile(pattern) for pattern in serve.redact]
        self._server = EndpointServer(USERS, self.failures, endpoint, self, self)
        self._prompts = self.file.groups()

    async def run(
        self, ticket: Ticket, setting: Setting, progress: TicketProgress, deliver: Deliver
    ) -> None:
        """Wait until there are rated conversations for all members of a ticket; deliver them."""
        first = self._newest is None
        self._newest = ticket, setting, TicketProgress(clock=progress.clock)
        for row in self.file.rows() if first else ():
            self._restore(row, setting)
        await self._server.listen()
        permit = Permit(ticket, deliver, asyncio.get_running_loop().create_future())
        self._permits.append(permit)
        self._match()
        progress.waiting += 1
        try:
            with progress.during(None, "waiting for rated conversations"):
                await permit.used
        finally:
            progress.waiting -= 1
            progress.played += len(ticket.members)
            if permit in self._permits:
                self._permits.remove(permit)

    def counters(self) -> dict[str, float]:
        """Return totals by metric name."""
        counted = {name: float(self.counts[name]) for name in COUNTED}
        counted |= {name: float(self._server.counts[name]) for name in ("requests", "refused")}
        return {f"serve/{name}": value for name, value in counted.items()}

    def worked_s(self) -> float:
        """Return seconds that grow throughout: people may take any time."""
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        await self._server.close()
        self.file.close()

    def caller(self, holder: str, *, trains: bool) -> Caller:
        """Return what answers the calls of a user."""

        def earlier(name: str) -> Messages | None:
            found = self._find(holder, name)
            return found.session.conversations.get(name) if found is not None else None

        return Caller((), earlier, partial(self._complete, holder, trains))

    async def answer(self, method: str, path: str, body: bytes, holder: str) -> bytes:
        """Answer a call that is of no API form. Raise RequestRefused."""
        self.sweep()
        first, _, rest = path.partition("/")
        if method == "DELETE" and first == "of" and rest:
            if holder != OPERATOR:
                raise RequestRefused("needs the key of the run", "not_allowed", 403)
            theirs = [one for one in self._known.values() if one.user == rest]
            forgotten = self._forget(*theirs)
            counts = {"forgotten": forgotten, "delivered": len(self.file.delivered(user=rest))}
            return msgspec.json.encode(counts)
        if (method, path) == ("GET", ""):
            return msgspec.json.encode(self._listed(holder))
        found = self._find(holder, first)
        if (method, rest) == ("DELETE", ""):
            forgotten = self._forget(found) if found is not None else 0
            named = ANSWER.fullmatch(first)
            taken = self.file.delivered(id=named[1]) if named else []
            delivered = sum(holder in (OPERATOR, user) for _, user in taken)
            if found is not None or delivered:
                return msgspec.json.encode({"forgotten": forgotten, "delivered": delivered})
        if found is None:
            raise RequestRefused("there is no such conversation", "no_episode", 404)
        if (method, rest) == ("GET", ""):
            messages = [one._asdict() for one in found.ends[-1]]
            return msgspec.json.encode(self._row(found) | {"messages": messages})
        if (method, rest) == ("POST", "reward"):
            self._rate(found, body)
            return msgspec.json.encode({"episode": found.id})
        raise RequestRefused(f"{method} episodes/{path} is not supported", "not_found", 404)

    def sweep(self) -> None:
        """Forget conversations whose time is over; count those that were not delivered."""
        now = asyncio.get_running_loop().time()
        if now < self._swept + SWEEP_S:
            return
        self._swept = now
        over = [
            one
            for one in self._known.values()
            if one.touched + self.rollout.reward_wait_s < now and not (one.session.busy or one.sent)
        ]
        if over:
            self._drop(*over)

    async def _complete(self, user: str, trains: bool, request: ChatRequest) -> list[Completion]:
        """Answer a call of the API forms. Raise RequestRefused."""
        self.sweep()
        self._limit(user, request.choices)
        request = request._replace(messages=tuple(map(self._redacted, request.messages)))
        found = self._continued(user, request)
        if found is None or not trains:
            if found is not None:
                self._forget(found)
            found = self._begin(user, request)
        try:
            answers = await found.session.complete(request)
        finally:
            found.session.rest()
        self.counts["calls"] += len(answers)
        if not trains:
            self.counts["opted_out"] += 1
            return answers
        found.touched = asyncio.get_running_loop().time()
        if found.id not in self._known:
            self._add(found)
        stored = list[StoredAnswer]()
        for answer in answers:
            said = found.session.conversations[answer.name]
            end = (*request.messages[: request.instructed], *said)
            stored.append(StoredAnswer(answer.name, request.instructed, end))
            self._note_end(found, end)
        with _storing():
            self.file.save(found.id, user, found.state, found.stored(), stored)
        return answers

    def _limit(self, user: str, calls: int) -> None:
        """Count calls of a user. Raise RequestRefused if there are too many in a minute."""
        now = asyncio.get_running_loop().time()
        recent = self._calls.setdefault(user, deque())
        while recent and recent[0] < now - MINUTE_S:
            recent.popleft()
        most = self.rollout.serve.calls_per_minute
        if len(recent) + calls > most:
            self.counts["limited"] += 1
            raise RequestRefused(f"at most {most} answers in a minute", "rate_limit", 429)
        recent.extend([now] * calls)

    def _redacted(self, message: ChatMessage) -> ChatMessage:
        """Replace what the rules forbid, before the policy reads it. Its own words it knows."""
        if message.role == "assistant":
            return message
        content = message.content
        for pattern in self._patterns:
            content = pattern.sub("[redacted]", content)
        return message._replace(content=content)

    def _continued(self, user: str, request: ChatRequest) -> LiveConversation | None:
        """Return the open conversation that a call continues, None if it begins one."""
        messages = request.messages
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1].role == "assistant":
                found = self._by_end.get((user, messages[:length]))
                if found is not None:
                    room = found.session.recorder.turns < found.session.setting.max_turns
                    return found if found.state == "open" and room else None
        return None

    def _begin(self, user: str, request: ChatRequest) -> LiveConversation:
        assert self._newest is not None, "the endpoint listens from the first ticket on"
        ticket, setting, progress = self._newest
        # The name is new in all launches: the id of an old answer must rate no other conversation.
        ticket = replace(ticket, group_id=secrets.randbits(53), members=[0], attempt=0)
        session = EndpointSession(ticket, 0, setting, self.engine, self._template, progress)
        prompt, now = (request.tools_text, request.messages), asyncio.get_running_loop().time()
        return LiveConversation(str(ticket.group_id), user, session, prompt, now, now)

    def _restore(self, row: Row, setting: Setting) -> None:
        """Continue a conversation that an earlier process of the actor has stored."""
        assert self._newest is not None, "the file is read with the first ticket"
        now, body = asyncio.get_running_loop().time(), row.body
        ticket, progress = body.session.ticket, self._newest[2]
        session = EndpointSession(ticket, 0, setting, self.engine, self._template, progress)
        session.restore(body.session)
        one = LiveConversation(row.id, row.user, session, body.prompt, now - body.lasted_s, now)
        self._known[one.id] = one
        for answer in row.answers:
            session.conversations[answer.name] = answer.messages[answer.instructed :]
            self._note_end(one, answer.messages)
        one.rating, one.state = body.rating, row.state
        if one.state != "rated":
            return
        assert one.rating is not None, "it is stored with its rating"
        try:
            one.episode = session.finished(outcome_of_end(one.rating, session), body.lasted_s)
        except (RewardTooLarge, RequestRefused) as error:
            log.warning("a rated conversation fits the run no more: %s", error)
            self._drop(one)
        else:
            self._rated.setdefault(one.prompt, deque()).append(one)

    def _note_end(self, one: LiveConversation, end: Messages) -> None:
        """Note messages that a call can continue."""
        if end not in one.ends:
            one.ends.append(end)
            self._by_end[one.user, end] = one

    def _add(self, conversation: LiveConversation) -> None:
        """Remember a conversation, in the place of the oldest one if there are too many: of one
        that is not to be delivered, if there is any."""
        while len(self._known) >= self.rollout.serve.conversations:
            places = [one for one in self._known.values() if not one.sent]
            if not places:
                break
            self._drop(min(places, key=lambda one: one.state == "rated"))
        self._known[conversation.id] = conversation
        self.counts["conversations"] += 1

    def _find(self, holder: str, id: str) -> LiveConversation | None:
        """Return the conversation with this id, or with this id of an answer."""
        named = ANSWER.fullmatch(id)
        found = self._known.get(named[1]) if named else None
        return found if found is not None and holder in (OPERATOR, found.user) else None

    def _rate(self, one: LiveConversation, body: bytes) -> None:
        """Rate a conversation; to repeat a rating changes nothing. Raise RequestRefused."""
        try:
            rating = msgspec.json.decode(body, type=End)
            if rating.reward is None or rating.error:
                raise ValueError("reward: is missing")
        except ValueError as error:  # msgspec's errors are some
            raise RequestRefused(str(error)[:500]) from None
        if one.rating is not None:
            if one.rating != rating:
                raise RequestRefused("the conversation is rated otherwise", "rewarded", 409)
            return
        if one.session.busy:
            raise RequestRefused("the conversation is being answered", "busy", 409)
        now = asyncio.get_running_loop().time()
        outcome = outcome_of_end(rating, one.session)
        try:
            episode = one.session.finished(outcome, one.touched - one.began)
        except RewardTooLarge as error:
            raise RequestRefused(str(error)) from None
        with _storing():
            self.file.save(one.id, one.user, "rated", one.stored(rating), synced=True)
        one.rating, one.state, one.touched, one.episode = rating, "rated", now, episode
        self._rated.setdefault(one.prompt, deque()).append(one)
        self.counts["rated"] += 1
        sampled = [run.weights for each in episode.trajectory.sequences for run in each.versions]
        newest = str(max(sampled)) if sampled else ""
        self._curve.append((now, Rated(0.0, episode.trajectory.reward, newest)))
        self._match()

    def _match(self) -> None:
        """Deliver rated conversations for which there is a ticket, the oldest prompts first."""
        for permit in [one for one in self._permits if not one.used.done()]:
            group, members = permit.ticket.group_id, permit.ticket.members
            known = self._prompts.get(group)
            full = (one for one, alike in self._rated.items() if len(alike) >= len(members))
            fits = (one for one in full if known is None or known == _hashed(one))
            if (prompt := next(fits, None)) is None:
                continue
            alike = self._rated[prompt]
            self._permits.remove(permit)
            if known is None:  # a member that comes to nothing is granted again
                self._prompts[group] = _hashed(prompt)
                self.file.note_group(group, self._prompts[group], MOST_GROUPS)
                if len(self._prompts) > MOST_GROUPS:
                    del self._prompts[next(iter(self._prompts))]
            for member in members:
                one = alike.popleft()
                assert one.episode is not None, "it is rated"
                one.sent = True
                episode = _as_member(one.episode, permit.ticket, member, int(one.id))
                permit.deliver(dataclasses.replace(episode, settled=partial(self._settled, one)))
            if not alike:
                del self._rated[prompt]
            if not permit.used.done():
                permit.used.set_result(None)

    def _settled(self, one: LiveConversation, outcome: object) -> None:
        """Note that the buffer has a conversation, or wait for another ticket."""
        one.sent = False
        if isinstance(outcome, Ack | Dup):
            one.state, one.episode = "delivered", None
            self.counts["delivered"] += 1
            self.file.deliver(one.id, one.user)
        elif one.id not in self._known:  # forgotten meanwhile
            return
        elif isinstance(outcome, Rejected | EnvironmentFailure):  # and would be again
            self._rated.setdefault(one.prompt, deque()).append(one)
            self._drop(one)
        else:
            self._rated.setdefault(one.prompt, deque()).append(one)
            self._match()

    def _drop(self, *gone: LiveConversation) -> None:
        """Forget conversations; count those that were never rated, or rated and not delivered."""
        for one in gone:
            if one.state != "delivered":
                self.counts["unrewarded" if one.state == "open" else "undelivered"] += 1
            self._remove(one)
        self.file.delete(one.id for one in gone)

    def _forget(self, *gone: LiveConversation) -> int:
        """Forget conversations on demand; return how many were not delivered."""
        forgotten = 0
        for one in gone:
            if one.sent:  # the buffer may have it, and does as a rule
                self.file.deliver(one.id, one.user)
            forgotten += not one.sent and one.state != "delivered"
            self._remove(one)
        self.counts["forgotten"] += forgotten
        self.file.delete((one.id for one in gone), scrub=True)
        return forgotten

    def _remove(self, one: LiveConversation) -> None:
        """Forget a conversation, apart from the file."""
        del self._known[one.id]
        for end in one.ends:
            if self._by_end.get((one.user, end)) is one:
                del self._by_end[one.user, end]
        if one.state == "rated" and not one.sent:
            self._rated[one.prompt].remove(one)
            if not self._rated[one.prompt]:
                del self._rated[one.prompt]
        one.session.close()

    def _listed(self, holder: str) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        theirs = [one for one in self._known.values() if holder in (OPERATOR, one.user)]
        curve = [rated._replace(seconds_ago=now - at)._asdict() for at, rated in self._curve]
        return {
            "episodes": [self._row(one) for one in theirs[: -LISTED - 1 : -1]],
            "counts": dict(self.counts) if holder == OPERATOR else {},
            "curve": curve if holder == OPERATOR else [],
            "tickets": len(self._permits),
        }

    def _row(self, one: LiveConversation) -> dict[str, Any]:
        first = next((each.content for each in one.prompt[1] if each.role == "user"), "")
        return {
            "episode": one.id,
            "user": one.user,
            "state": one.state,
            "answers": one.session.recorder.turns,
            "reward": None if one.rating is None else one.rating.reward,
            "seconds_ago": asyncio.get_running_loop().time() - one.touched,
            "prompt": first[:EXCERPT],
        }


def user_keys(key_env: str, users_env: str) -> dict[bytes, str]:
    """Return the names of users, and of the operator, by their keys. Raise ConfigError, which names
    the configuration's keys, never a secret."""
    keys = {start_key(key_env).encode(): OPERATOR}
    for entry in secret(users_env, USERS_KEY).split() if users_env else ():
        name, _, key = entry.partition("=")
        fits = NAME.fullmatch(name) and name != OPERATOR and len(key) >= LEAST_KEY_CHARS
        if not fits or not (key.isascii() and key.isprintable()) or key.encode() in keys:
            form = "NAME=KEY, separated by blanks, each key another one of at least"
            problem = f"{users_env} must hold {form} {LEAST_KEY_CHARS} printable characters"
            raise ConfigError(f"{USERS_KEY}: {problem}")
        keys[key.encode()] = name
    return keys


def _as_member(episode: Finished, ticket: Ticket, member: int, conversation: int) -> Finished:
    """Return the episode of a conversation as a member of a ticket's group."""
    names = {"group_id": ticket.group_id, "member": member, "attempt": ticket.attempt}
    trajectory = replace(episode.trajectory, **names, conversation=conversation)
    transcript = replace(episode.transcript, trajectory_id=trajectory.trajectory_id)
    return dataclasses.replace(episode, trajectory=trajectory, transcript=transcript)


def _hashed(prompt: Prompt) -> bytes:
    return hashlib.sha256(msgspec.json.encode(prompt)).digest()


@contextmanager
def _storing() -> Iterator[None]:
    """Refuse a call if what it brings cannot be stored."""
    try:
        yield
    except sqlite3.Error as error:
        log.error("a conversation cannot be stored: %s", error)
        raise RequestRefused(f"it cannot be stored: {error}", "not_stored", 503) from error
