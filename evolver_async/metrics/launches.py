"""Launches of a run, <run>/launches.jsonl: recipe, command line and versions of each."""

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evolver_async.config.secrets import looks_secret, mask
from evolver_async.durations import utc
from evolver_async.metrics.tail import Tail, append_row

LAUNCHES = "launches.jsonl"


def record(
    run_dir: Path, recipe: str | None, arguments: Sequence[str], versions: Mapping[str, str]
) -> int:
    """Append a launch; return the number of those before it. `recipe`: None for a resume."""
    before = len(launches(run_dir))
    row = {
        "time": utc(time.time()),
        "recipe": recipe,
        "command": mask(shlex.join(["evolver-async", *map(_shown, arguments)])),
        "versions": dict(versions),
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
