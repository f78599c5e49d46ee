"""Embedding of texts as vectors whose inner product is their similarity.

By hashed n-grams of words, which need no model and are equal on every machine, or by a user's
function. Further embedders: by a model in a local sentence-transformers directory
(`actors/engines/embedder.py`), and by an endpoint (`embedding_endpoint.py`); `embedders.py` loads
the configured one. For the n-grams each character counts as a word where a script writes no spaces
between words.
"""

import re
import zlib
from typing import Protocol

import numpy as np

from evolver_async.extension import imported, noted

DIMENSIONS = 256
NGRAM = 3  # words
# Thai, Lao, Myanmar, Khmer, kana, Han: the vowel signs of the first four are no \w, and stand alone
SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003134f"
)
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+|[^\w\s]")
KEY = "experience.embedder"


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
