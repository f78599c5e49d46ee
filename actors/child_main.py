"""A Python process that answers one request at a time: the process's own side.

Requests and replies are msgpack behind 4 bytes of length, on standard input and on what was
standard output; what the code prints goes to standard error. It runs in the main thread, so that it
may use signals. A second thread reads the requests and ends the process with the actor.
"""

import os
import queue
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

HEAD = struct.Struct(">I")


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        reply = msgspec.msgpack.encode(answer(requests.get()))
        replies.write(HEAD.pack(len(reply)) + reply)
        replies.flush()


def _read(requests: "queue.SimpleQueue[Any]") -> None:
    """Read requests; end the process, whatever its main thread does, when the actor has ended."""
    source = sys.stdin.buffer
    while len(head := source.read(HEAD.size)) == HEAD.size:
        requests.put(msgspec.msgpack.decode(source.read(HEAD.unpack(head)[0])))
    os._exit(0)
