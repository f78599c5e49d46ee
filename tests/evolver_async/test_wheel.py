"""The wheel: it holds every module and every recipe, and works without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PACKAGES = ("evolver_async", "actors", "learner")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "configs", *PACKAGES)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built by the installed setuptools from a copy of the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out))
    build = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(path)
    return path


def command(unpacked: Path, cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the unpacked wheel's command line in a directory outside of the repository."""
    return subprocess.run(
        [sys.executable, "-m", "evolver_async.cli", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )


def files(root: Path, directory: str, suffix: str) -> set[str]:
    found = (root / directory).rglob(f"*{suffix}")
    return {path.relative_to(root / directory).as_posix() for path in found}


def test_the_wheel_holds_every_module_and_every_recipe(unpacked: Path) -> None:
    for package in PACKAGES:
        assert files(unpacked, package, ".py") == files(ROOT, package, ".py")
    recipes = files(ROOT, "configs", ".yaml")
    assert {"frozen_lake.yaml", "gpu/grpo_roc.yaml", "studies/lag.yaml"} <= recipes
    assert files(unpacked, "evolver_async/recipes", ".yaml") == recipes
    assert (unpacked / "actors" / "envs" / "webshop" / "products.jsonl").is_file()
    assets = files(ROOT, "evolver_async/runs/report/assets", "")
    assert files(unpacked, "evolver_async/runs/report/assets", "") == assets >= {"page.html"}
    assert {path.name for path in unpacked.iterdir() if path.suffix == ""} == {*PACKAGES}


def test_the_recipes_of_a_wheel_are_listed_and_found_by_name(
    unpacked: Path, tmp_path: Path
) -> None:
    listed = command(unpacked, tmp_path, "recipes")
    assert listed.returncode == 0, listed.stderr
    assert str(unpacked / "evolver_async" / "recipes") in listed.stdout
    lines = {line.split()[0]: line for line in listed.stdout.splitlines() if line}
    assert lines.keys() >= {"frozen_lake", "gpu/grpo_roc", "gpu/retool"}
    assert "The embedded default" in lines["frozen_lake"]
    assert "ReTool: code within the answer" in lines["gpu/retool"]
    shown = command(unpacked, tmp_path, "config", "starpo_s_slippery", "learner.lr=3e-4")
    assert shown.returncode == 0, shown.stderr
    assert "actions_per_turn: 2" in shown.stdout, "the base of a recipe is beside it"
