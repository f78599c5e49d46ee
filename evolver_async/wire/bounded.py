"""Bounded decoding of a header to plain values: maps with text or integer keys, lists, numbers.

Decoding comes before any type is checked, so it trusts no length, depth or number of values.
Extension types and byte strings are refused, so no object can be made. The strict typed conversion
that follows is here as well, because it raises the same error.
"""

import math
from typing import Any

import msgpack
import msgspec

DEPTH = 32
# Of maps and lists; one takes some 60 bytes of memory and may take a single byte of the header.
FREE_CONTAINERS = 4096
KEY_TYPES = {str, int}
PLAIN_TYPES = {str, int, bool, type(None)}
REASON = 300  # characters of a decoder's message
NOT_PLAIN = "header: a key twice in one map, or a value not in its shortest form"


class WireError(ValueError):
    """Bytes that are not a message; the text names the field. `message_id` is 0 if unknown."""

    message_id = 0


def parse_plain(
    header: bytes | msgspec.Raw, container_bytes: int, within: str = ""
) -> dict[Any, Any]:
    """Decode a msgpack header to plain values. Raises WireError, with paths from `within` on.

    No length may exceed the header's own, and there may be one map or list (or entry of one map)
    for every `container_bytes` of its bytes: memory stays within a multiple of the header. Every
    value must have the form that msgpack writes, and no map may hold a key twice.
    """
    header = bytes(header)
    size = len(header)
    most = left = FREE_CONTAINERS + size // container_bytes

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise WireError(f"header: more than {most} maps and lists in {size} bytes")
        return container

    hook = count if size > most else None  # in fewer bytes there cannot be so many
    try:
        plain = msgpack.unpackb(
            header,
            raw=False,
            strict_map_key=False,  # RENEW has integer keys; `_check_plain` looks at every key
            object_hook=hook,
            list_hook=hook,
            max_str_len=size,
            max_array_len=size,
            max_map_len=min(size, most),
            max_bin_len=0,
            max_ext_len=0,
        )
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError) as error:  # includes bad UTF-8 and deep nesting
        raise WireError(f"header: not msgpack ({type(error).__name__}: {error})") from error
    if type(plain) is not dict:
        raise WireError(f"header: {type(plain).__name__} instead of a map{within and ' with type'}")
    _check_plain(plain, (within,) if within else ())
    if msgpack.packb(plain) != header:
        raise WireError(NOT_PLAIN)
    return plain


def convert(plain: Any, kind: Any) -> Any:
    """Convert plain values to a `kind`, strictly."""
    try:
        return msgspec.convert(plain, kind)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(str(error)[:REASON]) from error


def _check_plain(node: Any, path: tuple[Any, ...]) -> None:
    """Raise WireError, which names the path, for a value that is not JSON-like."""
    if len(path) > DEPTH:
        raise WireError(f"header: nested deeper than {DEPTH}")
    values = node
    if type(node) is dict:
        values = node.values()
        if not KEY_TYPES.issuperset(map(type, node)):
            name = next(name for name in node if type(name) not in KEY_TYPES)
            raise WireError(f"header: key {name!r:.80} is neither text nor an integer")
    if PLAIN_TYPES.issuperset(map(type, values)):
        return
    for name, value in node.items() if type(node) is dict else enumerate(node):
        kind = type(value)
        if kind in PLAIN_TYPES:
            continue
        if kind is dict or kind is list:
            _check_plain(value, (*path, name))
        elif kind is not float:
            raise WireError(f"{_dotted((*path, name))}: {kind.__name__} has no place here")
        elif not math.isfinite(value):
            raise WireError(f"{_dotted((*path, name))}: {value} is not a finite number")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(f"{name!s:.40}" for name in path)
