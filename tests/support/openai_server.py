"""A local OpenAI-compatible server that answers what a test tells it to, well or badly.

    with OpenAIServer("first answer", status(500), lambda body: "by the request") as server:
        config = Llm(url=server.url, model="m")
        ...
        assert server.calls[0].body["messages"][-1]["content"] == "..."

A script's answers are used up in order; after the last one, or where there is none, `otherwise`
answers, which by default is status 500 with "the script is over".
"""

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from http_server import HttpServer, Reply, raw

CHUNK = 1 << 16


@dataclass(frozen=True)
class Call:
    """What the server was asked."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: dict[str, Any]


Answer = str | Reply | Callable[[dict[str, Any]], "str | Reply"]  # a text is a proper answer


def answer(text: str, *, tokens: int = 10, finish: str = "stop") -> Reply:
    """A proper answer."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    usage = {"prompt_tokens": tokens - 1, "completion_tokens": 1, "total_tokens": tokens}
    return raw({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})


def status(number: int, text: str = "", **headers: str) -> Reply:
    """An error; `retry_after="3"` becomes the header `retry-after: 3`."""
    body = json.dumps({"error": {"message": text or f"status {number}"}}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(body=body, status=number, headers=named)


def garbage() -> Reply:
    """Status 200 with what is no JSON and no UTF-8."""
    return Reply(body=b"\xff\xfe<html>\x00not an answer" * 3)


def silence() -> Reply:
    """Nothing at all until the caller has enough, or the server ends."""
    return Reply(after_s=3600.0)


def dripping() -> Reply:
    """An answer that never gets anywhere: a byte now and then."""
    return Reply(body=b" ", repeat=1 << 20, pause_s=0.02)


def large(size: int = 10 << 20) -> Reply:
    """A proper answer of so many characters."""
    return answer("Step 1 Judgment: GOOD\n" * (size // 22))


def endless(size: int = 64 << 20) -> Reply:
    """As many bytes as the caller takes, without a length announced."""
    return Reply(body=b"[" * CHUNK, repeat=size // CHUNK)


def dropped() -> Reply:
    """The connection is closed without a word."""
    return Reply(drop=True)


def cut() -> Reply:
    """The connection is closed in the middle of an answer."""
    return Reply(body=b'{"choices": [{"mess', announced=999)


def closed_url() -> str:
    """The address of a server that is not there: connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


class OpenAIServer:
    """Serves in threads while it is entered. `most` is the largest number of calls at a time."""

    def __init__(self, *script: Answer, otherwise: Answer | None = None) -> None:
        self.calls: list[Call] = []
        self.most = 0
        self._script = list(script)
        self._otherwise = otherwise if otherwise is not None else status(500, "the script is over")
        self._now = 0
        self._lock = threading.Lock()
        self._http = HttpServer(self._reply, self._over)

    @property
    def url(self) -> str:
        return f"{self._http.url}/v1"

    @property
    def prompts(self) -> list[str]:
        """The last message of every call."""
        return [call.body["messages"][-1]["content"] for call in self.calls]

    def say(self, *script: Answer) -> None:
        """Add to the script."""
        with self._lock:
            self._script += script

    def __enter__(self) -> Self:
        self._http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.end()

    def _reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        with self._lock:
            self.calls.append(Call(path, headers, body))
            self._now += 1
            self.most = max(self.most, self._now)
            made = self._script.pop(0) if self._script else self._otherwise
        made = made(body) if callable(made) else made
        reply = answer(made) if isinstance(made, str) else made
        self._http.ended.wait(reply.after_s)
        return reply

    def _over(self) -> None:
        with self._lock:
            self._now -= 1
