"""HTTP server of an actor: one port, one base URL and one API key per episode.

uvicorn speaks HTTP/1.1 and pauses reading from clients that send too much. This module adds the
limits that uvicorn does not have: bytes per head and body, seconds per request, and the
cancellation of a generation whose client has disconnected. A call names its episode in the URL and
proves by the key, as `Authorization: Bearer` or `x-api-key`, that it is of its agent. The key is
checked before the body is read: strangers can take neither memory nor open files.
"""

import asyncio
import errno
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from actors.endpoint import chat_form, messages_form, responses_form
from actors.endpoint.external import OpenedEpisode
from actors.endpoint.request import ChatRequest, RequestRefused
from actors.endpoint.responses_form import Earlier
from actors.endpoint.session import Completion, EndpointSession
from actors.failure_counts import FailureCounts
from evolver_async.config import ConfigError
from evolver_async.config.sections.rollout import EndpointConfig

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 16 << 20
STRANGER_BYTES = 64 << 10  # of the body of a call without a key, which is answered all the same
MAX_STRANGERS = 512  # connections without a key; the oldest one makes room for the next
BACKLOG = 256  # connections accepted at once, before any of them has brought its key
# Time limit of a request's head and of its body. A kept connection may be idle as long: to close it
# before its client does would cost a call that is just being sent (OpenAI's clients keep them 5 s).
IDLE_S = 60
ID_BYTES, KEY_BYTES = 12, 24
PORTS = 64  # that are tried, from a given one on
EPISODES = "episodes"  # the part of a URL in which an episode's id stands otherwise
FORMS_OF_ALL = "v1"  # the first part of the URL of calls that are of no episode
TRAINS = b"x-train"  # header of a call; unless it is `yes`, nothing of its conversation is kept
JSON, EVENTS, PAGE = "application/json", "text/event-stream", "text/html; charset=utf-8"

log = logging.getLogger(__name__)


class ApiForm(NamedTuple):
    """One API: the decoder of its requests, which also finds earlier conversations, and the
    encoders of its answers and errors."""

    decode: Callable[[bytes, Earlier], ChatRequest]
    whole: Callable[[ChatRequest, list[Completion], int], bytes]
    events: Callable[[ChatRequest, list[Completion], int], bytes]
    refusal: Callable[[RequestRefused], bytes]


FORMS = {
    "v1/chat/completions": ApiForm(
        lambda body, _: chat_form.decode(body),
        *(chat_form.whole, chat_form.events, chat_form.refusal),
    ),
    "v1/responses": ApiForm(
        *(responses_form.decode, responses_form.whole, responses_form.events),
        chat_form.refusal,
    ),
    "v1/messages": ApiForm(
        lambda body, _: messages_form.decode(body),
        *(messages_form.whole, messages_form.events, messages_form.refusal),
    ),
}


class Caller(NamedTuple):
    """The one that calls an API form: its players, its earlier conversations, and what answers."""

    players: tuple[str, ...]
    earlier: Earlier
    complete: Callable[[ChatRequest], Awaitable[list[Completion]]]


class Episodes(Protocol):
    """Calls below /episodes. `keys`: the names of those who may make them, by their keys."""

    keys: Mapping[bytes, str]

    async def answer(self, method: str, path: str, body: bytes, holder: str) -> bytes:
        """Return the answer to a call of the key's `holder`. Raise RequestRefused."""
        ...


class Live(Episodes, Protocol):
    """Episodes of people, who call the API forms below /v1 without one. `page`: in HTML."""

    page: bytes

    def caller(self, holder: str, *, trains: bool) -> Caller:
        """Return what answers the calls of the key's `holder`, which may not train on them unless
        `trains`."""
        ...


class EndpointServer:
    """The HTTP endpoint of one actor. `agent` names the agent in messages; `episodes`: None if the
    actor calls its agents itself; `live`: the same as `episodes`, if people use the policy."""

    def __init__(
        self,
        agent: str,
        failures: FailureCounts,
        settings: EndpointConfig,
        episodes: Episodes | None,
        live: Live | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._agent = agent
        self._failures = failures
        self._settings = settings
        self._episodes, self._live = episodes, live
        self._ignored: set[str] = set()  # keys that were logged
        self._sessions: dict[str, EndpointSession] = {}
        # the holders of keys, by these and by the first part of a URL
        self._keys: dict[str, Mapping[bytes, str]] = {}
        if episodes is not None:
            self._keys[EPISODES] = episodes.keys
        if live is not None:
            self._keys[FORMS_OF_ALL] = live.keys
        self._strangers: dict[_Connection, None] = {}  # connections without a key, oldest first
        self._state = ServerState()
        self._listener: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def listen(self) -> None:
        """Start listening, if it does not listen yet. Raise ConfigError for an address that it
        cannot have."""
        async with self._starting:
            if self._listener is None:
                self._listener = await self._listen()

    def open(self, session: EndpointSession) -> OpenedEpisode:
        """Serve an episode."""
        assert self._listener is not None, "it listens before its first episode"
        id, key = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(KEY_BYTES)
        self._sessions[id], self._keys[id] = session, {key.encode(): id}
        host, port = public_host(self._settings), self._listener.sockets[0].getsockname()[1]
        host = f"[{host}]" if ":" in host else host
        return OpenedEpisode(id, f"http://{host}:{port}/{id}/v1", key)

    def close_session(self, id: str) -> None:
        """End an episode: cancel its calls and make its URL unknown."""
        del self._keys[id]
        self._sessions.pop(id).close()

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

    def holder(self, scope: Any) -> str:
        """Return the holder of the key that a request has, "" if its URL needs another one."""
        found = ""
        for given in _given_keys(scope):
            for key, name in self._keys.get(_first(scope), {}).items():
                if secrets.compare_digest(given, key):
                    found = name
        return found

    async def _listen(self) -> asyncio.Server:
        """Start listening. `uvicorn.Server` would replace the actor's signal handlers."""
        config = Config(
            self._serve,
            interface="asgi3",
            http="httptools",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            timeout_keep_alive=IDLE_S,
        )
        config.load()
        connection = partial(_Connection, self.holder, self._strangers, config, self._state, {})
        bind, port = self._settings.bind, self._settings.port
        ports = range(port, min(port + PORTS, 1 << 16)) if port else [0]
        cause: OSError | None = None
        for port in ports:
            try:
                server = await asyncio.get_running_loop().create_server(
                    connection, bind, port, backlog=BACKLOG
                )
            except OSError as error:
                cause = error
            else:
                log.info("agents call port %d of %s", server.sockets[0].getsockname()[1], bind)
                return server
        key = "port" if cause is not None and cause.errno == errno.EADDRINUSE else "bind"
        where = f"{bind}, port {ports[0]} to {ports[-1]}"
        raise ConfigError(f"rollout.endpoint.{key}: cannot listen on {where}: {cause}") from None

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as an ASGI application."""
        status, kind, closing = 200, JSON, []
        admitted = self.holder(scope)
        try:
            if self._live is not None and (scope["method"], scope["path"]) == ("GET", "/"):
                status, kind, content = (
                    200,
                    PAGE,
                    self._live.page,
                )  # without a key, as it holds none
            elif not admitted:
                await self._refuse_stranger(scope, receive)
            else:
                self.counts["requests"] += 1
                body = await _read(receive, MAX_BODY_BYTES)
                answer = self._answer(scope, body, admitted)
                kind, content = await _until_disconnect(answer, receive)
        except RequestRefused as refused:
            if not admitted:  # a stranger, or of an episode that has ended
                log.warning("a call that may not be of %s is refused: %s", self._agent, refused)
            elif refused.status not in (429, 503):
                self.counts["refused"] += 1
                self._failures.note("agent_call", self._agent, f"refused: {refused}")
                log.warning("a call of %s is refused: %s", self._agent, refused)
            status, content = refused.status, _refusal(scope, refused)
            closing = [(b"connection", b"close")] * (not admitted or status in (408, 413))
        except ConnectionError:
            return
        except Exception:
            log.exception("a call of %s fails", self._agent)
            refused = RequestRefused("the call failed", "internal", 500)
            status, content = refused.status, _refusal(scope, refused)
        length = (b"content-length", b"%d" % len(content))
        headers = [(b"content-type", kind.encode()), length, *closing]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _refuse_stranger(self, scope: Any, receive: Any) -> NoReturn:
        """Raise RequestRefused; a short body is received before, so that its sender hears of it."""
        with suppress(RequestRefused):
            await _read(receive, STRANGER_BYTES)
        if _first(scope) in self._keys:
            raise RequestRefused("the call has not the key of this URL", "invalid_api_key", 401)
        raise RequestRefused("no running episode has this URL", "no_episode", 404)

    async def _answer(self, scope: Any, body: bytes, holder: str) -> tuple[str, bytes]:
        """Return content type and body of an answer. Raise RequestRefused."""
        method, path = scope["method"], _path(scope)
        if _first(scope) == EPISODES and self._episodes is not None:
            return JSON, await self._episodes.answer(method, path, body, holder)
        caller = self._caller(scope, holder)
        if (method, path) == ("GET", "v1/models"):
            return JSON, chat_form.models(caller.players)
        form = FORMS.get(path)
        if form is None or method != "POST":
            raise RequestRefused(f"{method} {path} is not supported", "not_found", 404)
        request = form.decode(body, caller.earlier)
        for name in request.ignored:
            if name not in self._ignored:
                self._ignored.add(name)
                log.info("%s sets %s, which changes no sampling here", self._agent, name)
        answers = await caller.complete(request)
        encode = form.events if request.stream else form.whole
        return EVENTS if request.stream else JSON, encode(request, answers, int(time.time()))

    def _caller(self, scope: Any, holder: str) -> Caller:
        """Return the one that calls an API form. Raise RequestRefused."""
        if _first(scope) == FORMS_OF_ALL and self._live is not None:
            allowed = [value for name, value in scope["headers"] if name == TRAINS]
            trains = all(value.strip().lower() == b"yes" for value in allowed)
            return self._live.caller(holder, trains=trains)
        session = self._sessions.get(_first(scope))
        if session is None:
            raise RequestRefused("the episode has ended", "no_episode", 404)
        return Caller(session.setting.players, session.conversations.get, session.complete)


def public_host(settings: EndpointConfig) -> str:
    """Return the host by which agents reach the endpoint of an actor on this host."""
    everywhere = settings.bind in ("0.0.0.0", "::")
    return settings.public_host or (socket.gethostname() if everywhere else settings.bind)


def _first(scope: Any) -> str:
    """Return the part of a request's URL that names its episode."""
    return scope["path"][1:].partition("/")[0]


def _given_keys(scope: Any) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            yield value[7:].strip()


def _path(scope: Any) -> str:
    """Return the part of a request's URL behind the one that names its episode, if it has one."""
    first, _, rest = scope["path"][1:].partition("/")
    return f"{first}/{rest}" if first == FORMS_OF_ALL else rest


def _refusal(scope: Any, refused: RequestRefused) -> bytes:
    """Encode an error as the API that was called does, as OpenAI's where none was."""
    form = FORMS.get(_path(scope))
    return form.refusal(refused) if form is not None else chat_form.refusal(refused)


async def _read(receive: Any, limit_bytes: int) -> bytes:
    """Receive the body of a request.

    Raise RequestRefused if it is too large or too late, ConnectionError if the client disconnects.
    """
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(IDLE_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limit_bytes:
                    text = f"the request has more than {limit_bytes} bytes"
                    raise RequestRefused(text, "too_large", 413)
    except TimeoutError:
        text = f"the request was not complete within {IDLE_S:g} s"
        raise RequestRefused(text, "too_late", 408) from None
    return bytes(body)


async def _until_disconnect(answer: Any, receive: Any) -> tuple[str, bytes]:
    """Await `answer`; cancel it if the client disconnects.

    Raise ConnectionError then, and RequestRefused if the episode ends first.
    """
    answering = asyncio.create_task(answer)
    disconnected = asyncio.create_task(receive())
    disconnected.add_done_callback(lambda _: answering.cancel())
    try:
        return await answering
    except asyncio.CancelledError:
        if not answering.cancelled():
            raise
        if disconnected.done():
            raise ConnectionError from None
        raise RequestRefused("the episode has ended", "no_episode", 404) from None
    finally:
        answering.cancel()
        disconnected.cancel()


class _Connection(HttpToolsProtocol):
    """A connection that is closed if the head of a request takes longer than `IDLE_S`, or is longer
    than `MAX_HEAD_BYTES`.

    Until it has brought a request that is admitted, it is one of `strangers`.
    """

    _head_bytes: int | None = 0  # received of a head; None behind it

    def __init__(
        self,
        holder: Callable[[Any], str],
        strangers: dict["_Connection", None],
        *uvicorns: Any,
    ) -> None:
        super().__init__(*uvicorns)
        self._holder, self._strangers = holder, strangers

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_request()
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[self] = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = None
        if self in self._strangers and self._holder(self.scope):
            del self._strangers[self]
        self._idle.cancel()

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.cancel()
        self._strangers.pop(self, None)
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._idle = self.loop.call_later(IDLE_S, self.transport.abort)
