"""Faults of a served run: its actor is killed, then the whole run, and people go on meanwhile."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from launches import Launch, free_port, launching, wait_for

from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state import records

KEY = "operator-" + "k" * 20
RECIPE = Path(__file__).parents[2] / "examples" / "serve.yaml"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Launch]]:
    monkeypatch.setenv("SERVE_KEY", KEY)
    monkeypatch.setenv("SERVE_USERS", f"anne=anne-{'k' * 20}")
    with launching() as start:
        yield start


class Person:
    """One who talks and rates, and calls again while nothing listens."""

    def __init__(self, port: int) -> None:
        url, headers = f"http://127.0.0.1:{port}", {"x-api-key": KEY}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)
        self.rated: list[int] = []

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        def answer() -> httpx.Response | None:
            with suppress(httpx.TransportError):
                return self.client.request(method, path, json=body)
            return None

        return wait_for(answer, f"an answer to {method} {path}")

    def talk(self) -> str:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = self.ask("POST", "/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def rate(self, id: str) -> None:
        """Rate a conversation, with a 200, or a 200 of the same rating before."""
        answer = self.ask("POST", f"/episodes/{id}/reward", {"reward": 1.0})
        assert answer.status_code == 200, answer.text
        self.rated.append(int(answer.json()["episode"]))

    def states(self) -> Counter[str]:
        return Counter(one["state"] for one in self.ask("GET", "/episodes").json()["episodes"])


@pytest.mark.process
def test_acknowledged_ratings_are_taken_once_over_a_kill_and_a_resume(
    start: Callable[..., Launch], tmp_path: Path
) -> None:
    run_dir, port = tmp_path / "serve", free_port()
    endpoint, kept = f"rollout.endpoint.port={port}", "buffer.archive=all"
    step, name = "learner.groups_per_step=3", "run.name=serve"
    run = start(run_dir, RECIPE, f"run.dir={tmp_path}", name, endpoint, kept, step)
    anne = Person(port)
    waiting = anne.talk()
    for _ in range(7):
        anne.rate(anne.talk())
    # Without a pause after the last 200: some ratings are on their way now.
    os.kill(run.children()["actor-0"].pid, signal.SIGKILL)
    anne.rate(waiting)  # which the killed process has answered
    still_open = anne.talk()
    for _ in range(7):
        anne.rate(anne.talk())
    run.wait_for_steps(1)
    run.process.terminate()
    assert run.end()[0] == 128 + signal.SIGTERM
    run = start(run_dir, "--resume", run_dir)
    anne.rate(still_open)
    anne.rate(anne.talk())
    wait_for(lambda: anne.states()["delivered"] == len(anne.rated), "all deliveries")
    run.process.terminate()
    assert run.end()[0] == 128 + signal.SIGTERM
    taken = [
        record.conversation
        for record, _ in JournalReader(run_dir / "journal").read()
        if isinstance(record, records.Arrived)
    ]
    assert sorted(taken) == sorted(anne.rated)
