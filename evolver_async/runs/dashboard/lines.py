"""Lines of text for the views: titles, tables, wrapped sentences, blocks side by side. Pure.

Texts of unknown origin pass `plain` first: terminals act on control characters.
"""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

DIM = "grey62"
GAP = 2  # cells between two columns


def title(text: str, width: int) -> Text:
    """Return a heading with a rule to the end of the line."""
    head = f"─ {text} "[:width]
    return Text.assemble((head, "bold cyan"), ("─" * (width - len(head)), DIM))


def wrapped(text: str, width: int, style: str = "", most: int = 3) -> list[Text]:
    """Wrap a text into at most `most` lines; the rest of a longer one is left out."""
    lines = textwrap.wrap(text, max(10, width), max_lines=most, placeholder=" …")
    return [Text(line, style) for line in lines] or [Text("")]


def table(
    names: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    left: Sequence[str] = (),
) -> list[Text]:
    """Return a table with a head. Columns in `left` begin at the left, numbers end at the right.

    The last column gets the cells that are left over, and its texts are cut to fit.
    """
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    widths = [
        max([len(name), *(len(cell) for cell in column)])
        for name, column in zip(names, columns, strict=True)
    ]
    widths[-1] = max(len(names[-1]), min(widths[-1], width - sum(widths[:-1]) - GAP * len(names)))
    found = []
    for cells, style in ((names, DIM), *((row, "") for row in rows)):
        line = Text(style=style)
        for name, cell, cell_width in zip(names, cells, widths, strict=True):
            part = cell.copy() if isinstance(cell, Text) else Text(cell)
            part.truncate(cell_width, overflow="ellipsis")
            part.align("left" if name in left else "right", cell_width)
            line.append_text(part).append(" " * GAP)
        found.append(line)
    return found


def natural_width(names: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> int:
    """Return the cells that a table needs to show every text whole."""
    columns = zip(names, *rows, strict=True)
    return sum(max(map(len, column)) + GAP for column in columns)


def beside(blocks: Sequence[list[Text]], widths: Sequence[int]) -> list[Text]:
    """Put blocks of lines next to each other, each cut or filled up to its width."""
    found = []
    for lines in zip_longest(*blocks, fillvalue=None):
        whole = Text()
        for line, width in zip(lines, widths, strict=True):
            part = Text() if line is None else line.copy()
            part.truncate(width, pad=True)
            whole.append_text(part)
        found.append(whole)
    return found
