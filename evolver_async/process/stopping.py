"""Signals that stop a launch in order: SIGINT, SIGTERM, and SIGHUP when its terminal closes."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CODES = frozenset(128 + number for number in SIGNALS)  # exit codes of launches that were stopped


class StopSignal(KeyboardInterrupt):
    """A stop signal, raised where it came; `code`: the exit code of a launch that it ends."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class NodeDrained(StopSignal):
    """The end of a launch whose process `name` has no place but a node that is drained."""

    def __init__(self, name: str) -> None:
        super().__init__(signal.SIGTERM)
        self.args = (f"the drain of the node of {name}",)


def raise_stop(number: int) -> None:
    """Raise a signal as a StopSignal; for `handled_by`."""
    raise StopSignal(number)


@contextmanager
def handled_by(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of every stop signal. A SIGHUP that nohup ignores stays so.

    After a SIGHUP what is printed to the terminal goes nowhere, as writing to it would fail. One
    behind another signal is not handled: the end of a terminal is one event, but its shell sends a
    SIGHUP and the kernel another one when the shell has ended.
    """
    handled = list[int]()

    def stop(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
            if handled:
                return
        handled.append(number)
        handle(number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = SIGNALS[:2] if ignored else SIGNALS
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _leave_terminal() -> None:
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            with suppress(OSError):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(nowhere.fileno(), descriptor)
