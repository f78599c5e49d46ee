"""Writing of a run's report: one page where everything fits into it, else a folder."""

from dataclasses import dataclass
from pathlib import Path

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import stage_config
from evolver_async.durations import utc
from evolver_async.runs.report.browser import TrajectoryPages, pages
from evolver_async.runs.report.page import (
    PageContent,
    html,
    refuse_other_files,
    write_folder,
    write_page,
)
from evolver_async.runs.report.sections import sections
from evolver_async.runs.results.loaded_run import EMPTY, RunResults
from evolver_async.runs.watch import row_texts
from evolver_async.runs.watch.runs import digests, untouched_of

PAGE_BYTES = 5_000_000
RESERVED_BYTES = 2_200_000  # of a page: the library, the figures, the index
PAGE_TRAJECTORIES = 10_000
NAME = "report"


@dataclass(frozen=True)
class Written:
    """A report: its page, the trajectories in it and in the journal, a sentence on missing ones."""

    page: Path
    shown: int
    total: int
    missing: str


def write(run: RunResults, out: Path | None = None) -> Written:
    """Write the report of a run.

    `out` ending in .html is one page, with as many trajectories as fit; any other `out` is a folder
    with all of them. Without `out` it is report.html in the run directory if all fit, else the
    folder report. ConfigError for a run without metrics, and for an `out` that cannot be written.
    """
    if not run.rows:
        raise ConfigError(f"{run.path}: {EMPTY}")
    out_page = out is not None and out.suffix in (".html", ".htm")
    if out is not None and out.is_dir() == out_page and out.exists():
        kind = "is a directory" if out_page else "is a file, not a directory; name a .html file"
        raise ConfigError(f"{out}: {kind}")
    if out is not None and not out_page:
        refuse_other_files(out)  # before the trajectories of a long run are read for minutes
    trajectories = run.trajectories
    kept = sum(one.kept for one in trajectories)
    single = out_page or (out is None and kept <= PAGE_TRAJECTORIES)
    limits = (PAGE_BYTES - RESERVED_BYTES, PAGE_TRAJECTORIES) if single else ()
    found = pages(run, *limits)
    if out is None and single and found.count < found.total:
        single, found = False, pages(run)
    content = PageContent(
        title=run.path.name,
        facts=_facts(run),
        sections=sections(run, trajectories),
        pages=found,
        notes=_notes(run, found),
        meta=_meta(run),
    )
    try:
        if single:
            page = out or run.path / f"{NAME}.html"
            write_page(page, html(content))
        else:
            page = write_folder(out or run.path / NAME, content)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return Written(page, found.count, found.total, run.missing)


def _facts(run: RunResults) -> list[tuple[str, str]]:
    """Return the facts of the page's head."""
    end, config = run.end, run.config
    state = end.state + (f" ({end.reason})" if end.reason else "")
    facts = [
        ("state", f"{state}, {utc(end.time)}"),
        ("steps", f"{max(int(row['step']) for row in run.rows)}"),
        ("seconds", f"{max((row.get('time_s') or 0 for row in run.steps), default=0):.0f}"),
        ("stages", ", ".join(stage.kind for stage in config.stages)),
        *_stage_facts(config),
        ("lineages", f"{len({row['lineage'] for row in run.all_rows})}"),
    ]
    if len(run.evaluations) and "eval/success" in run.evaluations:
        newest = run.evaluations.rows[-1]
        success = row_texts.number(newest.get("eval/success"))
        summary = f"{success} at step {newest['step']} ({row_texts.played(newest)})"
        decided = [row for row in run.evaluations if row.get("eval/success") is not None]
        if decided and decided[-1] is newest:
            summary += f", {row_texts.bounds(newest)}"
            if (untouched := untouched_of(decided, digests(config))) is not None:
                summary += f", {row_texts.gain(newest, untouched)} against the untouched model"
        summary += "".join(f"; {name} {value}" for name, value in row_texts.eval_sets_of(newest))
        facts.append(("eval success", summary))
    told = ((row, row_texts.validation(row)) for row in reversed(run.steps.rows))
    if found := next((one for one in told if one[1]), None):
        facts.append(("validation", f"{found[1]} at step {found[0]['step']}"))
    if run.checkpoints:
        facts.append(("newest checkpoint", run.checkpoints[-1].path.name))
    return facts


def _stage_facts(config: Config) -> list[tuple[str, str]]:
    """Return the environments of all stages and the algorithms of those of rl."""
    stages = [stage_config(config, index) for index in range(len(config.stages))]
    environments = {index: stage.env.name for index, stage in enumerate(stages)}
    algorithms = {
        index: f"{stage.advantage.kind}, {stage.correction.kind}"
        for index, stage in enumerate(stages)
        if config.stages[index].kind == "rl"
    }
    facts = [("environment", _by_stage(environments)), ("algorithm", _by_stage(algorithms))]
    return [(name, text) for name, text in facts if text]


def _by_stage(texts: dict[int, str]) -> str:
    """Return the text that all stages share, else that of each stage."""
    if len(set(texts.values())) > 1:
        return "; ".join(f"stage {index}: {text}" for index, text in texts.items())
    return next(iter(texts.values()), "")


def _notes(run: RunResults, found: TrajectoryPages) -> list[str]:
    """Return sentences about the trajectories that the page has and lacks."""
    notes = [run.missing] if run.missing else []
    if not found.total:
        notes.append("The journal holds the tokens of no trajectory.")
    elif found.count < found.total:
        notes.append(
            f"This page has {found.count:,} of the {found.total:,} trajectories in the journal,"
            " whole groups spread evenly over the run; a folder as --out has all of them."
        )
    if found.total:
        measured = sum(found.columns["measured"])
        notes.append(
            f"Ratio and advantage are known for {measured:,} of them: the learner writes"
            f" {run.config.metrics.samples} trajectories of a step to samples/, every"
            f" {run.config.metrics.samples_every} steps (metrics.samples, metrics.samples_every)."
            " The journal itself does not hold them. Episodes of evaluations are only counted."
        )
    if run.tokenizer is None:
        notes.append("The policy's tokenizer.json is gone, so tokens are shown as numbers.")
    return notes


def _meta(run: RunResults) -> dict[str, object]:
    """Return the settings that the browser's sentences need."""
    experience = run.config.experience
    return {"internalise": experience.internalise, "experience": experience.kind}
