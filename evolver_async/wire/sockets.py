"""ZeroMQ options that the server's and the clients' sockets share."""

from collections.abc import Sequence

import zmq

from evolver_async.wire.envelope import LIMITS

REPLIES_QUEUED = 100_000  # per client; past it replies are dropped and asked for again
LINGER_MS = 1000
VIEW_BYTES = 64 << 10  # a longer frame is neither copied when it comes nor when it goes
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000


def set_options(zmq_socket: zmq.Socket, address: str) -> None:
    """Set the options of a socket that is about to bind or connect to `address`."""
    # Elsewhere off: libzmq would resolve names to IPv6 alone, and rewrite IPv4 addresses.
    zmq_socket.set(zmq.IPV6, address.startswith("tcp://["))
    zmq_socket.set(zmq.MAXMSGSIZE, max(LIMITS.header_bytes, LIMITS.parcel_bytes))
    zmq_socket.set(zmq.LINGER, LINGER_MS)
    zmq_socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    zmq_socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def receive(zmq_socket: zmq.Socket) -> list[bytes | memoryview]:
    """Return the frames of a waiting message, the long ones as views. Raises zmq.Again."""
    return [
        frame.bytes if len(frame) < VIEW_BYTES else frame.buffer.toreadonly()
        for frame in zmq_socket.recv_multipart(zmq.NOBLOCK, copy=False)
    ]


def send(zmq_socket: zmq.Socket, frames: Sequence[bytes | memoryview]) -> None:
    """Send a message without waiting. Raises zmq.ZMQError."""
    short = max(map(len, frames)) < VIEW_BYTES
    zmq_socket.send_multipart(frames, zmq.NOBLOCK, copy=short)
