"""Launches of a run, <run>/launches.jsonl: recipe, command line, versions and own code of each."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evolver_async.config.secrets import looks_secret, mask
from evolver_async.durations import utc
from evolver_async.metrics.tail import Tail, append_row

LAUNCHES = "launches.jsonl"


def record(
    run_dir: Path,
    recipe: str | None,
    arguments: Sequence[str],
    versions: Mapping[str, str],
    code: Mapping[str, str] = MappingProxyType({}),
    git: Mapping[str, Any] | None = None,
) -> int:
    """Append a launch; return the number of those before it.

    `recipe`: None for a resume. `code`: digests of own modules by file. `git`: commit and state of
    the working directory, None without one.
    """
    before = len(launches(run_dir))
    row = {
        "time": utc(),
        "recipe": recipe,
        "command": mask(shlex.join(["evolver-async", *map(_shown, arguments)])),
        "versions": dict(versions),
        "code": dict(code),
        "git": git and dict(git),
    }
    append_row(run_dir / LAUNCHES, row)
    return before


def launches(run_dir: Path) -> list[dict[str, Any]]:
    """Return all launches, the first one first."""
    return Tail(run_dir / LAUNCHES).rows()


def summary(run_dir: Path) -> dict[str, Any]:
    """Return the recipe, the command lines and the newest versions, as W&B's config holds them."""
    found = launches(run_dir)
    if not found:
        return {}
    recipe = next((one["recipe"] for one in found if one["recipe"] is not None), None)
    commands = [one["command"] for one in found]
    return {"recipe": recipe, "command": commands, "versions": found[-1]["versions"]}


def _shown(argument: str) -> str:
    """Return an argument, without the value of a key whose name says that it is secret."""
    name, equals, _ = argument.partition("=")
    return f"{name}=***" if equals and looks_secret(name.rpartition(".")[2]) else argument
