"""The sandbox: programs run, hostile ones harm nobody, and where it cannot hold it refuses."""

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import psutil
import pytest
from launches import DEADLINE_S, fair_time, wait_for

from actors.sandbox import process as cell
from actors.sandbox import seccomp
from actors.sandbox.interpreters import SandboxPool, routes, shared
from actors.sandbox.process import (
    ConfinedInterpreter,
    InterpreterConfig,
    SandboxLimits,
    SandboxUnavailable,
)

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
LIMITS = SandboxLimits(wall_s=hostile.WALL_S)
PATIENT = SandboxLimits(
    wall_s=10.0
)  # for programs that end by themselves, however busy the host is


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    os.environ["HOSTILE_SECRET"] = hostile.CANARY
    pool = SandboxPool(LIMITS, size=1)
    yield pool
    pool.close()
    del os.environ["HOSTILE_SECRET"]


@pytest.fixture(scope="module")
def patient() -> Iterator[SandboxPool]:
    pool = SandboxPool(PATIENT, size=1)
    yield pool
    pool.close()


def test_a_program_says_what_it_says(patient: SandboxPool) -> None:
    patient.start()
    began = time.monotonic()
    result = patient.run("import sys\nprint(34 * 57 % 1000)\nprint('ö', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.status) == ("938\n", "ö\n", "ok")
    assert 0 < result.seconds < time.monotonic() - began


@pytest.mark.parametrize(
    ("source", "last", "stdout"),
    [
        ("print(1)\n1 / 0", "ZeroDivisionError: division by zero", "1\n"),
        ("def f(:", "SyntaxError: invalid syntax", ""),
        ("import sys\nsys.exit('bad')", "bad", ""),
        ("raise SystemExit(3)", "", ""),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'", ""),
        ("input()", "EOFError: EOF when reading a line", ""),
    ],
)
def test_an_error_is_told_as_python_tells_it(
    patient: SandboxPool, source: str, last: str, stdout: str
) -> None:
    result = patient.run(source)
    assert (result.status, result.stdout) == ("error", stdout)
    assert result.stderr.strip().rpartition("\n")[2] == last
    assert "guest.py" not in result.stderr


@pytest.mark.parametrize(
    ("ending", "status"), [("", "ok"), ("import sys\nsys.exit(3)", "error"), ("1 / 0", "error")]
)
def test_threads_and_exit_handlers_end_as_with_python(
    patient: SandboxPool, ending: str, status: str
) -> None:
    source = (
        "import atexit, threading, time\n"
        "def late():\n    time.sleep(0.2)\n    print('thread')\n"
        "atexit.register(print, 'handler')\nthreading.Thread(target=late).start()\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint('main')\n"
    )
    result = patient.run(source + ending)
    assert (result.stdout, result.status) == ("main\nthread\nhandler\n", status)


def test_an_error_of_an_exit_handler_is_the_programs(patient: SandboxPool) -> None:
    result = patient.run("import atexit\natexit.register(lambda: 1 / 0)\nprint(1)")
    assert result.stdout == "1\n" and "ZeroDivisionError" in result.stderr
    broken = patient.run("import threading\nthreading._shutdown = lambda: 1 / 0\nprint(1)")
    assert (broken.stdout, broken.status) == ("1\n", "error")
    assert "ZeroDivisionError" in broken.stderr and "guest.py" not in broken.stderr


def test_exit_code_0_is_no_error(patient: SandboxPool) -> None:
    assert patient.run("import sys\nprint(1)\nsys.exit()").status == "ok"


def test_the_same_program_says_the_same(patient: SandboxPool) -> None:
    source = "import random\nprint(random.random(), hash('a'), list({'x', 'y', 'z'}))"
    first = patient.run(source)
    assert first.status == "ok" and first.stdout == patient.run(source).stdout
    other = SandboxPool(PATIENT, size=1)
    assert other.run(source).stdout == first.stdout
    other.close()


def test_what_was_said_before_the_deadline_is_kept(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "GRACE_S", 20.0)  # of an interpreter that is ended nothing is kept
    result = pool.run("print('before')\nwhile True: pass")
    assert (result.status, result.stdout) == ("timeout", "before\n")


@pytest.mark.parametrize("name", hostile.BATTERY)
def test_a_hostile_program_costs_its_deadline_and_harms_nobody(
    pool: SandboxPool, name: str
) -> None:
    assert hostile.failure(pool, hostile.BATTERY[name]) == ""


def held_bytes() -> int:
    """The memory of all processes below this one."""
    held = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            held += process.memory_info().rss
    return held


def test_nothing_hostile_is_left_on_the_host(pool: SandboxPool) -> None:
    pool.start()
    others = len(psutil.Process().children(recursive=True))
    before, available = held_bytes(), psutil.virtual_memory().available
    for name in ("fork bomb", "family of memory hogs", "many processors"):
        pool.run(hostile.BATTERY[name].source)
        left = psutil.Process().children(recursive=True)
        assert len(left) <= others, f"{name}: {left}"
    assert held_bytes() < before + (64 << 20)
    # of whatever is not below this process; others may be using the host too
    wait_for(lambda: psutil.virtual_memory().available > available - (1 << 30), "the host's memory")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can make an interpreter visible to all")
@pytest.mark.parametrize(
    "route",
    [
        "user",
        pytest.param(
            "bwrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="not installed")
        ),
    ],
)
def test_the_whole_battery_as_an_ordinary_user(route: str) -> None:
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    done = subprocess.run(
        [python, hostile.__file__, "54321", route, shutil.which("bwrap") or ""],
        env={"PYTHONPATH": str(ROOT), "HOSTILE_SECRET": hostile.CANARY},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == f"confined by {route}\ndone\n", done.stdout + done.stderr


def test_an_interpreter_that_is_killed_costs_one_program() -> None:
    pool, others = SandboxPool(PATIENT, size=1), set(psutil.Process().children())
    pool.start()
    (outside,) = set(psutil.Process().children()) - others
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pool.run, "import time\nprint(1)\ntime.sleep(99)")
        wait_for(lambda: len(outside.children(recursive=True)) == 2, "the program to run")
        outside.kill()
        assert running.result().status == "killed"
    assert pool.run("print(2)").stdout == "2\n"
    pool.close()


def test_nobody_is_left_when_the_owner_is_killed() -> None:
    script = (
        "from actors.sandbox.interpreters import SandboxLimits, SandboxPool\n"
        "pool = SandboxPool(SandboxLimits(wall_s=60, cpu_s=60), size=1)\n"
        "pool.start()\nprint('up', flush=True)\n"
        "pool.run('while True: pass')"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
    process = psutil.Process(owner.pid)
    wait_for(lambda: len(process.children(recursive=True)) == 3, "the program to run")
    family = process.children(recursive=True)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert alive == []


def test_threads_share_a_pool() -> None:
    pool = SandboxPool(PATIENT, size=2)
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: pool.run(f"print({n})"), range(40)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(40)]
    pool.close()
    pool.close()


def test_an_interpreter_too_busy_to_say_so_has_broken_the_limit_on_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell, "GRACE_S", -0.4)
    pool = SandboxPool(SandboxLimits(wall_s=0.5), size=1)
    pool.start()
    assert pool.run("while True: pass").status == "timeout"
    pool.close()


def test_the_rest_of_a_late_request_does_not_pass_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that stands still while it writes a request lets its program's time run out."""
    pool = SandboxPool(SandboxLimits(wall_s=1.0), size=1)
    pool.start()
    send = ConfinedInterpreter._send

    def halting(self: ConfinedInterpreter, content: bytes, deadline: float) -> None:
        send(self, content[:20], deadline)
        until = time.monotonic() + DEADLINE_S
        while self.alive() and time.monotonic() < until:
            time.sleep(0.01)
        send(self, content[20:], deadline)

    with monkeypatch.context() as patched:
        patched.setattr(ConfinedInterpreter, "_send", halting)
        assert pool.run("print(1)" + 200 * "#").status in ("killed", "timeout")
    pool.limits = PATIENT
    for number in range(2, 5):
        assert pool.run(f"print({number})").stdout == f"{number}\n"
    pool.close()


def test_limits_are_the_callers() -> None:
    pool = SandboxPool(SandboxLimits(wall_s=0.2), size=1)
    pool.start()
    took = []
    for _ in range(3):
        began = fair_time()
        assert pool.run("while True: pass").status == "timeout"
        took.append(fair_time() - began)
    assert min(took) < 0.2 + 0.5, "the best of three, since the host may stand still"
    pool.close()
    pool = SandboxPool(SandboxLimits(wall_s=10.0, memory_bytes=64 << 20, processes=1), size=1)
    assert "MemoryError" in pool.run("x = bytearray(60 << 20)").stderr
    assert "BlockingIOError" in pool.run("import os\nos.fork()").stderr
    pool.close()
    pool = SandboxPool(SandboxLimits(wall_s=10.0, output_bytes=10), size=1)
    assert pool.run("print('123456789')").status == "ok"
    cut = pool.run("print('1234567890')")
    assert (cut.status, cut.stdout) == ("output", "1234567890")
    pool.close()


def test_processor_time_is_limited_too() -> None:
    pool = SandboxPool(SandboxLimits(wall_s=90.0, cpu_s=1), size=1)
    result = pool.run("while True: pass")
    assert result.status == "killed" and 0.9 < result.seconds < 80
    pool.close()


@pytest.mark.parametrize(
    "name", ["wall_s", "cpu_s", "memory_bytes", "processes", "output_bytes", "open_files"]
)
def test_a_limit_out_of_range_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: 0 is less than"):
        SandboxLimits(**{name: 0})


def test_modules_are_warm_and_packages_are_there_when_asked_for(patient: SandboxPool) -> None:
    asks = (
        "import sys\nprint('fractions' in sys.modules)\nimport numpy\nprint(numpy.arange(4).sum())"
    )
    assert patient.run(asks).stdout == "False\n"
    limits = SandboxLimits(wall_s=20.0, cpu_s=20, memory_bytes=1 << 30)
    warm = SandboxPool(
        limits, size=1, interior=InterpreterConfig(imports=("fractions", "numpy"), packages=True)
    )
    assert warm.run(asks).stdout == "True\n6\n"
    warm.close()


def test_packages_behind_a_link_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: SandboxPool
) -> None:
    """A virtual environment can be a link; inside, its target is nowhere."""
    packages = tmp_path / "kept" / "packages"
    packages.mkdir(parents=True)
    (packages / "linked.py").write_text("name = 'there'\n")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "link" / "packages"))
    pool = SandboxPool(patient.limits, size=1, interior=InterpreterConfig(packages=True))
    assert pool.run("import linked\nprint(linked.name)").stdout == "there\n"
    pool.close()


def test_a_program_that_is_too_long_is_not_run() -> None:
    pool = SandboxPool(SandboxLimits(source_bytes=10), size=1)
    assert pool.run("print('01234567890')").status == "error"
    pool.close()


# ---- where it cannot hold


def test_where_nothing_works_it_says_what_is_missing() -> None:
    with pytest.raises(SandboxUnavailable, match=r"confined here; bubblewrap: .*nowhere"):
        SandboxPool(route="bwrap", interior=InterpreterConfig(bwrap="/nowhere/bwrap")).start()
    with pytest.raises(SandboxUnavailable, match="No module named 'nowhere'"):
        ConfinedInterpreter(routes()[0], LIMITS, InterpreterConfig(imports=("nowhere",)))


def test_a_container_that_forbids_namespaces_is_refused() -> None:
    script = (
        "import ctypes, struct\nfrom actors.sandbox import seccomp\n"
        "from actors.sandbox.interpreters import SandboxPool\nprogram = seccomp.program()\n"
        "libc, held = ctypes.CDLL(None), ctypes.create_string_buffer(program, len(program))\n"
        "filter = struct.pack('@HP', len(program) // 8, ctypes.addressof(held))\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0 == libc.prctl(22, 2, filter, 0, 0)\n"
        "SandboxPool().start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().rpartition("\n")[2]
    assert "programs cannot be confined here; " in last
    assert "an ordinary user: unshare: Operation not permitted; needed is root" in last


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's processes are not counted")
def test_confinement_whose_limits_do_not_hold_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="number of processes cannot be limited to 4"):
        SandboxPool(LIMITS, route="user").start()


def test_a_machine_whose_system_calls_are_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="no table of system calls for pdp11"):
        seccomp.program("pdp11")


def test_a_program_is_not_blamed_for_an_interpreter_that_was_dead_before() -> None:
    pool = SandboxPool(PATIENT, size=1)
    try:
        others = set(psutil.Process().children())
        pool.start()
        (outside,) = set(psutil.Process().children()) - others
        outside.kill()
        wait_for(lambda: outside.status() == psutil.STATUS_ZOMBIE, "its end")
        assert pool.run("print(2)").stdout == "2\n"
        assert outside not in psutil.Process().children()
    finally:
        pool.close()


def test_the_shared_pool_is_one() -> None:
    assert shared(LIMITS, 1, InterpreterConfig()) is shared(LIMITS, 1, InterpreterConfig())
    assert shared(LIMITS, 1, InterpreterConfig()) is not shared(
        SandboxLimits(), 1, InterpreterConfig()
    )


# ---- the filter, against a machine that carries it out


def verdict(
    program: bytes, architecture: int, number: int, argument: int = 0, second: int = 0
) -> int:
    """What the kernel would return: the classic BPF machine, for the instructions used here."""
    data = {0: number, 4: architecture, 16: argument, 24: second}
    instructions = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at, loaded = 0, 0
    while True:
        code, then, otherwise, value = instructions[at]
        at += 1
        match code:
            case 0x20:
                loaded = data[value]
            case 0x06:
                return value
            case 0x15:
                at += then if loaded == value else otherwise
            case 0x35:
                at += then if loaded >= value else otherwise
            case 0x45:
                at += then if loaded & value else otherwise
            case _:
                raise AssertionError(code)


ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_the_filter_denies_what_it_names_and_nothing_else(machine: str) -> None:
    column = list(seccomp.ARCHITECTURES).index(machine)
    architecture, program = seccomp.ARCHITECTURES[machine], seccomp.program(machine)
    assert len(program) // 8 < 4096
    denied = {numbers[column] for numbers in seccomp.DENIED.values()}
    assert len(denied) == len(seccomp.DENIED), "two names have one number"
    pairs = (seccomp.CLONE3, seccomp.SOCKET, seccomp.SOCKETPAIR, seccomp.PRLIMIT)
    special = {numbers[column] for numbers in pairs}
    for number in range(600):
        expected = EPERM if number in denied else ALLOW
        if number not in special:
            assert verdict(program, architecture, number) == expected, number
    assert verdict(program, architecture, seccomp.CLONE3[column]) == ENOSYS
    clone, prlimit, ioctl = (
        numbers[column] for numbers in (seccomp.CLONE, seccomp.PRLIMIT, seccomp.IOCTL)
    )
    for flag in (*(1 << bit for bit in range(25, 31)), 0x00020000, 0x80):
        assert verdict(program, architecture, clone, flag | 17) == EPERM, hex(flag)
    assert verdict(program, architecture, clone, 0x003D0F00) == ALLOW  # a thread
    for numbers in (seccomp.SOCKET, seccomp.SOCKETPAIR):
        made = [verdict(program, architecture, numbers[column], n) for n in (1, 2, 10, 16, 40)]
        assert made == [ALLOW, *[EPERM] * 4]
    asked = [seccomp.SETFLAGS, seccomp.FSSETXATTR, 0x80086601, 0x5413]
    answers = [verdict(program, architecture, ioctl, second=request) for request in asked]
    assert answers == [EPERM, EPERM, ALLOW, ALLOW]
    assert verdict(program, architecture, prlimit, 0) == ALLOW
    assert verdict(program, architecture, prlimit, 1) == EPERM
    assert verdict(program, 0x40000003, 0) == KILL
    if machine == "x86_64":
        assert verdict(program, architecture, 0x40000000 + 41) == EPERM
