"""Beats of a process whose work holds its loop, and what they tell of its use of the processor."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from buffer_world import World, config

from evolver_async.wire import heartbeat
from evolver_async.wire.heartbeat import Heartbeat, Usage
from evolver_async.wire.messages import Beat
from evolver_async.wire.server import Server

pytestmark = pytest.mark.process

DEADLINE_S = 60.0


def burn(seconds: float) -> None:
    """Use the processor for so many seconds of it."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_beats_reach_the_buffer_while_nothing_else_of_the_process_does(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", config(warn_s=0.2))
    address, stop, read = f"ipc://{tmp_path}/s", threading.Event(), []
    server = Server(world.service, address, "run")

    def beat() -> Beat:
        read.append(threading.current_thread())
        return Beat(role="learner", phase="forward", count=len(read))

    serving = threading.Thread(target=server.serve, args=(stop,))
    beating = Heartbeat(address, "run", "learner", 3, None, warn_s=0.2, read=beat)
    serving.start()
    beating.start()
    peers = world.service.activity.peers
    try:
        deadline = time.monotonic() + DEADLINE_S
        while (beat_of := peers["learner"].beat if "learner" in peers else None) is None or (
            beat_of.count < 3
        ):
            assert time.monotonic() < deadline, "no beats"
            time.sleep(0.01)  # what computes holds its loop all the time
        assert beat_of.incarnation == 3 and set(read) == {beating}
    finally:
        beating.stop()
        stop.set()
        serving.join()
        server.close()
        world.service.close()
    assert not beating.is_alive()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Usage:
    """The usage of this process, of which it is known that nothing runs beside."""
    monkeypatch.setattr(heartbeat, "BUSY_SHARE", 0.1)
    return Usage()


def test_the_share_of_the_processors_counts_children_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "SHARE_S", 0.0)
    monkeypatch.setattr(heartbeat.os, "cpu_count", lambda: 1)
    usage = Usage()
    usage.share()
    before_s = usage._total_s
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert 0 < usage.share() <= 1
    assert usage._total_s - before_s >= 0.2  # of 0.3, by ticks


def test_a_process_that_computes_is_busy_and_one_that_sleeps_is_not(slept: Usage) -> None:
    burn(0.3)
    assert slept.busy()
    deadline = time.monotonic() + DEADLINE_S
    while slept.busy():  # other threads of a test process work at times
        assert time.monotonic() < deadline, "it computes nothing"
        time.sleep(0.5)


def test_the_work_of_a_descendant_counts(slept: Usage) -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + DEADLINE_S
        slept.busy()
        time.sleep(0.2)
        slept.busy()
        while not slept.busy():
            assert time.monotonic() < deadline, "nobody sees it"
            time.sleep(0.5)
    finally:
        child.kill()
        child.wait()
