"""A power cut: what was written and not synced is gone. A shim that remembers every sync."""

import multiprocessing
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

CUT = 9  # exit code of a child that lost its power


def cut_at_every_sync(directory: Path, work: Callable[[], object], check: Callable[[], object]):
    """Runs `work` in a child whose power goes at its n-th sync, for every n; `check` after each.

    Returns how many syncs `work` has; its last run got through, and then the power went.
    """
    context = multiprocessing.get_context("fork")
    code, last = CUT, 0
    while code == CUT:
        child = context.Process(target=_work_until_cut, args=(directory, work, last))
        child.start()
        child.join(60)
        code = child.exitcode
        assert code in (0, CUT), f"the child ended with {code}"
        check()
        last += 1
    return last - 1


def _work_until_cut(directory: Path, work: Callable[[], object], last: int) -> None:
    power = Power(directory, last)
    os.fsync, os.fdatasync = power.watched(os.fsync), power.watched(os.fdatasync)
    work()
    power.cut()


class Power:
    """Takes back what is not synced: of a file the bytes, of a directory the entries.

    What is in `directory` at first counts as synced. Files are only appended to, deletions are
    never undone, and of a rename that was not synced neither name is left.
    """

    def __init__(self, directory: Path, last: int) -> None:
        self.directory = directory
        self.left = last
        self.bytes: dict[int, int] = {}  # by inode
        self.entries: dict[int, set[str]] = {}
        for path in (directory, *directory.rglob("*")):
            self._remember(path)

    def watched(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        """`sync`, which ends this process instead when its time has come."""

        def watched(descriptor: int) -> None:
            if self.left == 0:
                self.cut()
                os._exit(CUT)
            self.left -= 1
            sync(descriptor)
            self._remember(descriptor)

        return watched

    def cut(self) -> None:
        self._cut(self.directory)

    def _remember(self, place: int | Path) -> None:
        status = os.stat(place)
        if stat.S_ISDIR(status.st_mode):
            self.entries[status.st_ino] = set(os.listdir(place))
        else:
            self.bytes[status.st_ino] = status.st_size

    def _cut(self, directory: Path) -> None:
        kept = self.entries.get(directory.stat().st_ino, set())
        for path in list(directory.iterdir()):
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                self._cut(path)
            else:
                size = self.bytes.get(path.stat().st_ino, 0)
                os.truncate(path, min(size, path.stat().st_size))
