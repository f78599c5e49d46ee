"""The buffer's STATUS: the request for it, and its parts as text for people.

Names and activities are those that processes gave themselves, so every text passes `plain`.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from evolver_async.buffer.monitor.stalls import stall_text
from evolver_async.terminal import plain
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.failure_totals import FailureTotal
from evolver_async.wire.messages import StatusRequest

SHOWN = 3  # quarantined tasks


async def ask(address: str, keys: Path | None = None, timeout_s: float = 2.0) -> dict[str, Any]:
    """Ask the buffer for its STATUS. Raises TimeoutError without an answer, Rejected if refused."""
    with closing(DealerClient(address, "", f"watch-{os.getpid()}", keys=keys)) as client:
        return (await client.request(StatusRequest(), timeout_s=timeout_s)).status


def failures_of(status: dict[str, Any]) -> list[FailureTotal]:
    """Return the failures of a STATUS, the newest first."""
    names = FailureTotal.__struct_fields__
    return [FailureTotal(**{name: one[name] for name in names}) for one in status["failures"]]


def stalls_of(status: dict[str, Any]) -> list[str]:
    """Describe the stalls of a STATUS, the longest first."""
    return [plain(stall_text(**stall)) for stall in status["stalled"]]


def longest_stall(status: dict[str, Any]) -> str:
    """Describe the longest stall of a STATUS; "" if there is none."""
    return next(iter(stalls_of(status)), "")


def waits_of(status: dict[str, Any]) -> list[str]:
    """Describe the processes of a STATUS that wait, and the reasons."""
    return [
        plain(f"{name} waits {wait['for_s']:.0f} s: {wait['reason']}")
        for name, waits in status["waiting"].items()
        for wait in waits.values()
    ]


def status_lines(status: dict[str, Any]) -> list[str]:
    """Describe groups, trajectories, actors, waiting processes, failures, quarantined tasks and the
    journal."""
    groups = ", ".join(f"{count} {state}" for state, count in status["groups"].items())
    fates = ("received", "held", "trained", "filtered", "evicted")
    counts = ", ".join(f"{_trajectories(status['ledger'][fate])} {fate}" for fate in fates)
    lines = [
        f"stage {status['stage']}, take {status['take']}, version {status['head'] or 'none'}",
        f"groups: {groups}; {status['outstanding']} of {status['limit']} uses outstanding",
        f"trajectories: {counts}",
    ]
    for name, actor in status["actors"].items():
        lines.append(
            f"{name}: {actor['state']}, weights {actor['weights'] or 'none'},"
            f" {actor['trajectories_per_s']:.2f} trajectories/s,"
            f" {actor['tokens_per_s']:.0f} tokens/s, {actor['leases']} leases,"
            f" last contact {actor['seen_s_ago']:.0f} s ago"
        )
    if more := status["actors_not_shown"]:
        lines.append(f"{more} more actors, which were not heard as lately, are not shown")
    lines += waits_of(status)
    if (progress := status["progress"]) is not None and progress["phase"] not in ("", "data"):
        eta_s = progress["eta_s"]
        left = "" if eta_s is None else f", {progress['share']:.0%}, {eta_s:.0f} s to go"
        lines.append(f"learner: step {progress['step']}, {progress['phase']}{left}")
    lines += [f"{one['who']}: busy for {one['for_s']:.0f} s" for one in status["busy"]]
    lines += [f"evaluation {text}" for text in status["evaluations"]]
    lines += map(str, failures_of(status))
    newest = list(status["quarantined"].items())[: -SHOWN - 1 : -1]
    if newest:
        tasks = ", ".join(f"{task_id} ({reason})" for task_id, reason in newest)
        lines.append(f"newest quarantined tasks, which are not played again: {tasks}")
    journal = status["journal"]
    lines.append(f"journal: {journal['bytes'] / 2**20:.1f} MiB in {journal['segments']} segments")
    if journal["problem"]:
        lines.append(f"journal: {journal['problem']}")
    if status["stalled"]:
        lines.append(longest_stall(status))
    return [plain(line) for line in lines]


def _trajectories(amounts: dict[str, Any]) -> int:
    """Sum over kinds, and over reasons if there are any."""
    if "trajectories" in amounts:
        return amounts["trajectories"]
    return sum(_trajectories(part) for part in amounts.values())
