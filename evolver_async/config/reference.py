"""The config reference in docs/configuration.md, generated from the dataclasses and their comments.

`python -m evolver_async.config.reference docs/configuration.md` rewrites the part between the two
markers.
"""

import ast
import inspect
import io
import sys
import tokenize
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from evolver_async.config import Config, Stage

BEGIN = "<!-- config reference: begin -->"
END = "<!-- config reference: end -->"


def reference() -> str:
    """Markdown: one heading and one table a section, in the order of `Config`."""
    parts = []
    for section in fields(Config):
        is_stages = section.name == "stages"
        default = Stage() if is_stages else getattr(Config(), section.name)
        title = "stages[i]" if is_stages else section.name
        rows = "\n".join(_rows(default, f"{title}."))
        about = inspect.getdoc(type(default))
        parts.append(f"## `{title}`\n\n{about}\n\n| key | default | |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def rewrite(text: str) -> str:
    """`text` with a fresh reference between the markers. Raises ValueError without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _rows(section: Any, prefix: str) -> list[str]:
    """One table row a field; a nested section follows with its own prefix."""
    comments = _comments(type(section))
    rows = []
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            rows += _rows(value, f"{prefix}{item.name}.")
            continue
        shown = '""' if value == "" else str(value).lower() if isinstance(value, bool) else value
        comment = comments.get(item.name, "").replace("|", "\\|").replace("<", "\\<")
        rows.append(f"| `{prefix}{item.name}` | `{shown}` | {comment} |")
    return rows


def _comments(kind: type) -> dict[str, str]:
    """The comment on the lines of each field, by field name."""
    source = inspect.getsource(kind)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(by_line[line] for line in lines if line in by_line)
    return found


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
