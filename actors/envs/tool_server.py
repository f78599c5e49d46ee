"""MCP servers whose tools the policy calls beside those of its environment (`env.tools`).

One connection serves all episodes of a process. It is made when it is first needed, and made anew
after it broke. A command is started with it and ended with it. The package `mcp` is imported only
where a server is used.
"""

import asyncio
import json
import logging
import os
import shlex
import sys
import tempfile
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from actors.formats.tool_calls import ANSWER_TOOL
from actors.llm.endpoint_client import authorization
from evolver_async.config import ConfigError
from evolver_async.config.secrets import mask
from evolver_async.extension import RAISED

KEY, KEY_ENV = "env.tools.mcp", "env.tools.key_env"
MISSING = f"{KEY}: needs the package mcp, which is not installed: pip install 'evolver-async[mcp]'"
START_S = 60.0  # for a command to start, and a server to list its tools
SHOWN_CHARS = 500  # of what a command that does not start wrote to its standard error

log = logging.getLogger(__name__)


class ToolServerError(ConnectionError):
    """The server cannot be reached or broke; the message names the key."""


class ToolResult(NamedTuple):
    """Text of a tool's result. `failed`: the tool says that the call failed."""

    text: str
    failed: bool


class _ToolConnection(NamedTuple):
    client: Any
    over: asyncio.Event  # set to end it


class ToolServer:
    """Server at `address`: an http(s) URL, or a command that speaks MCP over its standard input and
    output. `key_env`: variable with the bearer token of a URL."""

    def __init__(self, address: str, key_env: str = "") -> None:
        self.address = address
        self.names: frozenset[str] = frozenset()  # of its tools, once they have been listed
        self._key_env = key_env
        self._specs: list[dict[str, Any]] | None = None
        self._errors: Any = sys.__stderr__  # of a command
        self._serving: asyncio.Task[None] | None = None  # the task of the newest connection
        self._ready: asyncio.Future[_ToolConnection] | None = None
        self._connection: _ToolConnection | None = None
        self._ending: set[asyncio.Task[None]] = set()  # those of broken ones

    async def tools(self) -> list[dict[str, Any]]:
        """Return the specs of its tools. Raise ToolServerError."""
        if self._specs is None:
            await self.connect()
        assert self._specs is not None, "a connection has listed them"
        return self._specs

    async def connect(self) -> _ToolConnection:
        """Return the connection, made within `START_S` if there is none. Raise ToolServerError."""
        if self._serving is None or self._ready is None or self._serving.done():
            self._connection = None
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready))
        return await asyncio.shield(self._ready)

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. What its server objects to in the arguments is a failed result. Raise
        ToolServerError, after which the next call connects anew."""
        import mcp  # pyright: ignore[reportMissingImports]
        from mcp.types import INVALID_PARAMS  # pyright: ignore[reportMissingImports]

        connection = await self.connect()
        try:
            result = await connection.client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult(f"error: {error}", True)
            self._end(connection)
            raise self._failure(error) from error
        except RAISED as error:  # of whatever transport
            self._end(connection)
            raise self._failure(error) from error
        return ToolResult(_text(result), result.is_error)

    async def close(self) -> None:
        """End the connection, and the command."""
        if self._connection is not None:
            self._end(self._connection)
        elif self._serving is not None:
            self._serving.cancel()
            self._ending.add(self._serving)
        if ending := [one for one in self._ending if not one.done()]:
            await asyncio.wait(ending)
        self._ending.clear()

    def probe(self) -> None:
        """Connect once, list the tools and end the connection. Raise ConfigError, also for names
        that tools cannot have. No event loop may run."""

        async def listed() -> None:
            try:
                await self.tools()
            finally:
                await self.close()

        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            self._errors = stderr
            try:
                asyncio.run(listed())
            except ToolServerError as error:
                stderr.seek(0)
                tail = " ".join(stderr.read().split())[-SHOWN_CHARS:]
                raise ConfigError(mask(f"{error}: {tail}" if tail else str(error))) from error
            finally:
                self._errors = sys.__stderr__
        if not self.names:
            raise ConfigError(f"{KEY}: {self.address} has no tools")
        if ANSWER_TOOL in self.names:
            raise ConfigError(
                f"{KEY}: {self.address} has a tool {ANSWER_TOOL}: that is the name of answers"
            )

    def _end(self, connection: _ToolConnection) -> None:
        """Begin to end a connection; the next call makes a new one."""
        connection.over.set()
        if connection is self._connection and self._serving is not None:
            self._ending.add(self._serving)
            self._serving = self._ready = self._connection = None

    async def _serve(self, ready: "asyncio.Future[_ToolConnection]") -> None:
        """Hold the connection until it is to end, in the one task that may begin and end it."""
        try:
            async with asyncio.timeout(START_S) as limit:
                async with self._client() as client:
                    self._specs = await _listed(client)
                    self.names = frozenset(spec["name"] for spec in self._specs)
                    limit.reschedule(None)
                    self._connection = connection = _ToolConnection(client, asyncio.Event())
                    ready.set_result(connection)
                    await connection.over.wait()
        except (*RAISED, BaseExceptionGroup) as error:
            failure = self._failure(error)
            if ready.done():
                log.warning("%s", failure)
            else:
                ready.set_exception(failure)
        finally:
            ready.cancel()

    def _client(self) -> AbstractAsyncContextManager[Any]:
        """Return a client that is not connected yet. Raise ConfigError."""
        try:
            import mcp  # pyright: ignore[reportMissingImports]
            from mcp.client.stdio import (  # pyright: ignore[reportMissingImports]
                StdioServerParameters,
                stdio_client,
            )
            from mcp.client.streamable_http import (  # pyright: ignore[reportMissingImports]
                create_mcp_http_client,
                streamable_http_client,
            )
        except ImportError as error:
            raise ConfigError(MISSING) from error
        if is_url(self.address):
            headers = authorization(self._key_env, KEY_ENV)
            http = create_mcp_http_client(headers) if headers else None
            return mcp.Client(streamable_http_client(self.address, http_client=http))
        command, *arguments = shlex.split(self.address)
        started = StdioServerParameters(command=command, args=arguments, env={**os.environ})
        return mcp.Client(stdio_client(started, self._errors))

    def _failure(self, error: BaseException) -> Exception:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConfigError):
            return error
        late = isinstance(error, TimeoutError)
        why = f"no answer within {START_S:g} s" if late else f"{type(error).__name__}: {error}"
        return ToolServerError(mask(f"{KEY}: {self.address}: {' '.join(why.split())}"))


_servers: dict[tuple[str, str], ToolServer] = {}


def tool_server(address: str, key_env: str) -> ToolServer:
    """Return this process's one server at an address."""
    return _servers.setdefault((address, key_env), ToolServer(address, key_env))


async def close_tool_servers() -> None:
    """End the connections of this process."""
    await asyncio.gather(*(one.close() for one in _servers.values()))


def is_url(address: str) -> bool:
    """Return True for an http(s) URL, False for a command."""
    return address.startswith(("http://", "https://"))


async def _listed(client: Any) -> list[dict[str, Any]]:
    """Return the specs of a server's tools, of all pages."""
    specs, cursor = list[dict[str, Any]](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        specs += [
            {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return specs


def _text(result: Any) -> str:
    """Return a result as text; what is none, as an image, by its kind alone."""
    parts = []
    for block in result.content:
        text = getattr(getattr(block, "resource", block), "text", None)
        parts.append(f"[{block.type}]" if text is None else text)
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
