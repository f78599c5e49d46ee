"""Formats of a run's files by number, and the sentence for files of another one.

A program reads the numbers below and no others; CHANGELOG.md says what each means.
"""

from pathlib import Path

from evolver_async import __version__
from evolver_async.files import parsed

RUN = "run.json"  # of a run directory; it holds the number of the directory
RUN_FORMAT = 1  # config.yaml and everything that has no number of its own
CHECKPOINT_FORMAT = 2
JOURNAL_FORMAT = 3


def numbered() -> dict[str, object]:
    """Return what `run.json` says of the format of the directory and of its program."""
    return {"format": RUN_FORMAT, "version": __version__}


def foreign(what: object, found: object, own: int, writer: str = "") -> str:
    """Return the sentence for files of the format `found`, where this program reads `own`."""
    by = writer and f", written by evolver-async {writer}"
    return (
        f"{what}: has format {found}{by}; this program, evolver-async {__version__},"
        f" reads format {own} (CHANGELOG.md says what the numbers mean): use the program that wrote"
        " it"
    )


def foreign_run(run_dir: Path) -> str:
    """Return the sentence for a run directory of another format, "" for one of this.

    A directory that was never launched may have no number, and a torn one is written anew.
    """
    try:
        facts = parsed((run_dir / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if not isinstance(facts, dict) or facts.get("format") == RUN_FORMAT:
        return ""
    found, writer = facts.get("format"), facts.get("version", "")
    return foreign(run_dir, "no number" if found is None else found, RUN_FORMAT, str(writer))
