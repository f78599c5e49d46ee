"""A header as plain values: maps with distinct text or integer keys, lists, finite numbers.

What is decoded before anything is typed, so it trusts nothing: no length, no depth, no number of
values. Extension types and byte strings are refused, so nothing in here can become an object.
"""

import math
import struct
import zlib
from typing import Any

import msgpack

DEPTH = 32
# Of maps and lists; one takes some 60 bytes of memory and may take a single byte of the header.
FREE_CONTAINERS = 4096
BYTES_EACH = 8  # of a header of ours, at least: its maps and lists come with names
KEY_TYPES = {str, int}
PLAIN_TYPES = {str, int, bool, type(None)}


class WireError(ValueError):
    """Bytes that are not a message; says which field. `message_id` is 0 where it is unknown."""

    message_id = 0


def parse_plain(header: memoryview, bytes_each: int = BYTES_EACH) -> dict[Any, Any]:
    """The plain values of a header: CRC32 (uint32) and msgpack. WireError if it is anything else.

    No length may exceed the header's own, and there may be one map or list (or entry of one map)
    for every `bytes_each` of its bytes: memory stays within a small multiple of the header.
    """
    size = header.nbytes
    if size < 4 or struct.unpack_from("<I", header)[0] != zlib.crc32(header[4:]):
        raise WireError("header: the data is damaged")
    most = left = FREE_CONTAINERS + size // bytes_each

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise WireError(f"header: more than {most} maps and lists in {size} bytes")
        return container

    try:
        plain = msgpack.unpackb(
            header[4:],
            raw=False,
            strict_map_key=False,  # RENEW has integer keys; `_distinct` checks every key
            object_pairs_hook=lambda pairs: count(_distinct(pairs)),
            list_hook=count,
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
        raise WireError(f"header: {type(plain).__name__} instead of a map")
    _check_plain(plain, ())
    return plain


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if not KEY_TYPES.issuperset([type(name) for name, _ in pairs]):
        name = next(name for name, _ in pairs if type(name) not in KEY_TYPES)
        raise WireError(f"header: key {name!r:.80} is neither text nor an integer")
    plain = dict(pairs)
    if len(plain) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise WireError(f"header: key {twice!r:.80} twice in one map")
    return plain


def _check_plain(node: Any, path: tuple[Any, ...]) -> None:
    """Refuses what is not JSON-like, with its path."""
    if len(path) > DEPTH:
        raise WireError(f"header: nested deeper than {DEPTH}")
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
