"""Numbers that a loss keeps of the tokens it trains: weights, ratios, movement, clips.

numpy only: callers turn their tensors into arrays. Formulas: docs/algorithms.md, Corrections.
"""

import io
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from evolver_async.schema import Array

OWN = "own/"  # before the names of a correction's own numbers


class Accounting:
    """Numbers of the tokens of all micro-batches of a step.

    `boosted`: counts of `add_boosted`. Numbers of a correction's own have names that begin with
    OWN.
    """

    def __init__(self) -> None:
        self.tokens: list[dict[str, Array]] = []
        self.boosted: Counter[str] = Counter()
        self.log_weights: list[Array] = []

    def add_tokens(
        self,
        *,
        lag_N: Array,
        stripped_N: Array,
        swapped_N: Array,
        w_N: Array,
        r_N: Array,
        log_rho_N: Array,
        log_moved_N: Array,
        clipped_low_N: Array,
        clipped_high_N: Array,
        masked_N: Array,
        own: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Add the ACTION tokens of one micro-batch; log_rho_N = theta - mu.

        log_moved_N: theta less what `loss.target_kl` measures from. `own`: numbers by name, nan for
        tokens that have none.
        """
        self.tokens.append(
            {
                "lag": lag_N,
                "stripped": stripped_N,
                "swapped": swapped_N,
                "w": w_N.astype(np.float64),
                "r": r_N.astype(np.float64),
                "log_rho": log_rho_N.astype(np.float64),
                "log_moved": log_moved_N.astype(np.float64),
                "clip_low": clipped_low_N,
                "clip_high": clipped_high_N,
                "masked": masked_N,
                **{f"{OWN}{name}": x_N.astype(np.float64) for name, x_N in own.items()},
            }
        )

    def add_boosted(self, *, tokens: int, freed: int, bound: int) -> None:
        """Count the stripped tokens with A > 0 of one micro-batch.

        `freed`: tokens that have a gradient because of the boost; `bound`: tokens beyond the
        boosted bound, too.
        """
        self.boosted.update(tokens=tokens, freed=freed, bound=bound)

    def add_trajectories(self, log_weight_P: Array) -> None:
        """Add the log importance weights of the whole trajectories of one micro-batch."""
        self.log_weights.append(log_weight_P.astype(np.float64))

    def column(self, name: str) -> Array:
        """Return one number of all tokens so far, such as `w` or `r`."""
        parts = [part[name] for part in self.tokens]
        return np.concatenate(parts) if parts else np.zeros(0)

    def ess_share(self) -> float:
        """Return (ΣW)² / (B ΣW²) of the trajectories' weights W, the effective share of all B.

        1 without trajectories. Large weights do not overflow: only their ratios count.
        """
        if not self.log_weights:
            return 1.0
        log_weight_P = np.concatenate(self.log_weights)
        weight_P = np.exp(log_weight_P - log_weight_P.max())
        return float(weight_P.sum() ** 2 / (len(weight_P) * (weight_P**2).sum()))

    def moved(self) -> float:
        """Return how far all tokens so far moved, in nats per token (`loss.target_kl`); 0 without.

        It is the mean of x - 1 - ln x, x the ratio of theta to what the tokens moved from.
        """
        log_moved_N = self.column("log_moved")
        return kl_of(log_moved_N) if len(log_moved_N) else 0.0

    def moved_since(self, before: "Accounting") -> float:
        """Return the same from what was measured before on the same tokens, whatever their age."""
        log_moved_N = self.column("log_moved") - before.column("log_moved")
        return kl_of(log_moved_N) if len(log_moved_N) else 0.0

    def merge(self, other: "Accounting") -> None:
        """Add the tokens of another accounting."""
        self.tokens += other.tokens
        self.log_weights += other.log_weights
        self.boosted.update(other.boosted)

    def packed(self) -> bytes:
        """Serialise the tokens for another process, which can `merge` them when `unpacked`."""
        columns = {f"tokens/{name}": column for name, column in self.columns().items()}
        columns |= {f"boosted/{name}": np.array(count) for name, count in self.boosted.items()}
        if self.log_weights:
            columns["trajectories/log_weight"] = np.concatenate(self.log_weights)
        data = io.BytesIO()
        np.savez(data, **columns)  # pyright: ignore[reportArgumentType]
        return data.getvalue()

    @classmethod
    def unpacked(cls, data: bytes) -> "Accounting":
        found = cls()
        with np.load(io.BytesIO(data), allow_pickle=False) as columns:
            parts = [(*name.split("/", 1), columns[name]) for name in columns.files]
        tokens = {name: column for family, name, column in parts if family == "tokens"}
        found.tokens = [tokens] if tokens else []
        found.boosted.update({name: int(n) for family, name, n in parts if family == "boosted"})
        found.log_weights = [column for family, _, column in parts if family == "trajectories"]
        return found

    def columns(self) -> dict[str, Array]:
        """Return all numbers of all tokens so far, by name; nan where a micro-batch has none."""
        names = dict.fromkeys(name for part in self.tokens for name in part)
        lacking = [np.full(len(part["lag"]), np.nan) for part in self.tokens]
        return {
            name: np.concatenate(
                [part.get(name, none) for part, none in zip(self.tokens, lacking, strict=True)]
            )
            for name in names
        }


def kl_of(log_ratio_N: Array) -> float:
    """Return k3 = mean(ratio - 1 - ln ratio)."""
    return float((np.expm1(log_ratio_N) - log_ratio_N).mean())
