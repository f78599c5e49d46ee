"""Quoting of untrusted text in a prompt, as data.

A quoted text can neither start a new line nor contain a tag or marker. `actors/formats/chat.py`
escapes the tokenizer's special tokens.
"""

import re
import unicodedata

MAX_CHARS = 2_000  # default limit of one episode's guidance
MARK = "- "  # before each item
OPENING = re.compile(r"<(?=[^\s<])|\[(?=/?[A-Z]+\])")  # of a tag, or of a marker like [INST]


def quoted_lines(texts: list[str], max_chars: int) -> dict[int, str]:
    """Quote untrusted texts in at most `max_chars` characters; return lines by place in `texts`.

    A text that does not fit whole is left out: its end may be what matters.
    """
    lines: dict[int, str] = {}
    room = max_chars
    for place, text in enumerate(texts):
        line = f"{MARK}{plain(text)}"
        if len(line) <= room:
            lines[place] = line
            room -= len(line) + 1
    return lines


def plain(text: str) -> str:
    """Return a text on one line, without control characters, invisible characters and markers."""
    text = unicodedata.normalize("NFKC", text)
    text = "".join(" " if c.isspace() else c for c in text)
    text = "".join(c for c in text if unicodedata.category(c)[0] != "C")
    return OPENING.sub(lambda match: f"{match[0]} ", " ".join(text.split()))
