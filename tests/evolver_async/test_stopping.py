"""Signals that stop a launch."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from evolver_async.process.stopping import CODES, SIGNALS, StopSignal, handled_by, raise_stop


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGHUP as in a terminal: the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", SIGNALS)
def test_each_stop_signal_is_handled_and_given_back(number: int) -> None:
    seen, before = list[int](), signal.getsignal(number)
    with handled_by(seen.append):
        os.kill(os.getpid(), number)
    assert seen == [number] and signal.getsignal(number) == before
    with pytest.raises(StopSignal) as stopped, handled_by(raise_stop):
        os.kill(os.getpid(), number)
    assert stopped.value.code in CODES


@pytest.mark.usefixtures("heeded")
def test_the_end_of_a_terminal_is_one_signal() -> None:
    """An interactive bash sends a SIGHUP to its jobs, and the kernel another one when bash ends."""
    hup, term = signal.SIGHUP, signal.SIGTERM
    for sent, expected in (
        ([hup, hup], [hup]),
        ([term, hup], [term]),
        ([hup, term], [hup, term]),
        ([term, term], [term, term]),
    ):
        seen = list[int]()
        with handled_by(seen.append):
            for number in sent:
                os.kill(os.getpid(), number)
        assert seen == expected


def test_a_run_under_nohup_ignores_the_end_of_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled_by(raise_stop):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.process
def test_what_is_printed_after_the_terminal_has_gone_fails_nothing() -> None:
    script = (
        "import os, signal, sys; from evolver_async.process.stopping import handled_by\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "sys.stdin.read()\n"
        "with handled_by(print): os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('the end', flush=True)"
    )
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=end) as process:
        os.close(end)
        os.close(terminal)
        process.communicate(b"")
    assert process.returncode == 0
