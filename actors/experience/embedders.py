"""Choice of the configured embedder, and account of its failures."""

import importlib
import logging

import numpy as np

from actors.experience.embed import KEY, Embedder, HashEmbedder, OwnEmbedder
from actors.experience.embedding_endpoint import ENDPOINT, EndpointEmbedder
from actors.failure_counts import FailureCounts
from evolver_async.config import ExperienceConfig
from evolver_async.extension import is_own
from evolver_async.wire.failure_totals import FailureKind

DEDUP_HASH, DEDUP_NEURAL = 0.95, 0.5  # texts with at least this cosine are duplicates

log = logging.getLogger(__name__)


class EmbedFailed(ValueError):
    """Failure to embed some texts, which has been counted and logged."""


class CountedEmbedder:
    """Embedder whose failures, of any kind, are counted under `failures`, logged, and raised as
    EmbedFailed: texts without a vector must not end their process."""

    def __init__(
        self, embedder: Embedder, failures: FailureCounts, kind: FailureKind = "experience"
    ) -> None:
        self.name, self.dimensions = embedder.name, embedder.dimensions
        self.failed = 0
        self._embedder, self._failures = embedder, failures
        self._kind: FailureKind = kind

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d], as `Embedder`. Raise EmbedFailed."""
        try:
            return self._embedder.embed(texts)
        except Exception as error:  # of a library, or a user's code, which can raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            self._failures.note(self._kind, KEY, problem)
            self.failed += 1
            if self.failed & (self.failed - 1) == 0:  # 1, 2, 4, 8 …
                log.warning("%s has failed %d times, the last: %s", KEY, self.failed, problem)
            raise EmbedFailed(f"{KEY}: {problem}") from error


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
        return EndpointEmbedder(config.embedding), config.dedup or DEDUP_NEURAL
    # imported here, as a service without a model needs no torch
    module = importlib.import_module("actors.engines.embedder")
    return module.load(config.embedder), config.dedup or DEDUP_NEURAL
