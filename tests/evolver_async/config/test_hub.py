"""Models and data sets of a hub: whole snapshots of the cache, downloads from a server here."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_models import SIZES

from evolver_async.metrics.replies import load as load_replies
from evolver_async.model.policy import make_tiny

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "model.bin": b"a pickle",
}
ASK = """
import sys
from evolver_async.config import ConfigError, hub
from evolver_async.config.sections.run import PolicyConfig
try:
    print(hub.snapshot(PolicyConfig(path=sys.argv[1], download=sys.argv[2] == "download")))
except ConfigError as error:
    print(error)
"""


ROWS = "".join(
    json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(40)
).encode()
DATA = "/api/datasets/org/sums"
ASK_ROWS = """
import sys
from evolver_async.buffer.tasks.row_files import rows_of
from evolver_async.config import ConfigError
from evolver_async.config.sections.data import TasksConfig
try:
    tasks = TasksConfig(path=sys.argv[1], download=sys.argv[2] == "download", prompt="question")
    rows = rows_of(tasks)
    print(rows.meta.revision, sum(rows.meta.counts.values()), rows.row(0)["question"])
except ConfigError as error:
    print(error)
"""


ENTRY = {"type": "file", "path": "rows.jsonl", "size": len(ROWS), "oid": "rows"}


class Hub(BaseHTTPRequestHandler):
    """The part of a hub's interface that downloads of `org/name` and of the data set `org/sums`
    ask."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/org/name/resolve/") and path.rpartition("/")[2] in FILES:
            body = FILES[path.rpartition("/")[2]]
            headers["ETag"] = f'"{path.rpartition("/")[2]}"'
        elif path.startswith("/api/models/org/name/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(body), "oid": name}
                for name, body in FILES.items()
            ]
            body = json.dumps(files).encode()
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"{DATA}/tree/"):
            body = json.dumps([ENTRY]).encode()
        elif path.startswith(DATA):
            siblings = [{"rfilename": "rows.jsonl"}]
            body = json.dumps({"id": "org/sums", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"/datasets/org/sums/resolve/{COMMIT}/rows.jsonl":
            body = ROWS
            headers["ETag"] = '"rows"'
        else:
            missing = "EntryNotFound" if path.startswith("/datasets/org/sums/") else "RepoNotFound"
            self.answer(b"", {"X-Error-Code": missing, "X-Repo-Commit": COMMIT}, 404)
            return
        self.answer(body, headers)

    def answer(self, body: bytes, headers: dict[str, str], code: int = 200) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the console quiet."""


@contextmanager
def served() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ask(home: Path, endpoint: str, *arguments: str, program: str = ASK) -> str:
    """Ask for a snapshot in a process of its own, which reads the endpoint once."""
    environment = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.process
def test_a_model_is_downloaded_once_if_that_is_allowed_and_named_by_its_commit(
    tmp_path: Path,
) -> None:
    with served() as endpoint:
        refused = ask(tmp_path, endpoint, "org/name", "cache")
        assert refused.startswith("policy.path: ") and "policy.download=true" in refused
        unknown = ask(tmp_path, endpoint, "org/other", "download")
        assert unknown.startswith("policy.path: cannot download org/other")
        directory = Path(ask(tmp_path, endpoint, "org/name", "download"))
    assert directory.name == COMMIT
    assert sorted(one.name for one in directory.iterdir()) == sorted(FILES.keys() - {"model.bin"})
    for how in ("cache", "download"):  # the server is gone
        assert ask(tmp_path, endpoint, "org/name", how) == str(directory)
    (directory / "model.safetensors").unlink()
    assert ask(tmp_path, endpoint, "org/name", "cache").startswith("policy.path: ")


@pytest.mark.process
def test_rows_are_downloaded_if_that_is_allowed_and_named_by_their_commit(tmp_path: Path) -> None:
    with served() as endpoint:
        refused = ask(tmp_path, endpoint, "org/sums", "cache", program=ASK_ROWS)
        assert refused.startswith("tasks.path: ") and "tasks.download=true" in refused
        unknown = ask(tmp_path, endpoint, "org/other", "download", program=ASK_ROWS)
        assert unknown.startswith("tasks.path: org/other: ")
        found = ask(tmp_path, endpoint, "org/sums", "download", program=ASK_ROWS)
    assert found == f"{COMMIT} 40 0 + 1?"


@pytest.mark.process
def test_a_bare_model_of_the_cache_is_evaluated(tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--org--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    make_tiny(kept / "snapshots" / COMMIT, seed=0, **SIZES)
    environment = {"HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), **os.environ}
    model = ("policy.path=org/tiny", "policy.max_length=64", "--episodes", "1")
    saved = ("--save", str(tmp_path / "saved.jsonl"))
    command = [sys.executable, "-m", "evolver_async.cli", "eval", "bandit", *model, *saved]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and f"{COMMIT}: success" in done.stdout, done.stderr
    reply, *of_sets = load_replies(tmp_path / "saved.jsonl")
    assert reply.task == "bandit/validation/0" and reply.evaluated.endswith(COMMIT)
    assert reply.prompt and reply.reply and reply.turns == 1
    assert all(one.set_name for one in of_sets)
