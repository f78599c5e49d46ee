"""Places that are drained or lost: who moves, who ends the run, and whom it costs a restart."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from evolver_async.config import Config
from evolver_async.errors import STOPPED, UNPLACED
from evolver_async.launch import supervisor as supervising
from evolver_async.launch.child import Child, Handle, Spawner, Unreachable
from evolver_async.launch.supervisor import RunFailed, Supervisor
from evolver_async.process.stopping import StopSignal
from evolver_async.runs.watch import runs

pytestmark = pytest.mark.process


class Places(Spawner):
    """Spawner of processes that sleep; some are at a place that is drained or lost."""

    started: Callable[[], None] = staticmethod(lambda: None)  # is called after each start
    drained: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()

    def place(
        self, role: str, name: str, incarnation: int, rank: int, arguments: list[str]
    ) -> Handle:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.names[process.pid] = name
        self.started()
        return process

    def moves(self, handle: Handle) -> bool:
        return self.names[handle.pid] in self.drained

    def lost(self, handle: Handle) -> bool:
        return self.names[handle.pid] in self.gone

    def bound(self, role: str) -> bool:
        return role == "buffer"

    def answers(self) -> bool:
        if not self.looks:
            raise Unreachable("start the head again")
        return self.looks.pop()

    looks: list[bool]  # what the looks for the service that places processes find, from the last
    names: dict[int, str]


class LatePlace:
    """Handle of a process that waits for its place for four minutes, as for a runtime_env."""

    def __init__(self) -> None:
        self.pid = 0
        self.now = 0.0  # 50 s later at every look

    def poll(self) -> int | None:
        self.now += 50.0
        self.pid = 17 if self.now > 240 else 0
        return None

    def wait(self) -> int:
        return 0

    def terminate(self) -> None: ...

    kill = terminate


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    config = Config()
    config.launch.restarts = 0
    spawner = Places(config, tmp_path, "ipc:///none")
    spawner.names, spawner.looks = {}, []
    one = Supervisor(config, tmp_path, spawner)
    yield one
    for child in one.children:
        child.process.kill()
        child.process.wait()


def after(supervisor: Supervisor, child: Child) -> Handle:
    """The process of a child after its present one has ended and was noticed."""
    child.process.wait()
    supervisor.supervise(child, time.monotonic())
    return child.process


def test_an_actor_leaves_a_place_that_is_drained_and_starts_at_another(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    actor = supervisor.add("actor", "actor-0")
    first = actor.process
    supervisor.supervise(actor, time.monotonic())
    assert first.poll() is None
    supervisor.spawner.drained = ("actor-0",)
    supervisor.supervise(actor, time.monotonic())
    assert first.wait() == -signal.SIGTERM
    supervisor.spawner.drained = ()
    second = after(supervisor, actor)
    assert second is not first and second.poll() is None
    assert re.search("actor-0 .*drained", caplog.text)
    assert actor.restarts == 0 and supervisor.signals == [] and not actor.moves


class Waiting:
    """Handle of a process without a place, until it is given a pid."""

    pid, code = 0, None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = -signal.SIGTERM

    kill = terminate

    def wait(self) -> int:
        return self.code or 0


def names(supervisor: Supervisor, role: str = "actor") -> set[str]:
    return {one.name for one in supervisor.children if one.role == role and one.leaves_by is None}


def test_actors_begin_when_the_learner_has_its_place(supervisor: Supervisor) -> None:
    supervisor.config.actors.count = supervisor.scaling.count = 2
    learner = supervisor.add("learner", "learner")
    placed, learner.process = learner.process, Waiting()
    supervisor.scale(0.0)
    assert not names(supervisor)
    learner.process = placed
    supervisor.scale(0.0)
    assert names(supervisor) == {"actor-0", "actor-1"}


def test_actors_make_room_for_a_learner_one_after_the_other(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait for a place go at once: they would get what the learner needs."""
    supervisor.config.actors.count = supervisor.scaling.count = 3
    learner = supervisor.add("learner", "learner")
    supervisor.scale(0.0)
    queued = next(one for one in supervisor.children if one.name == "actor-2")
    queued.process.kill()
    queued.process.wait()
    queued.process = Waiting()
    placed, learner.process = learner.process, Waiting()
    supervisor.scale(1.0)
    assert names(supervisor) == {"actor-0", "actor-1"} and queued.process.poll() is not None
    supervisor.scale(1.0 + supervising.PLACE_S)
    assert names(supervisor) == {"actor-0", "actor-1"}, "none of these would help"
    monkeypatch.setattr(Places, "hinders", lambda *_: True)
    supervisor.scale(2.0 + 2 * supervising.PLACE_S)
    assert names(supervisor) == {"actor-0"}
    supervisor.scale(2.0 + 4 * supervising.PLACE_S)
    assert names(supervisor) == {"actor-0"}, "one at a time"
    learner.process = placed
    for child in [one for one in supervisor.children if one.leaves_by is not None]:
        child.process.wait()
        supervisor.supervise(child, 0.0)
    supervisor.scale(100.0)
    assert names(supervisor) == {"actor-0", "actor-1", "actor-2"}


def test_a_drain_is_told_as_one(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start() -> None:
        supervisor.add("buffer", "buffer")
        supervisor.spawner.drained, supervisor.spawner.looks = ("buffer",), [True]

    monkeypatch.setattr(supervisor, "start", start)
    with pytest.raises(StopSignal) as end:
        supervisor.run()
    ending = runs.end(tmp_path, end.value.code, str(end.value))
    assert (ending.state, ending.code) == ("stopped", 143)
    assert "drain" in ending.text and "buffer" in ending.text
    assert runs.end(tmp_path, 143).reason == "SIGTERM"


def test_a_process_that_is_lost_with_its_node_costs_no_restart(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    actor = supervisor.add("actor", "actor-0")
    for _ in range(5):
        supervisor.spawner.gone = ("actor-0",)
        actor.process.kill()
        assert after(supervisor, actor).poll() is None
    assert len(re.findall("actor-0 .*lost", caplog.text)) == 5 and actor.restarts == 0


def test_the_run_ends_where_the_node_of_its_buffer_is_drained(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = supervisor.add("buffer", "buffer")
    supervisor.spawner.drained = ("buffer",)
    for _ in range(3):
        supervisor.supervise(buffer, time.monotonic())
    assert buffer.process.poll() is None
    assert re.search("buffer .*drained.*resumed", caplog.text)


def test_the_run_ends_where_the_node_of_its_buffer_is_lost(supervisor: Supervisor) -> None:
    buffer = supervisor.add("buffer", "buffer")
    supervisor.spawner.gone = ("buffer",)
    buffer.process.kill()
    with pytest.raises(RunFailed, match=r"buffer .*lost"):
        after(supervisor, buffer)


def test_the_run_ends_where_a_node_is_lost_before_its_process_is_started_again(
    supervisor: Supervisor,
) -> None:
    supervisor.config.launch.restarts = 1
    buffer = supervisor.add("buffer", "buffer")
    buffer.process.kill()
    assert after(supervisor, buffer).poll() is not None and buffer.due is not None
    supervisor.spawner.gone = ("buffer",)
    with pytest.raises(RunFailed, match=r"buffer .*lost"):
        supervisor.supervise(buffer, buffer.due)


def test_no_actor_is_started_after_a_signal(supervisor: Supervisor) -> None:
    supervisor.spawner.started = lambda: supervisor.signals.append(signal.SIGINT)
    supervisor.scale(time.monotonic())
    assert [child.name for child in supervisor.children] == ["actor-0"]


@pytest.mark.parametrize("answers", [True, False])
def test_a_buffer_has_its_time_to_answer_from_its_place_on(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    buffer = LatePlace()

    async def buffer_answers() -> bool:
        return answers and buffer.pid > 0

    place, clock = supervisor.spawner.place, SimpleNamespace(monotonic=lambda: buffer.now)
    monkeypatch.setattr(supervising, "time", clock)
    monkeypatch.setattr(supervisor, "buffer_answers", buffer_answers)
    places = {"buffer": lambda *_: buffer}
    monkeypatch.setattr(
        supervisor.spawner, "place", lambda role, *more: places.get(role, place)(role, *more)
    )
    if answers:
        supervisor.start()
        assert {child.role for child in supervisor.children} == {"buffer", "learner", "actor"}
        return
    with pytest.raises(RunFailed, match=r"does not answer at .* within 60 s"):
        supervisor.start()
    assert buffer.now == 300


def test_nothing_is_started_without_the_service_that_places_processes(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without it for too long ends as on a signal: its processes are asked to."""
    spawner = supervisor.spawner
    assert isinstance(spawner, Places)
    supervisor.config.launch.restarts = 1
    started: list[int] = []
    roles = ("learner", "buffer")

    def start() -> None:
        for role in roles:
            supervisor.add(role, role)
        supervisor.children[-1].process.kill()
        supervisor.children[-1].process.wait()
        spawner.started = lambda: started.append(len(spawner.looks))

    monkeypatch.setattr(supervisor, "start", start)
    monkeypatch.setattr(supervisor, "ask_buffer", lambda now: None)
    monkeypatch.setattr(supervisor.config.launch, "backoff_s", 0.0)
    spawner.looks = [True] * 3 + [False] * 5
    assert supervisor.run() == 1
    assert started and max(started) == 2, "the first start is after the silence of five looks"
    learner = supervisor.children[0].process
    assert learner.poll() == -signal.SIGTERM


def test_a_process_without_a_place_for_the_moment_costs_no_restart(
    supervisor: Supervisor,
) -> None:
    actor = supervisor.add("actor", "actor-0")
    actor.process.kill()
    actor.process.wait()
    actor.process = supervisor.spawner.failed("actor-0", "nobody answers", UNPLACED)
    assert "nobody answers" in supervisor.spawner.last_error(actor)
    for _ in range(3):
        supervisor.plan_restart(actor, UNPLACED, time.monotonic())
    assert actor.due is not None and actor.restarts == 0


SAVING = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit({STOPPED})))
print(flush=True)
time.sleep(600)
"""


def test_a_sigterm_that_comes_with_a_drain_lets_the_learner_save(supervisor: Supervisor) -> None:
    """A scheduler that drains the node sends one to the launcher on it, too."""
    spawner = supervisor.spawner
    assert isinstance(spawner, Places)
    learner = supervisor.add("learner", "learner")
    learner.process.kill()
    learner.process.wait()
    saving = subprocess.Popen([sys.executable, "-c", SAVING], stdout=subprocess.PIPE)
    assert saving.stdout is not None and saving.stdout.readline()
    learner.process, spawner.names[saving.pid] = saving, "learner"
    supervisor.add("buffer", "buffer")
    spawner.drained, spawner.looks = ("buffer",), [True]
    supervisor.watch()
    supervisor.signals.append(signal.SIGTERM)
    supervisor.end()
    assert saving.returncode == STOPPED
