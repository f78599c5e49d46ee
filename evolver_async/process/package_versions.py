"""Versions of a process's code and packages, by which hosts of a run are compared."""

import hashlib
import importlib.util
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CODE = "evolver-async"  # a digest of the source, which a version number would not tell
OURS = ("evolver_async", "actors", "learner")
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyzmq",
    "msgspec",
    "xgrammar",
)


@cache
def versions() -> dict[str, str]:
    """Return the digest of our own source and the versions of what results depend on."""
    found = {CODE: _digest(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Describe the versions that both know and that differ; "" if there is none."""
    names = [name for name in ours if name in theirs and theirs[name] != ours[name]]
    return ", ".join(f"{name} {theirs[name]} (buffer: {ours[name]})" for name in names)


def _digest() -> str:
    digest = hashlib.sha256()
    for package in OURS:
        spec = importlib.util.find_spec(package)
        for root in sorted(spec.submodule_search_locations or ()) if spec else ():
            # an editor's lock can be a link to nothing
            for path in sorted(filter(Path.is_file, Path(root).rglob("*.py"))):
                digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
