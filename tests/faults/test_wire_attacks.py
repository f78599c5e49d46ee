"""Faults 13 to 17: frames that are no messages, payloads that are too much, strangers, skew.

One real server is attacked over a raw socket while a client of the run goes on talking to it.
"""

import asyncio
import contextlib
import os
import pickle
import random
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq
from buffer_world import HEAD, config, trajectory
from invariants import check_journal, check_leaks, check_named, traces
from launches import fair_time

from evolver_async.buffer.service import BufferService
from evolver_async.schema import Ticket
from evolver_async.wire import messages
from evolver_async.wire.client import AccessDenied, Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.envelope import (
    LIMITS,
    PROTOCOL,
    SCHEMA_HASH,
    Envelope,
    WireError,
    pack,
    unpack,
)
from evolver_async.wire.keys import make
from evolver_async.wire.messages import Push, Reject, StatusReply, StatusRequest
from evolver_async.wire.server import Server
from evolver_async.wire.trajectory_bytes import HEADER_BYTES, PARCEL_BYTES

FRAMES = 10_000
GROWTH_BYTES = 50 << 20
BATCH = 200  # messages between two requests of the client that must not notice
ANSWER_MS = 20_000
SETTINGS = config(lease_s=600.0, stall_s=600.0)  # a grant outlives its test on any machine


class Attacked:
    """A served run with one granted group, a raw socket, and a client of the run."""

    def __init__(self, directory: Path, keys: Path | None = None) -> None:
        journal = directory / "journal"
        journal.mkdir()
        self.keys = keys
        self.journal = journal
        welcome = messages.Welcome(run_id="run", config={}, weights_address="")
        self.service = BufferService(
            SETTINGS, "run", journal, welcome, "tokenizer", time.monotonic()
        )
        self.server = Server(self.service, f"ipc://{directory}/s", "run", keys=keys)
        self.address = self.server.address
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.server.serve, args=(self.stop,))
        self.thread.start()
        self.raw = zmq.Context.instance().socket(zmq.DEALER)
        self.raw.connect(self.address)
        self.client = DealerClient(self.address, "run", "honest", keys=keys)

    def ask(self, message: messages.Request) -> Any:
        return asyncio.run(self.client.request(message, timeout_s=ANSWER_MS / 1000))

    def attack(self, frames: list[bytes]) -> Any:
        """What the server replies to these frames."""
        self.raw.send_multipart(frames)
        return self.answer().message

    def answer(self) -> Envelope:
        assert self.raw.poll(ANSWER_MS), "the sender hears nothing"
        return unpack(self.raw.recv_multipart())

    def close(self) -> None:
        self.raw.close(linger=0)
        self.client.close()
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.server.close()
        self.service.close()


@pytest.fixture
def attacked(private_directory: str, tmp_path: Path) -> Iterator[Attacked]:
    before = traces()
    directory = Path(private_directory) / tmp_path.name
    directory.mkdir(mode=0o700)
    with contextlib.closing(Attacked(directory)) as one:
        yield one
    check_journal(one.journal, SETTINGS, "run")
    check_leaks(before)


def sealed(header: bytes) -> bytes:
    """A header with the right checksum, so that what is in it is looked at."""
    return struct.pack("<I", zlib.crc32(header)) + header


def frames_of(message: Any, sender: str = "evil", run: str = "run", number: int = 7) -> list[bytes]:
    return [bytes(frame) for frame in pack(Envelope(run, sender, 0, number, message))]


def headed(body: Any, **fields: Any) -> list[bytes]:
    """A message without trajectories whose header has this body and these fields."""
    header = {
        **{"protocol": PROTOCOL, "run": "run", "sender": "evil", "incarnation": 0},
        **{"nonce": "", "id": 7},
        **{"schema": SCHEMA_HASH, "body": body, "parcels": []},
        **fields,
    }
    return [sealed(msgpack.packb(header))]


def parcelled(frames: list[bytes], parcel: bytes) -> list[bytes]:
    """The PUSH with another parcel, whose checksum is right."""
    header = {**msgpack.unpackb(frames[0][4:]), "parcels": [zlib.crc32(parcel)]}
    return [sealed(msgpack.packb(header)), parcel]


def granted(attacked: Attacked) -> Ticket:
    reply = attacked.ask(messages.Resume(lineage=0, take=0, version=0))
    assert isinstance(reply, messages.Resumed)
    tickets = attacked.ask(messages.Lease(credit=2, weights=HEAD))
    return tickets.tickets[0]


def mutated(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """The frames with some damage that no receiver may miss."""
    frames = list(frames)
    at = rng.randrange(len(frames))
    frame = bytearray(frames[at])
    kind = rng.choice(("flip", "cut", "grow", "drop", "twice", "swap", "resealed", "random"))
    if kind == "flip":
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(len(frame))
            frame[place] ^= 1 << rng.randrange(8)
        if bytes(frame) == frames[at]:
            frame[0] ^= 1
    elif kind == "cut":
        del frame[rng.randrange(len(frame)) :]
    elif kind == "grow":
        frame += rng.randbytes(rng.randint(1, 2000))
    elif kind == "drop":
        return frames[:at] + frames[at + 1 :] or [b""]
    elif kind == "twice":
        return [*frames, frames[at]]
    elif kind == "swap":
        return [frames[-1], *frames[:-1]]
    elif kind == "resealed":  # damage that only the typed half of decoding can see
        header, parcel = bytearray(frames[0][4:]), bytearray(frames[1])
        if rng.random() < 0.5:
            del header[-rng.randint(1, 40) :]
            return [sealed(bytes(header)), *frames[1:]]
        del parcel[-8 * rng.randint(1, 40) :]
        return parcelled(frames, bytes(parcel))
    else:
        return [rng.randbytes(rng.randint(0, 4000)) for _ in range(rng.randint(1, 9))]
    frames[at] = bytes(frame)
    return frames


def test_ten_thousand_bad_messages_are_refused_and_nobody_else_notices(
    attacked: Attacked, rng: random.Random
) -> None:
    """Fault 13. What is pushed is a member that was granted, so that it would be taken in."""
    ticket = granted(attacked)
    valid = frames_of(Push(trajectory=trajectory(ticket, 0, length=400)), sender="honest")
    ledger = attacked.ask(StatusRequest()).status["ledger"]
    process = psutil.Process()
    for _ in range(BATCH):  # buffers, caches and logs have their size after these
        assert isinstance(attacked.attack(mutated(valid, rng)), Reject)
    before = process.memory_info().rss
    seconds, refused = list[float](), 0
    for number in range(1000, 1000 + FRAMES // BATCH):
        for _ in range(BATCH):
            attacked.raw.send_multipart(mutated(valid, rng))
        began = fair_time()
        assert isinstance(attacked.ask(StatusRequest()), StatusReply)
        seconds.append(fair_time() - began)
        # those without a readable id share a reply, so a question of the same socket ends them
        attacked.raw.send_multipart(frames_of(StatusRequest(), number=number))
        while (envelope := attacked.answer()).message_id != number:
            reply = envelope.message
            assert isinstance(reply, Reject) and reply.reason, reply
            refused += 1
        assert isinstance(envelope.message, StatusReply)
    assert refused >= FRAMES // BATCH
    growth = process.memory_info().rss - before
    *_, slow_s, slowest_s = sorted(seconds)
    print(f"{FRAMES} frames, memory +{growth / (1 << 20):.1f} MB, slowest STATUS {slowest_s:.2f} s")
    assert growth < GROWTH_BYTES
    assert slow_s < 5.0, "a machine that stands still delays one"
    assert attacked.ask(StatusRequest()).status["ledger"] == ledger
    reply = attacked.ask(Push(trajectory=trajectory(ticket, 0)))
    assert isinstance(reply, messages.Ack), "the member was still wanted"


def test_payloads_that_are_too_much_are_refused_in_bounded_memory(attacked: Attacked) -> None:
    """Fault 14: maps, lists, keys, nesting and text by the million; nothing is ever inflated."""
    nested: Any = 0
    for _ in range(200):
        nested = [nested]
    bombs = {
        "maps": headed({"type": "status", "x": [{}] * 1_000_000}),
        "lists": headed({"type": "status", "x": [[]] * 1_000_000}),
        "entries": headed({"type": "status", "x": dict.fromkeys(range(300000), 0)}),
        "nesting": headed({"type": "status", "x": nested}),
        "nesting past the decoder": [sealed(b"\x91" * 100_000)],
        "a map that says to be endless": [sealed(b"\xdf\xff\xff\xff\xff")],
        "a text that says to be endless": [sealed(b"\xdb\xff\xff\xff\xff")],
        "parcels": [frames_of(StatusRequest())[0], *[b""] * (LIMITS.parcels + 1)],
        "an extension": [sealed(msgpack.packb({"a": msgpack.ExtType(5, b"x" * 100)}))],
        "deflated": [sealed(zlib.compress(bytes(50 << 20)))],
        "a long name": headed({"type": "status"}, sender="x" * 60_000),
    }
    process = psutil.Process()
    for name, frames in bombs.items():
        before = process.memory_info().rss
        peaks: list[int] = []
        done = threading.Event()

        def watch(peaks: list[int] = peaks, done: threading.Event = done) -> None:
            while not done.wait(0.001):
                peaks.append(process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        reply = attacked.attack(frames)
        done.set()
        watcher.join()
        growth = max(peaks, default=before) - before
        print(f"{name}: +{growth / (1 << 20):.1f} MB, {getattr(reply, 'reason', reply)!r:.90}")
        assert isinstance(reply, Reject), name
        assert growth < GROWTH_BYTES, name
        assert isinstance(attacked.ask(StatusRequest()), StatusReply)


def test_an_oversize_message_is_refused_where_it_is_made(attacked: Attacked) -> None:
    """Fault 14: libzmq drops a frame over the limit without a word, so no client sends one."""
    ticket = granted(attacked)
    for sent, named in (
        (trajectory(ticket, 0, length=PARCEL_BYTES // 11), "trajectory: "),
        (trajectory(ticket, 0), "header: "),
    ):
        if named == "header: ":
            sent.label_source = "x" * HEADER_BYTES
        with pytest.raises(WireError, match=f"{named}.*the limit is"):
            attacked.ask(Push(trajectory=sent))
    attacked.raw.send_multipart([bytes(PARCEL_BYTES + 1)])
    assert isinstance(attacked.ask(StatusRequest()), StatusReply)
    assert isinstance(attacked.ask(Push(trajectory=trajectory(ticket, 0))), messages.Ack)


def test_a_pickle_is_not_executed(attacked: Attacked, tmp_path: Path) -> None:
    """Fault 15, wherever bytes can stand in a message."""
    target = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(target),))

    blob = pickle.dumps(Payload())
    valid = frames_of(Push(trajectory=trajectory(granted(attacked), 0)))
    for frames in (
        [blob],
        [sealed(blob)],
        [blob, *valid[1:]],
        [valid[0], blob],
        parcelled(valid, blob),
        parcelled(valid, struct.pack("<I", len(blob)) + blob + bytes(-(4 + len(blob)) % 8)),
        headed(blob),
        headed({"type": "hello", "role": blob, "schema_hash": SCHEMA_HASH}),
        headed({"type": "hello", "role": "a", "schema_hash": msgpack.ExtType(1, blob)}),
    ):
        assert isinstance(attacked.attack(frames), Reject)
    assert not target.exists()
    pickle.loads(blob)
    assert target.exists(), "the payload works"


def test_strangers_are_told_within_five_seconds(private_directory: str, tmp_path: Path) -> None:
    """Fault 16: no key, an unlisted key, a wrong server key; others are served all the while."""
    before = traces()
    directory = Path(private_directory) / "strangers"
    directory.mkdir(mode=0o700)
    make(directory / "keys", ["gone"])
    (directory / "keys" / "allowed" / "gone.public").unlink()
    make(directory / "other", [])
    with contextlib.closing(Attacked(directory, directory / "keys")) as attacked:
        for keys, cause in (
            (None, "only clients with keys"),
            (directory / "keys" / "gone", "is not listed"),
            (directory / "other", "the server's key is not"),
        ):
            client = DealerClient(attacked.address, "run", "stranger", keys=keys)
            began = fair_time()
            with pytest.raises(AccessDenied) as caught:
                asyncio.run(client.request(StatusRequest(), timeout_s=30))
            assert fair_time() - began < 20.0
            check_named(str(caught.value), attacked.address, cause)
            client.close()
            assert isinstance(attacked.ask(StatusRequest()), StatusReply)
    check_journal(attacked.journal, SETTINGS, "run")
    check_leaks(before)


def test_a_message_of_another_run_is_refused(attacked: Attacked) -> None:
    """Fault 16: recorded in an earlier run and sent again; it would be taken in by its own."""
    push = Push(trajectory=trajectory(granted(attacked), 0))
    reply = attacked.attack(frames_of(push, sender="honest", run="yesterday"))
    assert isinstance(reply, Reject)
    check_named(reply.reason, "run: ", "'yesterday'", "'run'")
    again = frames_of(push, sender="honest", run="run")
    assert isinstance(attacked.attack(again), messages.Ack)
    assert isinstance(attacked.attack(again), messages.Dup), "of this run: taken in once"


def test_skew_is_refused_naming_both_sides(attacked: Attacked) -> None:
    """Fault 17: protocol, message types, and the tokenizer."""
    body = {"type": "hello", "role": "actor", "schema_hash": SCHEMA_HASH, "tokenizer": None}
    for frames, needles in (
        (headed(body, protocol=PROTOCOL + 1), ("protocol: ", f"{PROTOCOL + 1}", f"{PROTOCOL}")),
        (headed(body, schema="feedbeef"), ("schema: ", "'feedbeef'", SCHEMA_HASH)),
    ):
        reply = attacked.attack(frames)
        assert isinstance(reply, Reject)
        check_named(reply.reason, *needles)
    hello = messages.Hello(role="actor", schema_hash=SCHEMA_HASH, tokenizer="another")
    with pytest.raises(Rejected) as caught:
        attacked.ask(hello)
    check_named(str(caught.value), "tokenizer", "another", "tokenizer")
    hello.tokenizer = "tokenizer"
    assert isinstance(attacked.ask(hello), messages.Welcome)
