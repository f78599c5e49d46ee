"""A headless Chromium that tests drive over its DevTools protocol, with Bokeh's own tornado."""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launches import wait_for
from tornado.websocket import WebSocketClientConnection, websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
LARGEST_MESSAGE = 64 << 20


class Tab:
    """One tab: `problems` collects errors of its scripts and refusals of its policy."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.socket = self.loop.run_until_complete(_connected(url))
        self.calls = 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        return self.loop.run_until_complete(self._exchange(message))

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        await self.socket.write_message(json.dumps(message))
        while True:
            text = await asyncio.wait_for(self.socket.read_message(), 60)
            assert text is not None, "the browser has ended"
            answer = json.loads(text)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])
        if event["method"] == "Page.javascriptDialogOpening":
            self.problems.append("a dialog opened")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, page: Path | str, width: int = 1500, height: int = 1000) -> None:
        """Open a file or an address and wait until its script is ready."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        url = page if isinstance(page, str) else page.resolve().as_uri()
        self.call("Page.navigate", url=url)
        ready = "location.href !== 'about:blank' && document.body?.dataset.ready"
        wait_for(lambda: self.evaluate(ready), f"the page {url}")

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            point = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **point)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what the window shows, or the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.loop.run_until_complete(_closed(self.socket))
        self.loop.close()


async def _connected(url: str) -> WebSocketClientConnection:
    return await websocket_connect(url, max_message_size=LARGEST_MESSAGE)


async def _closed(socket: WebSocketClientConnection) -> None:
    """Close a socket; tornado wants a running loop for that."""
    socket.close()


@contextlib.contextmanager
def browsing(directory: Path) -> Iterator[Tab]:
    """Run a browser with its profile in `directory` and yield its tab."""
    assert EXECUTABLE is not None
    command = [EXECUTABLE, *OPTIONS, "--remote-debugging-port=0", f"--user-data-dir={directory}"]
    process = subprocess.Popen(
        [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    port = directory / "DevToolsActivePort"
    try:
        wait_for(lambda: port.exists() and port.read_text().count("\n"), "the browser")
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        with urllib.request.urlopen(address) as answer:
            tabs = json.load(answer)
        (url,) = [one["webSocketDebuggerUrl"] for one in tabs if one["type"] == "page"]
        tab = Tab(url)
        try:
            yield tab
        finally:
            tab.close()
    finally:
        process.terminate()
        process.wait()
