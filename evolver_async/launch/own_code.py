"""Own code of a run: the modules that its configuration names by import path, and what they import.

They are found by reading, not by importing: the launcher imports no library of theirs. What only
runs tell, as a name given to `importlib`, is not found.
"""

import ast
import hashlib
import importlib.util
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec

from evolver_async.config import Config
from evolver_async.config.load import to_dict
from evolver_async.config.secrets import mask
from evolver_async.process.package_versions import OURS

CODE = "code"  # directory of copies in that of a run
DIGEST_CHARS = 16  # of a copy's directory
GIT_S = 10.0  # longest time for the state of a repository
IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
INSTALLED = ("site-packages", "dist-packages")


class GitState(msgspec.Struct, frozen=True):
    """Commit of the working directory; `dirty`: files of the commit have changed since."""

    commit: str
    dirty: bool


def own_code(configs: Iterable[Config]) -> dict[str, Path]:
    """Return the files of own modules by name, such as `package/module.py`, in order.

    Own is what lies outside of this package, of installed ones and of the standard library.
    """
    found: dict[str, Path] = {}
    waiting = [name for config in configs for name in _named(to_dict(config))]
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for module, path in _files(name):
            file = _file_name(module, path)
            if file not in found and _is_own(path):
                found[file] = path
                waiting += _imported(module, path)
    return dict(sorted(found.items()))


def digests(code: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in code.items()}


def keep(code: Mapping[str, Path], directory: Path) -> dict[str, str]:
    """Copy the files that `directory`/code does not have yet; return their digests by name.

    Copies have no secrets of the environment; digests are of the files themselves.
    """
    found = {}
    for name, path in code.items():
        content = path.read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
        copy = copy_of(directory, name, found[name])
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_name(f".{copy.name}")
            if path.suffix == ".py":  # others are machine code
                content = mask(content.decode("utf-8", "surrogateescape"))
                content = content.encode("utf-8", "surrogateescape")
            part.write_bytes(content)
            part.replace(copy)
    return found


def copy_of(directory: Path, name: str, digest: str) -> Path:
    """Return the place of the copy of a file: that of an earlier content has another one."""
    return directory / CODE / digest[:DIGEST_CHARS] / name


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name the first file that is gone, new or another one; "" if the digests are the same."""
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            return f"{name} is gone"
        if name not in before:
            return f"{name} is new"
        if before[name] != now[name]:
            return f"{name} has changed"
    return ""


def git_state(directory: Path) -> GitState | None:
    """Return the commit of a working directory; None without one, or without git."""
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch"]
    try:
        done = subprocess.run(
            [*command, "--untracked-files=no"],
            cwd=directory,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    head, *_ = [*re.findall(r"^# branch\.oid ([0-9a-f]+)$", done.stdout, re.MULTILINE), ""]
    if done.returncode or not head:
        return None
    return GitState(head, any(not line.startswith("#") for line in done.stdout.splitlines()))


def _named(value: Any) -> Iterator[str]:
    """Yield the modules of all import paths in plain values."""
    if isinstance(value, str):
        if found := IMPORT_PATH.fullmatch(value):
            yield found[1]
    elif isinstance(value, dict):
        for one in value.values():
            yield from _named(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _named(one)


def _files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield a module and the packages around it, those that have files, with these."""
    places: Iterable[str] | None = None
    module = ""
    for part in name.split("."):
        module = f"{module}.{part}" if module else part
        try:
            # of a package within another one it would import the outer one
            spec = (
                importlib.util.find_spec(module)
                if places is None
                else PathFinder.find_spec(module, [*places])
            )
        except (ImportError, ValueError, AttributeError):  # as for a module made by hand
            return
        if spec is None:
            return
        if spec.origin is not None and Path(spec.origin).is_file():
            yield module, Path(spec.origin)
        places = spec.submodule_search_locations or ()


def _file_name(module: str, path: Path) -> str:
    inside = "/__init__" if path.stem == "__init__" else ""
    return f"{module.replace('.', '/')}{inside}{path.suffix}"


def _is_own(path: Path) -> bool:
    """True for a file that no installed package, the standard library or this package has."""
    path = path.resolve()
    root = Path(__file__).resolve().parents[2]
    foreign = [root / package for package in OURS]
    foreign += [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    inside = any(path.is_relative_to(one) for one in foreign)
    return not inside and not any(part in INSTALLED for part in path.parts)


def _imported(module: str, path: Path) -> Iterator[str]:
    """Yield the names that a module imports anywhere; some may be of functions, not of modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a library in machine code, or what its import will refuse
        return
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            whole = ".".join(part for part in (base, node.module) if part)
            yield whole
            yield from (f"{whole}.{alias.name}" for alias in node.names if alias.name != "*")
