"""Embedding of texts as vectors whose inner product is their similarity.

Either by hashed n-grams of words, which need no model and are equal on every machine, or by a model
in a local sentence-transformers directory (`actors/engines/embedder.py`), by an endpoint
(`embedding_endpoint.py`), or by a user's function.
For the n-grams each character counts as a word where a script writes no spaces between words.
"""

import importlib
import logging
import re
import zlib
from typing import Protocol

import numpy as np

from actors.failures import FailureCounts
from evolver_async.config import ExperienceConfig
from evolver_async.config.secrets import mask
from evolver_async.extension import imported, is_own, noted
from evolver_async.protocol.failures import FailureKind

DIMENSIONS = 256
NGRAM = 3  # words
# Thai, Lao, Myanmar, Khmer, kana, Han: the vowel signs of the first four are no \w, and stand alone
SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003134f"
)
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+|[^\w\s]")
KEY = "experience.embedder"
ENDPOINT = "endpoint"
DEDUP_HASH, DEDUP_NEURAL = 0.95, 0.5  # texts with at least this cosine are duplicates

log = logging.getLogger(__name__)


class EmbedderDown(ValueError):
    """No embedder for now: its endpoint gives no vectors."""


class EmbedFailed(ValueError):
    """Failure to embed some texts, which has been counted and logged."""


class Embedder(Protocol):
    """Embedder of texts. Embedders with different vectors have different names."""

    name: str
    dimensions: int

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d] with rows of length 1 (0 if a text has no words)."""
        ...


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, and its punctuation marks."""
    return WORD.findall(text.lower())


class HashEmbedder:
    """Counts of hashed 1- to 3-grams of words, with signs, so that collisions cancel on average."""

    def __init__(self, dimensions: int = DIMENSIONS) -> None:
        self.name = f"ngrams-{NGRAM}-{dimensions}"
        self.dimensions = dimensions

    def embed(self, texts: list[str]) -> np.ndarray:
        return embed(texts, self.dimensions)


def embed(texts: list[str], dimensions: int = DIMENSIONS) -> np.ndarray:
    """Embed texts by hashed n-grams as float32[n, d] with rows of length 1; see `HashEmbedder`."""
    hashes: list[int] = []
    counts: list[int] = []
    for text in texts:
        words = " ".join(words_of(text)).encode(errors="replace").split()
        spaced = [b" " + word for word in words]
        grams = list(map(zlib.crc32, words))
        before = len(hashes)
        hashes += grams
        for size in range(1, NGRAM):  # the hash of an n-gram goes on from that of its first words
            grams = list(map(zlib.crc32, spaced[size:], grams))
            hashes += grams
        counts.append(len(hashes) - before)
    hash_H = np.array(hashes, np.int64)
    place_H = np.repeat(np.arange(len(texts)) * dimensions, counts) + hash_H % dimensions
    signs_H = np.where(hash_H >> 31, 1.0, -1.0)
    sums = np.bincount(place_H, signs_H, len(texts) * dimensions)
    vectors = sums.reshape(len(texts), dimensions).astype(np.float32)
    return of_length_one(vectors)


class CountedEmbedder:
    """Embedder whose failures, of any kind, are counted under `failures`, logged, and raised as
    EmbedFailed: texts without a vector must not end their process."""

    def __init__(
        self, embedder: Embedder, failures: FailureCounts, kind: FailureKind = "experience"
    ) -> None:
        self.name, self.dimensions = embedder.name, embedder.dimensions
        self.failed = 0
        self._embedder, self._failures, self._kind = embedder, failures, kind

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d], as `Embedder`. Raise EmbedFailed."""
        try:
            return self._embedder.embed(texts)
        except Exception as error:  # of a library, or a user's code, which can raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            self._failures.note(self._kind, KEY, problem)
            self.failed += 1
            if self.failed & (self.failed - 1) == 0:  # 1, 2, 4, 8 …
                log.warning("%s has failed %d times, the last: %s", KEY, self.failed, mask(problem))
            raise EmbedFailed(f"{KEY}: {problem}") from error


class OwnEmbedder:
    """Embedder by a user's function: a list of texts → one vector a text, of any length.

    Raise ValueError, which names the key, if it returns anything else.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._function = noted(KEY, path, imported(KEY, path))
        self.dimensions = 0
        try:
            self.dimensions = self.embed(["a text"]).shape[1]
        except Exception as error:  # a user's code, which can raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{KEY}: {path}: {problem}") from error
        self.name = f"{path}-{self.dimensions}"

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d] with rows of length 1 (0 if a vector is 0)."""
        if not texts:
            return np.zeros((0, self.dimensions), np.float32)
        vectors = np.array(self._function(list(texts)), np.float32)
        wanted = (len(texts), self.dimensions or vectors.shape[-1])
        if vectors.shape != wanted or not np.isfinite(vectors).all():
            given = f"returned {vectors.shape}" if vectors.shape != wanted else "is not finite"
            raise ValueError(f"{KEY}: {self._path} {given}; one vector a text: {wanted}")
        return of_length_one(vectors)


def of_length_one(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to length 1 in place; those of 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=vectors, where=lengths > 0)


def load_embedder(config: ExperienceConfig) -> tuple[Embedder, float]:
    """Load the configured embedder and its cosine from which two texts are duplicates.

    Raise ValueError, which names `experience.embedder`, if its directory holds no model, or if the
    user's function or the endpoint returns no vectors; EmbedderDown in the last case.
    """
    if config.embedder == "hash":
        return HashEmbedder(config.dimensions), config.dedup or DEDUP_HASH
    if is_own(config.embedder):
        return OwnEmbedder(config.embedder), config.dedup or DEDUP_NEURAL
    if config.embedder == ENDPOINT:
        module = importlib.import_module("actors.experience.embedding_endpoint")
        return module.EndpointEmbedder(config.embedding), config.dedup or DEDUP_NEURAL
    # imported here, as a service without a model needs no torch
    module = importlib.import_module("actors.engines.embedder")
    return module.load(config.embedder), config.dedup or DEDUP_NEURAL
