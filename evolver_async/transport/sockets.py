"""ZeroMQ options that the server's and the clients' sockets share."""

import zmq

from evolver_async.protocol.envelope import LIMITS

REPLIES_QUEUED = 100_000  # per client; past it replies are dropped and asked for again
LINGER_MS = 1000
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000


def set_options(zmq_socket: zmq.Socket) -> None:
    zmq_socket.set(zmq.MAXMSGSIZE, max(LIMITS.header_bytes, LIMITS.parcel_bytes))
    zmq_socket.set(zmq.LINGER, LINGER_MS)
    zmq_socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    zmq_socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
