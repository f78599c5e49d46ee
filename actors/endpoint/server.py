"""HTTP on the loopback interface: one port an actor, one base URL an episode.

    connection   produces a request at a time; the next waits until that is answered
    answering    consumes it, waits for the engine; ended when its client hangs up

Who knows an episode's URL may speak in its name: it holds a token that cannot be guessed, and is
worth nothing when the episode is over.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from urllib.parse import urlsplit

import h11

from actors.endpoint import response
from actors.endpoint.request import Refused, decode
from actors.endpoint.session import Session
from actors.failures import FailureCounts

HOST = "127.0.0.1"
MOST_BODY = 16 << 20  # bytes of one request
MOST_EARLY = 1 << 16  # bytes of the next request before this one is answered
IDLE_S = 60.0  # that a connection may wait for a whole request; clients of OpenAI's keep one for 5
TOKEN_BYTES = 24
JSON, EVENTS = "application/json", "text/event-stream"

log = logging.getLogger(__name__)


class Server:
    """The endpoint of one actor. `agent` names who calls it."""

    def __init__(self, agent: str, failures: FailureCounts) -> None:
        self.counts: Counter[str] = Counter()
        self._agent = agent
        self._failures = failures
        self._sessions: dict[str, Session] = {}
        self._connections: set[_Connection] = set()
        self._listening: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def open(self, session: Session) -> tuple[str, str]:
        """Answer for an episode; its base URL and the token that is in it."""
        async with self._starting:
            if self._listening is None:
                loop = asyncio.get_running_loop()
                self._listening = await loop.create_server(lambda: _Connection(self), HOST, 0)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._sessions[token] = session
        port = self._listening.sockets[0].getsockname()[1]
        return f"http://{HOST}:{port}/{token}/v1", token

    def close_session(self, token: str) -> None:
        """The episode is over: its calls are cancelled and its URL leads nowhere."""
        self._sessions.pop(token).close()

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._connections):
            connection.hang_up()

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body for a request."""
        self.counts["requests"] += 1
        try:
            return 200, *await self._answer(method, target, body)
        except Refused as refused:
            self.counts["refused"] += 1
            self._failures.note("agent_call", self._agent, f"refused: {refused}")
            log.warning("a call of %s is refused: %s", self._agent, refused)
            return refused.status, JSON, response.refusal(refused)
        except Exception:
            log.exception("a call fails")
            return 500, JSON, response.refusal(Refused("the answer failed", "internal"))

    async def _answer(self, method: str, target: str, body: bytes) -> tuple[str, bytes]:
        token, _, path = urlsplit(target).path.removeprefix("/").partition("/")
        session = self._sessions.get(token)
        if session is None:
            raise Refused("no episode has this URL, or it is over", "no_episode", 404)
        if (method, path) == ("GET", "v1/models"):
            return JSON, response.models()
        if (method, path) != ("POST", "v1/chat/completions"):
            raise Refused(f"{method} {path} is not supported", "not_found", 404)
        asked = decode(body)
        answer = await session.complete(asked)
        now_s = int(time.time())
        if asked.stream:
            return EVENTS, response.events(asked, answer, now_s)
        return JSON, response.whole(asked, answer, now_s)

    def joined(self, connection: "_Connection") -> None:
        self._connections.add(connection)

    def left(self, connection: "_Connection") -> None:
        self._connections.discard(connection)


class _Connection(asyncio.Protocol):
    """One client's connection; several requests, one after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER)
        self._body = bytearray()
        self._request: h11.Request | None = None
        self._answering: asyncio.Task[None] | None = None
        self._early = 0
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.joined(self)
        self._wait(IDLE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        self._wait(None)
        if self._answering is not None:
            self._answering.cancel()

    def hang_up(self) -> None:
        self._transport.abort()

    def _wait(self, for_s: float | None) -> None:
        """Hang up after so long; None: wait for as long as it takes."""
        if self._idle is not None:
            self._idle.cancel()
        loop = asyncio.get_running_loop()
        self._idle = None if for_s is None else loop.call_later(for_s, self.hang_up)

    def data_received(self, data: bytes) -> None:
        self._early = self._early + len(data) if self._answering is not None else 0
        if self._early > MOST_EARLY:
            return self.hang_up()
        try:
            self._http.receive_data(data)
            self._advance()
        except h11.RemoteProtocolError as error:
            log.info("a connection speaks no HTTP: %s", error)
            self._transport.close()

    def eof_received(self) -> bool:
        return False  # who sends no more waits for no answer either

    def _advance(self) -> None:
        """Take in what there is of a request; a whole one is answered."""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
                return
            if isinstance(event, h11.Request):
                self._request = event
                self._body.clear()
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > MOST_BODY:
                    refused = Refused(f"a request of more than {MOST_BODY} bytes", "too_large", 413)
                    self._respond(refused.status, JSON, response.refusal(refused), last=True)
                    return
            elif isinstance(event, h11.EndOfMessage):
                self._wait(None)
                self._answering = asyncio.create_task(self._answer())
                return
            else:  # ConnectionClosed, or PAUSED until the answer is out
                return

    async def _answer(self) -> None:
        assert self._request is not None
        method, target = self._request.method.decode(), self._request.target.decode()
        try:
            status, kind, body = await self._server.answer(method, target, bytes(self._body))
        except asyncio.CancelledError:  # its episode is over, and whoever still waits is to know
            self.hang_up()
            raise
        self._answering = None
        self._wait(IDLE_S)
        try:
            self._respond(status, kind, body, last=False)
            if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                self._http.start_next_cycle()
                self._advance()
            else:
                self._transport.close()
        except h11.ProtocolError as error:
            log.info("a connection ends: %s", error)
            self._transport.close()

    def _respond(self, status: int, kind: str, body: bytes, *, last: bool) -> None:
        headers = [("content-type", kind), ("content-length", str(len(body)))]
        if last:
            headers.append(("connection", "close"))
        self._send(h11.Response(status_code=status, headers=headers))
        self._send(h11.Data(data=body))
        self._send(h11.EndOfMessage())
        if last:
            self._transport.close()

    def _send(self, event: h11.Event) -> None:
        sent = self._http.send(event)
        if sent:
            self._transport.write(sent)
