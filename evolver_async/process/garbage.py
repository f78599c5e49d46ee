"""Cyclic garbage collection of a process: it must not traverse what stays until the end."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def permanent_imports() -> Iterator[None]:
    """Keep the collector away from all that exists when the block ends, modules above all.

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
