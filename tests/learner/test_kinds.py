"""Every built-in kind of selection, advantage and correction has all that belongs to it."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from drawn_options import OPTIONS
from oracles import ORACLES

from evolver_async.config import Config
from evolver_async.config.kinds import KINDS
from learner.advantage.assign import BY_CRITIC
from learner.advantage.group_relative import ESTIMATORS
from learner.data.selection import SELECTIONS
from learner.loss.correction import CORRECTIONS

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
FUNCTIONS = {
    "selection": SELECTIONS,
    "advantage": ESTIMATORS | BY_CRITIC,
    "correction": CORRECTIONS,
}


def documented(section: str) -> set[str]:
    """The kinds in the first column of the section's table."""
    _, _, rest = DOCUMENT.read_text().partition(f"\n| `{section}.kind` |")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return {kind for row in rows for kind in re.findall(r"`(\w+)`", row.split("|")[1])}


def differences(section: str, kinds: Iterable[str]) -> list[str]:
    """What a kind lacks, and what is left of one that is none."""
    default = getattr(Config(), section).kind  # drawn wherever no other kind is
    places = {
        "function in learner": set(FUNCTIONS[section]),
        "oracle in tests/support/oracles.py": set(ORACLES[section]),
        "row in docs/algorithms.md": documented(section),
        "option in tests/support/drawn_options.py": {default, *OPTIONS[f"{section}.kind"]},
    }
    known = set(kinds)
    return [
        f"{section}.kind={kind}: {'no ' if kind in known else 'needless '}{place}"
        for place, named in places.items()
        for kind in sorted(known ^ named)
    ]


@pytest.mark.parametrize("section", KINDS)
def test_every_kind_has_a_function_an_oracle_a_row_and_a_drawn_option(section: str) -> None:
    assert differences(section, KINDS[section]) == []


@pytest.mark.parametrize("section", KINDS)
def test_what_a_new_kind_lacks_is_named(section: str) -> None:
    found = differences(section, [*KINDS[section], "new"])
    assert len(found) == 4 and all(f"{section}.kind=new: no " in one for one in found)
    assert len(differences(section, list(KINDS[section])[1:])) == 4


@pytest.mark.parametrize("section", KINDS)
def test_every_key_that_a_kind_reads_is_one_of_its_section(section: str) -> None:
    keys = vars(getattr(Config(), section))
    assert {name for facts in KINDS[section].values() for name in facts.reads} <= set(keys)
