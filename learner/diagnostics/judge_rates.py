"""Rates of the judge's audit over the last steps, from totals that the actors report. Pure.

The totals are counted in `actors/judge/audit.py`; a rate belongs to the probes between the first
and the last report of a window.
"""

from learner.state import Watched

WINDOW = 5  # steps
LEAST = 6  # turns in the window; a rate of fewer is not measured
TOTALS = (
    *("known", "known_right", "praised", "praised_good", "unpraised_good"),
    *("longer", "longer_good", "shorter", "shorter_good"),
)


def note(watched: Watched, counters: dict[str, float]) -> None:
    """Add the totals of a step to the windows; begin anew where they have fallen."""
    watched.not_arrived.append(counters.get("weights/not_arrived", 0.0))
    del watched.not_arrived[:-2]
    if "judge/known" not in counters:
        return
    totals = [counters.get(f"judge/{name}", 0.0) for name in TOTALS]
    window = watched.judge_totals
    if window and any(new < old for new, old in zip(totals, window[-1], strict=True)):
        window.clear()
    window.append(totals)
    del window[: -(WINDOW + 1)]


def forget_totals(watched: Watched) -> None:
    """Begin the windows anew: the totals before a restored checkpoint are older than its steps."""
    watched.not_arrived.clear()
    watched.judge_totals.clear()


def judge_rates(watched: Watched) -> dict[str, float]:
    """Return the rates of the window that at least `LEAST` turns give, by metric name."""
    window = watched.judge_totals
    if len(window) < 2:
        return {}
    ends = zip(TOTALS, window[0], window[-1], strict=True)
    turns = {name: last - first for name, first, last in ends}
    rates = {}
    if turns["known"] >= LEAST:
        rates["judge/agreement"] = turns["known_right"] / turns["known"]
    if turns["praised"] >= LEAST:
        more = turns["praised_good"] - turns["unpraised_good"]
        rates["judge/praise_bias"] = more / turns["praised"]
    if min(turns["longer"], turns["shorter"]) >= LEAST:
        longer = turns["longer_good"] / turns["longer"]
        rates["judge/length_bias"] = longer - turns["shorter_good"] / turns["shorter"]
    return rates
