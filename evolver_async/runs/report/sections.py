"""Sections of the page: their figures, tables and sentences, in reading order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from evolver_async.config import Config
from evolver_async.config.arguments import text_of
from evolver_async.config.load import to_dict
from evolver_async.config.rerun_changes import changed_values
from evolver_async.config.secrets import without_secrets
from evolver_async.metrics.activity import LEARNER
from evolver_async.runs.chosen_curves import (
    DATA,
    LEARNING,
    MECHANISMS,
    OFFPOLICY,
    PUBLISHING,
    Curve,
)
from evolver_async.runs.report.page_tables import Table, fates_table
from evolver_async.runs.report.plots import bars
from evolver_async.runs.report.plots.curve_plots import CurveBoard, Figure
from evolver_async.runs.results.events import SHOWN
from evolver_async.runs.results.loaded_run import RunResults
from evolver_async.runs.results.trajectories import RecordedTrajectory
from evolver_async.runs.watch import row_texts
from evolver_async.runs.watch.throughput import TimeBudget

REPLIES = 200  # of a saved evaluation
PROMPT_CHARS = 120  # of its end
BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")  # of lag_<bucket>/*


@dataclass
class PageSection:
    """One section: its sentences stand above the figures, its tables below them."""

    title: str
    sentences: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def sections(run: RunResults, trajectories: Sequence[RecordedTrajectory]) -> list[PageSection]:
    """Return the sections of a run's page. `trajectories` is empty if the journal is gone."""
    board = CurveBoard(run.steps, run.evaluations, run.events)
    made = [
        _curves(board, "Learning", (*LEARNING, *_reward_terms(board), *_players(board))),
        *_eval_sets(board),
        *_mechanisms(board),
        _off_policy(board, [] if run.missing else trajectories),
        _data(board, trajectories),
        _time(board),
        _curves(board, "Publishing and throughput", PUBLISHING),
        _faults(run, board),
        *_replies(run),
        _configuration(run.config),
    ]
    if len(run.evaluations):
        played = row_texts.played(run.evaluations.rows[-1])
        made[0].sentences.insert(0, f"Newest evaluation: {played} tasks.")
    if board.every > 1:
        made[0].sentences.append(f"The curves show every {board.every}th step.")
    return made


def _reward_terms(board: CurveBoard) -> list[Curve]:
    """Return a figure for each reward term that the run has."""
    train, evaluated = "train/reward/", "eval/reward/"
    names = [one.removeprefix(train) for one in board.all_steps.names if one.startswith(train)]
    names += [n.removeprefix(evaluated) for n in board.evaluations.names if n.startswith(evaluated)]
    return [
        Curve(
            f"Reward term {name}",
            {f"{train}{name}": "training"},
            {f"{evaluated}{name}": "evaluation"},
        )
        for name in sorted(set(names))
    ]


def _players(board: CurveBoard) -> list[Curve]:
    """Return a figure of the players' rewards and one of their successes, if there are several."""
    measured = [name.split("/") for name in board.all_steps.names]
    names = [parts[1] for parts in measured if parts[0] == "player" and parts[-1] == "reward"]
    return [
        Curve(
            f"{what.capitalize()} by player",
            {f"player/{name}/{what}": name for name in names},
            {f"eval/player/{name}/{what}": f"{name}, evaluation" for name in names},
        )
        for what in ("reward", "success")
        if names
    ]


def _curves(
    board: CurveBoard,
    title: str,
    curves: Sequence[Curve],
    missing: str = "Not recorded in this run, or always 0",
) -> PageSection:
    """Return a section of curves, with a sentence about those that have nothing to show."""
    section = PageSection(title)
    absent = []
    for curve in curves:
        made = board.draw(curve)
        if made is None:
            absent.append(curve.title)
        else:
            section.figures.append(made)
    if absent:
        section.sentences.append(f"{missing}: {', '.join(absent)}.")
    return section


def _eval_sets(board: CurveBoard) -> list[PageSection]:
    """Return a section with every metric of the sets of `eval.sets`; none without sets."""
    by_metric: dict[str, dict[str, str]] = {}
    distinct: dict[str, str] = {}
    for name in sorted(board.evaluations.names):
        match name.split("/"):
            case ["eval", chosen, "distinct"]:
                distinct[chosen] = row_texts.number(board.evaluations.rows[-1].get(name))
            case ["eval", chosen, metric] if metric not in ("episodes", "turns_mean"):
                by_metric.setdefault(metric, {})[name] = chosen
    if not by_metric:
        return []
    section = PageSection("Evaluation sets")
    if distinct:
        counts = ", ".join(f"{chosen} {count}" for chosen, count in distinct.items())
        section.sentences.append(f"Distinct tasks: {counts}.")
    for metric, curves in by_metric.items():
        made = board.draw(Curve(metric, {}, curves))
        if made is None:
            section.sentences.append(f"{metric} is always 0 in {', '.join(curves.values())}.")
        else:
            section.figures.append(made)
    return [section]


def _mechanisms(board: CurveBoard) -> list[PageSection]:
    """Return the sections of experience, judge and questioning, without what is not recorded."""
    made: dict[str, PageSection] = {}
    newest = dict(row_texts.mechanisms(board.all_steps.rows[-1])) if len(board.all_steps) else {}
    for one in MECHANISMS:
        if not any(mark in board.all_steps for mark in one.marks):
            continue
        found = [curve for curve in one.curves if any(m in board.all_steps for m in curve.metrics)]
        drawn = _curves(board, one.section, found, "Always 0")
        section = made.setdefault(one.section, PageSection(one.section))
        section.figures += drawn.figures
        section.sentences.append(one.meaning)
        if one.name in newest:
            section.sentences.append(f"Newest step, {one.name}: {newest[one.name]}.")
        section.sentences += drawn.sentences
    return list(made.values())


def _off_policy(board: CurveBoard, trajectories: Sequence[RecordedTrajectory]) -> PageSection:
    """Return the staleness of the trained data. `trajectories`: all of the run, else none."""
    section = _curves(board, "Staleness and off-policyness", OFFPOLICY)
    lags = Counter(
        use.lag
        for one in trajectories
        for use in one.trainings
        if use.fate == "trained" and not use.abandoned and use.lag is not None
    )
    source = "journal"
    counts = {str(lag): float(lags[lag]) for lag in sorted(lags)}
    if not counts or len(counts) > 30:
        counts, source = dict(_by_lag(board, "trajectories", total=True)), "metrics"
    if counts:
        title = f"Trained trajectories by version lag (from the {source})"
        section.figures.insert(0, bars.bars(title, "lag", {"trajectories": counts}))
    for title, names in (
        ("Effective sample size by lag", {"ess": "ess"}),
        ("KL by lag", {"kl": "KL"}),
        ("Clipped and masked by lag", {"clip_low": "low", "clip_high": "high", "masked": "masked"}),
    ):
        columns = {label: dict(_by_lag(board, name)) for name, label in names.items()}
        if any(columns.values()):
            section.figures.append(bars.bars(title, "lag", columns))
    return section


def _by_lag(board: CurveBoard, name: str, total: bool = False) -> Iterator[tuple[str, float]]:
    """Yield for each bucket of lags the token-weighted mean of a metric, or its sum."""
    for bucket in BUCKETS:
        column, tokens = f"lag_{bucket}/{name}", f"lag_{bucket}/tokens"
        if column not in board.all_steps or tokens not in board.all_steps:
            continue
        values, weights = board.all_steps[column], board.all_steps[tokens]
        both = np.isfinite(values) & np.isfinite(weights)
        if total:
            yield bucket, float(values[both].sum())
        elif weights[both].sum() > 0:
            yield bucket, float(np.average(values[both], weights=weights[both]))


def _data(board: CurveBoard, trajectories: Sequence[RecordedTrajectory]) -> PageSection:
    section = _curves(board, "Trained and evicted data", DATA)
    if not trajectories:
        section.sentences.append(
            "The journal has no trajectories, so their fates are known from the metrics alone."
        )
        return section
    table, counts = fates_table(trajectories)
    section.tables.append(table)
    title = "Trajectories of the journal by fate"
    section.figures.insert(0, bars.amounts(title, "trajectories", counts))
    for title, axis, name in (
        ("Length of trained and evicted rollouts", "ACTION tokens", "tokens"),
        ("Reward of trained and evicted rollouts", "reward", "reward"),
    ):
        samples = {
            fate: [
                float(getattr(one, name))
                for one in trajectories
                if one.fate == fate and one.kind == "rollout"
            ]
            for fate in ("trained", "evicted")
        }
        if all(samples.values()):
            section.figures.append(bars.histogram(title, axis, samples))
    if not any(one.fate == "evicted" and one.kind == "rollout" for one in trajectories):
        section.sentences.append(
            "The journal has no evicted rollouts to compare with trained ones."
        )
    return section


def _time(board: CurveBoard) -> PageSection:
    """Return the learner's seconds of each step by activity, and both sides' shares of their time.

    The shares are those that `train` prints at its end.
    """
    section = PageSection("Time")
    seconds = "throughput/learner/seconds"
    if seconds not in board.steps:
        section.sentences.append(f"Not recorded in this run: {seconds}.")
        return section
    whole = np.nan_to_num(board.steps[seconds])
    found = {
        name: whole * np.nan_to_num(board.steps[f"throughput/learner/{name}"])
        for name in LEARNER
        if f"throughput/learner/{name}" in board.steps
    }
    parts = dict(sorted(found.items(), key=lambda part: -part[1].sum()))
    parts = {name: values for name, values in parts.items() if values.sum() > 0}
    section.figures.append(board.stacked("Seconds per step by activity", parts))
    budget = TimeBudget.of(board.all_steps)
    for whose, shares in (("learner's", budget.learner), ("actors'", budget.actor)):
        percent = {name: 100 * share for name, share in shares.items() if share}
        if percent:
            section.figures.append(bars.amounts(f"Share of the {whose} time", "percent", percent))
    return section


def _replies(run: RunResults) -> list[PageSection]:
    """Return a table for each saved evaluation; none without any."""
    if not run.replies:
        return []
    section = PageSection("Replies of evaluations")
    for name, replies in run.replies.items():
        rows = [
            [
                *(one.set_name, one.task, one.sample, "yes" if one.success else "no", one.reward),
                *(one.prompt[-PROMPT_CHARS:], one.reply),
            ]
            for one in replies[:REPLIES]
        ]
        head = ["set", "task", "sample", "success", "reward", "end of the prompt", "reply"]
        title = f"{name}: {replies[0].evaluated}"
        more = f", the first {REPLIES} of {len(replies)}" if len(replies) > REPLIES else ""
        section.tables.append(Table(title + more, head, rows))
    return [section]


def _configuration(config: Config) -> PageSection:
    """Return every key of the run that is not at its default, then all keys, without secrets."""
    trees = (without_secrets(to_dict(one)) for one in (config, Config()))
    chosen, usual = (dict(changed_values({}, tree)) for tree in trees)
    rows = [[name, text_of(one), text_of(usual.get(name, ""))] for name, one in chosen.items()]
    changed = [row for row in rows if row[1] != row[2]]
    head = ["key", "value", "default"]
    section = PageSection("Configuration")
    section.sentences.append(f"{len(changed)} of {len(rows)} keys are not at their defaults.")
    section.tables += [Table("Keys of this run", head, changed), Table("All keys", head, rows)]
    return section


def _faults(run: RunResults, board: CurveBoard) -> PageSection:
    """Return what the run survived: restarts, rollbacks, alarms, failures."""
    section = PageSection("Faults and alarms")
    names = [*run.steps.columns("failures/"), *run.steps.columns("buffer/repeats/")]
    names = [name for name in names if np.nansum(run.steps[name]) > 0]
    title = names[0] if len(names) == 1 else "Failures and repeated takes"
    made = board.draw(Curve(title, {name: name for name in names}))
    if made is not None:
        section.figures.append(made)
    counts = Counter(event.kind for event in run.events)
    if run.events:
        counted = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        most = f"; of each kind the newest {SHOWN} at most" if max(counts.values()) >= SHOWN else ""
        section.sentences.append(f"Events: {counted}{most}.")
        rows = [["" if one.step is None else one.step, one.kind, one.text] for one in run.events]
        section.tables.append(Table("Events", ["step", "kind", "event"], rows))
    if counts.keys() <= {"stage"}:
        section.sentences.append("No restart, rollback, alarm or failure is recorded.")
    return section
