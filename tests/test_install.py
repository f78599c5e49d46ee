"""What the documented install commands bring: pins that fit, and one owner of every folder."""

import re
import tomllib
from itertools import combinations
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from evolver_async.doctor.probes import libraries

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OWNERS = {"faiss-cpu", "faiss-gpu"}  # both own the folder faiss/
EITHER = {"faiss", "gpu"}  # one owner each: the one for CPUs, the other for GPUs
DOCUMENTS = [ROOT / name for name in ("README.md", "Makefile", "tests/gpu/run.sh")]
DOCUMENTS += [*(ROOT / "docs").glob("*.md")]
DOCUMENTS += [*(ROOT / "evolver_async").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]
COMMANDS = [
    (path.name, tuple(extras.split(",")))
    for path in DOCUMENTS
    for extras in re.findall(r"(?:'\.|evolver-async)\[([\w,-]+)\]'", path.read_text())
]


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    split = [line.split("==") for line in lines]
    return {canonicalize_name(package): Version(version) for package, version in split}


def brought(*extras: str) -> set[str]:
    return {Requirement(line).name for extra in extras for line in EXTRAS[extra]}


@pytest.mark.parametrize(
    ("name", "extras"),
    [("constraints.txt", ("dev", "faiss")), ("constraints-gpu.txt", ("gpu",))],
)
def test_pins_keep_to_the_bounds_of_the_project(name: str, extras: tuple[str, ...]) -> None:
    found = pins(name)
    for line in (*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])):
        wanted = Requirement(line)
        pin = found[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(pin), f"{name}: {pin} for {line}"


def test_the_gpu_pins_keep_to_what_vllm_wants() -> None:
    """The two packages that constraints.txt has newer."""
    found = pins("constraints-gpu.txt")
    assert found["numpy"] < Version("2.4") and found["setuptools"] < Version("81")


def test_every_install_command_names_extras_that_are_there() -> None:
    assert {("gpu",), ("faiss",), ("dev", "faiss")} <= {extras for _, extras in COMMANDS}
    assert {extra for _, extras in COMMANDS for extra in extras} <= EXTRAS.keys()


@pytest.mark.parametrize(("document", "extras"), COMMANDS)
def test_no_install_command_brings_two_owners_of_a_folder(
    document: str, extras: tuple[str, ...]
) -> None:
    assert len(OWNERS & brought(*extras)) <= 1


def test_no_other_pair_of_extras_brings_two_owners_of_a_folder() -> None:
    clash = [{*pair} for pair in combinations(EXTRAS, 2) if len(OWNERS & brought(*pair)) > 1]
    assert clash == [EITHER]


def test_the_documented_gpu_commands_use_their_constraints() -> None:
    lines = [line for line in (ROOT / "docs/scaling.md").read_text().splitlines() if "[gpu" in line]
    installs = [line for line in lines if "pip install" in line]
    assert installs and all("-c constraints-gpu.txt" in line for line in installs)


def test_two_owners_of_faiss_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"faiss": ["faiss-cpu", "faiss-gpu"]}
    monkeypatch.setattr(libraries, "packages_distributions", lambda: owners)
    found = libraries.faiss()
    assert not found.works and "faiss-cpu, faiss-gpu" in found.summary
