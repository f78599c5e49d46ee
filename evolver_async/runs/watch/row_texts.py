"""Texts of a row of metrics: numbers, durations, evaluations, experience, judge, questioning,
engine. Pure.

A text is made of the metrics that the row has, and is "" without them.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from evolver_async import intervals

Row = dict[str, Any]
Part = tuple[str, str]  # a metric, and the format of its value

GUIDANCE = (
    ("guidance/gain", "gain {:+.2f}"),
    ("guidance/wasted", "wasted {:.0%}"),
    ("experience/reliance", "reliance {:.2f} nats"),
    ("boost/freed_fraction", "freed {:.0%}"),
)
JUDGE = (
    ("judge/agreement", "agreement {:.2f}"),
    ("judge/praise_bias", "praise {:+.2f}"),
    ("judge/length_bias", "length {:+.2f}"),
    ("judge/good_share", "{:.0%} GOOD"),
)
ENGINE = (
    ("engine/kv_use", "KV {:.0%}"),
    ("engine/reused_share", "reused {:.0%}"),
    ("engine/waiting", "{:.0f} waiting"),
    ("engine/preemptions", "{:,.0f} preemptions"),
    ("engine/pause_s", "paused {:.1f} s"),
    ("engine/restarts", "{:.0f} restarts"),
)
VALIDATION = (
    ("validation/loss", "loss {:.3f}"),
    ("validation/perplexity", "perplexity {:.3f}"),
    ("validation/token_accuracy", "token accuracy {:.3f}"),
    ("validation/accuracy", "accuracy {:.3f}"),
    ("validation/margin", "margin {:.3f}"),
)
QUESTIONING = (
    ("questioning/pool_size", "{:,.0f} tasks"),
    ("questioning/useful", "{:,.0f} useful"),
    ("questioning/explored", "{:,.0f} explorations"),
    ("questioning/explored_turns", "{:,.0f} turns"),
)


def mechanisms(row: Row) -> Iterator[tuple[str, str]]:
    """Yield guidance, judge, questioning and engine of a step, without those that the row lacks."""
    for name, text in (
        ("guidance", guidance(row)),
        ("judge", _joined(row, JUDGE)),
        ("questioning", _joined(row, QUESTIONING)),
        ("engine", _joined(row, ENGINE)),
    ):
        if text:
            yield name, text


def guidance(row: Row) -> str:
    """Return what experience brings and costs; `upper`: the upper bound of the gain."""
    first, *others = GUIDANCE
    gain, rest = _joined(row, [first]), _joined(row, others)
    upper = _joined(row, [("guidance/upper", "{:+.2f}")])
    if gain and upper:
        gain += f" (upper {upper})"
    return ", ".join(filter(None, (gain, rest)))


def _joined(row: Row, parts: Iterable[Part]) -> str:
    found = ((row.get(name), text) for name, text in parts)
    return ", ".join(text.format(value) for value, text in found if value is not None)


def validation(row: Row) -> str:
    """Return what rows that never train say of the policy."""
    text = _joined(row, VALIDATION)
    return f"{text} over {number(row['validation/rows'])} rows" if text else ""


def played(row: Row) -> str:
    """Return the size of an evaluation: its episodes, and the different tasks among them."""
    episodes, distinct = row.get("eval/episodes"), row.get("eval/distinct")
    return f"{number(episodes)} episodes, {number(distinct)} distinct"


def bounds(row: Row) -> str:
    """Return the interval of an evaluation's success, as of so many different tasks."""
    found = intervals.share(row["eval/success"], row.get("eval/distinct") or 0)
    return intervals.written(found)


def gain(row: Row, before: Row) -> str:
    """Return the difference of success between two evaluations, with its interval."""
    value, first = row["eval/success"], before["eval/success"]
    counts = [one.get("eval/distinct") or 0 for one in (row, before)]
    found = intervals.difference(value, counts[0], first, counts[1])
    return f"{value - first:+.3f} ({intervals.written(found, signed=True)})"


def eval_sets_of(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the sets of an evaluation's row, each with its averages as text."""
    for name, value in row.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "eval" and parts[2].startswith("avg@"):
            _, chosen, average = parts
            best = average.replace("avg", "best")
            text = f"{average} {number(value)}"
            if average != "avg@1":
                text += f" {best} {number(row.get(f'eval/{chosen}/{best}'))}"
            text += f" ({number(row.get(f'eval/{chosen}/distinct'))} distinct)"
            yield chosen, text


def number(value: float | None) -> str:
    """Format a number, "–" without one."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
