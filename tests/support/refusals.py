"""Refusals of a configuration, as the text of their error."""

import pytest

from evolver_async.config import ConfigError
from evolver_async.config.load import load

STEPS = "stages.0.steps=10"


def refusal(*dotlist: str) -> str:
    """Return the error of loading these arguments over the defaults, with one stage."""
    with pytest.raises(ConfigError) as caught:
        load(None, [STEPS, *dotlist])
    return str(caught.value)
