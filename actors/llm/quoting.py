"""Quoting of untrusted text in a prompt, as data.

A quoted text can neither start a new line nor contain a tag or marker. `actors/formats/chat.py`
escapes the tokenizer's special tokens.
"""

import re
import unicodedata

MAX_CHARS = 2_000  # default limit of one episode's guidance
OPENING = re.compile(r"<(?=[^\s<])|\[(?=/?[A-Z]+\])")  # of a tag, or of a marker like [INST]


def quoted(texts: list[str], max_chars: int = MAX_CHARS) -> str:
    """Quote untrusted texts as a list with one line per item; see `quoted_lines`."""
    return "\n".join(quoted_lines(texts, max_chars))


def quoted_lines(texts: list[str], max_chars: int) -> list[str]:
    """Quote untrusted texts, one line per item, in at most `max_chars` characters.

    From the first item on that does not fit, items are left out; the very first is cut instead.
    """
    lines: list[str] = []
    room = max_chars
    for text in texts:
        line = f"- {plain(text)}"
        if not lines:
            line = line[:room]
        if len(line) > room:
            break
        lines.append(line)
        room -= len(line) + 1
    return lines


def plain(text: str) -> str:
    """Return a text on one line, without control characters, invisible characters and markers."""
    text = unicodedata.normalize("NFKC", text)
    text = "".join(" " if c.isspace() else c for c in text)
    text = "".join(c for c in text if unicodedata.category(c)[0] != "C")
    return OPENING.sub(lambda match: f"{match[0]} ", " ".join(text.split()))
