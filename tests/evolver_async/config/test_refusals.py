"""Configurations that cannot work: the key that each error names, and its text as recorded."""

from refusals import recorded, refusal


def test_every_refusal_reads_as_recorded() -> None:
    """`python tests/support/refusals.py` records what they read like now."""
    changed = {
        " ".join(arguments): said
        for arguments, error in recorded()
        if (said := refusal(*arguments)) != error
    }
    assert changed == {}


def test_every_refusal_names_a_key_that_was_given_or_that_it_needs() -> None:
    for arguments, error in recorded():
        key, _, reason = error.partition(": ")
        assert key and " " not in key and reason, (arguments, error)
