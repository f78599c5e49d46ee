"""Scores of a batch's tokens under the weights that its step begins with."""

from dataclasses import dataclass

from evolver_async.schema import Array


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the N ACTION tokens of a batch, float32.

    anchor_N: under the policy, 0 where nothing reads it. old_N: the log-probs that the data is
    corrected from, mu_N but for stripped tokens (`guided_old`). reference_N: under the KL
    reference, 0 without one.
    """

    anchor_N: Array
    old_N: Array
    reference_N: Array


@dataclass(frozen=True)
class Values:
    """Values by a critic: of the N ACTION tokens and behind the last token of each row, float32."""

    value_N: Array
    end_value_R: Array
