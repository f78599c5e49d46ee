"""A local HTTP server in threads whose every answer a test decides, well or badly.

What it serves is asked for a `Reply` to each POST; `tests/support/openai_server.py` and
`tests/support/env_service.py` say which.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server does with one call. `after_s` of silence come first.

    `body` is sent as it is, `repeat` times over; `pause_s` lie between two of them. `drop`: the
    connection is closed instead. `announced`: the length in the header; what is missing of it never
    comes, since the connection is closed.
    """

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    repeat: int = 1
    pause_s: float = 0.0
    drop: bool = False
    announced: int | None = None


def raw(value: Any) -> Reply:
    """Status 200 with some other JSON."""
    return Reply(body=json.dumps(value).encode(), headers={"content-type": "application/json"})


Answering = Callable[[str, dict[str, str], Any], Reply]  # path, headers in lower case, JSON


class HttpServer:
    """Serves on the loopback interface between `start` and `end`; `over` is called once a reply has
    been sent. `ended` cuts every pause short."""

    def __init__(self, reply: Answering, over: Callable[[], None] = lambda: None) -> None:
        self.ended = threading.Event()
        self._http = _Http(("127.0.0.1", 0), _handler(reply, over, self.ended))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Callers that hang up are part of the tests."""


def _handler(
    reply: Answering, over: Callable[[], None], ended: threading.Event
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                self._send(reply(self.path, headers, json.loads(sent)))
            finally:
                over()

        def _send(self, reply: Reply) -> None:
            bare = reply.drop or ended.is_set()
            self.close_connection = bare or reply.repeat > 1 or reply.announced is not None
            if bare:
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.repeat == 1:
                length = len(reply.body) if reply.announced is None else reply.announced
                self.send_header("content-length", str(length))
            self.end_headers()
            for _ in range(reply.repeat):
                self.wfile.write(reply.body)
                if ended.wait(reply.pause_s):
                    return

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
