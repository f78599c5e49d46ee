"""Encoding of a trajectory as one run of bytes, which is carried unchanged from its actor on.

    [header bytes u32][header][padding] [array][padding] [array][padding] …

The header is msgpack of the trajectory, in which an array is its dtype and length. The arrays
follow in the same order, little-endian, each at a multiple of 8 bytes, and are read where they lie.

A parcel has no checksum inside: its CRC32 stands beside it, in the header of a message or in a
record of the journal. So one checksum, computed by the actor, guards the same bytes
on the wire, on the disk and on the wire again.

Decoding is bounded by the size of the header and by the types: every field is typed at once. A
header of more than `HEADER_BYTES` may take one in `HEADER_SHARE` bytes: it grows with the number of
sequences, and so do the arrays.
"""

import operator
import struct
import sys
import zlib
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

from evolver_async.errors import Inconsistency
from evolver_async.schema import Array, Sequence, Trajectory
from evolver_async.wire.bounded import NOT_PLAIN, REASON, WireError

HEADER_BYTES = 64 << 10
HEADER_SHARE = 4  # a context of 128 bytes in the header has about 1 KB of arrays
MOST_HEADER_BYTES = 6 << 20  # for a context in each of the 32,767 turns that can be numbered
PARCEL_BYTES = 64 << 20
ALIGNMENT = 8
UNSENT = ("conversation",)  # fields that a header lacks where they are unset
DTYPES = {name: np.dtype(name) for name in ("int8", "uint8", "int16", "int32", "float32")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
if sys.byteorder != "little":
    raise Inconsistency("arrays travel in the byte order of the host, which must be little")


class Parcel(NamedTuple):
    """The bytes of a trajectory, or a view that cannot be written to, and their CRC32."""

    data: bytes | memoryview
    crc: int


def _header_of(kind: type[msgspec.Struct], **other: Any) -> type[msgspec.Struct]:
    """Make the type of a `kind` in a header, where an array is its dtype and length."""
    hints = get_type_hints(kind)
    fields = [(name, tuple[str, int] if hints[name] is Array else hints[name]) for name in hints]
    typed = [(name, other.get(name, its_type)) for name, its_type in fields]
    given = [(*one, msgspec.UNSET) if one[0] in UNSENT else one for one in typed]
    return msgspec.defstruct(kind.__name__, given, kw_only=True, forbid_unknown_fields=True)


_TrajectoryHeader = _header_of(Trajectory, sequences=list[_header_of(Sequence)])  # type: ignore[misc]
_SEQUENCE_ARRAYS, _TRAJECTORY_ARRAYS = (
    tuple(name for name, its_type in get_type_hints(kind).items() if its_type is Array)
    for kind in (Sequence, Trajectory)
)
if (_SEQUENCE_ARRAYS, _TRAJECTORY_ARRAYS) != (
    ("tokens", "roles", "turns", "logprobs"),
    ("turn_rewards", "turn_flags", "labels"),
):
    raise Inconsistency("a parcel has other arrays than a trajectory")
_header_decoder = msgspec.msgpack.Decoder(_TrajectoryHeader)
_header_encoder = msgspec.msgpack.Encoder()


class _Origin(NamedTuple):
    """The parcel of a trajectory and its arrays. `final`: the trajectory is not to change."""

    parcel: Parcel
    arrays: list[np.ndarray]
    final: bool


def wrap(trajectory: Trajectory) -> Parcel:
    """Encode a trajectory; reuse the bytes that it was decoded from if it is unchanged.

    Integer rewards and seconds become floats. Raises WireError if it is too large or holds a value
    of a foreign type.
    """
    origin: _Origin | None = vars(trajectory).get("origin")
    if origin is not None and origin.final:
        return origin.parcel
    trajectory.reward = _fraction(trajectory.reward)
    for named in ("timing", "terms", "metrics"):
        numbers = getattr(trajectory, named)
        setattr(trajectory, named, {name: _fraction(number) for name, number in numbers.items()})
    header, arrays = _encode(trajectory)
    if origin is not None:
        same = origin.parcel.data[4 : 4 + len(header)] == header
        if same and all(map(operator.is_, arrays, origin.arrays)):
            return origin.parcel
    parts: list[Any] = [struct.pack("<I", len(header)), header, _padding(4 + len(header))]
    for array in arrays:
        parts += (np.ascontiguousarray(array).data, _padding(array.nbytes))
    data = b"".join(parts)
    _header_end(data)
    return Parcel(data, zlib.crc32(data))


def unwrap(parcel: Parcel) -> Trajectory:
    """Decode a trajectory, whose CRC32 was compared; its arrays are read-only views on the data.

    Raises WireError and no other error, for any data.
    """
    data = parcel.data
    end = _header_end(data)
    header = data[4:end]
    arrays: list[np.ndarray] = []
    try:
        read: Any = _header_decoder.decode(header)
        if _header_encoder.encode(read) != header:  # as an integer in place of a float
            raise WireError(NOT_PLAIN)
        sequences = []
        for one in read.sequences:
            declared = one.tokens, one.roles, one.turns, one.logprobs
            end = _place(data, end, _SEQUENCE_ARRAYS, declared, arrays)
            tokens, roles, turns, logprobs = arrays[-4:]
            sequences.append(
                Sequence(
                    tokens=tokens,
                    roles=roles,
                    turns=turns,
                    logprobs=logprobs,
                    versions=one.versions,
                )
            )
        declared = read.turn_rewards, read.turn_flags, read.labels
        end = _place(data, end, _TRAJECTORY_ARRAYS, declared, arrays)
        fields = msgspec.structs.asdict(read)
        fields["sequences"] = sequences
        fields["turn_rewards"], fields["turn_flags"], fields["labels"] = arrays[-3:]
        trajectory = Trajectory(**fields)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(str(error)[:REASON]) from error
    if end + -end % ALIGNMENT != len(data):
        raise WireError(f"arrays: {end} bytes declared in a trajectory of {len(data)}")
    vars(trajectory)["origin"] = _Origin(parcel, arrays, False)
    return trajectory


def finish(trajectory: Trajectory) -> Parcel:
    """Return the parcel of a trajectory that will not change any more; `wrap` returns it as well.

    One that was decoded must not have changed since: a relay does not encode it again.
    """
    origin: _Origin | None = vars(trajectory).get("origin")
    parcel = wrap(trajectory) if origin is None else origin.parcel
    vars(trajectory)["origin"] = _Origin(parcel, [], True)
    return parcel


def _place(
    data: bytes | memoryview,
    end: int,
    names: tuple[str, ...],
    declared: tuple[tuple[str, int], ...],
    arrays: list[np.ndarray],
) -> int:
    """Append a view on the data for every declared array; return their end."""
    for name, (kind, length) in zip(names, declared, strict=True):
        dtype = DTYPES.get(kind)
        if dtype is None or length < 0:
            raise ValueError(f"{name}: {(kind, length)!r:.80} is no array")
        start = end + -end % ALIGNMENT
        end = start + length * dtype.itemsize
        if end > len(data):
            raise ValueError(f"{name}: {length} of {kind} end beyond the {len(data)} bytes")
        arrays.append(np.frombuffer(data, dtype, length, start))
    return end


def _fraction(number: float) -> float:
    """Convert an int, as a sum of no rewards is, to the one form that the wire allows."""
    return float(number) if type(number) is int else number


def _encode(trajectory: Trajectory) -> tuple[bytes, list[np.ndarray]]:
    """Encode the header; return it with the arrays in its order."""
    arrays: list[np.ndarray] = []

    def lift(value: Any) -> tuple[str, int]:
        name = NAMES.get(value.dtype) if isinstance(value, np.ndarray) else None
        if name is None or value.ndim != 1:
            raise WireError(f"body: {type(value).__name__} {value!r:.80} has no place on the wire")
        arrays.append(value)
        return name, len(value)

    return msgspec.msgpack.encode(trajectory, enc_hook=lift), arrays


def _header_end(data: bytes | memoryview) -> int:
    """Return the end of the header. Raises WireError if a size is over its limit or cut short."""
    if not 4 <= len(data) <= PARCEL_BYTES:
        raise WireError(f"trajectory: {len(data)} bytes, the limit is {PARCEL_BYTES}")
    size = struct.unpack_from("<I", data)[0]
    limit = min(max(HEADER_BYTES, len(data) // HEADER_SHARE), MOST_HEADER_BYTES)
    if size > min(limit, len(data) - 4):
        raise WireError(f"header: {size} bytes of {len(data)}, the limit is {limit}")
    return 4 + size


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)
