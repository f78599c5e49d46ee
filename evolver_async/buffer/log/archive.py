"""Archive of journal segments that the buffer needs no more."""

import math
from dataclasses import dataclass
from pathlib import Path

from evolver_async.buffer.log.disk import no_room
from evolver_async.buffer.log.segment import NAMES
from evolver_async.files import make_own


def archive_bytes(archive: str) -> float:
    """Return the limit of the archive in bytes from `buffer.archive`: none, all or a number."""
    return {"none": 0, "all": math.inf}[archive] if archive in ("none", "all") else int(archive)


@dataclass
class Archive:
    """Directory that keeps the newest removed segments, `limit_bytes` at most; 0 keeps none.

    Links, in its place or in it, are unlinked and never followed.
    """

    _directory: Path
    limit_bytes: float

    def remove(self, path: Path) -> None:
        """Move a segment into the archive, or delete it where nothing is archived.

        Raises DiskFull if the archive's directory needs room that is not there.
        """
        if not self.limit_bytes:
            return path.unlink()
        try:
            make_own(self._directory)
            path.rename(self._directory / path.name)
        except OSError as error:
            raise no_room(self._directory, error) from error

    def trim(self) -> None:
        """Delete the oldest segments beyond the limit."""
        if self.limit_bytes in (0, math.inf) or self._directory.is_symlink():
            return
        paths = sorted(self._directory.glob(NAMES))
        size = sum(path.lstat().st_size for path in paths)
        for path in paths:
            if size <= self.limit_bytes:
                return
            size -= path.lstat().st_size
            path.unlink()
