"""Which rows of metrics.jsonl count after a run was resumed, possibly more than once."""

from hypothesis import given
from hypothesis import strategies as st

from evolver_async.metrics.newest_lineage import RowKey, current, current_rows, supersedes

KINDS = st.sampled_from(("take", "eval", "other"))
KEYS = st.lists(st.builds(RowKey, st.integers(1, 4), st.integers(1, 12), KINDS), max_size=40)


def take(lineage: int, step: int) -> dict:
    return {"lineage": lineage, "step": step, "stage_kind": "rl", "time_s": 1.0}


def evaluation(lineage: int, step: int) -> dict:
    return {"lineage": lineage, "step": step, "eval/success": 0.5, "eval/episodes": 4.0}


@given(KEYS)
def test_a_row_counts_unless_another_one_supersedes_it(keys):
    kept = [i for i, old in enumerate(keys) if not any(supersedes(new, old) for new in keys)]
    assert current(keys) == kept


def test_what_a_resumed_run_repeats_is_replaced_evaluations_included():
    first = [*(take(1, step) for step in range(1, 6)), evaluation(1, 2), evaluation(1, 4)]
    second = [take(2, 4), take(2, 5)]
    assert current_rows(first + second) == [*first[:3], first[5], *second]


def test_a_late_evaluation_replaces_only_that_of_its_step():
    first = [take(1, 1), take(1, 2), evaluation(1, 1), evaluation(1, 2)]
    again = evaluation(2, 2)
    assert current_rows([*first, again, take(2, 3)]) == [*first[:3], again, take(2, 3)]


def test_every_older_lineage_ends_where_any_newer_one_began():
    rows = [take(1, 1), take(1, 2), take(1, 3), take(2, 3), take(2, 4), take(3, 2), take(3, 3)]
    assert current_rows(rows) == [rows[0], *rows[-2:]]
