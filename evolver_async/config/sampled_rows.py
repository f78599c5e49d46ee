"""Lengths of a recipe's rows in tokens, by a bounded sample of their file, for defaults.

What cannot be read has no lengths; the checks before a start name its fault.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evolver_async.config.sections import Config
from evolver_async.files import parsed

ROWS = 256
PIECES, PIECE_BYTES = 4, 1 << 18  # of a file of lines, evenly spread
KINDS = ("*.parquet", "*.jsonl", "*.arrow")  # in a directory
TOKENIZER = "tokenizer.json"
TOKEN_BYTES = 3  # of text, where the model has no such file
MESSAGE_TOKENS = 8  # of its template around a message


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the longest prompt and of the longest answer, 0 without one, among `rows`."""

    rows: int
    prompt: int
    answer: int


def row_lengths(config: Config) -> RowLengths | None:
    """Return the lengths of a recipe's prompts and answers; None if it has none that are here."""
    tasks = config.tasks
    if not (tasks.path and tasks.prompt):
        return None
    found = Path(tasks.path).expanduser()
    files = (
        [one for kind in KINDS for one in sorted(found.glob(kind))] if found.is_dir() else [found]
    )
    if not files:
        return None
    tokenizer = Path(config.policy.path).expanduser() / TOKENIZER
    try:
        changed = files[0].stat().st_mtime_ns
        return _lengths(files[0], changed, tasks.prompt, tasks.answer or "answer", tokenizer)
    except Exception:  # of any kind: tokenizers raises no other, and pyarrow many
        return None


@lru_cache(maxsize=8)
def _lengths(path: Path, _: int, prompt: str, answer: str, tokenizer: Path) -> RowLengths | None:
    rows = [row for row in _rows(path) if isinstance(row, dict) and row.get(prompt)]
    if not rows:
        return None
    count = _counter(tokenizer)

    def tokens(value: Any) -> int:
        if isinstance(value, list):  # messages
            texts = [one.get("content") for one in value if isinstance(one, dict)]
            return sum(count(text) + MESSAGE_TOKENS for text in texts if isinstance(text, str))
        return count(str(value)) + MESSAGE_TOKENS

    answers = [count(str(row[answer])) for row in rows if row.get(answer) is not None]
    return RowLengths(len(rows), max(tokens(row[prompt]) for row in rows), max(answers, default=0))


def _counter(tokenizer: Path) -> Any:
    """Return a function that counts the tokens of a text."""
    if not tokenizer.is_file():
        return lambda text: -(-len(text.encode()) // TOKEN_BYTES)
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def _rows(path: Path) -> Iterator[Any]:
    """Yield rows of a file, at most ROWS."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS):
                yield from batch.to_pylist()
                return
    elif path.suffix == ".arrow":
        from pyarrow import ipc

        with open(path, "rb") as file:
            for batch in ipc.open_stream(file):
                yield from batch.slice(0, ROWS).to_pylist()
                return
    else:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[Any]:
    """Yield the objects in whole lines of some pieces of a file."""
    size = path.stat().st_size
    starts = sorted({piece * size // PIECES for piece in range(PIECES)})
    with open(path, "rb") as file:
        if size <= PIECE_BYTES:
            starts = [0]
        for start in starts:
            file.seek(start)
            lines = file.read(PIECE_BYTES).split(b"\n")
            whole = lines[start > 0 : None if len(lines) == 1 else -1]
            for line in whole[: ROWS // len(starts)]:
                try:
                    yield parsed(line)
                except ValueError:  # a torn or broken line
                    continue
