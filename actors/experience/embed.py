"""Embedding of texts as vectors whose inner product is their similarity.

Either by hashed n-grams of words, which need no model and are equal on every machine, or by a model
in a local sentence-transformers directory (`actors/engines/embedder.py`).
"""

import importlib
import re
import zlib
from typing import Protocol

import numpy as np

from evolver_async.config import ExperienceConfig

DIMENSIONS = 256
NGRAM = 3  # words
WORD = re.compile(r"\w+|[^\w\s]")
DEDUP_HASH, DEDUP_NEURAL = 0.95, 0.5  # texts with at least this cosine are duplicates


class Embedder(Protocol):
    """Embedder of texts. Embedders with different vectors have different names."""

    name: str
    dimensions: int

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d] with rows of length 1 (0 if a text has no words)."""
        ...


class HashEmbedder:
    """Counts of hashed 1- to 3-grams of words, with signs, so that collisions cancel on average."""

    def __init__(self, dimensions: int = DIMENSIONS) -> None:
        self.name = f"hash-{NGRAM}-{dimensions}"
        self.dimensions = dimensions

    def embed(self, texts: list[str]) -> np.ndarray:
        return embed(texts, self.dimensions)


def embed(texts: list[str], dimensions: int = DIMENSIONS) -> np.ndarray:
    """Embed texts by hashed n-grams as float32[n, d] with rows of length 1; see `HashEmbedder`."""
    vectors = np.zeros((len(texts), dimensions), np.float32)
    for vector, text in zip(vectors, texts, strict=True):
        words = [word.encode(errors="replace") for word in WORD.findall(text.lower())]
        grams = list(words)
        for size in range(2, NGRAM + 1):
            grams += [b" ".join(words[i : i + size]) for i in range(len(words) - size + 1)]
        if not grams:
            continue
        hashes = np.fromiter(map(zlib.crc32, grams), np.int64, len(grams))
        signs = np.where(hashes >> 31, 1.0, -1.0)
        vector += np.bincount(hashes % dimensions, signs, dimensions)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=vectors, where=lengths > 0)


def load_embedder(config: ExperienceConfig) -> tuple[Embedder, float]:
    """Load the configured embedder and its cosine from which two texts are duplicates.

    Raise ValueError, which names `experience.embedder`, if its directory holds no model.
    """
    if config.embedder == "hash":
        return HashEmbedder(config.dimensions), config.dedup or DEDUP_HASH
    # imported here, as a service without a model needs no torch
    module = importlib.import_module("actors.engines.embedder")
    return module.TransformerEmbedder(config.embedder), config.dedup or DEDUP_NEURAL
