"""Refusals of a configuration, as the text of their error.

`tests/data/refusals.yaml` holds arguments and the whole error that each gives. As a script this
module writes the errors anew: `python tests/support/refusals.py`, then read the difference.
"""

from pathlib import Path

import pytest
import yaml

from evolver_async.config import ConfigError
from evolver_async.config.load import load

STEPS = "stages.0.steps=10"
RECORDED = Path(__file__).parents[1] / "data" / "refusals.yaml"


def refusal(*dotlist: str) -> str:
    """Return the error of loading these arguments over the defaults, with one stage."""
    with pytest.raises(ConfigError) as caught:
        load(None, [STEPS, *dotlist])
    return str(caught.value)


def recorded() -> list[tuple[list[str], str]]:
    """Return arguments, each with its recorded error."""
    rows = yaml.safe_load(RECORDED.read_text(encoding="utf-8"))
    return [(row["arguments"], row["error"]) for row in rows]


def record(rows: list[list[str]]) -> None:
    """Write the errors of these arguments, by key."""
    errors = sorted((refusal(*arguments), arguments) for arguments in rows)
    written = [{"error": error, "arguments": arguments} for error, arguments in errors]
    text = yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=1000)
    RECORDED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record([arguments for arguments, _ in recorded()])
