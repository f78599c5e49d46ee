"""Checkpoints as directories that exist completely or not at all. Knows files, no tensors.

A checkpoint is written into a temporary directory, every file is synced, a manifest with their
SHA-256 is added, and the directory is renamed into place. The name `<serial>-step-<step>` counts
checkpoints, so newer ones sort later even where a resumed run is at a smaller step than before.
A run that goes back to an earlier checkpoint leaves the later ones: they hold the file `LEFT`, and
nothing resumes from them by itself. `history` chooses among checkpoints.
`progress` shows another process that a checkpoint is being written, and that it moves.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from evolver_async.checkpoint.sync import sync_directory, sync_file
from evolver_async.errors import Unrecoverable
from evolver_async.file_formats import CHECKPOINT_FORMAT, foreign
from evolver_async.files import is_inside, remove

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"  # the learner's numbers
LEFT = "LEFT"  # the file that marks a checkpoint whose run has gone back to an earlier one
NAME = re.compile(r"(\d{6,})-step-(\d+)")
TEMPORARY = ".tmp-"  # the prefix of a checkpoint that is being written
DELETED = ".deleted-"  # the prefix of one that is being deleted
READ_BYTES = 4 << 20  # hashed between two of them; every reader of a checkpoint holds so many


class CheckpointError(Unrecoverable, ValueError):
    """Lack of a usable checkpoint; the message names the directory and the reason."""


class NoCheckpointError(CheckpointError):
    """Lack of any checkpoint that a run could continue from by itself."""


class File(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


class NumberedManifest(msgspec.Struct):
    """Manifest of any format."""

    format: int


class Manifest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Manifest of a checkpoint: `files` by path inside it."""

    format: int
    run_id: str
    step: int
    files: dict[str, File]


def save(
    directory: Path,
    step: int,
    write: Callable[[Path], object],
    *,
    run_id: str,
    keep: int,
    lasting: Container[Path] = (),
) -> Path:
    """Let `write` fill an empty directory and make it the newest checkpoint in `directory`.

    When this returns the checkpoint survives a power cut. Of the others the newest `keep` valid
    ones and those in `lasting` are kept.
    """
    if not directory.exists():
        directory.mkdir(parents=True)
        sync_directory(directory.parent)
    for left in directory.glob(f"{TEMPORARY}*"):
        remove(left)  # of a writer that died: there is one at a time
    serial = max((serial for serial, _ in _by_serial(directory)), default=0) + 1
    final = directory / f"{serial:06d}-step-{step}"
    temporary = directory / f"{TEMPORARY}{final.name}"
    temporary.mkdir()
    try:
        _fill(temporary, step, write, run_id)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise
    # The rename is the commit: every file is on disk by now. Without the sync of the parent a power
    # cut could lose the new name.
    temporary.rename(final)
    sync_directory(directory)
    _prune(directory, keep, lasting)
    return final


def exists(directory: Path) -> bool:
    """True if `directory` holds any checkpoint, valid or not."""
    return bool(_by_serial(directory))


def progress(directory: Path) -> tuple[int, int] | None:
    """Numbers that change while a checkpoint is being written in `directory`; None if none is.

    They are the bytes written so far and the sum of the times at which each path was last written
    to, or a chunk hashed or synced: a maximum stands still when the clock is set back.
    """
    size, times = 0, 0
    found = list(directory.glob(f"{TEMPORARY}*"))
    for temporary in found:
        with suppress(FileNotFoundError):  # the writer renames it, while it is listed or read
            for path in (temporary, *temporary.rglob("*")):
                status = path.stat()
                size, times = size + status.st_size, times + status.st_mtime_ns
    return (size, times) if found else None


def valid(directory: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints that are complete, oldest first; their contents are not compared."""
    found = []
    for _, path in _by_serial(directory):
        try:
            found.append((path, _complete(path)))
        except CheckpointError as error:
            log.warning("%s", error)
    return found


def resumable(directory: Path) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints that the run may resume from, oldest first."""
    return [(path, manifest) for path, manifest in valid(directory) if not is_left(path)]


def distinct(found: Iterable[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """Without copies: of checkpoints of one step with the same files the newest, oldest first.

    Every start and every end of a learner writes a copy, which differs in its numbers alone.
    """
    last = {}
    for path, manifest in found:
        key = _contents(manifest)
        last.pop(key, None)
        last[key] = path, manifest
    return list(last.values())


def _contents(manifest: Manifest) -> tuple[int, frozenset[tuple[str, str]]]:
    """The step and the files, which copies have in common."""
    hashes = {name: file.sha256 for name, file in manifest.files.items() if name != STATE}
    return manifest.step, frozenset(hashes.items())


def serial_of(path: Path) -> int:
    """The number of a checkpoint, by which newer ones are larger."""
    return int(path.name.partition("-")[0])


def is_left(path: Path) -> bool:
    """True if the run has gone back to a checkpoint before this one."""
    return (path / LEFT).exists()


def leave(directory: Path, after: Path, newest: Path) -> None:
    """Mark the checkpoints between `after` and its copy `newest`, where the run goes on, as left.

    A link is removed instead: its target may belong to other runs.
    """
    for serial, path in _by_serial(directory):
        if not serial_of(after) < serial < serial_of(newest):
            continue
        if path.is_symlink():
            path.unlink()
        else:
            (path / LEFT).touch()
            sync_directory(path)


def verify(path: Path, run_id: str) -> Manifest:
    """The manifest of a checkpoint whose every file has the recorded hash; else CheckpointError."""
    manifest = _complete(path)
    _compare(path, manifest)
    if manifest.run_id != run_id:
        raise _of_another(path, manifest, run_id)
    return manifest


def load_newest(directory: Path, run_id: str) -> tuple[Path, Manifest]:
    """The newest checkpoint whose every file has the recorded hash.

    Those that the run has left are passed over, damaged ones with a warning. Raises CheckpointError
    when the newest valid one belongs to another run, or when none is left: a run never starts from
    scratch by accident.
    """
    problems = []
    for _, path in reversed(_by_serial(directory)):
        if is_left(path):
            continue
        try:
            manifest = _complete(path)
            _compare(path, manifest)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if manifest.run_id != run_id:
            raise _of_another(path, manifest, run_id)
        for problem in problems:
            log.warning("%s; going back to %s", problem, path.name)
        return path, manifest
    if problems:
        raise NoCheckpointError(f"no valid checkpoint: {'; '.join(problems)}")
    raise NoCheckpointError(f"{directory}: holds no checkpoint")


def _of_another(path: Path, manifest: Manifest, run_id: str) -> CheckpointError:
    """Return the error of a checkpoint in a directory of another name than its run's."""
    named = path.parents[1].with_name(manifest.run_id)
    return CheckpointError(
        f"{path}: belongs to run {manifest.run_id}, not to {run_id}; rename the directory to"
        f" {named}, and begin a run of another name as a fork of it (evolver-async train --resume"
        f" {named} --fork NAME)"
    )


def _fill(directory: Path, step: int, write: Callable[[Path], object], run_id: str) -> None:
    """Let `write` fill the directory, add the manifest, sync all files."""
    write(directory)
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest = Manifest(
        format=CHECKPOINT_FORMAT,
        run_id=run_id,
        step=step,
        files={str(path.relative_to(directory)): _describe(path, directory) for path in paths},
    )
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for path in (*paths, directory / MANIFEST):
        sync_file(path, directory)
    for path in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
        sync_directory(path)


def _by_serial(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = [(NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _complete(path: Path) -> Manifest:
    """Read the manifest and compare the sizes of the files."""
    try:
        written = (path / MANIFEST).read_bytes()
        found = msgspec.json.decode(written, type=NumberedManifest).format
        if found != CHECKPOINT_FORMAT:
            raise CheckpointError(foreign(path, found, CHECKPOINT_FORMAT))
        manifest = msgspec.json.decode(written, type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: has no {MANIFEST}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}/{MANIFEST}: unreadable ({error})") from None
    for name, file in manifest.files.items():
        if not is_inside(name):
            raise CheckpointError(f"{path}/{MANIFEST}: names a file outside, {name!r}")
        try:
            size = (path / name).stat().st_size
        except (OSError, ValueError) as error:  # its owner may be deleting it
            raise CheckpointError(f"{path}: {name} is missing ({error})") from error
        if size != file.bytes:
            raise CheckpointError(f"{path}: {name} is torn")
    return manifest


def _compare(path: Path, manifest: Manifest) -> None:
    for name, file in manifest.files.items():
        try:
            found = _describe(path / name)
        except OSError as error:  # taken away meanwhile, or an unreadable disk
            raise CheckpointError(f"{path}: {name} cannot be read ({error.strerror})") from error
        if found.sha256 != file.sha256:
            raise CheckpointError(f"{path}: {name} is damaged (SHA-256 differs)")


def _describe(path: Path, touched: Path | None = None) -> File:
    """Size and hash of a file. The modification time of `touched` shows the progress."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(READ_BYTES, path.stat().st_size)))
    size = 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if touched is not None:
                os.utime(touched)
    return File(bytes=size, sha256=digest.hexdigest())


def _prune(directory: Path, keep: int, lasting: Container[Path]) -> None:
    """Keep the newest `keep` different resumable checkpoints, all after the oldest of these, and
    `lasting`. Of copies the newest is kept; it gets the notes of the others."""
    for left in directory.glob(f"{DELETED}*"):
        _delete(left)
    found = resumable(directory)
    newest = distinct(found)[-keep:]
    oldest = serial_of(newest[0][0])
    copied = {_contents(manifest): path for path, manifest in newest}
    for path, manifest in found:
        last = copied.get(_contents(manifest), path)
        if path != last and path not in lasting:
            for note in () if path.is_symlink() or last.is_symlink() else path.iterdir():
                known = note.name in (*manifest.files, MANIFEST) or (last / note.name).exists()
                if note.is_file() and not known:
                    note.rename(last / note.name)
            _delete(path)
    for serial, path in _by_serial(directory):
        if path not in lasting and (is_left(path) or serial < oldest):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint, renamed first: what a killed deletion leaves is not listed, and is
    deleted after the next one, as is what NFS keeps while a process reads it. A link is only
    unlinked."""
    try:
        if path.is_symlink():
            path.unlink()
            return
        deleted = path.with_name(f"{DELETED}{path.name.removeprefix(DELETED)}")
        path.rename(deleted)
        # After a power cut it can have its name again: then it must not be complete.
        (deleted / MANIFEST).unlink(missing_ok=True)
        remove(deleted)
    except OSError as error:
        log.warning("%s: cannot be deleted yet: %s", path, error.strerror)
