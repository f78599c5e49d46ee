"""A proxy of the environment, and the addresses of this host that no proxy reaches."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from evolver_async.process.setup import except_loopback

DEAD = "http://127.0.0.1:9"
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()


@pytest.fixture
def url() -> Iterator[str]:
    """URL of a server of this host, such as of an actor's endpoint."""
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables as they are without a proxy; what a test changes is undone."""
    for name in (*NAMES, *map(str.upper, NAMES)):
        monkeypatch.setenv(name, "")  # which is remembered for the end
        monkeypatch.delenv(name)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("listed", [{}, {"NO_PROXY": "a.example"}, {"no_proxy": "a.example, b"}])
def test_calls_to_this_host_do_not_go_to_a_proxy(
    variable: str, listed: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {variable: DEAD, **listed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    for _ in range(2):
        except_loopback()
    assert httpx.get(url).status_code == 204
    names = os.environ["NO_PROXY"].split(",")
    assert names == os.environ["no_proxy"].split(",") and len(names) == len({*names})
    before = ",".join(listed.values()).replace(" ", "").split(",") if listed else []
    assert [*before, "localhost", "127.0.0.1"] == names


@pytest.mark.parametrize(
    "variables", [{}, {"NO_PROXY": "a"}, {"HTTP_PROXY": DEAD, "NO_PROXY": "*"}]
)
def test_variables_that_need_no_exception_stay(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    except_loopback()
    assert dict(os.environ) == before


@pytest.mark.process
def test_processes_of_a_run_except_this_host() -> None:
    script = (
        "import os, sys; from pathlib import Path;"
        " from evolver_async.process.setup import RoleArgs, run_process;"
        " args = RoleArgs(address='', name='one', incarnation=0, run_dir=Path());"
        " main = lambda _: 10 + ('127.0.0.1' in os.environ.get('NO_PROXY', ''));"
        " sys.exit(run_process('actor', lambda: main, args, None))"
    )
    root = str(Path(__file__).parents[2])
    variables = os.environ | {"HTTP_PROXY": DEAD, "PYTHONPATH": root}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=variables, stderr=subprocess.PIPE).returncode == 11
