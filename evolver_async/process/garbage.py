"""Memory of a process: garbage collection without permanent objects, return of freed memory."""

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_S = 60.0  # between two returns of freed memory, which cost about 0.1 s each


@contextmanager
def permanent_imports() -> Iterator[None]:
    """Exempt all objects that exist when the block ends, above all modules, from collection.

    Torch and transformers are a million objects. Traversing them again and again while they are
    imported, and at the end of the process, costs two fifths of an actor's start and end.
    """
    enabled = gc.isenabled()
    gc.collect()  # what is garbage by now is to be freed
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def collect_rarely() -> None:
    """Let the collector of this process run seldom, after its set-up.

    Trajectories are many small objects without cycles, and models are permanent: repeated
    traversals cost a fifth of the buffer's time and a tenth of the learner's.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def give_back_memory() -> None:
    """Return freed memory to the kernel from now on, every TRIM_S seconds, by a thread.

    With the thresholds of `launch.child` glibc keeps it, as the next step needs as much again; but
    a long step can have needed more than any other one will.
    """
    threading.Thread(target=_trim_often, name="trim", daemon=True).start()


def trim() -> None:
    """Return freed memory to the kernel now; without glibc do nothing."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def _trim_often() -> None:
    while True:
        time.sleep(TRIM_S)
        trim()
