"""Secrets, which stay in the environment: a configuration refers to them, and no file holds them.

`${oc.env:NAME}` among an environment's own parameters is kept as that text in every dump, on the
wire and in the journal; `reveal` reads the variable in the process that uses it. Logs go through
`mask`. Values that came from the environment are never part of an error.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

from evolver_async.config.values.config_error import ConfigError, references

# Sections with keys of the user's own, without list indices. A stage's override can hold them too.
FREE = (".env.params", ".tasks.mixture.params")
JUDGE = "judge.params"  # of a judge of one's own: no reference stays one there
MASK = "***"
SHORTEST = 8  # characters of a masked text: a shorter one would occur in unrelated words
REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")
OPENING = re.compile(r"(\\*)\$\{")  # of an interpolation, with the backslashes before it
INDEX = re.compile(r"\[\d+\]")
MENTIONED = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")
SECRET = re.compile(  # the plurals `keys` and `tokens` alone count things
    r"(^|_)(key|token|auth|authorization|bearer|cookie|credentials?|passphrase|passwd|dsn|pat)$"
    r"|(^|_)(api|access|auth|private)_?(key|token)s?$|(password|apikey)s?$|(^|_)secrets?(_|$)"
)
SHAPE = re.compile(  # a URL with a user's part, and tokens that say what they are
    r"[a-zA-Z][\w+.-]*://[^/@\s]+@|(gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|hf_|pypi-|AKIA|eyJ)\w{8}"
)

_revealed: set[str] = set()  # variables that hold a secret, by their use and not by their name


@lru_cache(maxsize=4096)
def looks_secret(name: str) -> bool:
    """Return True if the name of a key or an environment variable says that its value is secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return bool(SECRET.search(words))


def reveal(params: Any, key: str = "env.params") -> Any:
    """Return parameters with values for references. Raise ConfigError for a variable not set."""
    return _revealed_in(params, key, False)


def secret(name: str, key: str) -> str:
    """Return the secret in the environment variable `name` of configuration key `key`.

    From now on `mask` removes it. Raise ConfigError if the variable is not set.
    """
    if name not in os.environ:
        raise ConfigError(f"{key}: the environment variable {name} is not set")
    _revealed.add(name)
    return os.environ[name]


def mask(text: str) -> str:
    """Replace the values of the environment's secrets in `text`, plain or encoded, by asterisks."""
    for name, value in os.environ.items():
        if len(value) < SHORTEST:
            continue
        if name in _revealed or looks_secret(name) or SHAPE.match(value):
            for form in _forms(value):
                if form in text:
                    text = text.replace(form, MASK)
    return text


@lru_cache(maxsize=1024)
def _forms(value: str) -> tuple[str, ...]:
    """Return the texts that can represent a secret, the longest first.

    Plain, percent-encoded, escaped as in JSON and in Python's repr, and each line by itself.
    """
    lines = [line.strip() for line in value.splitlines()]
    forms = {value, *(line for line in lines if len(line) >= SHORTEST)}
    for plain in list(forms):
        raw = plain.encode(errors="surrogateescape")
        for encoded in (quote(raw), quote(raw, safe=""), quote_plus(raw)):
            forms |= {encoded, re.sub(r"%..", lambda code: code[0].lower(), encoded)}
        forms |= {json.dumps(plain, ensure_ascii=only)[1:-1] for only in (True, False)}
        forms |= {repr(plain)[1:-1], repr(raw)[2:-1], ascii(plain)[1:-1]}
        forms |= {form.replace("/", r"\/") for form in forms}  # JSON can escape it as well
    return tuple(sorted(forms, key=len, reverse=True))


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration without the entries whose names say that they are secret."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not looks_secret(str(name))
    }


def refuse_written(config: Any) -> None:
    """Raise ConfigError for a secret in a raw configuration, or one that a file would hold."""
    for key, text, free, secret in _texts(config):
        if secret and text and not (free and REFERENCE.search(text)):
            refer = "write ${oc.env:NAME}" if free else "read it in your function"
            raise ConfigError(
                f"{key}: looks like a secret: set an environment variable and {refer}"
            )
        if free and REFERENCE.search(text) and "${" in REFERENCE.sub("", text):
            raise ConfigError(f"{key}: can refer to environment variables or to keys, not to both")
        named = next(filter(looks_secret, MENTIONED.findall(text)), None)
        if named and not (free and REFERENCE.search(text)):
            raise ConfigError(f"{key}: {named} looks like a secret, which files would hold")


def mentioned(config: Any) -> set[str]:
    """Return the names of the variables to which values of a configuration refer."""
    return {name for _, text, _, _ in _texts(config) for name in MENTIONED.findall(text)}


def note_references(config: Any) -> None:
    """Make errors show references instead of the values of a raw configuration's variables."""
    for _, text, _, _ in _texts(config):
        for name in MENTIONED.findall(text):
            if value := os.environ.get(name, ""):
                for form in {value, *value.split("\n"), repr(value)[1:-1], *_numbers(value)} - {""}:
                    references[form] = f"${{oc.env:{name}}}"


def _numbers(value: str) -> Iterator[str]:
    """Yield the other texts of a value that is a number, as errors write them."""
    for kind in (int, float):
        with suppress(ValueError):
            yield from (f"{kind(value)}", f"{kind(value):g}")


def kept(params: Any) -> Any:
    """Escape references in parameters, so that the resolution of interpolations keeps them."""
    if isinstance(params, dict):
        return {name: kept(value) for name, value in params.items()}
    if isinstance(params, list):
        return [kept(value) for value in params]
    if isinstance(params, str) and REFERENCE.search(params):
        return params.replace("${", "\\${")
    return params


def escaped(node: Any, key: str = "") -> Any:
    """Escape `${` in values of a resolved configuration below `key`, so that they read back equal.

    References among parameters, and those in the override of a stage, stay references.
    """
    if isinstance(node, dict):
        return {name: escaped(value, f"{key}.{name}") for name, value in node.items()}
    if isinstance(node, list):
        return [escaped(value, key) for value in node]
    refers = any(f"{path}." in f"{key}." for path in (".override", *FREE))
    if not isinstance(node, str) or (refers and REFERENCE.search(node)):
        return node
    return OPENING.sub(lambda found: found[1] * 2 + r"\${", node)


def _texts(
    node: Any, key: str = "", free: bool = False, secret: bool = False
) -> Iterator[tuple[str, str, bool, bool]]:
    """Yield every text of a section with its key, True if the key is free, and True if a
    parameter's name is secret."""
    if isinstance(node, str):
        yield key, node, free, secret
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _texts(value, f"{key}[{index}]", free, secret)
    elif is_dataclass(node) or isinstance(node, dict):
        place = f".{INDEX.sub('', key)}" if key else ""
        own = free or f".{JUDGE}." in f"{place}."
        for name, value in (node if isinstance(node, dict) else vars(node)).items():
            if value is None or isinstance(value, int | float):
                continue
            inside = free or f"{place}.{name}".endswith(FREE)
            named = own and looks_secret(str(name))
            yield from _texts(value, f"{key}.{name}" if key else str(name), inside, secret or named)


def _revealed_in(node: Any, key: str, secret_named: bool) -> Any:
    if isinstance(node, dict):
        return {
            name: _revealed_in(value, f"{key}.{name}", secret_named or looks_secret(str(name)))
            for name, value in node.items()
        }
    if isinstance(node, list):
        return [_revealed_in(value, f"{key}[{i}]", secret_named) for i, value in enumerate(node)]
    if not isinstance(node, str):
        return node

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if secret_named:
            return secret(name, key)
        if name not in os.environ:
            raise ConfigError(f"{key}: the environment variable {name} is not set")
        return os.environ[name]

    return REFERENCE.sub(value_of, node)
