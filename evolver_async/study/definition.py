"""The definition of a study: its recipe, seeds, grid, ties and threshold, from YAML and arguments.

Values are kept as the texts of `key=value` arguments. Nothing here looks at the configuration.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evolver_async.config.arguments import APPEND, text_of
from evolver_async.config.values.config_error import ConfigError
from evolver_async.metrics.families import EVAL_METRICS, evaluated

SEEDS = re.compile(r"(\d+)(?:\.\.(\d+))?")
OPENING, CLOSING, QUOTES = "[{(", "]})", "'\""
VARIANT = "variant"  # name of the axis of variants
SEED = "run.seed"  # the study itself sets it; other keys can follow it


class Threshold(NamedTuple):
    """A metric of evaluations or steps, and the value that a run is to reach."""

    metric: str = "eval/success"
    value: float = 0.8

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"


DEFAULT_THRESHOLD = Threshold()


@dataclass(frozen=True)
class Definition:
    """A study as it is written; each setting of a cell has one source."""

    recipe: str
    seeds: tuple[int, ...] = (0, 1, 2)
    grid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # named settings of several keys at once: an axis before those of the grid
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # key to the swept key that sets it; or to run.seed, so that runs of a seed share what it draws
    tie: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)  # of all cells
    threshold: Threshold = DEFAULT_THRESHOLD
    equivalence: float = 0.0  # margin of the test for equivalence; 0: no test
    cold_start: bool = False  # train the first supervised stages once a seed
    baseline: str = ""  # the cell that others are compared with; "": the first

    def __post_init__(self) -> None:
        if VARIANT in self.grid or VARIANT in self.overrides:
            raise ConfigError(f"{VARIANT}: is no key; a study runs all its variants")
        for key, swept in self.tie.items():
            if swept not in self.grid and swept != SEED:
                known = f"; swept are: {', '.join(self.grid)}" if self.grid else ""
                raise ConfigError(f"tie {key}={swept}: {swept} is not swept{known}")
        variant_keys = {key for changes in self.variants.values() for key in changes}
        sources = {"the grid": self.grid, "a variant": variant_keys, "a tie": self.tie}
        sources["the overrides"] = self.overrides
        seen: dict[str, str] = {}
        for source, keys in sources.items():
            for key in sorted(keys):
                if key in seen:
                    raise ConfigError(f"{key}: is set by {seen[key]} and by {source}")
                seen[key] = source
        for key, values in self.grid.items():
            if len({*values}) < len(values):
                raise ConfigError(f"{key}: a value is repeated: {', '.join(values)}")


def read(path: Path) -> Definition | None:
    """Read a study's YAML; None if the file is a recipe. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: is nested too deep") from None
    if not isinstance(tree, dict) or "recipe" not in tree:
        return None
    try:
        for key in _repeated(yaml.compose(text, Loader=yaml.SafeLoader)):
            raise ConfigError(f"{key}: is given twice in one mapping")
        return _of_tree(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _repeated(node: Any) -> Iterator[str]:
    """Yield the keys that a mapping has twice: the loader of YAML keeps the last one alone.

    It merges all `<<` of a mapping.
    """
    parts = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys if key.tag != "tag:yaml.org,2002:merge"]
        yield from (name for name in names if names.count(name) > 1)
        parts = [part for _, part in node.value]
    for part in parts:
        yield from _repeated(part)


def _of_tree(tree: dict[str, Any]) -> Definition:
    known = [item.name for item in fields(Definition)]
    for name in tree:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise ConfigError(f"{name}: unknown key{f', did you mean {close[0]}?' * bool(close)}")
    definition = Definition(recipe=str(tree["recipe"]))
    readers = {
        "seeds": lambda value: parse_seeds(",".join(map(str, _listed(value)))),
        "grid": lambda value: {
            key: tuple(map(text_of, _listed(values))) for key, values in _map(value).items()
        },
        "variants": lambda value: {name: _texts(changes) for name, changes in _map(value).items()},
        "tie": _texts,
        "overrides": _texts,
        "threshold": parse_threshold,
        "equivalence": parse_margin,
        "baseline": str,
    }
    values: dict[str, Any] = {}
    for name, value in tree.items():
        try:
            values[name] = readers[name](value) if name in readers else value
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if not isinstance(values.get("cold_start", False), bool):
        raise ConfigError(f"cold_start: must be true or false, is {values['cold_start']!r}")
    return replace(definition, **values)


def _map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"must be a mapping, is {value!r}")
    return {str(key): item for key, item in value.items()}


def _texts(value: Any) -> dict[str, str]:
    return {key: text_of(item) for key, item in _map(value).items()}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list) and not value:
        raise ConfigError("must not be an empty list")
    return value if isinstance(value, list) else [value]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds like `0..4`, `0,2,5` or `0..2,7`; both ends of a range belong to it."""
    seeds: list[int] = []
    for part in text.split(","):
        found = SEEDS.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"seeds: {text!r} cannot be read; write 0..4 or 0,1,2")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ConfigError(f"seeds: {part.strip()} ends before it begins")
        seeds += range(first, last + 1)
    if len({*seeds}) < len(seeds):
        raise ConfigError(f"seeds: {text} repeats a seed")
    return tuple(seeds)


def parse_threshold(text: Any) -> Threshold:
    """Read `metric=value`."""
    metric, _, number = str(text).rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not metric or not math.isfinite(value):
        raise ConfigError(f"threshold: must be metric=number like eval/success=0.8, is {text!r}")
    if metric.startswith("eval/") and not evaluated(metric):
        guesses = difflib.get_close_matches(metric, EVAL_METRICS, 1)
        hint = f", did you mean {guesses[0]}?" if guesses else f": {', '.join(EVAL_METRICS)}"
        raise ConfigError(f"threshold: evaluations have no metric {metric}{hint}")
    return Threshold(metric, value)


def parse_margin(text: Any) -> float:
    """Read the margin of the test for equivalence."""
    try:
        margin = float(text)
    except (TypeError, ValueError):
        margin = math.nan
    if not (math.isfinite(margin) and margin >= 0):
        raise ConfigError(f"equivalence: must be a number of at least 0, is {text!r}")
    return margin


def parse_tie(text: str) -> tuple[str, str]:
    """Read `key=swept_key`."""
    key, equals, swept = text.partition("=")
    if not (key and equals and swept):
        raise ConfigError(f"--tie {text}: must be written --tie key=swept.key")
    return key, swept


def split_values(text: str) -> list[str]:
    """Split a text at its commas, except those inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES and not parts[-1].strip():
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    return parts


def with_arguments(definition: Definition, changes: Sequence[str]) -> Definition:
    """Apply `key=value` and `key=value,value` arguments, which replace what the YAML says."""
    grid, overrides, tie = dict(definition.grid), dict(definition.overrides), dict(definition.tie)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise ConfigError(f"{change!r}: arguments are written section.key=value,value")
        if key == APPEND and (key in overrides or key in grid):
            raise ConfigError(f"{APPEND}: a study adds one stage; write others into its recipe")
        values = split_values(text)
        if len(values) > 1 and not all(value.strip() for value in values):
            raise ConfigError(f"{key}: an empty value between commas in {text!r}")
        tie.pop(key, None)
        if len(values) > 1:
            overrides.pop(key, None)
            grid[key] = tuple(value.strip() for value in values)
        else:
            grid.pop(key, None)
            overrides[key] = text
    return replace(definition, grid=grid, overrides=overrides, tie=tie)


def dump(definition: Definition) -> str:
    """Return the definition as YAML that `read` reads back."""
    tree = {
        "recipe": definition.recipe,
        "seeds": list(definition.seeds),
        "grid": {key: list(values) for key, values in definition.grid.items()},
        "variants": {name: dict(changes) for name, changes in definition.variants.items()},
        "tie": dict(definition.tie),
        "overrides": dict(definition.overrides),
        "threshold": str(definition.threshold),
        "equivalence": definition.equivalence,
        "cold_start": definition.cold_start,
        "baseline": definition.baseline,
    }
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
