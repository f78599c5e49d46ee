"""Programs that nobody should run, and how each must end. What gets away with it says "escaped".

Also a script: `python hostile.py USER ROUTE BWRAP` lets them loose as an ordinary user, for whom it
first makes this interpreter visible; it needs root's rights for that.
"""

import ctypes
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

WALL_S = 1.0
CANARY = "canary-of-the-host"


class Hostile(NamedTuple):
    """A program, the statuses it may end with, and what its last line must hold.

    `before`: a program that runs first.
    """

    source: str
    statuses: tuple[str, ...]
    said: str = ""
    before: str = ""


def tries(*attempts: str, imports: str = "import os") -> str:
    """A program that makes every attempt, each of which must raise an OSError or ValueError."""
    lines = [imports, "failed = 0"]
    for attempt in attempts:
        lines += ["try:", f"    {attempt}", f"    print('escaped', {attempt!r})"]
        lines += ["except (OSError, ValueError): failed += 1"]
    return "\n".join([*lines, f"print(failed, 'of {len(attempts)} refused')"])


def calls(*attempts: str) -> str:
    """The same for functions of the C library, which must answer -1."""
    lines = ["import ctypes", "libc = ctypes.CDLL(None)"]
    for attempt in attempts:
        lines += [f"if libc.{attempt} != -1: print('escaped', {attempt!r})"]
    return "\n".join([*lines, "print('all refused')"])


def all_refused(*attempts: str) -> str:
    return f"{len(attempts)} of {len(attempts)} refused"


SOCKETS = tuple(
    f"socket.socket({family}, socket.SOCK_{kind})"
    for family in ("socket.AF_INET", "socket.AF_INET6", "socket.AF_NETLINK", "40")  # 40: vsock
    for kind in ("STREAM", "DGRAM", "RAW")
)
READS = tuple(
    f"open({path!r}, 'rb').read()"
    for path in (
        *("/proc/self/environ", "/proc/1/environ", "/proc/meminfo", "/etc/passwd", "/etc/hostname"),
        *("/sys/kernel/notes", "/dev/mem", "/root/.bashrc", "/dev/shm/x", __file__),
    )
)
WRITES = tuple(
    f"open({path!r}, 'w').write('x')"
    for path in (
        *(
            "/escaped",
            "/guest.py",
            "/hardening.py",
            "/dev/escaped",
            "/usr/lib/escaped",
            os.__file__,
        ),
        *("/dev/shm/escaped", f"{tempfile.gettempdir()}/sub/escaped", "/../escaped"),
    )
)
KILLS = (
    *("os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.chroot('/tmp')", "os.nice(-5)"),
    *("resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))", "os.sched_setaffinity(1, {0})"),
    *("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "os.setpriority(os.PRIO_PROCESS, 1, 9)"),
    *("resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))", "os.execv('/bin/sh', ['sh'])"),
)
ATTRIBUTES = (
    *("os.setxattr('/tmp', 'user.left', b'x')", "os.removexattr('/tmp', 'user.left')"),
    "os.setxattr('/tmp', 'system.posix_acl_default', bytes([2, *[0] * 27]))",
    *("os.setxattr(os.open('/tmp', 0), 'user.left', b'x')", "os.removexattr(0, 'user.left')"),
)
FLAGS = tuple(
    f"fcntl.ioctl(os.open('/tmp', 0), {request:#x}, {content!r})"
    for request, content in (
        (0x40086602, bytes([0xC0, *[0] * 7])),  # FS_IOC_SETFLAGS: nodump, noatime
        (0x401C5820, bytes([0xC0, *[0] * 27])),  # FS_IOC_FSSETXATTR: the same
    )
)

# Leaves marks of its own in its request, its output and the names of its files.
EARLIER = "\n".join(
    [
        *(f"# earlier-request-{number}" for number in range(100000, 100500)),
        "for n in range(500):",
        "    print('earlier-' + 'output-' + str(200000 + n))",
        "    open('/tmp/earlier-' + 'file-' + str(300000 + n), 'w').close()",
    ]
)
# Looks for them in all memory around the objects of the interpreter and below the end of the heap.
# A page that is not mapped makes `write` fail instead of ending the program.
MEMORY = """
import ctypes, os, re, sys
for path in ("/proc/self/maps", "/proc/self/mem", "/proc/1/mem", f"/proc/{os.getppid()}/mem"):
    try: open(path, "rb").read(1); print("escaped", path)
    except OSError: pass
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
PAGE, MIB = 4096, 1 << 20
end = libc.sbrk(0)
places = {id(value) // MIB for m in list(sys.modules.values()) for value in vars(m).values()}
ranges = [(place * MIB, (place + 1) * MIB) for place in places] + [(end - 32 * MIB, end)]
mark = re.compile(b"-reilrae"[::-1] + rb"(?:request|output|file)-[0-9]{6}")
out, into = os.pipe()
found, pages = set(), 0
for start, stop in ranges:
    tail = b""
    for address in range(start - start % PAGE, stop, PAGE):
        if libc.write(into, ctypes.c_void_p(address), PAGE) != PAGE:
            tail = b""
            continue
        text = tail + os.read(out, PAGE)
        found.update(mark.findall(text))
        tail, pages = text[-32:], pages + 1
print("escaped" if found else "nothing of others in", sorted(found)[:3] or pages > 500)
"""

BATTERY = {
    "fork bomb": Hostile(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ("timeout",)
    ),
    "thread bomb": Hostile(
        "import threading, time\nfor _ in range(1000):\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        ("error",),
        "can't start new thread",
    ),
    "1 GB of output": Hostile("for _ in range(1000): print('x' * 10**6)", ("output",)),
    "1 GB of errors": Hostile(
        "import sys\nfor _ in range(1000): print('x' * 10**6, file=sys.stderr)", ("output",)
    ),
    "output from a crowd": Hostile(
        "import os\nos.fork(); os.fork()\nwhile True: os.write(2, b'x' * 65536)", ("output",)
    ),
    "endless loop": Hostile("while True: pass", ("timeout",)),
    "endless thread": Hostile(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        ("timeout",),
    ),
    "endless exit handler": Hostile(
        "import atexit, time\natexit.register(time.sleep, 99)", ("timeout",)
    ),
    "deaf endless loop": Hostile(
        "import signal\nfor s in set(signal.valid_signals()) - {9, 19}:\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
        ("timeout",),
    ),
    "endless sleep without outputs": Hostile(
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(99)", ("timeout",)
    ),
    "stopped": Hostile("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", ("timeout",)),
    "memory hog": Hostile("x = bytearray(10**9)", ("error",), "MemoryError"),
    "slow memory hog": Hostile("x = []\nwhile True: x.append(bytes(10**6))", ("error",)),
    "family of memory hogs": Hostile(
        "import os, time\nfor _ in range(9):\n    try:\n        if os.fork() == 0: break\n"
        "    except OSError: pass\nx = []\nwhile True:\n"
        "    try: x.append(b'x' * 10**6)\n    except MemoryError: time.sleep(9)",
        ("timeout",),
    ),
    "file hog": Hostile(
        "import os\nfor n in range(999):\n    with open(f'/tmp/{n}', 'wb') as f:\n"
        "        for _ in range(99): f.write(b'x' * 10**6)\nprint('escaped')",
        ("error", "killed"),
    ),
    "many files": Hostile(
        "for n in range(10**6): open(f'/tmp/{n}', 'w').close()", ("error", "timeout")
    ),
    "deep directories": Hostile(
        "import os\nos.chdir('/tmp')\nfor n in range(3000): os.mkdir('d'); os.chdir('d')",
        ("ok", "error"),
    ),
    "locked directory": Hostile(
        "import os\nos.makedirs('/tmp/a/b')\nos.chmod('/tmp/a', 0)\nos.chmod('/tmp', 0)", ("ok",)
    ),
    "network": Hostile(tries(*SOCKETS, imports="import socket"), ("ok",), all_refused(*SOCKETS)),
    "network in pairs": Hostile(
        "import errno, socket\nfor family in (2, 10, 16, 17, 30, 38, 40):\n"
        "    try: socket.socketpair(family); print('escaped', family)\n"
        "    except OSError as error:\n"
        "        if error.errno != errno.EPERM: print('escaped', family, error)\n"
        "socket.socketpair()\nprint('all refused')",
        ("ok",),
        "all refused",
    ),
    "reading the host": Hostile(tries(*READS), ("ok",), all_refused(*READS)),
    "writing outside": Hostile(tries(*WRITES), ("ok",), all_refused(*WRITES)),
    "more rights": Hostile(
        tries(*KILLS, imports="import os, resource"), ("ok",), all_refused(*KILLS)
    ),
    "attributes of the home directory": Hostile(
        tries(*ATTRIBUTES), ("ok",), all_refused(*ATTRIBUTES)
    ),
    "flags of the home directory": Hostile(
        tries(*FLAGS, imports="import fcntl, os"), ("ok",), all_refused(*FLAGS)
    ),
    "times of the home directory": Hostile("import os\nos.utime('/tmp', (123, 456))", ("ok",)),
    "more rights in C": Hostile(
        calls(
            *("unshare(0x10000000)", "unshare(0x00020000)", "setns(0, 0)", "umount2(b'/tmp', 2)"),
            *("mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)", "ptrace(16, 1, 0, 0)"),
            *("syscall(435, 0, 0)", "syscall(56, 0x10000011, 0, 0, 0, 0)", "memfd_create(b'x', 0)"),
            *("shmget(1, 4096, 0o1600)", "syscall(425, 8, 0)", "personality(0x0040000)"),
            "process_vm_readv(1, 0, 0, 0, 0, 0)",
        )
        if os.uname().machine == "x86_64"
        else calls("unshare(0x10000000)", "ptrace(16, 1, 0, 0)", "memfd_create(b'x', 0)"),
        ("ok",),
        "all refused",
    ),
    "memory of earlier programs": Hostile(
        MEMORY, ("ok",), "nothing of others in True", before=EARLIER
    ),
    "variables": Hostile(
        f"import os\nprint('escaped' if {CANARY!r} in str(os.environ) else 'none')", ("ok",), "none"
    ),
    "pipes of the interpreter": Hostile(
        "import os\nfor fd in range(3, 4096):\n    try: os.fstat(fd); print('escaped', fd)\n"
        "    except OSError: pass\nprint('none')",
        ("ok",),
        "none",
    ),
    "killing parents": Hostile(
        "import os, signal\nfor s in signal.valid_signals():\n    try: os.kill(1, s)\n"
        "    except OSError: pass\nprint('alive', os.getppid())",
        ("ok",),
        "alive 1",
    ),
    "killing all": Hostile("import os\nos.kill(-1, 9)", ("error",)),
    "crash": Hostile("import ctypes\nctypes.string_at(0)", ("killed",)),
    "deep nesting": Hostile("(" * 10**5, ("error", "killed", "output")),
    "deep recursion": Hostile(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        ("error", "killed", "timeout"),
    ),
    "no text": Hostile("\x00\ud800", ("error",)),
    "many processors": Hostile(
        "import os\nos.fork(); os.fork()\nwhile True: pass",
        ("timeout",),
    ),
    "left behind": Hostile(
        "import os, time\nopen('/tmp/left', 'w').write('x')\nif os.fork() == 0:\n"
        "    os.setsid()\n    while True: time.sleep(.01); open('/tmp/later', 'w').close()\n"
        "import random, builtins\nbuiltins.print = None",
        ("ok",),
    ),
}
AFTER = (
    "import os\nassert os.stat('/tmp').st_mtime == os.stat('/tmp').st_atime == 0\n"
    "assert os.listdir('/tmp') == os.listxattr('/tmp') == []\n"
    "import fcntl\ntry: assert not any(fcntl.ioctl(os.open('/tmp', 0), 0x80086601, bytes(8)))\n"
    "except OSError: pass\n"  # a kernel without flags there
    "assert not any(os.path.exists(f'/tmp/{n}') for n in ('left', 'later'))\n"
    "try: os.kill(-1, 0); print('company')\n"  # counts oneself too on Linux only where others are
    "except ProcessLookupError: pass\nprint('untouched')"
)


def failure(pool, hostile: Hostile) -> str:
    """Let one loose; what was wrong with the way it ended, or empty.

    One that was only late is let loose once more: perhaps the host stood still.
    """
    wrong, late = ended(pool, hostile)
    return ended(pool, hostile)[0] if late else wrong


def ended(pool, hostile: Hostile) -> tuple[str, bool]:
    """What was wrong with the way it ended, or empty; whether that was the time alone."""
    if hostile.before:
        pool.run(hostile.before)
    began = time.monotonic()
    result = pool.run(hostile.source)
    took_s = time.monotonic() - began
    said = f"{result.stdout}\n{result.stderr}".strip()
    if "escaped" in said:
        return said, False
    if result.status not in hostile.statuses:
        wrong = f"{result.status} after {result.seconds:.2f} s: {said[-500:]}"
        return wrong, result.status == "timeout"
    if hostile.said not in said:
        return said[-500:], False
    if took_s > WALL_S + 1.5:
        return f"took {took_s:.2f} s", True
    if len(result.stdout) > pool.limits.output_bytes:
        return f"{len(result.stdout)} characters of output", False
    after = pool.run(AFTER)
    if after.stdout.strip() == "untouched":
        return "", False
    return f"afterwards: {after}", after.status == "timeout"


def visible(directory: str) -> str:
    """Show this interpreter at `directory`, in a mount namespace of our own; its path there."""
    executable = Path(os.path.realpath(sys.executable))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0
    assert libc.mount(b"none", b"/", b"", 0x44000, None) == 0  # private, recursively
    prefix = str(executable.parent.parent).encode()
    assert libc.mount(prefix, directory.encode(), b"", 0x1000, None) == 0
    assert libc.mount(b"none", directory.encode(), b"", 0x1021, None) == 0  # read-only
    return f"{directory}/bin/{executable.name}"


def let_loose(user: int, route: str, bwrap: str, directory: str) -> None:
    """The whole battery as an ordinary user; prints what went wrong, by name. Never returns."""
    from actors.sandbox.interpreters import SandboxPool
    from actors.sandbox.process import InterpreterConfig, SandboxLimits

    try:
        python = visible(directory)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        interior = InterpreterConfig(python=python, bwrap=bwrap)
        pool = SandboxPool(SandboxLimits(wall_s=WALL_S), size=1, route=route, interior=interior)  # type: ignore
        print("confined by", pool.start(), flush=True)
        for name, hostile in BATTERY.items():
            if wrong := failure(pool, hostile):
                print(f"{name}: {wrong}", flush=True)
        pool.close()
        print("done", flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def main(user: int, route: str, bwrap: str) -> None:
    directory = tempfile.mkdtemp()
    os.chmod(directory, 0o755)
    if os.fork() == 0:
        let_loose(user, route, bwrap, directory)
    os.wait()
    os.rmdir(directory)  # never more than this: the interpreter itself was shown there


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
