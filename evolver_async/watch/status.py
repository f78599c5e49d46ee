"""The buffer's STATUS as a short text for people."""

from typing import Any

from evolver_async.watch.view import failures_of, longest_stall


def lines(status: dict[str, Any]) -> list[str]:
    """Text of where groups stand, which actors work, which process waits for what, what fails."""
    groups = ", ".join(f"{count} {state}" for state, count in status["groups"].items())
    said = [
        f"stage {status['stage']}, take {status['take']}, version {status['head'] or 'none'}",
        f"groups: {groups}; {status['outstanding']} of {status['limit']} uses outstanding",
        f"trajectories: {_fates(status['ledger'])}",
    ]
    for name, actor in status["actors"].items():
        said.append(
            f"{name}: {actor['trajectories_per_s']:.2f} trajectories/s,"
            f" {actor['tokens_per_s']:.0f} tokens/s, {actor['leases']} leases,"
            f" last heard {actor['seen_s_ago']:.0f} s ago"
        )
    for name, waits in status["waiting"].items():
        said += [f"{name} waits {w['for_s']:.0f} s: {w['reason']}" for w in waits.values()]
    said += [f"evaluation {text}" for text in status["evaluations"]]
    said += map(str, failures_of(status))
    journal = status["journal"]
    said.append(f"journal: {journal['bytes'] / 2**20:.1f} MiB in {journal['segments']} segments")
    if journal["problem"]:
        said.append(f"journal: {journal['problem']}")
    if status["stalled"]:
        said.append(longest_stall(status))
    return said


def _fates(ledger: dict[str, Any]) -> str:
    """Trajectories of all kinds by what became of them."""
    fates = ("received", "held", "trained", "filtered", "evicted")
    return ", ".join(f"{_trajectories(ledger[fate])} {fate}" for fate in fates)


def _trajectories(amounts: dict[str, Any]) -> int:
    """The sum over kinds, and over reasons where there are some."""
    if "trajectories" in amounts:
        return amounts["trajectories"]
    return sum(_trajectories(part) for part in amounts.values())
