"""Embedders by an endpoint and by a function of one's own, and what a failure of them ends."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contributions import LOST, WON, Told, contribution, episode
from openai_server import (
    OpenAIServer,
    Reply,
    closed_url,
    cut,
    dripping,
    dropped,
    endless,
    garbage,
    raw,
    silence,
    status,
)

from actors.checks.config import check
from actors.experience import experience_service as services
from actors.experience.embed import KEY
from actors.experience.embedders import CountedEmbedder, EmbedFailed, load_embedder
from actors.experience.embedding_endpoint import BATCH, EmbedderDown, EndpointEmbedder
from actors.experience.experience_service import (
    CounterReporter,
    ExperienceService,
    build,
    open_pool,
)
from actors.failure_counts import FailureCounts
from actors.llm.endpoint_client import Unavailable
from actors.questioning.filters import KnownTasks
from evolver_async.config import Config, ConfigError, EmbeddingConfig, ExperienceConfig, StageConfig
from evolver_async.config.load import load
from evolver_async.schema import Task
from evolver_async.wire import messages
from evolver_async.wire.messages import Counters

WORDS = ("goal", "arm", "down", "left")
ODD = "a text that cannot be embedded"
TASK = "walk to the goal"


def vectors_of(texts: list[str]) -> list[list[float]]:
    """Counts of a few words, and 1."""
    return [[*(float(text.count(word)) for word in WORDS), 1.0] for text in texts]


def answering(body: dict[str, Any]) -> Reply:
    """A proper answer of an endpoint, the last vector first."""
    found = vectors_of(body["input"])
    rows = [{"object": "embedding", "index": n, "embedding": one} for n, one in enumerate(found)]
    return raw({"object": "list", "model": body["model"], "data": rows[::-1], "usage": {}})


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(otherwise=answering) as served:
        yield served


def settings(url: str, **changes: Any) -> EmbeddingConfig:
    return EmbeddingConfig(**{"url": url, "model": "m", "breaker_failures": 1000, **changes})


def asking(server: OpenAIServer, **changes: Any) -> ExperienceConfig:
    """The configuration of a service that asks the server for vectors."""
    where = settings(server.url, **changes)
    return ExperienceConfig(kind="contrast", embedder="endpoint", embedding=where, similarity=0.9)


# ---- endpoint


def test_an_endpoint_is_asked_in_openais_form(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "sk-0123456789")
    embedder = EndpointEmbedder(settings(server.url, key_env="SOME_VARIABLE"))
    texts = [*(f"the goal {n} " + "goal " * (n % 7) for n in range(BATCH + 5)), "", " \n", "\ud800"]
    found = embedder.embed(texts)
    assert {call.path for call in server.calls} == {"/v1/embeddings"}
    assert {call.headers["authorization"] for call in server.calls} == {"Bearer sk-0123456789"}
    assert {call.body["model"] for call in server.calls} == {"m"}
    assert [len(call.body["input"]) for call in server.calls] == [1, BATCH, 6]
    expected = np.array(vectors_of(texts), np.float32)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    expected[-3:-1] = 0.0
    assert found.dtype == np.float32 and embedder.dimensions == len(WORDS) + 1
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert embedder.embed([]).shape == (0, embedder.dimensions)


BAD: list[Any] = [
    *[status(500), status(401), status(400), garbage(), dropped(), cut(), raw([]), raw({})],
    raw({"data": []}),
    raw({"data": [{"index": 0, "embedding": [1.0] * 4}]}),  # of another length
    raw({"data": [{"index": 1, "embedding": [1.0] * 5}]}),  # of a text that was not asked about
    raw({"data": [{"index": 0, "embedding": [1e300] * 5}]}),
    raw({"data": [{"index": 0, "embedding": [1.0] * 5}] * 2}),
    raw({"data": [{"index": 0, "embedding": "AAAA"}]}),
]


@pytest.mark.parametrize("bad", BAD)
def test_an_answer_without_vectors_is_unavailable_and_the_next_is_asked_for(
    server: OpenAIServer, bad: Reply
) -> None:
    embedder = EndpointEmbedder(settings(server.url))
    server.say(bad)
    with pytest.raises(Unavailable):
        embedder.embed(["a goal"])
    assert embedder.embed(["a goal"]).shape == (1, embedder.dimensions)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(silence(), "timeout"), (dripping(), "timeout"), (endless(), "too_long")],
)
def test_no_answer_is_waited_for_or_read_without_end(
    server: OpenAIServer, bad: Reply, reason: str
) -> None:
    embedder = EndpointEmbedder(settings(server.url, timeout_s=0.3, max_bytes=100_000))
    server.say(bad)
    with pytest.raises(Unavailable) as caught:
        embedder.embed(["a goal"])
    assert caught.value.reason == reason


def test_an_endpoint_that_is_down_is_not_asked_for_a_while(server: OpenAIServer) -> None:
    embedder = EndpointEmbedder(settings(server.url, breaker_failures=2, breaker_s=3600.0))
    server.say(status(503), status(503))
    reasons = []
    for _ in range(4):
        with pytest.raises(Unavailable) as caught:
            embedder.embed(["a goal"])
        reasons.append(caught.value.reason)
    assert reasons == ["status", "status", "breaker", "breaker"]
    assert len(server.calls) == 3 and "503" in str(caught.value)


def test_an_endpoint_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    given = ["experience.kind=contrast", "experience.embedder=endpoint"]
    stage = "stages=[{kind: rl, steps: 1}]"
    with pytest.raises(ConfigError, match=r"^experience\.embedding\.(url|model): "):
        load(None, [stage, *given])
    where = "experience.embedding={url: http://127.0.0.1:1/v1, model: m, key_env: NO_SUCH_KEY}"
    with pytest.raises(ConfigError, match=r"^experience\.embedder: .*serial"):
        load(None, [stage, *given, where, "launch.kind=serial"])
    config = load(None, [stage, *given, where])
    assert config.experience.embedder == "endpoint"
    with pytest.raises(ConfigError, match=r"^experience\.embedding\.key_env: .*NO_SUCH_KEY"):
        check(config)
    load(None, [stage, "experience.embedder=endpoint"])  # nothing embeds


def test_an_endpoint_that_is_down_is_named_with_its_key() -> None:
    config = ExperienceConfig(embedder="endpoint", embedding=settings(closed_url()))
    with pytest.raises(EmbedderDown, match=r"^experience\.embedder: endpoint: "):
        load_embedder(config)


# ---- failures of any embedder


def moody(texts: list[str]) -> list[list[float]]:
    """An own function that raises for one text."""
    if ODD in texts:
        raise KeyError(ODD)
    return vectors_of(texts)


OWN = ExperienceConfig(kind="contrast", embedder=f"{__name__}:moody", similarity=0.9)


def retrieve(service: ExperienceService, *queries: str) -> list[messages.Guidance]:
    replies = [service.handle("actor-0", messages.Retrieve(query=one), 0.0) for one in queries]
    service.commit()
    found = [reply for (reply,) in replies if isinstance(reply, messages.Guidance)]
    assert len(found) == len(queries)
    return found


@pytest.fixture(params=["endpoint", "own"])
def broken(
    request: pytest.FixtureRequest, server: OpenAIServer, tmp_path: Path
) -> Iterator[tuple[ExperienceService, Callable[[], str]]]:
    """A service with one entry, and a function that returns a query that fails the next time."""
    config = Config(stages=[StageConfig(steps=1)])
    config.experience = asking(server) if request.param == "endpoint" else OWN

    def query() -> str:
        if request.param == "own":
            return ODD
        server.say(status(503))
        return f"{TASK} {len(server.calls)}"

    service = build(config, tmp_path, Told())
    service.handle("actor-0", contribution(WON, LOST), 0.0)
    yield service, query
    service.close()


def test_a_question_that_cannot_be_embedded_goes_unguided_and_is_counted(
    broken: tuple[ExperienceService, Callable[[], str]], caplog: pytest.LogCaptureFixture
) -> None:
    service, query = broken
    (before,) = retrieve(service, TASK)
    assert before.texts
    with caplog.at_level(logging.WARNING):
        together = retrieve(service, query(), "walk on to the goal")
        retrieve(service, query())
        retrieve(service, query())
    assert [one.texts for one in together] == [[], []]
    assert retrieve(service, "walk on to the goal")[0].texts == before.texts
    assert service.counters()["experience/embed_failures"] == 3
    told = service._report
    assert isinstance(told, Told)
    service.tick(1e9)
    service.commit()
    (failure,) = told[-1].failures
    assert (failure.kind, failure.name, failure.count) == ("experience", KEY, 3)
    warnings = [one for one in caplog.messages if one.startswith(KEY)]
    assert len(warnings) == 2, "after 1, 2, 4 … failures"


def test_a_group_that_cannot_be_embedded_teaches_nothing_and_ends_nothing(
    broken: tuple[ExperienceService, Callable[[], str]],
) -> None:
    service, query = broken
    before = service.counters()
    for number, successes in enumerate(([True, False], [False])):
        episodes = [
            episode("a=right", f"b={one}", success=one, number=10 * number + 2 + n)
            for n, one in enumerate(successes)
        ]
        given = contribution(*episodes, query=query())
        (reply,) = service.handle("actor-0", given, 0.0)
        assert isinstance(reply, messages.Ok)
    service.commit()
    after = service.counters()
    assert after["experience/contributed"] == before["experience/contributed"] + 2
    assert after["experience/embed_failures"] >= 2
    assert retrieve(service, TASK)[0].texts, "what is known stays"


def test_a_pool_whose_texts_cannot_be_embedded_again_stays_as_it_is(
    server: OpenAIServer, tmp_path: Path
) -> None:
    """Its service waits; the entries keep the vectors that they have."""
    pool = open_pool(ExperienceConfig(kind="contrast"), tmp_path)
    service = ExperienceService(pool, ExperienceConfig(kind="contrast"), Told())
    service.handle("actor-0", contribution(WON, LOST), 0.0)
    service.close()
    server.say(answering, status(503))
    with pytest.raises(EmbedFailed):
        open_pool(asking(server), tmp_path)
    again = open_pool(asking(server), tmp_path)
    assert len(again) == 1 and again.retrieve(TASK, 1, 0.9)
    again.close()


class Reporter(CounterReporter):
    """Keeps what it is told, and sends nothing."""

    def __init__(self) -> None:
        self.told: list[Counters] = []

    def report(self, counters: Counters) -> None:
        self.told.append(counters)


def test_a_service_that_starts_while_the_endpoint_is_down_waits_for_it(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "DOWN_S", 0.01)
    config = Config(stages=[StageConfig(steps=1)])
    config.experience = asking(server)
    reporter = Reporter()
    server.say(status(503), status(503))
    made = services._built(config, tmp_path, reporter, threading.Event())
    assert made is not None
    assert [one.failures[0].count for one in reporter.told] == [1, 2]
    made.close()
    stopped = threading.Event()
    stopped.set()
    assert services._built(config, tmp_path, reporter, stopped) is None


def test_a_task_that_cannot_be_embedded_is_compared_by_its_words() -> None:
    def task(query: str) -> Task:
        return Task(
            task_id=query, env="e", split="train", map_seed=1, query=query, reference=["look"]
        )

    failures = FailureCounts()
    own, _ = load_embedder(OWN)
    known = KnownTasks(0.8, 0.95, CountedEmbedder(own, failures, "questioning"))
    odd = task(ODD)
    assert known.objection(odd, odd) is None
    known.add(odd, odd)
    assert known.objection(task(f"{ODD}!"), odd) == "lexical"
    (failure,) = failures.totals()
    assert failure.kind == "questioning" and failure.count == 2
