"""Bare ZeroMQ with fdatasync: the least that a durable push can cost. No decoding, no checks.

The server appends what came to a file, syncs once for all messages that waited, and answers each.
"""

import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import zmq

from evolver_async.wire.server import BATCH_BYTES, BATCH_MESSAGES, BATCH_S

POLL_MS = 50
LARGEST = 1 << 30


def serve_bare(address: str, path: Path, stop: Event) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while not stop.is_set():
        if not router.poll(POLL_MS):
            continue
        begun, size, waiting, parts = time.monotonic(), 0, [], []
        while len(parts) < BATCH_MESSAGES and size < BATCH_BYTES:
            try:
                identity, number, body = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            waiting.append((identity, number))
            parts.append(body)
            size += len(body)
            if time.monotonic() - begun >= BATCH_S:
                break
        left = memoryview(b"".join(parts))
        while left:
            left = left[os.write(file, left) :]
        os.fdatasync(file)
        for reply in waiting:
            router.send_multipart(reply)
        if os.fstat(file).st_size > LARGEST:
            os.ftruncate(file, 0)
    os.close(file)
    router.close(linger=0)


def push_bare(
    address: str,
    size: int,
    in_flight: int,
    active: Event,
    stop: Event,
    results: multiprocessing.Queue,
) -> None:
    """Keep so many messages of `size` bytes under way while `active`; give the times of replies."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(address)
    body, number, ends = os.urandom(size), 0, list[float]()
    while not stop.is_set():
        if not active.wait(POLL_MS / 1000):
            continue
        while number - len(ends) < in_flight:
            dealer.send_multipart([str(number).encode(), body])
            number += 1
        if dealer.poll(POLL_MS):
            dealer.recv_multipart()
            ends.append(time.perf_counter())
    dealer.close(linger=0)
    results.put(ends)
