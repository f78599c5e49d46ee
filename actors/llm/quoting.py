"""How text of unknown origin is written into a prompt: as data.

It can neither end its place there, nor spell a marker, nor pass for a line of somebody else's.
Special tokens of the tokenizer at hand are the matter of `actors/formats/chat.py`.
"""

import re
import unicodedata

MAX_CHARS = 2_000  # of one episode's guidance where nothing else is said
OPENING = re.compile(r"<(?=[^\s<])|\[(?=/?[A-Z]+\])")  # of a tag, or of a marker like [INST]


def quoted(texts: list[str], max_chars: int = MAX_CHARS) -> str:
    """Texts of unknown origin as one list of data, an item a line, in at most so many characters.

    An item that does not fit any more is left out; the first is cut instead.
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
    return "\n".join(lines)


def plain(text: str) -> str:
    """A text on one line, without control and invisible characters and without markers."""
    text = unicodedata.normalize("NFKC", text)
    text = "".join(" " if c.isspace() else c for c in text)
    text = "".join(c for c in text if unicodedata.category(c)[0] != "C")
    return OPENING.sub(lambda match: f"{match[0]} ", " ".join(text.split()))
