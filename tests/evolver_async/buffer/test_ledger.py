"""The ledger closes: what came in is held or has a fate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.buffer.state.ledger import CLOSED, Amount, Ledger

amounts = st.builds(
    Amount, groups=st.just(1), trajectories=st.integers(0, 8), tokens=st.integers(0, 999)
)


@given(st.lists(st.tuples(amounts, st.sampled_from((*CLOSED, "open", "taken")), st.booleans())))
def test_ledger_closes_whatever_becomes_of_groups(groups):
    ledger = Ledger()
    held = {"rollout": {"open": Amount(), "ready": Amount(), "taken": Amount()}}
    for amount, fate, back in groups:
        ledger.receive("rollout", amount)
        if fate in held["rollout"]:
            held["rollout"][fate].add(amount)
            continue
        ledger.close("rollout", fate, "why", amount)
        if back:
            ledger.reopen("rollout", fate, "why", amount)
            held["rollout"]["ready"].add(amount)
    ledger.check(held)


@given(amounts)
def test_ledger_names_what_does_not_close(amount):
    ledger = Ledger()
    ledger.receive("demo", amount)
    with pytest.raises(AssertionError, match="ledger of demo"):
        ledger.check({})


def test_totals_are_over_all_reasons_and_the_door_is_apart():
    ledger = Ledger()
    for reason in ("age", "stage"):
        ledger.receive("rollout", Amount(1, 2, 3))
        ledger.close("rollout", "evicted", reason, Amount(1, 2, 3))
    ledger.refuse("duplicate", Amount(0, 1, 7))
    assert ledger.total("rollout", "evicted") == Amount(2, 4, 6)
    assert ledger.refused["duplicate"] == Amount(0, 1, 7)
    ledger.check({})
