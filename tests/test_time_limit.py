"""The time limit of the tests themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

HANGS = {
    "in a loop": "while True: pass",
    "in a wait": "threading.Event().wait()",
    "in a task beside the test": (
        "async def spin():\n"
        "        while True: await asyncio.sleep(0)\n"
        "    async def both(): await asyncio.gather(spin(), spin(), return_exceptions=True)\n"
        "    asyncio.run(both())"
    ),
    "behind an except": (
        "while True:\n        try: threading.Event().wait()\n        except Exception: pass"
    ),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_hanging_test_fails_by_name_and_the_next_one_runs(tmp_path: Path, hang: str) -> None:
    written = tmp_path / "test_written.py"
    written.write_text(
        f"import asyncio, threading\n\ndef test_that_hangs():\n    {HANGS[hang]}\n\n"
        "def test_after_it():\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "time_limit", "-p", "no:cacheprovider", written],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).parent / "support"), "TEST_LIMIT_S": "4"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "test_written.py::test_that_hangs took longer than 4 s" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
