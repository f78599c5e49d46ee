"""The correction of a configuration applied to a step, and what an own one must keep to.

The kinds themselves are in `correction`. Errors name the key and the function.
"""

import re
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch

from evolver_async.config import CorrectionConfig
from evolver_async.errors import TrainingError
from evolver_async.extension import is_own, noted
from evolver_async.schema import Array
from learner.loss.correction import CORRECTIONS, ActionTokens, Corrected, StepTokens

METRIC_NAME = re.compile(r"[\w.@-]{1,64}")  # as of an environment's own numbers
NUMBERS = ("ratio_N", "weight_N", "w_N", "r_N")  # fields of Corrected, one number a token


def corrected_tokens(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """Correct the tokens as `correction.kind` says.

    Raises TrainingError, which names the key, if an own function changes the tokens, which the loss
    reads too, or returns anything but one number a token, which could be spread over all tokens
    without an error.
    """
    correction = CORRECTIONS.of(settings.kind)
    if not is_own(settings.kind):
        return correction(tokens, settings)
    before = _writes(tokens)
    found = correction(tokens, settings)
    changed = [name for name, writes in _writes(tokens).items() if writes != before[name]]
    if changed:
        problem = f"changed its input {changed[0]} in place"
        raise TrainingError(f"correction.kind: {settings.kind} {problem}")
    if problem := _unfit(found, tokens.theta_N):
        raise TrainingError(f"correction.kind: {settings.kind} returned {problem}")
    return found


def not_finite(found: Corrected, tokens: ActionTokens, settings: CorrectionConfig) -> list[str]:
    """Return what of an own function's work is not finite, by name; [] if the policy is not."""
    if not is_own(settings.kind) or not torch.isfinite(tokens.theta_N).all():
        return []
    numbers = {"prepared_N": tokens.prepared_N, **{name: getattr(found, name) for name in NUMBERS}}
    return [name for name, x_N in numbers.items() if not torch.isfinite(x_N).all()]


def _writes(tokens: ActionTokens) -> dict[str, int]:
    """Return how often each tensor was changed in place, as autograd counts it."""
    return {one.name: getattr(tokens, one.name)._version for one in fields(tokens)}


def prepared(settings: CorrectionConfig, tokens: StepTokens) -> Array:
    """Return what the kind's `prepare` computes of a step's ACTION tokens, else ones.

    An own one gets copies: what it changes in place changes nothing else. Raises TrainingError,
    which names the key, if it does not return one number a token.
    """
    prepare = getattr(CORRECTIONS.of(settings.kind), "prepare", None)
    if prepare is None:
        return np.ones_like(tokens.old_N)
    if not is_own(settings.kind):
        return prepare(tokens, settings)
    # not read-only views, through which torch.from_numpy would write after a warning
    given = StepTokens(**{name: array_N.copy() for name, array_N in vars(tokens).items()})
    found = noted("correction.kind", f"prepare of {settings.kind}", prepare)(given, settings)
    wanted = tokens.old_N.shape
    try:
        prepared_N = np.asarray(found, np.float32)
        problem = "" if prepared_N.shape == wanted else f"shape {prepared_N.shape}"
    except (TypeError, ValueError, RuntimeError) as error:  # the latter: a tensor with a gradient
        prepared_N, problem = tokens.old_N, f"{type(found).__name__} ({error})"
    if problem:
        raise TrainingError(
            f"correction.kind: prepare of {settings.kind} returned {problem}, not shape {wanted}:"
            " one number a token"
        )
    return prepared_N


def _unfit(found: object, theta_N: torch.Tensor) -> str:
    """Return what is wrong with an own function's result; "" if nothing is."""
    if not isinstance(found, Corrected):
        return f"{type(found).__name__}, not Corrected"
    wanted = tuple(theta_N.shape)
    for name in NUMBERS:
        value = getattr(found, name)
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape != wanted:
            return f"{name} as {shape}, not as a tensor of {wanted}: one number a token"
        if theta_N.requires_grad and value.requires_grad != (name == "ratio_N"):
            return f"{name} {'without' if name == 'ratio_N' else 'with'} a gradient"
    if not isinstance(found.metrics, Mapping):
        return f"metrics as {type(found.metrics).__name__}, not as a mapping"
    for name, value in found.metrics.items():
        if not (isinstance(name, str) and METRIC_NAME.fullmatch(name)):
            return f"metrics with the name {name!r}, not up to 64 letters, digits and _ . @ -"
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != wanted:
            return f"metrics[{name!r}] that is no tensor of {wanted}: one number a token"
    return ""
