"""Tagged blocks of a turn, found in time linear in its length; pure.

The policy writes the text, so no search may start again at every opening: n openings without an end
would cost n² and stop the actor.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

THOUGHT, THOUGHT_END = "<think>", "</think>"


def escaped_response(text: str) -> str:
    """Escape closing tags of a tool's output, which it could end itself with."""
    return text.replace("</tool_response", "</ tool_response")


class TaggedBlock(NamedTuple):
    """A block `<tag>body</tag>`, which is text[start:end]. `closed`: False if it has no end; it
    then reaches to the end of the text."""

    tag: str
    body: str
    start: int
    end: int
    closed: bool


def blocks(text: str, *tags: str) -> Iterator[TaggedBlock]:
    """Yield the blocks of these tags in order; one within another is part of the outer one's body.

    Of the openings of a tag without an end only the first is a block. Blocks of other tags can
    follow within it.
    """
    opening = re.compile("|".join(f"<{tag}>" for tag in tags))
    unclosed: set[str] = set()
    place = 0
    while found := opening.search(text, place):
        tag, start, place = found[0][1:-1], found.start(), found.end()
        if tag in unclosed:
            continue
        closing = f"</{tag}>"
        end = text.find(closing, place)
        if end < 0:
            unclosed.add(tag)
            yield TaggedBlock(tag, text[place:], start, len(text), False)
            continue
        body, place = text[place:end], end + len(closing)
        yield TaggedBlock(tag, body, start, place, True)


def thought_end(text: str, *tags: str) -> int:
    """Return the position behind the last `</think>` that stands in no block of these tags; 0
    without one. A block in a thought does not count: it can be one that the policy only mentions.
    """
    found = list(re.finditer(rf"{THOUGHT_END}|</?(?:{'|'.join(tags)})>", text))
    ends: set[int] = set()  # of blocks; a closing tag without an opening ends none
    opened: set[str] = set()
    for tag in found:
        if tag[0].startswith("</") and (name := tag[0][2:]) in opened:
            opened.remove(name)
            ends.add(tag.start())
        elif not tag[0].startswith("</"):
            opened.add(tag[0][1:])
    inside = False
    for tag in reversed(found):
        if tag[0] == THOUGHT_END:
            if not inside:
                return tag.end()
        elif tag.start() in ends or not tag[0].startswith("</"):
            inside = tag.start() in ends
    return 0
