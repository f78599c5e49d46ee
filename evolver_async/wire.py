"""How messages become bytes: a msgpack header and raw little-endian arrays, never pickle.

A message is a list of frames: `[header, array, array, …]`. The header is a CRC32 (uint32) and a map
of protocol, run, sender, incarnation, id, schema hash, body and arrays; inside the body an array is
its index into `arrays`, whose entries give dtype, shape and CRC32 of each frame. Decoding is
bounded before it is typed: frame sizes, then msgpack limits, then plain values only, then a strict
typed conversion (where the schema types check their values). Whatever is wrong is a `WireError`
naming the field.

The untyped half of decoding is in `plain.py`, sockets live in `transport.py`; the records of the
journal use the same code (`pack_record`).
"""

import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from evolver_async.messages import Part, Push, Reply, Request
from evolver_async.plain import WireError, parse_plain

PROTOCOL = 1

Buffer = bytes | bytearray | memoryview
DTYPES = {name: np.dtype(name) for name in ("int8", "uint8", "int16", "int32", "float32")}
NAMES: dict[np.dtype, Any] = {dtype: name for name, dtype in DTYPES.items()}
ARRAYS_PER_TRAJECTORY = 7  # at least: four of a sequence, three of the trajectory
ALIGNMENT = 8
NAME_BYTES = 255  # of a run or a sender
REASON = 300  # characters of a decoder's own words
assert sys.byteorder == "little", "arrays travel in the byte order of the host"


class MismatchError(WireError):
    """The other side speaks another protocol version or has other message types."""


@dataclass(frozen=True)
class Limits:
    """What is refused before anything is interpreted. Sizes in bytes."""

    header_bytes: int = 64 << 10  # of a trajectory
    other_header_bytes: int = 1 << 20  # of a message without trajectories
    group_header_bytes: int = 16 << 20  # of all members of a group together
    arrays: int = 16 << 10
    array_bytes: int = 16 << 20
    message_bytes: int = 256 << 20

    def header(self, kind: type | None, arrays: int) -> int:
        """The largest header of a message of this type (None: of any) with so many arrays."""
        if kind is Push:
            return self.header_bytes
        members = max(1, arrays // ARRAYS_PER_TRAJECTORY)
        group = min(members * self.header_bytes, self.group_header_bytes)
        if kind is Part:
            return group
        return self.other_header_bytes if kind else max(self.other_header_bytes, group)


LIMITS = Limits()


@dataclass(frozen=True)
class Envelope:
    """One message with who sent it; a reply carries the `message_id` of its request."""

    run_id: str
    sender: str
    incarnation: int
    message_id: int
    message: Request | Reply


class _Array(msgspec.Struct, forbid_unknown_fields=True):
    """What a frame holds. One-dimensional: every array of the schema is."""

    dtype: Literal["int8", "uint8", "int16", "int32", "float32"]
    shape: tuple[int]
    crc: int


class _Preamble(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A header without its body."""

    protocol: int
    run: str
    sender: str
    incarnation: int
    id: int
    schema: str
    arrays: list[_Array]


class _Content(msgspec.Struct):
    """A body and its arrays. The body is encoded first, which is what fills `arrays`."""

    body: Any
    arrays: list[_Array]


class _Header(_Content, kw_only=True):
    protocol: int
    run: str
    sender: str
    incarnation: int
    id: int
    schema: str


def schema_hash() -> str:
    """A hash of every message type's fields and their types; documentation does not count."""

    def without_text(node: Any) -> Any:
        if isinstance(node, dict):
            kept = {k: v for k, v in node.items() if not (k == "description" and type(v) is str)}
            return {k: without_text(v) for k, v in kept.items()}
        return [without_text(item) for item in node] if isinstance(node, list) else node

    schema = msgspec.json.schema(Request | Reply, schema_hook=lambda kind: {"array": kind.__name__})
    text = json.dumps(without_text(schema), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


SCHEMA_HASH = schema_hash()
TYPES: dict[str, type] = {
    kind.__struct_config__.tag: kind for kind in (*get_args(Request), *get_args(Reply))
}


def pack(envelope: Envelope, limits: Limits = LIMITS) -> list[Buffer]:
    """The frames of a message; arrays are views, not copies. WireError if it is over the limits."""
    specs: list[_Array] = []
    header = _Header(
        protocol=PROTOCOL,
        run=envelope.run_id,
        sender=envelope.sender,
        incarnation=envelope.incarnation,
        id=envelope.message_id,
        schema=SCHEMA_HASH,
        body=envelope.message,
        arrays=specs,
    )
    frames = _encode(header, specs)
    views = [memoryview(frame) for frame in frames]
    _check_sizes(views, limits)
    _check_header(views, type(envelope.message), limits)
    return frames


def unpack(frames: Sequence[Any], limits: Limits = LIMITS) -> Envelope:
    """The message of these frames; its arrays are read-only views on them.

    Raises WireError, and nothing else, whatever the frames hold; MismatchError if both sides are
    of different versions.
    """
    views = [memoryview(frame).toreadonly() for frame in frames]
    _check_sizes(views, limits)
    header = parse_plain(views[0])
    message_id = header.get("id")
    try:
        return _open(header, views, limits)
    except WireError as error:
        # lets a refusal be matched to its request
        error.message_id = message_id if type(message_id) is int and message_id >= 0 else 0
        raise


def pack_record(record: Any) -> bytes:
    """One blob of a msgspec value: header length, header, arrays, each padded to 8 bytes."""
    specs: list[_Array] = []
    header, *arrays = _encode(_Content(body=record, arrays=specs), specs)
    parts: list[Buffer] = [struct.pack("<I", len(header)), header, _padding(4 + len(header))]
    for array in arrays:
        parts += (array, _padding(memoryview(array).nbytes))
    return b"".join(parts)


def unpack_record(blob: Any, kind: Any, limits: Limits = LIMITS) -> Any:
    """The value of type `kind` in a blob of `pack_record`; WireError if it is not one."""
    view = memoryview(blob).toreadonly()
    if view.nbytes < 4 or view.nbytes > limits.message_bytes:
        raise WireError(f"record: {view.nbytes} bytes")
    end = 4 + struct.unpack_from("<I", view)[0]
    if end > min(view.nbytes, 4 + limits.group_header_bytes):
        raise WireError(f"header: {end - 4} bytes in a record of {view.nbytes}")
    header = parse_plain(view[4:end], bytes_each=1)  # our own: a snapshot may be made of numbers
    body = header.pop("body", None)
    specs = _convert(header.pop("arrays", None), list[_Array])
    if header:
        raise WireError(f"record: unknown field {min(map(str, header))}")
    frames = []
    for spec in specs:
        start = end + -end % ALIGNMENT
        end = start + max(0, spec.shape[0]) * DTYPES[spec.dtype].itemsize
        frames.append(view[start:end])
    if end + -end % ALIGNMENT != view.nbytes:
        raise WireError(f"arrays: {end} bytes declared in a record of {view.nbytes}")
    return _typed(body, kind, specs, frames)


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def _encode(content: _Content, specs: list[_Array]) -> list[Buffer]:
    """Header and arrays; every array met while the body is encoded is appended to `specs`."""
    frames: list[Buffer] = [b""]

    def lift(value: Any) -> int:
        name = NAMES.get(value.dtype) if isinstance(value, np.ndarray) else None
        if name is None or value.ndim != 1:
            raise WireError(f"body: {type(value).__name__} {value!r:.80} has no place on the wire")
        data = np.ascontiguousarray(value).data
        specs.append(_Array(name, value.shape, zlib.crc32(data)))
        frames.append(data)
        return len(specs) - 1

    header = msgspec.msgpack.encode(content, enc_hook=lift)
    frames[0] = struct.pack("<I", zlib.crc32(header)) + header
    return frames


def _check_sizes(frames: Sequence[memoryview], limits: Limits) -> None:
    if not frames:
        raise WireError("header: missing")
    if len(frames) - 1 > limits.arrays:
        raise WireError(f"arrays: {len(frames) - 1}, the limit is {limits.arrays}")
    _check_header(frames, None, limits)
    sizes = [frame.nbytes for frame in frames]
    if max(sizes[1:], default=0) > limits.array_bytes:
        raise WireError(f"arrays: {max(sizes[1:])} bytes, the limit is {limits.array_bytes}")
    if sum(sizes) > limits.message_bytes:
        raise WireError(f"message: {sum(sizes)} bytes, the limit is {limits.message_bytes}")


def _check_header(frames: Sequence[memoryview], kind: type | None, limits: Limits) -> None:
    limit = limits.header(kind, len(frames) - 1)
    if frames[0].nbytes > limit:
        raise WireError(f"header: {frames[0].nbytes} bytes, the limit is {limit}")


def _open(header: dict[Any, Any], views: list[memoryview], limits: Limits) -> Envelope:
    """Preamble first: another version's body must be a mismatch, not a puzzle of fields."""
    body = header.pop("body", None)
    for name, ours in (("protocol", PROTOCOL), ("schema", SCHEMA_HASH)):
        theirs = header.get(name)
        if theirs != ours:
            raise MismatchError(f"{name}: the sender has {theirs!r:.80}, this side has {ours!r}")
    preamble = _convert(header, _Preamble)
    if preamble.incarnation < 0 or preamble.id < 0:
        raise WireError(f"incarnation, id: negative ({preamble.incarnation}, {preamble.id})")
    for name, text in (("run", preamble.run), ("sender", preamble.sender)):
        if len(text.encode()) > NAME_BYTES:
            raise WireError(f"{name}: longer than {NAME_BYTES} bytes")
    name = body.get("type") if type(body) is dict else None
    kind = TYPES.get(name) if type(name) is str else None
    if kind is None:
        raise WireError(f"type: {name!r:.80} is no message")
    _check_header(views, kind, limits)
    return Envelope(
        run_id=preamble.run,
        sender=preamble.sender,
        incarnation=preamble.incarnation,
        message_id=preamble.id,
        message=_typed(body, kind, preamble.arrays, views[1:]),
    )


def _convert(plain: Any, kind: Any, dec_hook: Any = None) -> Any:
    try:
        return msgspec.convert(plain, kind, dec_hook=dec_hook)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(str(error)[:REASON]) from error


def _typed(body: Any, kind: Any, specs: list[_Array], frames: Sequence[memoryview]) -> Any:
    """The body as a `kind`, each array put in exactly once."""
    arrays = _arrays(specs, frames)

    def place(wanted: type, index: Any) -> np.ndarray:
        if wanted is not np.ndarray or type(index) is not int or not 0 <= index < len(arrays):
            raise ValueError(f"array {index!r:.80} of {len(arrays)}")
        array, arrays[index] = arrays[index], None
        if array is None:
            raise ValueError(f"array {index} used twice")
        return array

    value = _convert(body, kind, place)
    unused = [index for index, array in enumerate(arrays) if array is not None]
    if unused:
        raise WireError(f"arrays: {unused[0]} is not used by the body")
    return value


def _arrays(specs: list[_Array], frames: Sequence[memoryview]) -> list[np.ndarray | None]:
    if len(specs) != len(frames):
        raise WireError(f"arrays: {len(specs)} declared, {len(frames)} came")
    arrays: list[np.ndarray | None] = []
    for index, (spec, frame) in enumerate(zip(specs, frames, strict=True)):
        dtype = DTYPES[spec.dtype]
        if spec.shape[0] < 0 or spec.shape[0] * dtype.itemsize != frame.nbytes:
            raise WireError(
                f"arrays[{index}].shape: {spec.shape[0]} × {spec.dtype} in {frame.nbytes} bytes"
            )
        if zlib.crc32(frame) != spec.crc:
            raise WireError(f"arrays[{index}].crc: the data is damaged")
        arrays.append(np.frombuffer(frame, dtype))
    return arrays
