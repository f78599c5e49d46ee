"""Server and client within one asyncio loop, for serial runs.

Bytes and rules are those of the sockets; the clock is the loop's, which may be virtual.
"""

import asyncio

from evolver_async.wire.client import Client
from evolver_async.wire.router import PARK_S, TICK_S, RequestHandler, RequestRouter


class LocalServer:
    """Server of a service to the `LocalClient`s of its asyncio loop.

    An exception of the service ends the server and is raised by every request from then on.
    """

    def __init__(self, service: RequestHandler, run_id: str, *, park_s: float = PARK_S) -> None:
        self.run_id = run_id
        self.clients: list[LocalClient] = []
        self._router = RequestRouter(
            service, run_id, park_s, connected=lambda client: client in self.clients
        )
        self._inbox: list[tuple[LocalClient, list[bytes]]] = []
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the ticks; call it inside the loop."""
        self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def post(self, client: "LocalClient", frames: list[bytes]) -> None:
        """Queue a message; it is handled with all others of this turn of the loop."""
        if self._failure is not None:
            raise self._failure
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._work, False)
        self._inbox.append((client, frames))

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._work(True)

    def _work(self, tick: bool) -> None:
        now = asyncio.get_running_loop().time()
        inbox, self._inbox = self._inbox, []
        try:
            for client, frames in inbox:
                self._router.receive(client, frames, now)
            if tick:
                self._router.tick(now)
            replies = self._router.settle(now)
        except Exception as error:
            self._failure = error
            self.close()
            for client in self.clients:
                client.fail(error)
            return
        for client, frames in replies:
            client.deliver(frames)


class LocalClient(Client):
    """Client of a `LocalServer` in the same loop."""

    def __init__(self, server: LocalServer, sender: str, incarnation: int = 0) -> None:
        super().__init__("local", server.run_id, sender, incarnation)
        self._server = server
        server.clients.append(self)

    def deliver(self, frames: list[bytes]) -> None:
        """Receive a reply."""
        self._receive(frames)

    def close(self) -> None:
        if self in self._server.clients:
            self._server.clients.remove(self)

    def _send(self, frames: list[bytes]) -> None:
        self._server.post(self, frames)

    def _poll(self) -> None:
        """Do nothing: replies are delivered, not fetched."""
