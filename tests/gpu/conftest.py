"""What tests on a GPU share: they are skipped where there is none, and leave their figures.

A test that takes `device` runs twice, in small on the CPU and whole on the GPU: the same body.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from figures import Figure

FIGURES = pytest.StashKey[list[tuple[str, str, float, str]]]()
FOLDER = "GPU_FOLDER"  # of the suite, where figures go as they come


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the test's tensors are; a GPU is left empty."""
    yield torch.device(request.param)
    if request.param == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """`figure(name, value, unit)` keeps a measurement of this test, also for the closing table."""
    kind = request.node.name.partition("[")[2].rstrip("]")

    def keep(name: str, value: float, unit: str) -> None:
        request.config.stash[FIGURES].append((kind, name, value, unit))
        if FOLDER in os.environ:
            line = {"name": f"{name} ({request.node.nodeid})", "value": value, "unit": unit}
            with open(Path(os.environ[FOLDER]) / "figures.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = terminalreporter.config.stash[FIGURES]
    if not figures:
        return
    lines = [f"{kind:<24} {name:<44} {value:>12.4g} {unit}" for kind, name, value, unit in figures]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    terminalreporter.section(f"figures: {where}, torch {torch.__version__}")
    for line in lines:
        terminalreporter.write_line(line)
