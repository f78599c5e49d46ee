"""Result of one learner step: what became of its groups, and the values that it computed. Pure."""

from dataclasses import dataclass, field

from evolver_async.metrics.histograms import Histogram
from evolver_async.schema import Array, Group
from learner.data.batch import Batch, LogProbs

NON_FINITE = "non_finite"  # reason of groups whose update could not be applied
TRUNCATED = "truncated"  # reason of groups of which `loss.mask_truncated` left nothing to train
TARGET_KL = "target_kl"  # reason of groups whose update `loss.target_kl` left out


@dataclass(frozen=True)
class Trained:
    """Groups of an rl step, their batch, its log-probs and its advantages, float32[N]."""

    groups: list[Group]
    batch: Batch
    logprobs: LogProbs
    advantage_N: Array


@dataclass(frozen=True)
class StepResult:
    """Fate of the groups of one take: ids that trained, and ids that did not, by reason.

    `updates`: optimizer updates that were applied; `tokens`: ACTION tokens in them.
    """

    trained: list[int]
    filtered: dict[str, list[int]]
    updates: int
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    data: Trained | None = None
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def rates(self, seconds: float) -> dict[str, float]:
        """Return trained ACTION tokens and consumed groups per second of a step of `seconds`."""
        groups = len(self.trained) + sum(len(ids) for ids in self.filtered.values())
        return {
            "throughput/tokens_per_s": self.tokens / seconds,
            "throughput/groups_per_s": groups / seconds,
        }
