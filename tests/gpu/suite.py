"""The GPU tests, file by file: `suite.py FOLDER [FILE …] [pytest options]`, as `run.sh` calls it.

Each file is a process of its own with an exit code. A test that takes longer than TEST_S ends its
process; the rest of its file goes on in a new one. What is known so far is in FOLDER at any time:
`codes.tsv` (exit code by file), `tests.jsonl` (every test with outcome, seconds and reason),
`figures.jsonl` (what was measured), `stacks.txt` (where a test was that took too long).

The functions called `pytest_…` run in those processes: this module is their plugin.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = "GPU_FOLDER"
TEST_S = float(os.environ.get("TEST_S", "90"))
LIMIT_S = float(os.environ.get("LIMIT_S", "560"))  # of all files together
STALLED = "took too long"
ENDED = (0, 1, 5)  # all passed, some failed, none chosen
# What most is built on comes first; FSDP last, which can hang where NCCL does.
FIRST = ("packing", "step", "parity", "cuda_ipc", "groups", "lora", "limits")
LAST = "test_fsdp.py"


def note(file: str, line: str) -> None:
    with open(Path(os.environ[FOLDER]) / file, "a", encoding="utf-8") as out:
        out.write(line + "\n")


def known(folder: Path) -> dict[str, dict[str, Any]]:
    """The newest entry of every test."""
    path = folder / "tests.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {one["test"]: one for one in map(json.loads, lines)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    note("tests.jsonl", json.dumps({"test": item.nodeid, "outcome": "started"}))
    with open(Path(os.environ[FOLDER]) / "stacks.txt", "a", encoding="utf-8") as stacks:
        faulthandler.dump_traceback_later(TEST_S, exit=True, file=stacks)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    entry = {"outcome": report.outcome, "seconds": report.duration, "reason": reason}
    note("tests.jsonl", json.dumps({"test": report.nodeid} | entry))


def files() -> list[str]:
    """Every file with a test that needs a GPU, in the order in which they run."""
    elsewhere = ("faults", "vllm")
    tests = ROOT / "tests"
    found = [p for p in tests.rglob("test_*.py") if p.relative_to(tests).parts[0] not in elsewhere]
    marked = [path for path in found if "mark.gpu" in path.read_text() or path.parent == HERE]

    def place(path: Path) -> tuple[bool, int]:
        kind = path.stem.removeprefix("test_").removesuffix("_gpu")
        of_suite = path.parent == HERE and kind in FIRST
        return path.name == LAST, FIRST.index(kind) if of_suite else len(FIRST)

    return [str(path.relative_to(ROOT)) for path in sorted(sorted(marked), key=place)]


def run_file(file: str, options: list[str], folder: Path, until: float) -> int:
    """Its exit code: 1 where a test took too long, 124 where time ran out for all."""
    stalled, others, seen = False, known(folder).keys(), -1
    while len(done := known(folder).keys() - others) > seen:  # else this made no headway
        seen, gone = len(done), [f"--deselect={test}" for test in sorted(done)]
        command = [sys.executable, "-m", "pytest", file, "-m", "gpu", "-q", "-rs", *options, *gone]
        command += ["-p", "no:cacheprovider", "-p", "suite", "--rootdir", str(ROOT)]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124
        started = [test for test, one in known(folder).items() if one["outcome"] == "started"]
        for test in started:
            print(f"suite.py: {test} {STALLED} or ended its process (exit code {code})", flush=True)
            note("tests.jsonl", json.dumps({"test": test, "outcome": STALLED, "code": code}))
        if not started:
            return 1 if stalled and code in ENDED else code
        stalled = True
    return 1


def main(folder: Path, arguments: list[str]) -> int:
    """0 where every file ended with 0 or 5, 124 where time ran out, else 1."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("codes.tsv", "tests.jsonl", "figures.jsonl", "stacks.txt"):
        (folder / name).unlink(missing_ok=True)
    os.environ[FOLDER] = str(folder)
    paths = [
        str(HERE),
        str(ROOT / "tests" / "support"),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    named = [one for one in arguments if one.partition("::")[0].endswith(".py")]
    options = [one for one in arguments if one not in named]
    until, codes = time.monotonic() + LIMIT_S, {}
    for file in named or files():
        start = time.monotonic()
        codes[file] = run_file(file, options, folder, until)
        line = f"{codes[file]}\t{time.monotonic() - start:.1f} s\t{file}"
        note("codes.tsv", line)
        print(f"suite.py: exit code {line}", flush=True)
    for test, one in known(folder).items():
        if one["outcome"] not in ("passed", "started"):
            lines = str(one.get("reason", "")).strip().splitlines() or [""]
            print(f"suite.py: {one['outcome']}: {test}: {lines[-1]}")
    print(f"suite.py: figures and outcomes are in {folder}")
    wrong = {code for code in codes.values() if code not in (0, 5)}
    return 124 if 124 in wrong else int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
