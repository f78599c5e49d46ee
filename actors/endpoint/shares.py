"""Shares of a question's characters among its texts. Pure."""

from collections.abc import Collection

FIRST_CHARS = 2_000  # of each text that is served first, if all of them have room for as many
LEAST_CHARS = 200  # on average, for which a text is worth quoting
MARK = " … [{} characters cut] … "


def shares(lengths: list[int], first: Collection[int], room: int) -> list[int]:
    """Divide `room` characters among texts of these lengths; no text gets more than its length.

    The texts with the indices `first` get up to FIRST_CHARS each, then all texts equal shares of
    the rest.
    """
    each = min(FIRST_CHARS, room // max(1, len(first)))
    given = [min(length, each) if index in first else 0 for index, length in enumerate(lengths)]
    missing = [length - share for length, share in zip(lengths, given, strict=True)]
    level = _level(missing, room - sum(given))
    return [share + min(lacks, level) for share, lacks in zip(given, missing, strict=True)]


def shorten(text: str, limit: int) -> str:
    """Cut a text in its middle to `limit` characters, the mark in place of the rest included; the
    mark alone where there is room for no more."""
    if len(text) <= limit:
        return text
    kept = max(0, limit - len(MARK.format(len(text))))
    tail = text[len(text) - kept // 2 :]
    return text[: kept - kept // 2] + MARK.format(len(text) - kept) + tail


def abridge(texts: list[str], most: int) -> list[str]:
    """Replace texts in the middle by one line, to keep at most `most` of them, at least the last
    one."""
    if len(texts) <= most:
        return texts
    tail = max(1, most - most // 2)
    omitted = len(texts) - tail - most // 2
    return [*texts[: most // 2], f"[{omitted} messages cut]", *texts[-tail:]]


def _level(needs: list[int], room: int) -> int:
    """Return the largest share that all needs can get at once, where no need gets more than it
    lacks."""
    for index, need in enumerate(sorted(needs)):
        share = room // (len(needs) - index)
        if need > share:
            return share
        room -= need
    return max(needs, default=0)
