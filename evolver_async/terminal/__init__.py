"""Text for terminals: what others wrote (names, alerts, replies, errors) may hold sequences that
move the cursor, rename the window or hide what stands before them.

Every command prints with `say`, or on a `SafeConsole`; the formatter of all logs uses `harmless`.
"""

import re
from typing import TextIO

# Controls but tabs and line ends, halves of surrogate pairs, and what turns the direction of a line
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Return a text with question marks for what a terminal would obey and not show."""
    return CONTROLS.sub("?", text)


def plain(text: str) -> str:
    """Return a text on one line, with question marks for what is not printable."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in line)


def say(text: object, file: TextIO | None = None, *, end: str = "\n", flush: bool = False) -> None:
    """Print a text, harmless for a terminal; to stdout without a `file`."""
    print(harmless(str(text)), file=file, end=end, flush=flush)
