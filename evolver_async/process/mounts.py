"""Mounted file systems of this host, as the kernel describes them."""

import os
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
LOCAL_LOCKS = {  # options of NFS, Lustre and CIFS
    *("nolock", "local_lock=flock", "local_lock=all", "localflock", "nobrl"),
}
UNSHOWN_LOCKS = ("fuse", "9p", "virtiofs", "beegfs")  # local by default, and no option tells


@dataclass(frozen=True)
class Mount:
    """A mounted file system: `kind` as in `mount -t`, `options` of the whole file system."""

    kind: str = ""
    options: frozenset[str] = frozenset()

    @property
    def locks_are_local(self) -> bool:
        """True if a lock that one host holds may not be seen by the others."""
        return self.kind.startswith(UNSHOWN_LOCKS) or not LOCAL_LOCKS.isdisjoint(self.options)


def mount_of(device: int) -> Mount:
    """Return the file system with this number, an empty description if it is unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            kind, *_, options = fields[fields.index("-") + 1 :]  # between them is its source
            return Mount(kind, frozenset(options.split(",")))
    return Mount()
