"""Time of a run's processes by activity: a table, and a sentence that says what to change. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from evolver_async.config import Config
from evolver_async.config.load import concurrent_members, stage_config
from evolver_async.metrics.activity import (
    ACTOR,
    HOST_CPU_SHARE,
    LEARNER,
    OTHER,
    RUN_CPU_SHARE,
    SYNC_S,
)

WAITS = 0.25  # share of its time from which on a side waits for the other
FULL, EMPTY = 0.8, 0.5  # shares of the slots in use
BUSY = 0.9  # share of the processors from which on there is none to spare
OWN = 0.7  # share that the run itself uses then, from which on more actors only share them
SLOW_SYNC_S = 0.05  # of the journal; a disk of this age has some milliseconds
COMPUTES = ("engine", "rollout", "environment", OTHER)  # activities that can need a processor
GENERATIONS = "throughput/actor/generations"
FIXED = ("optimizer", "publish", "report", "checkpoint")  # cost the same for larger steps
SLOWS = {  # what to change if this activity of the actors holds up the learner
    "rollout": "the episodes' own code takes most of it, on one core for each actor: add actors"
    " (actors.count)",
    "environment": "environments take most of it: run more groups beside them (actors.groups),"
    " or add actors (actors.count)",
    "judge": "judging takes most of it: use a faster judge or endpoint, or let it answer more at a"
    " time (judge, reward, questioning)",
    "push": "handing in takes most of it: give the buffer a faster network, disk or processor",
    "weights": "waiting for weights takes most of it: allow older ones (buffer.max_staleness), or"
    " publish less often by larger steps (learner.groups_per_step), or over a faster network",
    OTHER: "no activity of theirs that is measured takes most of it: look for a slow endpoint or"
    " start",
}


@dataclass(frozen=True)
class Setup:
    """Settings of a stage that the advice depends on.

    `concurrent`: members that an actor plays at a time.
    """

    serial: bool = False
    slots: int = 1
    concurrent: int = 1
    staleness: int = 0
    max_ready: float = 0.0

    @classmethod
    def by_stage(cls, config: Config) -> "list[Setup]":
        """Return the settings of every stage."""
        buffers = [stage_config(config, index).buffer for index in range(len(config.stages))]
        return [
            cls(
                serial=config.launch.kind == "serial",
                slots=config.engine.slots,
                concurrent=concurrent,
                staleness=buffer.max_staleness,
                max_ready=buffer.max_ready,
            )
            for buffer, concurrent in zip(buffers, concurrent_members(config), strict=True)
        ]


@dataclass(frozen=True)
class TimeBudget:
    """Shares by activity, over some rows, of all actors and of the learner; empty if unknown.

    `actor_s`, `learner_s`: the seconds that they divide. `generations`: mean number of turns that
    one actor generates at a time. `busy`: processors in use of the actors' least busy host, 0 to 1;
    `own`: those that this run uses there. `sync_s`: seconds of a sync of the journal.
    """

    actor: dict[str, float]
    learner: dict[str, float]
    actor_s: float = 0.0
    learner_s: float = 0.0
    generations: float = 0.0
    busy: float = 0.0
    own: float = 0.0
    sync_s: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "TimeBudget":
        """Add up the rows of metrics from the first one with figures of the actors on.

        The learner waits for the start of the actors before that.
        """
        kept = list(dropwhile(lambda row: "throughput/actor/seconds" not in row, rows))
        actor_s, actor = _means(kept, "actor", ACTOR)
        learner_s, learner = _means(kept, "learner", LEARNER)
        names = GENERATIONS, HOST_CPU_SHARE, RUN_CPU_SHARE, SYNC_S
        means = (_mean(kept, name) for name in names)
        return cls(actor, learner, actor_s, learner_s, *means)


def _mean(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a metric over the actors' seconds in rows that have both; 0 without."""
    both = [(row.get(name), row.get("throughput/actor/seconds")) for row in rows]
    known = [(value, seconds) for value, seconds in both if value is not None and seconds]
    whole = sum(seconds for _, seconds in known)
    return sum(value * seconds for value, seconds in known) / whole if whole else 0.0


def _means(
    rows: list[Mapping[str, Any]], role: str, activities: Iterable[str]
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a role, and the shares of its activities in them, largest first."""
    name = f"throughput/{role}"
    timed = [row for row in rows if row.get(f"{name}/seconds")]
    whole = sum(row[f"{name}/seconds"] for row in timed)
    if not whole:
        return 0.0, {}
    seconds = {
        one: sum((row.get(f"{name}/{one}") or 0.0) * row[f"{name}/seconds"] for row in timed)
        for one in activities
    }
    order = sorted(seconds, key=lambda one: (one == OTHER, -seconds[one]))
    return whole, {one: seconds[one] / whole for one in order}


def table(budget: TimeBudget) -> list[str]:
    """Format both roles side by side, without activities that took no time; [] if unknown."""
    if not (budget.actor or budget.learner):
        return []
    sides = [
        [f"{role:<12}{seconds:8.1f} s", *(f"{one:<12}{share:8.1%}" for one, share in parts.items())]
        for role, seconds, parts in (
            ("actors", budget.actor_s, _taken(budget.actor)),
            ("learner", budget.learner_s, _taken(budget.learner)),
        )
    ]
    height = max(map(len, sides))
    left, right = (side + [""] * (height - len(side)) for side in sides)
    return [f"{one:<26}{other}".rstrip() for one, other in zip(left, right, strict=True)]


def time_lines(rows: Sequence[Mapping[str, Any]], config: Config) -> list[str]:
    """Return the table of these rows and the advice, which is of their last stage."""
    budget = TimeBudget.of(rows)
    setup = Setup.by_stage(config)[newest_stage(rows)]
    return [*table(budget), *filter(None, [advice(budget, setup)])]


def newest_stage(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the stage of the newest row of a step; the first one without steps."""
    return next((int(row["stage"]) for row in reversed(rows) if "stage" in row), 0)


def line(shares: Mapping[str, float]) -> str:
    """Format the shares of one role in a line."""
    return ", ".join(f"{one} {share:.0%}" for one, share in shares.items() if share >= 0.005)


def _taken(shares: dict[str, float]) -> dict[str, float]:
    return {one: share for one, share in shares.items() if share}


def advice(budget: TimeBudget, setup: Setup) -> str:
    """Say which side holds up the other and what to change; "" if a side is unknown."""
    if not (budget.actor and budget.learner):
        return ""
    data, tickets = budget.learner["data"], budget.actor["tickets"]
    if setup.serial:
        return (
            f"Learner and actors take turns in a serial run: the learner waits {data:.0%} of its"
            " time. Run them side by side (launch.kind=local)."
        )
    if slow := _hand_in(budget):
        return slow
    if data >= WAITS and tickets >= WAITS:
        change = f"allow more staleness (buffer.max_staleness, now {setup.staleness})"
        if setup.max_ready:  # the tighter bound, as the check of the configuration sees to
            change = f"let more groups be ready (buffer.max_ready, now {setup.max_ready:g})"
        return (
            f"Both sides wait for each other, the learner {data:.0%} and the actors {tickets:.0%}"
            f" of their time: {change}."
        )
    if data >= WAITS:
        change = _actors(budget, setup)
        return f"The actors hold up the learner, which waits {data:.0%} of its time; {change}."
    if tickets >= WAITS:
        change = _learner(budget)
        return f"The learner holds up the actors, which wait {tickets:.0%} of their time; {change}."
    short = (
        f"Neither side waits long: the learner {data:.0%} of its time, the actors {tickets:.0%}."
    )
    if shared := _shared(budget):
        return f"{short} {shared[0].upper()}{shared[1:]}."
    return f"{short} More speed needs both more actors and a faster learner."


def _actors(budget: TimeBudget, setup: Setup) -> str:
    """Say what makes the actors faster, by what they spend most time on besides waiting."""
    slowest = max((one for one in budget.actor if one != "tickets"), key=budget.actor.__getitem__)
    # an environment that sleeps uses no processor, whatever else does
    waits = slowest == "environment" and budget.own < OWN
    if slowest in COMPUTES and not waits and (shared := _shared(budget)):
        return f"{slowest} takes most of their time; {shared}"
    if slowest != "engine":
        return SLOWS[slowest]
    used = f"with {budget.generations:.0f} turns at a time in {setup.slots} slots"
    if setup.concurrent > setup.slots and budget.generations >= FULL * setup.slots:
        return f"generation takes most of it, {used}: give the engine more slots (engine.slots)"
    if 0 < budget.generations <= EMPTY * setup.slots and setup.concurrent < setup.slots:
        return f"generation takes most of it, {used}: run more groups at once (actors.groups)"
    return f"generation takes most of it, {used}: add actors (actors.count)"


def _hand_in(budget: TimeBudget) -> str:
    """Say that the buffer takes long to accept what it is given; "" if it does not.

    Then each side waits for the other as well, and no bound of the staleness changes that.
    """
    push, report = budget.actor["push"], budget.learner["report"]
    if budget.learner["data"] < WAITS <= budget.actor["tickets"]:
        push = 0.0  # the learner holds up the actors whatever they do
    if max(push, report) < WAITS:
        return ""
    took = (
        f"The buffer holds up both sides: handing in takes {push:.0%} of the actors' time and"
        f" reports {report:.0%} of the learner's"
    )
    if budget.sync_s >= SLOW_SYNC_S:
        return (
            f"{took}, and a sync of its journal {budget.sync_s:.2g} s: put the journal on a faster"
            " disk (run.dir)."
        )
    return (
        f"{took}, though its disk is fast: look at the network between the hosts, and at the"
        " processor of the buffer."
    )


def _shared(budget: TimeBudget) -> str:
    """Say that no processor is to spare, and whose they are; "" if some are."""
    if budget.busy < BUSY and budget.own < BUSY:
        return ""
    used = f"the processors are {max(budget.busy, budget.own):.0%} in use"
    if budget.own and budget.own < OWN:
        return (
            f"{used}, {budget.own:.0%} by this run: other programs there take the rest, so end"
            " those or use other hosts"
        )
    return f"{used}: more actors would only share them; more speed needs more processors, or hosts"


def _learner(budget: TimeBudget) -> str:
    """Say what makes the learner faster, by what it spends most time on."""
    shares = budget.learner
    fixed = sum(shares[one] for one in FIXED)
    if shares["checkpoint"] >= max(WAITS, fixed / 2):
        return (
            f"checkpoints take {shares['checkpoint']:.0%} of the learner's time: write fewer"
            " (checkpoint.every), or to a faster disk"
        )
    if fixed >= 1 - fixed - shares["data"]:
        return (
            f"{fixed:.0%} of the learner's time is spent once a step or update, whatever its size:"
            " use larger steps (learner.groups_per_step)"
        )
    return (
        f"its passes over the data take {1 - fixed - shares['data']:.0%} of the learner's: run"
        " fewer actors (actors.count), or give the learner more threads or GPUs"
    )
