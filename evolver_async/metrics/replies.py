"""Saved episodes of evaluations, one JSON object a line, and two such files side by side.

`evolver-async eval --save` writes them. An episode is known by its set, task and sample, so that
two checkpoints, or two models, can be compared episode by episode.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from evolver_async import intervals
from evolver_async.config import ConfigError
from evolver_async.files import write_whole
from evolver_async.metrics.first_reply import printable

DIRECTORY = "evaluations"  # of a run directory: report, watch and W&B show what is saved there
SHOWN = 20  # tasks of a comparison whose replies are shown
CHARS = 300  # of a reply in a comparison


class Key(NamedTuple):
    """Identity of an episode."""

    set_name: str
    task: str
    sample: int


class SavedReply(msgspec.Struct, kw_only=True, frozen=True):
    """One episode: `evaluated` names the model, `set_name` is "" for the deciding set.

    `prompt`: what the policy read before its first turn; `reply`: everything after it, the
    observations between the turns included; both with special tokens. `terms`: reward terms;
    `metrics`: numbers of the environment's own.
    """

    evaluated: str
    set_name: str = msgspec.field(name="set", default="")
    task: str
    sample: int = 0
    success: bool
    reward: float
    turns: int
    prompt: str
    reply: str
    terms: dict[str, float] = {}
    metrics: dict[str, float] = {}

    @property
    def key(self) -> Key:
        return Key(self.set_name, self.task, self.sample)


def check_writable(path: Path) -> None:
    """Raise ConfigError if `--save` cannot be a file that is written at the end."""
    if path.is_dir():
        raise ConfigError(f"--save: {path} is a directory; name a file")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save: {path.parent}: {error.strerror}") from error


def save(path: Path, replies: Sequence[SavedReply]) -> None:
    """Write the episodes; an existing file is replaced."""
    write_whole(path, "".join(f"{msgspec.json.encode(one).decode()}\n" for one in replies))


def load(path: Path) -> list[SavedReply]:
    """Read the episodes of a file. ConfigError, which names the line, for another file."""
    decoder, found = msgspec.json.Decoder(SavedReply), []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            found.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}, line {number}: no episode of eval --save: {error}"
            ) from None
    if not found:
        raise ConfigError(f"{path}: has no episode")
    return found


def files_in(run_dir: Path) -> dict[Path, int]:
    """Return the files in `DIRECTORY` of a run with the times of their last change, in ns, the
    newest first."""
    found = {}
    for path in (run_dir / DIRECTORY).glob("*.jsonl"):
        with suppress(FileNotFoundError):  # removed meanwhile
            found[path] = path.stat().st_mtime_ns
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def saved_in(run_dir: Path) -> dict[str, list[SavedReply]]:
    """Return the episodes of the files in `DIRECTORY` of a run, by file, the newest first."""
    return {path.name: load(path) for path in files_in(run_dir)}


def compared(first: Path, second: Path) -> list[str]:
    """Compare two files by the episodes that both have; return lines for people.

    ConfigError if they have none in common.
    """
    before, after = ({one.key: one for one in load(path)} for path in (first, second))
    common = [key for key in before if key in after]
    if not common:
        raise ConfigError(f"{first} and {second} have no episode of the same task in common")
    lines = [
        f"{name}: {path}, {next(iter(found.values())).evaluated}"
        for name, path, found in (("A", first, before), ("B", second, after))
    ]
    for set_name in dict.fromkeys(key.set_name for key in common):
        keys = [key for key in common if key.set_name == set_name]
        lines += _summary(set_name, [before[key] for key in keys], [after[key] for key in keys])
    if alone := len(before) + len(after) - 2 * len(common):
        lines.append(f"{alone} episodes are in one of the files alone and left out")
    differing = [key for key in common if _result(before[key]) != _result(after[key])]
    lines.append(f"{len(differing)} of {len(common)} episodes differ in success or reward")
    for key in differing[:SHOWN]:
        lines += _side_by_side(before[key], after[key])
    if len(differing) > SHOWN:
        lines.append(f"… and {len(differing) - SHOWN} more")
    return lines


def _summary(set_name: str, before: list[SavedReply], after: list[SavedReply]) -> Iterator[str]:
    """Yield success and reward of both, and their difference over the same tasks."""
    head = f"{set_name}: " if set_name else ""
    pairs = list(zip(before, after, strict=True))
    for title, value in (
        ("success", lambda one: float(one.success)),
        ("reward", lambda one: one.reward),
    ):
        gains: dict[str, list[float]] = {}  # samples of a task are not independent
        for one, other in pairs:
            gains.setdefault(one.task, []).append(value(other) - value(one))
        means = [fmean(found) for found in gains.values()]
        a, b = (fmean(map(value, found)) for found in (before, after))
        bounds = intervals.written(intervals.paired(means), signed=True)
        yield (
            f"{head}{title} A {a:.3f}, B {b:.3f}, B - A {math.fsum(means) / len(means):+.3f}"
            f" ({bounds}) over {len(pairs)} episodes, {len(means)} tasks"
        )
    won = sum(other.success and not one.success for one, other in pairs)
    lost = sum(one.success and not other.success for one, other in pairs)
    yield f"{head}{won} episodes succeed in B alone, {lost} in A alone"


def _result(one: SavedReply) -> tuple[bool, float]:
    return one.success, one.reward


def _side_by_side(before: SavedReply, after: SavedReply) -> Iterator[str]:
    sample = f", sample {before.sample}" if before.sample else ""
    yield ""
    yield f"{before.set_name + ': ' if before.set_name else ''}{before.task}{sample}"
    for name, one in (("A", before), ("B", after)):
        result = "success" if one.success else "no success"
        text = " ".join(printable(one.reply).split())
        text = text if len(text) <= CHARS else f"{text[:CHARS]}…"
        yield f"  {name} | {result}, reward {one.reward:g}, {one.turns} turns | {text}"
