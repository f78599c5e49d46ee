"""The real model that these tests need, which `make model` makes."""

import os
from pathlib import Path

import pytest

MADE = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct in Hugging Face's form."""
    found = Path(os.environ.get("EVOLVER_TEST_MODEL", MADE))
    assert (found / "config.json").is_file(), f"{found}: run `make model`"
    return found
