"""Private directories of a run: claimed under a lock, swept when their owner has ended.

The lock is a `flock` on a file in the directory. The kernel releases it at the owner's end. All
processes that share the directory see it: those of another container, where process numbers differ,
and those of another host if the file system carries locks between hosts. The owner writes its host,
boot and process number into `owner.json`, for people to read, and because on some network file
systems one host alone sees a lock.
"""

import errno
import fcntl
import json
import logging
import os
import pwd
import shutil
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evolver_async.files import parsed
from evolver_async.process import segments
from evolver_async.process.mounts import mount_of

PREFIX = "evolver-"
OWNER = "owner.json"
LOCK = "lock"
YOUNG_S = 60.0  # a younger directory without owner may be claimed soon
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of flock
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


@dataclass
class Claim:
    """A private directory and the locks that its owner holds, for its life or until `remove`.

    `owner` is False where another process has claimed the directory before.
    """

    directory: Path
    owner: bool
    _locks: list[int]

    def remove(self) -> None:
        """Remove the directory; only its content if another process owns it."""
        if self.owner:
            _remove(self.directory)
        else:
            _empty(self.directory)
        self.release()

    def release(self) -> None:
        """Release the locks."""
        while self._locks:
            os.close(self._locks.pop())


def claim(directory: Path) -> Claim:
    """Make `directory` private to this process and its user. A running owner keeps it.

    Raises PermissionError if another user owns the directory or may enter it.
    """
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        _check_private(directory)
        locks = []
        try:
            locks = [_lock(directory / LOCK, os.O_CREAT)]
            # A sweep can remove the file between its opening and its lock. A lock on a file without
            # a name excludes nothing.
            if not os.path.samestat(os.fstat(locks[0]), (directory / LOCK).stat()):
                raise FileNotFoundError(f"{directory / LOCK}: was replaced")
        except BlockingIOError:
            return Claim(directory, False, [])
        except FileNotFoundError:  # swept since it was made
            for lock in locks:
                os.close(lock)
            continue
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning("%s: cannot be locked (%s); other runs do not remove it", directory, error)
        break
    with suppress(OSError):  # systemd-tmpfiles does not remove a locked directory
        locks.append(_lock(directory, os.O_DIRECTORY))
    part = directory / f".{OWNER}"
    part.write_text(json.dumps({"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid()}))
    part.replace(directory / OWNER)
    return Claim(directory, True, locks)


def sweep(parent: Path) -> None:
    """Remove this user's channel directories in `parent` whose owner has ended.

    Other directories with this prefix stay: ours are private, and hold `owner.json` or are empty.
    """
    for directory in sorted(parent.glob(f"{PREFIX}*")):
        with suppress(FileNotFoundError):  # another process sweeps as well
            found = directory.lstat()
            if found.st_uid == os.getuid() and _private(found) and _is_claimed(directory):
                _sweep(directory)


def owned(directory: Path) -> bool:
    """True if the process that claimed the directory still runs, here or elsewhere."""
    try:
        os.close(_lock(directory / LOCK))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def owner_of(directory: Path) -> dict[str, str | int]:
    """Return the content of `owner.json`, empty if it is missing or damaged."""
    try:
        owner = parsed((directory / OWNER).read_bytes())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _sweep(directory: Path) -> None:
    """Remove a directory of this user, unless it is locked, or young and without owner."""
    owner = owner_of(directory)
    if not owner and _is_young(directory):
        return  # its maker may be about to lock it
    words = "%s: is not removed, as it cannot be locked (%s); its owner is on host %s"
    if _is_elsewhere(owner) and mount_of(directory.lstat().st_dev).locks_are_local:
        log.warning(words, directory, "locks of other hosts may not be seen here", owner["host"])
        return
    try:
        lock = _lock(directory / LOCK)
    except BlockingIOError:
        return
    except FileNotFoundError:
        lock, owner = None, {}
    except OSError as error:
        log.warning(words, directory, error, owner.get("host", "unknown"))
        return
    if owner or not _is_young(directory):
        _remove(directory)
    if lock is not None:
        os.close(lock)


def _is_young(directory: Path) -> bool:
    return time.time() - directory.lstat().st_mtime <= YOUNG_S


def _is_elsewhere(owner: dict[str, str | int]) -> bool:
    """True if an owner may be on another host than this one."""
    boot = _boot()
    other_name = "host" in owner and owner["host"] != socket.gethostname()
    return other_name and (not boot or owner.get("boot") != boot)


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if found.st_uid != os.getuid():
        raise PermissionError(
            f"{directory}: belongs to user {_user(found.st_uid)}; choose another directory"
        )
    if not _private(found):
        raise PermissionError(f"{directory}: must be a directory private to this user (mode 0700)")


def _private(found: os.stat_result) -> bool:
    """True for a directory that its user alone may enter; it may have inherited setgid."""
    return stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == 0o700


def _is_claimed(directory: Path) -> bool:
    """True if a process claimed the directory, or made it and was killed before its claim."""
    names = {path.name for path in directory.iterdir()}
    return OWNER in names or names <= {LOCK, f".{OWNER}"}


def _remove(directory: Path) -> None:
    """Remove a directory, `owner.json` last: a later sweep recognizes the rest by it."""
    segments.remove_noted(directory)
    _empty(directory)
    shutil.rmtree(directory, ignore_errors=True)


def _empty(directory: Path) -> None:
    """Remove what a directory holds beside the files of its owner."""
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if path.name in (OWNER, LOCK):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def _lock(path: Path, flags: int = 0) -> int:
    """Lock a file and return its descriptor. BlockingIOError if another process holds the lock."""
    access = os.O_RDONLY if flags & os.O_DIRECTORY else os.O_RDWR
    descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _boot() -> str:
    """Return the identity of this boot of the kernel, "" if it is unknown."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
