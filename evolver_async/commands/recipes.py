"""Recipes by name: the search for the one that a command names, and `evolver-async recipes`.

The files are those of the repository's `configs/`: `evolver_async/recipes` is a link to it in a
checkout, and holds copies in a wheel.
"""

import argparse
import difflib
import itertools
import os
from importlib.resources import files
from pathlib import Path

from evolver_async.config.values.config_error import ConfigError
from evolver_async.terminal import say

RECIPES = Path(str(files("evolver_async"))) / "recipes"
STUDIES = "studies/"  # folder of the files of `study`, which no other command reads


def recipe_path(text: str) -> Path:
    """Return the file of a recipe: a path, or the name of one that is shipped.

    Raises ConfigError, with the names that are close, if there is neither.
    """
    if os.path.isfile(text):
        return Path(text)
    if os.path.isfile(os.path.join(text, "config.yaml")):
        raise ConfigError(
            f"{text}: is the directory of a run, whose recipe is {Path(text) / 'config.yaml'}; "
            f"to continue the run: evolver-async train --resume {text}"
        )
    named = _recipes()
    if text in named:
        return named[text]
    hint = " or ".join(_close(text, named))
    raise ConfigError(
        f"{text}: is neither a file nor the name of a recipe"
        f"{f', did you mean {hint}?' if hint else ''} (evolver-async recipes lists the names)"
    )


def names_file(text: str) -> bool:
    """Return True for an argument that names a recipe or a study, False for a change KEY=VALUE."""
    # Path.is_file raises for a text that is too long for the name of a file
    return "=" not in text or os.path.isfile(text)


def list_recipes(_: argparse.Namespace) -> int:
    """Print the name of every recipe with the head of its first comment, then their directory."""
    everything = _recipes()
    named = {name: path for name, path in everything.items() if not name.startswith(STUDIES)}
    width = max(map(len, named))
    for name, path in named.items():
        say(f"{name:{width}}  {_headline(path)}")
    say(f"\nTrain one by its name: evolver-async train NAME. The files are in {RECIPES.resolve()}.")
    studies = [name.removeprefix(STUDIES) for name in everything.keys() - named.keys()]
    say(f"Studies, for evolver-async study NAME: {', '.join(sorted(studies))}.")
    return 0


def _recipes() -> dict[str, Path]:
    """Files of the shipped recipes by name; those of the top directory come first."""
    paths = [*sorted(RECIPES.glob("*.yaml")), *sorted(RECIPES.glob("*/*.yaml"))]
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in paths}


def _close(text: str, names: dict[str, Path]) -> list[str]:
    """Names that end like `text`, else those that are spelled alike, or whose end is."""
    wanted = text.removesuffix(".yaml").removeprefix("configs/")
    last = wanted.rpartition("/")[2]
    ends = {name.rpartition("/")[2]: name for name in reversed(names)}
    same = [name for name in names if name.rpartition("/")[2] == last]
    alike = (difflib.get_close_matches(one, names, n=3) for one in (wanted, last))
    alike_ends = (ends[end] for end in difflib.get_close_matches(last, ends, n=3))
    return same or list(dict.fromkeys([*itertools.chain(*alike), *alike_ends]))[:3]


def _headline(path: Path) -> str:
    """The first line of a recipe's comment, cut after its last whole sentence if it has one."""
    line = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
    sentences, _, _ = line.rpartition(". ")
    if line.endswith("."):
        return line
    return f"{sentences}." if sentences else f"{line} …"
