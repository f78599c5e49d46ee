"""Confinement of a program: its own namespaces, a read-only root, no network, no rights, no
variables.

Run as a script with a specification in JSON, by path and with the standard library alone. It stays
outside, and when it ends, what it shut in is killed with it. Three routes lead in: `root` builds
everything with root's rights and gives them up under a user id that nobody else has; `user` needs
namespaces for ordinary users; `bwrap` leaves it to bubblewrap. /proc is mounted nowhere.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
LAST_CAPABILITY = 63
NOBODY = 65534
OWN_USERS = 0x70000000  # + process id: a user id that no one has
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
INODES = 4096
NAME = "sandbox"

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, doing: str) -> None:
    """Raise OSError, naming the operation, if a call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind)]
    must(libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mounting {target}")


def restrict(path: str, attributes: int, recursive: bool) -> None:
    """Set attributes of the mount at `path`, and of those below it (Linux 5.12)."""
    attr = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attr, len(attr))
    must(result, f"restricting {path}")


def leave_namespaces(user: int, group: int, own_user: bool) -> None:
    """Enter new namespaces; with `own_user` also one of users, in which the caller is nobody."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (NEWUSER if own_user else 0)
    must(libc.unshare(flags), "unshare")
    if own_user:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(text)
    socket.sethostname(NAME)


def build(paths: list[list[str]], owner: int, temporary_bytes: int) -> None:
    """Make a new root of `paths` (pairs: source, target), devices and a small /tmp."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")  # any place will do
    os.mkdir("/proc/old")
    machine = os.uname().machine
    must(libc.syscall(PIVOT_ROOT[machine], b"/proc", b"/proc/old"), "pivot_root")
    os.chdir("/")
    for path, seen in paths:
        bind(f"/old{path}", seen)
        restrict(seen, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, recursive=True)
    for device in DEVICES:
        bind(f"/old{device}", device)
        restrict(device, ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC, recursive=False)
    must(libc.umount2(b"/old", MNT_DETACH), "leaving the old root")
    os.rmdir("/old")
    os.mkdir("/tmp")
    options = f"size={temporary_bytes},nr_inodes={INODES},mode=0700,uid={owner},gid={owner}"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    restrict("/", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, recursive=False)


def bind(source: str, target: str) -> None:
    """Mount a file or directory at `target`, which is created."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, "", MS_BIND | MS_REC)


def give_up_rights(user: int) -> None:
    """Drop all capabilities for good; if `user` is positive, also root's user id."""
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # those that do not exist: EINVAL
    if user > 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def bubblewrap(spec: dict[str, Any]) -> list[str]:
    """Return the command line that asks bubblewrap for the same confinement."""
    command = [spec["bwrap"], "--unshare-all", "--unshare-user", "--die-with-parent"]
    command += [
        "--new-session",
        "--as-pid-1",
        "--clearenv",
        "--cap-drop",
        "ALL",
    ]
    command += ["--hostname", NAME, "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for path, seen in spec["paths"]:
        command += ["--ro-bind", path, seen]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    for name, value in spec["variables"].items():
        command += ["--setenv", name, value]
    command += ["--size", str(spec["temporary_bytes"]), "--perms", "0700", "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--", *spec["command"]]


def shut_in(spec: dict[str, Any]) -> None:
    """Take the last steps in the process that becomes the confined one, then execute the
    program."""
    if spec["route"] == "bwrap":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        command = bubblewrap(spec)
        os.execve(command[0], command, {})
    give_up_rights(spec["user"])
    # After the change of the user id, at which the kernel forgets it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir("/tmp")
    os.execve(spec["command"][0], spec["command"], spec["variables"])


def main() -> None:
    """Confine the specified program, and end as it ends."""
    spec = json.loads(sys.argv[1])
    with open("/proc/self/oom_score_adj", "w") as adjustment:
        adjustment.write("1000")  # where memory is short, this goes first
    route = spec["route"]
    spec["user"] = OWN_USERS + os.getpid() if route == "root" else 0
    try:
        if route != "bwrap":
            leave_namespaces(os.getuid(), os.getgid(), own_user=route == "user")
            build(spec["paths"], spec["user"] or NOBODY, spec["temporary_bytes"])
    except OSError as error:
        sys.exit(f"{error.strerror}")
    child = os.fork()
    if child == 0:
        shut_in(spec)
    _, status = os.waitpid(child, 0)
    sys.exit(max(os.waitstatus_to_exitcode(status), 0))


if __name__ == "__main__":
    main()
