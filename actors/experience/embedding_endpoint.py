"""Embedder by an OpenAI-compatible endpoint: `POST url/embeddings`.

Answers are untrusted, as those of `actors/llm/endpoint_client.py`, whose failures these are. Calls
block, as every embedder does: the service has no answer without the vector. The circuit breaker
keeps an endpoint that is down from being waited for with every question.
"""

import time

import httpx
import msgspec
import numpy as np

from actors.experience.embed import KEY, of_length_one
from actors.llm.budget import Breaker
from actors.llm.endpoint_client import Unavailable, authorization, status_failure
from evolver_async.config import EmbeddingConfig

ENDPOINT = "endpoint"  # value of `experience.embedder`
SECTION = "experience.embedding"
BATCH = 64  # texts of one call


class EmbedderDown(ValueError):
    """No embedder for now: its endpoint gives no vectors."""


class _Row(msgspec.Struct):
    index: int
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Row]


class EndpointEmbedder:
    """Embedder by an endpoint; see `actors/experience/embed.py: Embedder`.

    It asks for one vector at once, whose length it takes for that of all. Raise ConfigError if its
    key is missing, EmbedderDown if there is no vector.
    """

    def __init__(self, settings: EmbeddingConfig) -> None:
        self._settings = settings
        self._breaker = Breaker(settings.breaker_failures, settings.breaker_s)
        self._last = ""  # failure
        self._client = httpx.Client(
            headers={"content-type": "application/json", "accept-encoding": "identity"}
            | authorization(settings.key_env, f"{SECTION}.key_env"),
            timeout=settings.timeout_s,
        )
        self.dimensions = 0
        try:
            self.dimensions = self.embed(["a text"]).shape[1]
        except Unavailable as error:
            self._client.close()
            raise EmbedderDown(f"{KEY}: {ENDPOINT}: {error}") from None
        self.name = f"{settings.model}-{ENDPOINT}-{self.dimensions}"

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d] with rows of length 1 (0 for an empty text). Raise Unavailable."""
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        told = [place for place, text in enumerate(texts) if text.strip()]  # others are refused
        for start in range(0, len(told), BATCH):
            places = told[start : start + BATCH]
            found = self._admitted([texts[place] for place in places])
            if not self.dimensions:
                vectors = np.zeros((len(texts), found.shape[1]), np.float32)
            vectors[places] = found
        return of_length_one(vectors)

    def _admitted(self, texts: list[str]) -> np.ndarray:
        """Make one call, unless the breaker is open, and tell the breaker its outcome."""
        if not self._breaker.admits(time.monotonic()):
            problem = f"the circuit breaker is open, the last failure: {self._last}"
            raise Unavailable("breaker", problem)
        try:
            vectors = self._call(texts)
        except Unavailable as failure:
            self._last = str(failure)
            if failure.endpoint_fault:
                self._breaker.failed(time.monotonic())
            else:
                self._breaker.undecided()
            raise
        self._breaker.succeeded()
        return vectors

    def _call(self, texts: list[str]) -> np.ndarray:
        """Send one request and read its answer within `timeout_s`, of which each read has as much.

        Return float32[n, d].
        """
        settings = self._settings
        written = [text.encode(errors="replace").decode() for text in texts]  # halves of surrogates
        body = msgspec.json.encode({"model": settings.model, "input": written})
        url = settings.url.rstrip("/") + "/embeddings"
        received, deadline = bytearray(), time.monotonic() + settings.timeout_s
        try:
            with self._client.stream("POST", url, content=body) as response:
                for part in response.iter_raw():
                    received += part
                    if len(received) > settings.max_bytes:
                        text = f"the answer has more than {SECTION}.max_bytes"
                        raise Unavailable("too_long", f"{text} ({settings.max_bytes})")
                    if time.monotonic() > deadline:
                        raise TimeoutError
        except (TimeoutError, httpx.TimeoutException):
            text = f"no complete answer within {settings.timeout_s:g} s"
            raise Unavailable("timeout", text) from None
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            raise Unavailable("connection", f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise status_failure(response, bytes(received))
        return self._vectors(bytes(received), len(texts))

    def _vectors(self, received: bytes, count: int) -> np.ndarray:
        """Decode one vector a text, which may come in any order."""
        try:
            rows = msgspec.json.decode(received, type=_Embeddings).data
            rows.sort(key=lambda row: row.index)
            with np.errstate(over="ignore"):  # what is infinite is refused below
                vectors = np.array([row.embedding for row in rows], np.float32)
        except (ValueError, RecursionError) as error:  # also of vectors of several lengths
            raise Unavailable("garbage", f"the answer holds no vectors: {error}") from error
        wanted = (count, self.dimensions or vectors.shape[-1])
        whole = [row.index for row in rows] == [*range(count)] and np.isfinite(vectors).all()
        if vectors.shape != wanted or not vectors.size or not whole:
            problem = f"the answer holds vectors {vectors.shape}, not finite ones {wanted}"
            raise Unavailable("garbage", problem)
        return vectors
