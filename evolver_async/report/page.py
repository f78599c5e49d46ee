"""The HTML page: everything inline, or with its trajectories in script files beside it.

All text of the run is untrusted: it is escaped in the HTML, and the scripts only ever assign it as
text. The Content-Security-Policy allows the page's own scripts by their hashes and no connection.
"""

import base64
import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from evolver_async.report.browser import TrajectoryPages
from evolver_async.report.plots import document
from evolver_async.report.sections import PageSection
from evolver_async.report.tables import Table

PARTS = "trajectories"  # the folder of script files beside a page
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


def html(content: PageContent, *, beside: bool = False) -> str:
    """Return the page; `beside`: the tokens are in script files of the folder PARTS."""
    figures = [figure for section in content.sections for figure in section.figures]
    docs, targets = document.to_json(figures)
    library, own = document.library(), asset("report.js")
    data = {"figures": docs, "index": content.pages.index(), "meta": json.dumps(content.meta)}
    if not beside:
        data |= {f"part-{index}": part for index, part in enumerate(content.pages.parts)}
    waiting = iter(targets)
    return Template(asset("page.html")).substitute(
        policy=escape(policy(library, own, beside=beside)),
        title=escape(content.title),
        style=asset("report.css"),
        facts="".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in content.facts),
        links="".join(
            f'<a href="#section-{index}">{escape(one.title)}</a>'
            for index, one in enumerate(content.sections)
        ),
        sections="".join(
            section_html(f"section-{index}", one, [next(waiting) for _ in one.figures])
            for index, one in enumerate(content.sections)
        ),
        notes=_sentences(content.notes),
        data="\n".join(
            f'<script type="application/json" id="{name}">{inert(text)}</script>'
            for name, text in data.items()
        ),
        library=library,
        script=own,
    )


def write_page(path: Path, content: PageContent) -> None:
    """Write one self-contained page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    part.write_text(html(content), encoding="utf-8")
    part.replace(path)


def write_folder(directory: Path, content: PageContent) -> Path:
    """Write a page and its trajectories as script files beside it; return the page."""
    shutil.rmtree(directory / PARTS, ignore_errors=True)  # of an earlier report
    (directory / PARTS).mkdir(parents=True)
    for index, part in enumerate(content.pages.parts):
        script = f'receiveTrajectories({index}, "{part}");\n'
        (directory / PARTS / f"{index}.js").write_text(script, encoding="ascii")
    page = directory / "index.html"
    page.write_text(html(content, beside=True), encoding="utf-8")
    return page


def asset(name: str) -> str:
    """Return the text of a file that belongs to the page."""
    return files("evolver_async.report").joinpath("assets", name).read_text(encoding="utf-8")


def policy(*scripts: str, beside: bool) -> str:
    """Return the Content-Security-Policy.

    Bokeh writes style elements, which need 'unsafe-inline' for styles; its icons are data URLs.
    """
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = [f"'sha256-{one}'" for one in hashes] + (["'self'", "file:"] if beside else [])
    return (
        f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def inert(text: str) -> str:
    """Escape JSON or base64 so that it cannot end its script element."""
    return text.replace("<", "\\u003c")


def section_html(name: str, section: PageSection, targets: Iterable[str]) -> str:
    """Return a section; `targets` are the element ids of its figures."""
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
    number = isinstance(value, int | float)
    text = f"{value:,}" if number else str(value)[:CUT]
    return f'<td class="{"number" if number else "text"}">{escape(text)}</td>'
