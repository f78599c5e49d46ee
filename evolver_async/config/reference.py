"""Reference of all keys (docs/configuration.md), generated from the fields and their comments.

`python -m evolver_async.config.reference FILE` rewrites the part between the two markers.
"""

import ast
import inspect
import io
import re
import sys
import tokenize
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from evolver_async.config.scopes import declared
from evolver_async.config.sections import Config
from evolver_async.config.sections.run import StageConfig
from evolver_async.config.values.kinds import BOUNDS, CORRECTIONS, KINDS
from evolver_async.config.values.rules import annotations, item_kind, rule

BEGIN = "<!-- config reference: begin -->"
END = "<!-- config reference: end -->"


def reference() -> str:
    """Return Markdown: one heading and one table a section, in the order of `Config`."""
    parts = []
    for section in fields(Config):
        is_stages = section.name == "stages"
        default = StageConfig() if is_stages else getattr(Config(), section.name)
        title = "stages[i]" if is_stages else section.name
        rows = "\n".join(_rows(default, f"{title}."))
        head = "| key | default | allowed | scope | |\n|---|---|---|---|---|"
        parts.append(f"#### `{title}`\n\n{inspect.getdoc(type(default))}\n\n{head}\n{rows}\n")
    return "\n".join(parts)


def rewrite(text: str) -> str:
    """Return `text` with a new table between the markers. Raise ValueError without markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _rows(section: Any, prefix: str) -> list[str]:
    """Return one table row a field. A nested section follows with its own prefix, and so do the
    items of a mapping or a list."""
    comments = _comments(type(section))
    rows = []
    for name, annotation in annotations(type(section)).items():
        value = getattr(section, name)
        if is_dataclass(value):
            rows += _rows(value, f"{prefix}{name}.")
            continue
        shown = '""' if value == "" else str(value).lower() if isinstance(value, bool) else value
        allowed = str(rule(annotation) or "").removeprefix("one of ")
        _, scope = declared(re.split(r"\.|\[", f"{prefix}{name}"))
        text = _of_kinds(prefix, name) + comments[name] + _open_values(prefix, name)
        texts = map(_escaped, (allowed, str(scope), text))
        rows.append(f"| {' | '.join((f'`{prefix}{name}`', f'`{shown}`', *texts))} |")
        item = item_kind(annotation)
        if isinstance(item, type) and is_dataclass(item):
            place = ".NAME" if isinstance(value, dict) else "[i]"
            rows += _rows(item(), f"{prefix}{name}{place}.")
    return rows


def _of_kinds(prefix: str, name: str) -> str:
    """Return the kinds that read a key, "" if all do."""
    kinds = KINDS.get(prefix.removesuffix("."), {}).items()
    reading = ", ".join(kind for kind, facts in kinds if name in facts.reads)
    return f"{reading}: " if reading else ""


def _open_values(prefix: str, name: str) -> str:
    """Return what a key left open stands for, by kind of correction; "" for another key."""
    if f"{prefix}{name}" == "correction.level":
        kinds = (kind for kind, facts in CORRECTIONS.items() if name in facts.reads)
        return f"; auto: {', '.join(f'{CORRECTIONS[kind].level} for {kind}' for kind in kinds)}"
    found = f"; -1: {BOUNDS[name]:g}" if name in BOUNDS else ""
    for kind, facts in CORRECTIONS.items():
        for case, bounds in facts.bounds.items():
            found += (
                f", {' '.join(filter(None, (kind, case)))} {bounds[name]:g}"
                if name in bounds
                else ""
            )
    return found


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _comments(kind: type) -> dict[str, str]:
    """Return the comment above and beside each field, by field name."""
    source = inspect.getsource(kind)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found, above = {}, 0
    for node in definition.body:
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(above + 1, end + 1)
            found[node.target.id] = " ".join(by_line[line] for line in lines if line in by_line)
        above = end
    return found


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(rewrite(readme.read_text(encoding="utf-8")), encoding="utf-8")
