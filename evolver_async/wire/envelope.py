"""Encoding of messages: a msgpack header and the trajectories that it carries, never pickle.

A message is a list of frames: `[header, trajectory, trajectory, …]`. The header is a CRC32 (uint32)
and a map of protocol, run, sender, incarnation, nonce, id, schema hash, body and the CRC32 of each
of the other frames, which are parcels (see `trajectories`): a PUSH has one, PUSHES have several, a
PART those of its group, and the body omits them. Decoding is bounded before it is typed: frame
sizes, then msgpack limits, then plain values only (`bounded`), then a strict typed conversion, in
which the schema types check their values. Every error is a `WireError` that names the field.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from evolver_async.schema import Trajectory
from evolver_async.wire.bounded import NOT_PLAIN, REASON, WireError, convert, parse_plain
from evolver_async.wire.messages import GroupReply, Push, Pushes, Reply, Request
from evolver_async.wire.trajectory_bytes import PARCEL_BYTES, Parcel, unwrap, wrap

PROTOCOL = 3

NAME_BYTES = 255  # of a run, a sender or a nonce


class MismatchError(WireError):
    """A message of another protocol version, or of other message types."""


class ChecksumError(WireError):
    """A message whose bytes have changed on their way: sent again, it can arrive whole.

    It names no message, so that its refusal ends no request.
    """


@dataclass(frozen=True)
class MessageLimits:
    """Limits that are checked before decoding. Sizes in bytes.

    By default a message may be as large as its parcels: a group that the buffer has accepted, one
    trajectory at a time, must be fit to be sent. A header holds tasks, and one of a row of 1 MiB
    can take 2.4 MiB: as prompt and as column, and a number of three digits takes nine bytes.
    """

    header_bytes: int = 8 << 20
    parcels: int = 4096
    parcel_bytes: int = PARCEL_BYTES
    message_bytes: int = (8 << 20) + 4096 * PARCEL_BYTES
    container_bytes: int = 1  # of the header, for each map and list in it; 1: no limit


LIMITS = MessageLimits()


class Envelope(msgspec.Struct, frozen=True):
    """One message with its sender; a reply carries the `message_id` of its request.

    `nonce` distinguishes processes of one name and incarnation.
    """

    run_id: str
    sender: str
    incarnation: int
    message_id: int
    message: Request | Reply
    nonce: str = ""


class _Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A header, whose body is decoded apart. `parcels`: the CRC32 of each."""

    protocol: int
    run: str
    sender: str
    incarnation: int
    nonce: str
    id: int
    schema: str
    body: msgspec.Raw
    parcels: list[int]


_header_decoder = msgspec.msgpack.Decoder(_Header)
_header_encoder = msgspec.msgpack.Encoder()


def schema_hash() -> str:
    """Hash the fields of every message type and their types, without documentation."""

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


def _refuse(value: Any) -> None:
    raise WireError(f"body: {type(value).__name__} {value!r:.80} has no place on the wire")


_body_encoder = msgspec.msgpack.Encoder(enc_hook=_refuse)


def pack(envelope: Envelope, limits: MessageLimits = LIMITS) -> list[bytes]:
    """Encode a message to frames. Raises WireError if it exceeds the limits."""
    body, trajectories = _apart(envelope.message)
    return seal(envelope, body, [wrap(trajectory) for trajectory in trajectories], limits)


def pack_pushes(sender: Envelope, number: int, pushes: dict[int, Parcel]) -> list[bytes]:
    """Encode the PUSHes of these numbers to the frames of one message with this `number`.

    The message and the number of `sender` are ignored.
    """
    envelope = msgspec.structs.replace(sender, message_id=number)
    single = len(pushes) == 1
    body = {"type": "push"} if single else {"type": "pushes", "ids": [*pushes]}
    return seal(envelope, body, [*pushes.values()])


def seal(
    envelope: Envelope, body: Any, parcels: list[Parcel], limits: MessageLimits = LIMITS
) -> list[bytes]:
    """Encode a message of this body and these parcels; that of the envelope is ignored.

    Raises WireError if it exceeds the limits.
    """
    header = _Header(
        protocol=PROTOCOL,
        run=envelope.run_id,
        sender=envelope.sender,
        incarnation=envelope.incarnation,
        nonce=envelope.nonce,
        id=envelope.message_id,
        schema=SCHEMA_HASH,
        body=msgspec.Raw(_body_encoder.encode(body)),
        parcels=[parcel.crc for parcel in parcels],
    )
    data = _header_encoder.encode(header)
    frames = [struct.pack("<I", zlib.crc32(data)) + data, *(parcel.data for parcel in parcels)]
    _check_sizes(frames, limits)
    return frames


def unpack(frames: Sequence[Any], limits: MessageLimits = LIMITS) -> Envelope:
    """Decode the message of these frames; its arrays are read-only views on them.

    Raises WireError and no other error, for any frames; MismatchError if the versions differ.
    """
    _check_sizes(frames, limits)
    head, *parcels = map(_unchanging, frames)
    head = bytes(head)
    if len(head) < 4 or struct.unpack_from("<I", head)[0] != zlib.crc32(head[4:]):
        raise ChecksumError("header: the data is damaged")
    header = _read_header(head[4:], limits)
    try:
        return _open(header, parcels, limits)
    except ChecksumError:
        raise
    except WireError as error:
        error.message_id = header.id  # lets a refusal be matched to its request
        raise


def _unchanging(frame: Any) -> Any:
    """Return a read-only frame: the frame itself if it is one, else a copy."""
    return frame if type(frame) is memoryview and frame.readonly else bytes(frame)


def _read_header(data: bytes, limits: MessageLimits) -> _Header:
    """Decode a header, typed at once. Raises WireError; MismatchError if the versions differ."""
    try:
        header = _header_decoder.decode(data)
        # The decoder accepts a key twice and numbers in a longer form; a message has one form only.
        if _header_encoder.encode(header) != data:
            raise WireError(NOT_PLAIN)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        # finds the damage, or another version, which has other fields
        plain = parse_plain(data, limits.container_bytes)
        message_id = plain.get("id")
        found = WireError(str(error)[:REASON])
        for name, ours in (("protocol", PROTOCOL), ("schema", SCHEMA_HASH)):
            if plain.get(name) != ours:
                found = _mismatch(name, plain.get(name), ours)
        found.message_id = message_id if type(message_id) is int and message_id >= 0 else 0
        raise found from error
    if header.incarnation < 0 or header.id < 0:
        raise WireError(f"incarnation, id: negative ({header.incarnation}, {header.id})")
    return header


def _mismatch(name: str, theirs: object, ours: object) -> MismatchError:
    return MismatchError(f"{name}: the sender has {theirs!r:.80}, this side has {ours!r}")


def _apart(message: Request | Reply) -> tuple[Any, list[Trajectory]]:
    """Separate a message into the body for the header and its trajectories."""
    if isinstance(message, Push):
        return {"type": "push"}, [message.trajectory]
    if isinstance(message, Pushes):
        return {"type": "pushes", "ids": message.ids}, message.trajectories
    if isinstance(message, GroupReply):
        group = msgspec.structs.asdict(message.group)
        trajectories = group.pop("trajectories")
        return {"type": "part", "group": group}, trajectories
    return message, []


def _together(body: dict[Any, Any], kind: type, trajectories: list[Trajectory]) -> None:
    """Put the trajectories back into the place from which `_apart` took them."""
    home, found = body, {}
    if kind is Push and len(trajectories) == 1:
        found = {"trajectory": trajectories[0]}
    elif kind is Pushes:
        found = {"trajectories": trajectories}
    elif kind is GroupReply and type(body.get("group")) is dict:
        home, found = body["group"], {"trajectories": trajectories}
    elif trajectories:
        raise WireError(f"parcels: {len(trajectories)} in a {body['type']}")
    if not found.keys().isdisjoint(home):
        raise WireError(f"{min(found)}: in the header")
    home.update(found)


def _check_sizes(frames: Sequence[Any], limits: MessageLimits) -> None:
    if not frames:
        raise WireError("header: missing")
    head, *parcels = map(len, frames)
    if head > limits.header_bytes:
        raise WireError(f"header: {head} bytes, the limit is {limits.header_bytes}")
    if len(parcels) > limits.parcels:
        raise WireError(f"parcels: {len(parcels)}, the limit is {limits.parcels}")
    if parcels and max(parcels) > limits.parcel_bytes:
        raise WireError(f"trajectory: {max(parcels)} bytes, the limit is {limits.parcel_bytes}")
    if (size := head + sum(parcels)) > limits.message_bytes:
        raise WireError(f"message: {size} bytes, the limit is {limits.message_bytes}")


def _open(header: _Header, parcels: list[Any], limits: MessageLimits) -> Envelope:
    """Decode the rest of a message. A body of another version must be a mismatch."""
    if header.protocol != PROTOCOL:
        raise _mismatch("protocol", header.protocol, PROTOCOL)
    if header.schema != SCHEMA_HASH:
        raise _mismatch("schema", header.schema, SCHEMA_HASH)
    for name in ("run", "sender", "nonce"):
        if len(getattr(header, name).encode()) > NAME_BYTES:
            raise WireError(f"{name}: longer than {NAME_BYTES} bytes")
    body = parse_plain(header.body, limits.container_bytes, "body")
    name = body.get("type")
    kind = TYPES.get(name) if type(name) is str else None
    if kind is None:
        raise WireError(f"type: {name!r:.80} is no message")
    _together(body, kind, _unwrap_all(header.parcels, parcels))
    return Envelope(
        run_id=header.run,
        sender=header.sender,
        incarnation=header.incarnation,
        message_id=header.id,
        message=convert(body, kind),
        nonce=header.nonce,
    )


def _unwrap_all(crcs: list[int], parcels: list[bytes]) -> list[Trajectory]:
    if len(crcs) != len(parcels):
        raise WireError(f"parcels: {len(crcs)} declared, {len(parcels)} came")
    trajectories = []
    for index, (crc, data) in enumerate(zip(crcs, parcels, strict=True)):
        if zlib.crc32(data) != crc:
            raise ChecksumError(f"parcels[{index}].crc: the data is damaged")
        trajectories.append(unwrap(Parcel(data, crc)))
    return trajectories
