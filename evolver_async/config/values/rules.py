"""Rules that a field's annotation carries, and the check of a section's values by them.

The choices of a field are its `Literal`; a range or a pattern is the metadata of its `Annotated`,
and so are its scope, if it differs from that of the section, and the mark of a path.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Flag, auto
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from evolver_async.config.values.config_error import ConfigError

T = TypeVar("T")
PLAIN_BYTES = 32_768  # of free parameters: those of a task travel in the head of a message
PLAIN_DEPTH = 16  # of maps and lists in them: a message has some around them
USUAL = 1 << 63  # smaller numbers fit into journal and wire


class Scope(Flag):
    """Changes that a key permits. A key of a stage can differ between stages."""

    STAGE = 0
    RUN = auto()  # all stages share it: no override of a stage can change it
    # the learner alone reads it: a rerun can change it, and so can a rollback if it is no RUN
    LEARNER = auto()
    WEIGHTS = auto()  # weights have their shape or scale by it: fixed once there is a checkpoint
    DATA = auto()  # the data in the journal was made by it: fixed on resume
    REPLAY = auto()  # the buffer replays the journal by it: fixed once the stage has begun

    def __str__(self) -> str:
        first = "run" if Scope.RUN in self else "stage"
        return ", ".join([first, *(str(one.name).lower() for one in self & ~Scope.RUN)])


@dataclass(frozen=True)
class FilePath:
    """A path, which a run makes absolute to read it again from another working directory."""

    but: tuple[str, ...] = ()  # texts that are no path
    hub: bool = False  # the id of a hub is no path; a run can have a copy of the content
    own: bool = False  # an import path is no path


@dataclass(frozen=True)
class Range:
    """Allowed numbers. A number without a range of its own is finite and at least 0."""

    ge: float = 0
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    infinite: bool = False  # inf is allowed
    also: float = math.nan  # one number outside the range, with a meaning of its own

    def allows(self, value: float) -> bool:
        """True if the field may have this number."""
        if value == self.also:
            return True
        inside = self.ge <= value <= self.le and self.gt < value
        return inside and (value < self.lt or (self.infinite and value == math.inf))

    def __str__(self) -> str:
        if self.ge == -math.inf:
            return "a finite number"
        lower = f"greater than {self.gt}" if self.gt >= self.ge else f"at least {self.ge}"
        upper = f" and at most {self.le}" if self.le < math.inf else ""
        upper = f" and less than {self.lt}" if self.lt < math.inf else upper
        also = "" if math.isnan(self.also) else f", or {self.also:g}"
        return f"{lower}{upper}{also}"


@dataclass(frozen=True)
class Pattern:
    """Allowed texts: a regular expression for all of the text, and its meaning in words."""

    pattern: str
    words: str
    hidden: bool = False  # errors leave the value out, because it could be a secret by mistake

    def allows(self, value: object) -> bool:
        """True if the field may have this value, which need not be a text."""
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.words


class OneOf:
    """The values of a `Literal`."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def allows(self, value: str) -> bool:
        """True if the field may have this value."""
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


class Open(OneOf):
    """The names of the built-in implementations, or the import path of one's own."""

    def allows(self, value: str) -> bool:
        """True if the field may have this value."""
        return super().allows(value) or re.fullmatch(IMPORT_PATH, value) is not None

    def __str__(self) -> str:
        return f"{super().__str__()}, or package.module:function"


ImportPath = Annotated[str, Pattern(IMPORT_PATH, "package.module:function")]
Variable = Annotated[
    str, Pattern(r"([A-Za-z_]\w*)?", "the name of an environment variable", hidden=True)
]
Positive = Annotated[float, Range(gt=0)]
PositiveOrInfinite = Annotated[float, Range(gt=0, infinite=True)]
Fraction = Annotated[float, Range(le=1)]
PositiveFraction = Annotated[float, Range(gt=0, le=1)]
Signed = Annotated[float, Range(ge=-math.inf)]
Count = Annotated[int, Range(ge=1)]


@cache
def annotations(kind: type) -> dict[str, Any]:
    """Return the annotations of a dataclass by field name, with their metadata."""
    return get_type_hints(kind, include_extras=True)


def unwrapped(annotation: Any) -> Any:
    """Return the type of an annotation without its metadata."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def mark(annotation: Any, kind: type[T] | tuple[type[T], ...]) -> T | None:
    """Return the metadata of this kind that an annotation carries. None if there is none."""
    found = (one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, kind))
    return next(found, None)


def rule(annotation: Any) -> Range | Pattern | OneOf | None:
    """Return the rule of an annotation. None if every value of its type is allowed."""
    kind = unwrapped(annotation)
    if get_origin(kind) is Literal:
        return OneOf(*get_args(kind))
    return mark(annotation, (Range, Pattern, Open)) or (Range() if kind in (int, float) else None)


def item_kind(annotation: Any) -> Any:
    """Return the type of the items of a list or of a mapping. None for another annotation."""
    kind = unwrapped(annotation)
    return get_args(kind)[-1] if get_origin(kind) in (list, dict) else None


def keys(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a dataclass and of the sections in it, with its annotation."""
    for name, annotation in annotations(kind).items():
        section = unwrapped(annotation)
        if isinstance(section, type) and is_dataclass(section):
            yield from keys(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", annotation


def check_fields(section: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first value in a section that its field does not allow."""
    for name, annotation, allowed in _rules(type(section)):
        value = getattr(section, name)
        if not _is_usual(value) or (allowed and not allowed.allows(value)):
            check_value(f"{prefix}{name}", value, annotation)


def _is_usual(value: Any) -> bool:
    """Return True for a text or a number that needs its rule alone."""
    if isinstance(value, str):
        return value.isascii()
    return isinstance(value, int | float) and abs(value) < USUAL


@cache
def _rules(kind: type) -> tuple[tuple[str, Any, Range | Pattern | OneOf | None], ...]:
    return tuple((name, one, rule(one)) for name, one in annotations(kind).items())


def check_value(key: str, value: Any, annotation: Any) -> None:
    """Raise ConfigError, naming `key`, for a value that its field's annotation does not allow."""
    if is_dataclass(value):
        check_fields(value, f"{key}.")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            check_value(f"{key}[{index}]", part, item_kind(annotation))
    elif is_dataclass(item_kind(annotation)):
        for name, part in value.items():
            check_fields(part, f"{key}.{name}.")
    elif (allowed := rule(annotation)) and not allowed.allows(value):
        finite = not isinstance(value, float) or math.isfinite(value)
        shown = "" if isinstance(allowed, Pattern) and allowed.hidden else f", is {value!r}"
        raise ConfigError(f"{key}: must be {allowed if finite else 'finite'}{shown}")
    else:
        _check_part(key, value, True, PLAIN_DEPTH)


def check_plain(key: str, value: Any) -> None:
    """Raise ConfigError for parameters, or a part of them, that journal and wire do not carry.

    They carry text, booleans, None, finite numbers and lists and maps of these, of bounded size.
    """
    _check_part(key, value, False, PLAIN_DEPTH)
    if (size := len(msgspec.msgpack.encode(value))) > PLAIN_BYTES:
        raise ConfigError(f"{key}: {size} bytes, at most {PLAIN_BYTES} are allowed")


def _check_part(key: str, value: Any, infinite: bool, depth: int) -> None:
    if depth < 0:
        raise ConfigError(f"{key}: nested deeper than {PLAIN_DEPTH}")
    if isinstance(value, dict):
        for name, item in value.items():
            if type(name) not in (str, int):
                raise ConfigError(f"{key}: key {name!r}: must be text or an integer")
            _check_part(f"{key}: key {name!r}", name, infinite, depth)
            _check_part(f"{key}.{name}", item, infinite, depth - 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_part(f"{key}[{index}]", item, infinite, depth - 1)
    elif isinstance(value, float):
        if math.isnan(value) or (math.isinf(value) and not infinite):
            raise ConfigError(f"{key}: must be finite, is {value}")
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ConfigError(f"{key}: must be in -2**63..2**64 - 1")
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
            raise ConfigError(f"{key}: must be text without surrogates")
    elif value is not None:
        raise ConfigError(f"{key}: {type(value).__name__} has no place here")
