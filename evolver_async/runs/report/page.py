"""The HTML page: everything inline, or with its trajectories in script files beside it.

All text of the run is untrusted: it is escaped in the HTML, and the scripts only ever assign it as
text. The Content-Security-Policy allows the page's own scripts by their hashes and no connection.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from evolver_async.config import ConfigError
from evolver_async.files import make_own
from evolver_async.runs.report.browser import TrajectoryPages
from evolver_async.runs.report.page_tables import Link, Table
from evolver_async.runs.report.plots import document
from evolver_async.runs.report.sections import PageSection

PARTS = "trajectories"  # the folder of script files beside a page
MARK = b'<meta name="generator" content="evolver_async report">'  # in the head of every page
HEAD_BYTES = 1000  # of a page, with the mark
CUT = 300  # characters of a cell


@dataclass
class PageContent:
    """Everything that a page shows. `facts` are lines of its head, `meta` is for the browser."""

    title: str
    facts: list[tuple[str, str]]
    sections: list[PageSection]
    pages: TrajectoryPages
    notes: list[str]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """Parts of a page in which runs and studies differ, beside its sections.

    `kind` is the class of the body. `links`, `key` (a sentence of the head) and `closing` (behind
    the sections) are HTML. `script` is an asset; it reads `data` from elements of these ids.
    """

    kind: str
    title: str
    facts: Iterable[tuple[str, str]]
    key: str
    script: str
    data: Mapping[str, str] = field(default_factory=dict)
    links: str = ""
    closing: str = ""


def html(content: PageContent, *, beside: bool = False) -> str:
    """Return the page of a run; `beside`: the tokens are in script files of the folder PARTS."""
    data = {"index": content.pages.index(), "meta": json.dumps(content.meta)}
    if not beside:
        data |= {f"part-{index}": part for index, part in enumerate(content.pages.parts)}
    notes = _sentences(content.notes)
    frame = Frame(
        kind="run",
        title=content.title,
        facts=content.facts,
        key=asset("marks.html"),
        script="report.js",
        data=data,
        links='<a href="#browser">Trajectories</a>',
        closing=Template(asset("browser.html")).substitute(notes=notes),
    )
    return framed(frame, content.sections, beside=beside)


def framed(frame: Frame, sections: Sequence[PageSection], *, beside: bool = False) -> str:
    """Return a page of these sections; `beside` allows script files beside it."""
    docs, targets = document.to_json([figure for one in sections for figure in one.figures])
    library, own = document.library(), asset(frame.script)
    waiting = iter(targets)
    return Template(asset("page.html")).substitute(
        policy=escape(_policy(library, own, beside=beside)),
        kind=frame.kind,
        title=escape(frame.title),
        style=asset("report.css"),
        facts="".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in frame.facts),
        links="".join(
            f'<a href="#section-{index}">{escape(one.title)}</a>'
            for index, one in enumerate(sections)
        )
        + frame.links,
        key=frame.key,
        sections="".join(
            _section(f"section-{index}", one, [next(waiting) for _ in one.figures])
            for index, one in enumerate(sections)
        ),
        closing=frame.closing,
        data="\n".join(
            f'<script type="application/json" id="{name}">{_inert(text)}</script>'
            for name, text in {"figures": docs, **frame.data}.items()
        ),
        library=library,
        script=own,
    )


def write_page(path: Path, page: str) -> None:
    """Write one self-contained page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    part.write_text(page, encoding="utf-8")
    part.replace(path)


def write_folder(directory: Path, content: PageContent) -> Path:
    """Write a page and its trajectories as script files beside it; return the page.

    They replace those of an earlier report. ConfigError for a folder with other files.
    """
    refuse_other_files(directory)
    page, parts = directory / "index.html", directory / PARTS
    make_own(parts)
    for script in parts.iterdir():
        script.unlink()
    write_page(page, html(content, beside=True))  # first: its mark tells a report that was cut off
    for index, part in enumerate(content.pages.parts):
        script = f'receiveTrajectories({index}, "{part}");\n'
        (parts / f"{index}.js").write_text(script, encoding="ascii")
    return page


def refuse_other_files(directory: Path) -> None:
    """Raise ConfigError for a folder that `write_folder` would not replace."""
    if not is_report(directory):
        raise ConfigError(f"{directory}: is not empty and no earlier report; choose another folder")


def is_report(directory: Path) -> bool:
    """True if a folder is absent, empty, or an earlier report with nothing else in its PARTS."""
    if not directory.exists() or not any(directory.iterdir()):
        return True
    page, parts = directory / "index.html", directory / PARTS
    if not page.is_file():
        return False
    with page.open("rb") as file:
        marked = MARK in file.read(HEAD_BYTES)
    scripts = parts.iterdir() if parts.exists() else ()
    return marked and all(
        one.is_file() and one.suffix == ".js" and one.stem.isdecimal() for one in scripts
    )


def asset(name: str) -> str:
    """Return the text of a file that belongs to the page."""
    return files("evolver_async.runs.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(*scripts: str, beside: bool) -> str:
    """Return the Content-Security-Policy.

    Bokeh writes style elements, which need 'unsafe-inline' for styles; its icons are data URLs.
    """
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = [f"'sha256-{one}'" for one in hashes] + (["'self'", "file:"] if beside else [])
    return (
        f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _inert(text: str) -> str:
    """Escape JSON or base64 so that it cannot end its script element."""
    return text.replace("<", "\\u003c")


def _section(name: str, section: PageSection, targets: Iterable[str]) -> str:
    figures = "".join(f'<div class="figure" id="{target}"></div>' for target in targets)
    tables = "".join(map(_table, section.tables))
    return (
        f'<section id="{name}"><h2>{escape(section.title)}</h2>{_sentences(section.sentences)}'
        f'<div class="figures">{figures}</div>{tables}</section>'
    )


def _sentences(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(one)}</p>" for one in sentences)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in table.head)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f"<h3>{escape(table.title)}</h3>"
        f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f'<td class="text">{", ".join(map(_link, value))}</td>'
    number = isinstance(value, int | float)
    text = f"{value:,}" if number else str(value)[:CUT]
    return f'<td class="{"number" if number else "text"}">{escape(text)}</td>'


def _link(one: Link) -> str:
    text = escape(one.text[:CUT])
    return f'<a href="{escape(one.href)}">{text}</a>' if one.href else text
