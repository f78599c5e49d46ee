"""A reading that takes long says how far it is, and one of a few seconds says nothing."""

from evolver_async.runs.results.reading_progress import ProgressLines


def test_a_line_comes_every_few_seconds() -> None:
    now, lines = 0.0, list[str]()
    progress = ProgressLines(lines.append, lambda: now)
    for now in range(12):
        progress("MB of metrics.jsonl read", 100.0 * now, 1234.5)
    assert lines == [
        "MB of metrics.jsonl read: 500 of 1,234",
        "MB of metrics.jsonl read: 1,000 of 1,234",
    ]
