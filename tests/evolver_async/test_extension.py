"""A user's functions: what they raise is named, and their `sys.exit` ends no process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.endpoint.outcome import load_agent
from actors.envs.base import EnvError, env_class, make_env
from evolver_async.extension import Builtins, imported, noted
from evolver_async.metrics.sinks import Sinks, nothing


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that writes a module to import."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


@pytest.mark.parametrize("code", [0, 2])
def test_an_exit_in_an_own_function_is_its_failure(code: int) -> None:
    def leaves() -> None:
        sys.exit(code)

    with pytest.raises(
        RuntimeError, match=rf"advantage\.kind: own:leaves called sys\.exit\({code}\)"
    ):
        noted("advantage.kind", "own:leaves", leaves)()


def test_a_sink_that_exits_is_reported_and_the_others_get_the_row(
    write: Callable[[str, str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        "leaving_sinks",
        "import sys\n\ndef leaves(row, run_dir):\n    sys.exit()\n\n"
        "class Leaves:\n    def __call__(self, row, run_dir):\n        sys.exit()\n\n"
        "instance = Leaves()\n\n"
        "def keeps(row, run_dir):\n    (run_dir / 'row').write_text(str(row['step']))\n",
    )
    names = ["leaving_sinks:leaves", "leaving_sinks:instance", "leaving_sinks:keeps"]
    Sinks(names, tmp_path).send({"step": 7})
    assert (tmp_path / "row").read_text() == "7"
    assert all(f"metrics.sinks: {name} failed" in caplog.text for name in names[:2])
    assert nothing({}, tmp_path) is None


def test_a_module_that_exits_cannot_be_imported(write: Callable[[str, str], None]) -> None:
    write("leaving_module", "import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"^buffer\.sampler: cannot import .*SystemExit"):
        imported("buffer.sampler", "leaving_module:one")
    with pytest.raises(ValueError, match=r"^rollout\.agent: cannot import .*SystemExit"):
        load_agent("leaving_module:one")
    with pytest.raises(EnvError, match=r"^env\.name: cannot import .*SystemExit"):
        env_class("leaving_module:one")


def test_an_environment_that_exits_cannot_be_made(write: Callable[[str, str], None]) -> None:
    write(
        "leaving_env",
        "import sys\n\nclass Leaves:\n    def __init__(self) -> None:\n        sys.exit(0)\n"
        "    async def reset(self, task): ...\n    async def step(self, actions): ...\n"
        "    async def close(self): ...\n",
    )
    with pytest.raises(EnvError, match=r"env\.name: .*SystemExit"):
        make_env("leaving_env:Leaves", {})


def test_a_kind_has_one_function() -> None:
    builtins: Builtins[Callable[[], str]] = Builtins("correction.kind")
    builtins("ppo", prepare=None)(lambda: "first")
    with pytest.raises(ValueError, match=r"^correction\.kind=ppo: "):
        builtins("ppo")(lambda: "second")
    assert builtins.of("ppo")() == "first" and vars(builtins["ppo"]) == {"prepare": None}
