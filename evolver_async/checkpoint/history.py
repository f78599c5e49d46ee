"""History of a run: its checkpoints are evaluated, chosen by step or success, and gone back to.

Beside its own files a checkpoint may hold `evaluation.json`, the success of its policy on held-out
tasks, which is known only after it was written. Knows files, no tensors.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint.checkpoints import STATE, CheckpointError, Manifest, distinct
from evolver_async.files import parsed

EVALUATION = "evaluation.json"
BEST = "best"

Found = tuple[Path, Manifest]


class CheckpointEvaluation(msgspec.Struct, kw_only=True, frozen=True):
    """The success of a checkpoint's policy; it is comparable where `digest` is equal."""

    success: float
    episodes: int
    digest: str  # of the evaluation


def numbers(path: Path) -> dict[str, Any]:
    """The learner's numbers in a checkpoint, empty where there are none or they are damaged."""
    try:
        found = parsed((path / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def note(path: Path, evaluation: CheckpointEvaluation) -> None:
    """Write the evaluation of a checkpoint into its directory, unless this is a link."""
    if path.is_symlink():
        return
    part = path / f".{EVALUATION}"
    part.write_bytes(msgspec.json.encode(evaluation))
    part.replace(path / EVALUATION)


def evaluation_of(path: Path) -> CheckpointEvaluation | None:
    """The note on a checkpoint, None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode((path / EVALUATION).read_bytes(), type=CheckpointEvaluation)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def best(found: Iterable[Found]) -> list[Path]:
    """The evaluated checkpoints, best first, of equal ones the newer; copies count once.

    Only those with the digest of the newest evaluation: success on other tasks cannot be compared.
    """
    listed = list(found)
    notes = {path: note for path, _ in listed if (note := evaluation_of(path)) is not None}
    # the note of a checkpoint is not beside a copy that a later start has made
    evaluated = [
        (path, notes[path]) for path, _ in distinct(one for one in listed if one[0] in notes)
    ]
    if not evaluated:
        return []
    newest = evaluated[-1][1].digest
    alike = [(path, note.success) for path, note in evaluated if note.digest == newest]
    alike.reverse()
    return [path for path, _ in sorted(alike, key=lambda one: -one[1])]


def choose(directory: Path, run_id: str, step: int | str | None) -> Found:
    """The verified checkpoint of a step, the `best`, or with None the newest.

    Raises CheckpointError, which lists the existing steps, if there is none.
    """
    if step is None:
        return checkpoint.load_newest(directory, run_id)
    found = checkpoint.valid(directory)
    if step == BEST:
        chosen = best(found)[:1]
        if not chosen:
            raise CheckpointError(f"{directory}: no checkpoint was evaluated, so none is best")
    else:
        chosen = [path for path, manifest in reversed(found) if manifest.step == step]
    if not chosen:
        steps = ", ".join(map(str, sorted({manifest.step for _, manifest in found})))
        raise CheckpointError(
            f"{directory}: there is no checkpoint of step {step}, only of {steps or 'none'}"
        )
    *newer, oldest = chosen
    for path in newer:
        with suppress(CheckpointError):  # a damaged one, of which an older copy can be intact
            return path, checkpoint.verify(path, run_id)
    return oldest, checkpoint.verify(oldest, run_id)


def go_back(directory: Path, source: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Make a copy of an earlier checkpoint the newest; those between are marked as left, none is
    deleted.

    `change` gets the learner's numbers, which then also say that what was taken since is discarded.
    """

    def discarding(state: dict[str, Any]) -> None:
        state["discard"] = True
        change(state)

    manifest = checkpoint.verify(source, directory.parent.name)
    made = copy(source, manifest.files, directory, manifest.run_id, discarding)
    checkpoint.leave(directory, source, made)
    return made


def finish_going_back(directory: Path, newest: Found) -> None:
    """Finish a `go_back` that was killed after its copy, `newest`: mark the checkpoints between as
    left.

    Their steps are trained again, and the old checkpoints would pass for the new ones.
    """
    if not numbers(newest[0]).get("discard"):
        return
    made = checkpoint.serial_of(newest[0])
    earlier = [one for one in checkpoint.valid(directory) if checkpoint.serial_of(one[0]) < made]
    copied = [path for path, manifest in earlier if len(distinct([(path, manifest), newest])) == 1]
    for source in copied[-1:]:
        checkpoint.leave(directory, source, newest[0])


def copy(
    source: Path,
    files: Iterable[str],
    directory: Path,
    run_id: str,
    change: Callable[[dict[str, Any]], None],
) -> Path:
    """Make a copy of `source` the newest checkpoint of a run, with its numbers changed.

    Files are linked where the file system can do that: they are never written to again.
    CheckpointError if `source` is gone: a run that goes on drops its older checkpoints.
    """
    dropped = CheckpointError(f"{source}: was dropped by its run meanwhile; choose another")
    state = numbers(source)
    if not state:
        raise dropped
    change(state)

    def write(made: Path) -> None:
        for name in files:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / name, made / name)
            except OSError:
                try:
                    shutil.copyfile(source / name, made / name)
                except FileNotFoundError:  # they are removed one after the other
                    raise dropped from None
        (made / STATE).unlink(missing_ok=True)  # else the link would be written through
        (made / STATE).write_text(json.dumps(state, indent=1))

    # Going back deletes nothing: the user may change the choice.
    everything = [path for path, _ in checkpoint.valid(directory)]
    made = checkpoint.save(
        directory, state["take"], write, run_id=run_id, keep=1, lasting=everything
    )
    if (evaluation := evaluation_of(source)) is not None:
        note(made, evaluation)
    return made
