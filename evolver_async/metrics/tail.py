"""JSONL files that one process appends to and others read. A line that cannot be read, as a full
disk or a power cut leaves one, costs no other line."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from evolver_async.files import parsed

PIECE_BYTES = 1 << 19  # that are read at a time
DECODER = msgspec.json.Decoder(dict[str, Any])

log = logging.getLogger(__name__)


@dataclass
class Tail:
    """Position in a JSONL file; the file may not exist yet. `lines`: those before the offset;
    `unreadable`: how many of them were left out."""

    path: Path
    offset: int = 0
    lines: int = 0
    unreadable: int = 0

    def rows(self, most_bytes: int = -1) -> list[dict[str, Any]]:
        """Return the complete rows that were written since the last call; warn of unreadable
        ones.

        `most_bytes`: read no more at a time than that and the rest of a longer line. -1: read
        everything.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                content = file.read(most_bytes)
                if len(content) == most_bytes and b"\n" not in content:
                    content += file.readline()
        except FileNotFoundError:
            return []
        # The writer may be within the last line.
        complete = content[: content.rfind(b"\n") + 1]
        found = [row_of(line) for line in complete.split(b"\n")[:-1]]
        if missing := [number for number, row in enumerate(found, self.lines + 1) if row is None]:
            words = "%s: %d lines cannot be read and are left out, the first is line %d"
            log.warning(words, self.path, len(missing), missing[0])
        self.offset += len(complete)
        self.lines += len(found)
        self.unreadable += len(missing)
        return [row for row in found if row is not None]

    def pieces(self) -> Iterator[list[dict[str, Any]]]:
        """Yield what `rows` returns piece by piece: the whole file of a long run fills a memory."""
        before = -1
        while self.offset > before:
            before = self.offset
            yield self.rows(PIECE_BYTES)


def last_rows(path: Path, enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Return the last rows of a file: as many as `enough` wants, or all.

    The file of a long run is not read whole. Unreadable rows are left out.
    """
    if not path.exists():
        return []
    size, piece = path.stat().st_size, PIECE_BYTES
    while True:
        with open(path, "rb") as file:
            file.seek(max(0, size - piece))
            lines = file.read(min(piece, size)).split(b"\n")
        whole = lines[piece < size : -1]  # without the part of a line at the beginning
        rows = [row for row in map(row_of, whole) if row is not None]
        if piece >= size or enough(rows):
            return rows
        piece *= 4


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row as a line of its own, also behind a torn one."""
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = size > 0 and file.read(1) != b"\n"
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line, None if it cannot be read.

    msgspec is fast, but it refuses the NaN of a sample. Rows share their names, which need more
    memory than its values: msgspec shares only short ones, and of them not all.
    """
    try:
        row = DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            row = parsed(line)
        except ValueError:
            return None
    return {sys.intern(name): row[name] for name in row} if isinstance(row, dict) else None
