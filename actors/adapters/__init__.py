"""Environments of other suites, each behind this project's protocol."""

import importlib
from typing import Any


def required(module: str, param: str, package: str, version: str = "") -> Any:
    """Import a module of an optional package; ValueError, naming `param`, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        wanted = f"{package}{version} (pip install {package})"
        raise ValueError(f"{param}: needs the package {wanted}: {error}") from error
