"""The local launcher with real processes: a dead one is replaced, and an end leaves nothing."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from launches import COMMAND, DEADLINE_S, Launch, alive, is_step, launching, wait_for

from evolver_async.buffer.log.disk import SyncError
from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state.records import GroupsTaken
from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import CheckpointError, load_newest, valid
from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.errors import DISK_FAILED, EVALUATION_LOST, STOPPED, TRAINING_ERROR, USER_ERROR
from evolver_async.launch import supervisor as supervision
from evolver_async.launch.child import Child, Handle, LocalSpawner
from evolver_async.launch.local import run
from evolver_async.launch.registry import CHECKS, PROCESSES, ROLES, resolve
from evolver_async.launch.resumption import resume
from evolver_async.launch.run_directory import address_of
from evolver_async.launch.supervisor import OUTAGE_S, RunFailed, Supervisor
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.tail import Tail
from evolver_async.process.rendezvous import make_weights_dir, weights_dir
from evolver_async.process.setup import RoleArgs, run_process
from evolver_async.runs.results.final_ledger import final_ledger

pytestmark = pytest.mark.process

RECIPE = """
env: {name: bandit}
policy: {max_length: 128, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
advantage: {kind: reinforce}
learner: {groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}
stages: [{kind: rl, hours: 1}]
eval: {every: 0, episodes: 4}
checkpoint: {every: 1}
metrics: {panel: none}
launch: {restarts: 1, backoff_s: 0.1}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "recipe.yaml"
    path.write_text(RECIPE + f"run: {{dir: {path.parent}, name: run}}\n")
    return path


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start


@dataclass
class Ended:
    """A run that has ended, and what was seen of it."""

    run_dir: Path
    first: dict[str, psutil.Process]
    threads: str  # OMP_NUM_THREADS of the first actor-0
    second: psutil.Process  # actor-0
    code: int
    errors: str
    log: str  # of actor-0
    steps: list[int]
    kept: int  # the step of its newest checkpoint


@pytest.fixture(scope="module")
def ended(recipe: Path) -> Ended:
    """The run whose actor-0 is killed, whose learner is stopped alone, and which ends as its second
    actor-0 leaves; later tests resume it."""
    run_dir = recipe.parent / "run"
    with launching() as launch:
        run = launch(run_dir, recipe, "checkpoint.every=1000000")
        run.wait_for_steps(1)
        first = run.children()
        threads = first["actor-0"].environ()["OMP_NUM_THREADS"]
        first["actor-0"].kill()

        def another() -> psutil.Process | None:
            found = run.children().get("actor-0")
            return None if found == first["actor-0"] else found

        second = wait_for(another, "a new actor-0")
        run.rows()
        run.wait_for_steps(1)
        stopped = run.children()["learner"]
        stopped.terminate()
        wait_for(
            lambda: (found := run.children().get("learner")) and found != stopped, "a new learner"
        )
        run.rows()
        run.wait_for_steps(1)
        second.terminate()
        code, errors = run.end()
    steps = [row["step"] for row in Tail(run_dir / "metrics.jsonl").rows() if is_step(row)]
    kept = valid(run_dir / "checkpoints")[-1][1].step
    log = (run_dir / "logs" / "actor-0.log").read_text()
    return Ended(run_dir, first, threads, second, code, errors, log, steps, kept)


def test_a_dead_actor_is_replaced_until_its_budget_is_spent(ended: Ended) -> None:
    errors = ended.errors
    assert set(ended.first) == {"buffer", "learner", "actor-0", "actor-1"}
    assert ended.threads == "1"
    assert f"actor-0, incarnation 1001, pid {ended.second.pid}" in ended.log
    assert ended.code == 1
    assert "actor-0 was killed by SIGKILL, restart 1 of 1" in errors
    assert "actor-0 left the running job (exit code 0) and is not started again" in errors
    assert ended.log.splitlines()[-1] in errors
    assert ended.kept == ended.steps[-1], "a last one was written"
    assert not any(alive(child) for child in [*ended.first.values(), ended.second])


def test_a_learner_that_is_stopped_alone_is_started_again(ended: Ended) -> None:
    said = f"learner was stopped before it had finished (exit code {STOPPED}), restart 1"
    assert said in ended.errors


def check_backup(run_dir: Path, place: Path) -> None:
    """Copy a running run as docs/weeks.md says; the copy can be resumed where it is."""
    copy = place / run_dir.name
    copy.mkdir()
    subprocess.run(["cp", "-a", run_dir / "checkpoints", copy], check=False)  # one can go meanwhile
    rest = [one for one in run_dir.iterdir() if one.name != "checkpoints"]
    subprocess.run(["cp", "-a", *rest, copy], check=False)
    config = resume(copy, [])
    _, manifest = history.choose(copy / "checkpoints", copy.name, None)
    found = [one for one, _ in JournalReader(copy / "journal").read()]
    assert max(one.take for one in found if isinstance(one, GroupsTaken)) + 1 >= manifest.step > 0
    assert final_ledger(copy, config)
    with pytest.raises(CheckpointError, match=rf"{copy} --fork NAME"):
        resume(copy.rename(copy.with_name("other")), [])


def test_sigterm_leaves_a_checkpoint_and_nothing_else(
    ended: Ended, launch: Callable[..., Launch], tmp_path: Path
) -> None:
    run_dir = ended.run_dir
    before = valid(run_dir / "checkpoints")[-1][1].step
    run = launch(run_dir, "--resume", run_dir)
    run.wait_for_steps(2)
    check_backup(run_dir, tmp_path)
    children = run.children()
    weights = weights_dir(load(run_dir / "config.yaml"), run_dir)
    socket_dir = Path(address_of(run_dir).removeprefix("ipc://")).parent
    assert weights.is_dir() and socket_dir.is_dir()
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.end()
    assert (code, errors) == (128 + signal.SIGTERM, "")
    assert valid(run_dir / "checkpoints")[-1][1].step > before
    assert not any(alive(child) for child in children.values())
    assert not weights.exists() and not socket_dir.exists()


def test_a_killed_launcher_takes_its_processes_along(
    ended: Ended, launch: Callable[..., Launch]
) -> None:
    run_dir = ended.run_dir
    run = launch(run_dir, "--resume", run_dir)
    children = wait_for(lambda: len(found := run.children()) == 4 and found, "all processes")
    run.process.kill()
    run.process.wait()
    assert wait_for(lambda: not any(alive(child) for child in children.values()), "everybody's end")


def test_every_name_of_a_role_leads_to_a_function() -> None:
    for name in (*ROLES, *CHECKS):
        assert callable(resolve(name))
    assert set(PROCESSES) <= set(ROLES)


def test_the_weights_directory_of_a_launch_has_a_random_name_that_the_run_records(
    tmp_path: Path,
) -> None:
    config = Config()
    config.weights.dir = str(tmp_path)
    first = weights_dir(config, tmp_path)
    assert weights_dir(config, tmp_path) == first and first.parent == tmp_path
    second = make_weights_dir(config, tmp_path)
    assert weights_dir(config, tmp_path) == second != first
    assert first.stat().st_mode & 0o777 == second.stat().st_mode & 0o777 == 0o700


def test_a_weights_directory_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config()
    config.weights.dir = str(tmp_path / "missing")
    assert run(config, tmp_path) == USER_ERROR
    assert f"{tmp_path}/missing" in caplog.text and "Traceback" not in caplog.text
    assert not (tmp_path / "run.json").exists()


def test_a_child_whose_parent_is_gone_ends() -> None:
    command = [*COMMAND, "actor", "--connect", "ipc:///tmp/none"]
    done = subprocess.run(
        [*command, "--parent", str(os.getpid() + 1)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1 and "has ended" in done.stderr


def python(program: str, *arguments: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_training_that_cannot_go_on_is_not_started_again(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from evolver_async.errors import TrainingError
from evolver_async.process.setup import RoleArgs, run_process

def give_up(args):
    raise TrainingError("five steps in a row had nothing to train on")

args = RoleArgs(address="", name="learner", incarnation=0, run_dir=Path(sys.argv[1]))
log_file = args.run_dir / "logs" / "learner.log"
sys.exit(run_process("learner", lambda: give_up, args, log_file))
"""
    process = python(program, tmp_path)
    assert process.wait(DEADLINE_S) == TRAINING_ERROR
    launcher = supervisor(Config(), tmp_path)
    child = Child("learner", "learner", process, 0)
    with pytest.raises(RunFailed, match=r"learner cannot go on: .*five steps") as failure:
        launcher.supervise(child, time.monotonic())
    assert failure.value.code == TRAINING_ERROR
    assert "\n" not in str(failure.value) and child.restarts == 0


def supervisor(config: Config, run_dir: Path) -> Supervisor:
    return Supervisor(config, run_dir, LocalSpawner(config, run_dir, "ipc:///none", None))


class FailingSpawner(LocalSpawner):
    """Spawner of processes that write a line to their log and end at once."""

    exit_code = 7

    def start(
        self, role: str, name: str, incarnation: int, rank: int = 0
    ) -> "subprocess.Popen[bytes]":
        with open(self.log_file(name), "a") as output:
            output.write(f"life {incarnation % 1000} of {name}\n")
        process = python(f"raise SystemExit({self.exit_code})")
        process.wait(DEADLINE_S)
        return process


class FailingSupervisor(Supervisor):
    """Supervisor whose processes all fail, on a clock that the test moves."""

    def __init__(self, run_dir: Path, exit_code: int = 7) -> None:
        config = Config()
        spawner = FailingSpawner(config, run_dir, "ipc:///none", None)
        spawner.exit_code = exit_code
        super().__init__(config, run_dir, spawner)
        self.config.launch.restarts = 2
        self.now = time.monotonic()

    def live(self, child: Child, seconds: float) -> None:
        """Notice the end of the process after `seconds`, and restart it when it is due."""
        self.now = child.started + seconds
        self.supervise(child, self.now)
        assert child.due is not None
        self.now = child.due
        self.supervise(child, self.now)


def test_a_process_that_keeps_dying_exhausts_its_budget_and_is_named(tmp_path: Path) -> None:
    launcher = FailingSupervisor(tmp_path)
    child = launcher.add("actor", "actor-3")
    for _ in range(2):
        launcher.live(child, 1.0)
    with pytest.raises(RunFailed) as failure:
        launcher.live(child, 1.0)
    said = str(failure.value)
    assert "actor-3 ended with exit code 7 and is not started again" in said
    assert "(restarted 2 times, ran 1 s)" in said and said.endswith("life 2 of actor-3")
    alerts = Tail(tmp_path / ALERTS).rows()
    assert [row["title"] for row in alerts] == ["crash of actor-3", "restart of actor-3"] * 2
    assert "life 0 of actor-3" in alerts[0]["text"]


def test_a_process_that_cannot_be_started_is_tried_again_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = supervisor(Config(), tmp_path)
    with monkeypatch.context() as short:
        short.setattr(sys, "executable", str(tmp_path / "missing"))  # as where memory is short
        child = launcher.add("actor", "actor-0")
        launcher.supervise(child, child.started)
    assert child.due is not None and "actor-0 cannot be started: [Errno 2]" in caplog.text
    monkeypatch.setattr(LocalSpawner, "place", lambda *_: python("import time; time.sleep(600)"))
    launcher.supervise(child, child.due)
    assert child.poll() is None and child.restarts == 1
    child.process.kill()
    child.process.wait()


def test_the_first_process_that_cannot_be_started_has_its_budget_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None, ["stages.0.steps=1", "launch.restarts=1", "launch.backoff_s=0.01"])
    launcher = supervisor(config, tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(RunFailed, match=r"buffer ended .* \(restarted 1 times") as failure:
        launcher.start()
    assert failure.value.code == 1, "no error of the user: another launch may find room"


@pytest.mark.parametrize("role", ["actor", "buffer"])
def test_a_process_that_leaves_a_running_job_is_started_again_within_its_budget(
    tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = FailingSupervisor(tmp_path, exit_code=0)
    child = launcher.add(role, f"{role}-0")
    for _ in range(2):
        launcher.live(child, 1.0)
    assert f"{role}-0 left the running job (exit code 0), restart 2 of 2" in caplog.text
    with pytest.raises(RunFailed, match=r"left the running job .* is not started again"):
        launcher.live(child, 1.0)


@pytest.mark.parametrize("exit_code", [7, USER_ERROR])
def test_a_run_goes_on_without_an_experience_service_that_cannot_be_kept_alive(
    tmp_path: Path, exit_code: int, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = FailingSupervisor(tmp_path, exit_code)
    child = launcher.add("experience", "experience")
    if exit_code == 7:
        for _ in range(2):
            launcher.live(child, 1.0)
    launcher.supervise(child, child.started + 1.0)
    assert launcher.children == []
    assert f"ended with exit code {exit_code} and is not started again" in caplog.text
    assert "episodes go unguided from now on: life" in caplog.text


def test_failures_long_ago_do_not_count(tmp_path: Path) -> None:
    launcher = FailingSupervisor(tmp_path)
    child = launcher.add("actor", "actor-3")
    for _ in range(9):
        launcher.live(child, launcher.config.launch.healthy_s + 1)
        launcher.live(child, 1.0)
        assert child.restarts == 2
    with pytest.raises(RunFailed):
        launcher.live(child, launcher.config.launch.healthy_s - 1)


def test_a_disk_that_fails_for_a_minute_spends_one_restart(tmp_path: Path) -> None:
    launcher = FailingSupervisor(tmp_path, DISK_FAILED)
    child = launcher.add("buffer", "buffer")
    for _ in range(9):
        launcher.live(child, 1.0)
        assert child.restarts == 1
    launcher.live(child, OUTAGE_S)
    assert child.restarts == 2
    launcher.live(child, 1.0)
    with pytest.raises(RunFailed):
        launcher.live(child, OUTAGE_S)


def test_a_failed_sync_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(_: RoleArgs) -> int:
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError as error:
            raise SyncError("journal: could not be synced") from error

    monkeypatch.setattr("evolver_async.process.setup.set_up_logging", lambda *_: None)
    args = RoleArgs(address="", name="buffer", incarnation=0, run_dir=tmp_path)
    assert run_process("buffer", lambda: main, args, None) == DISK_FAILED


@pytest.mark.parametrize("code", [0, 3, None, "enough"])
def test_an_exit_that_is_not_ours_is_no_end_of_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: object
) -> None:
    def main(_: RoleArgs) -> int:
        raise SystemExit(code)

    monkeypatch.setattr("evolver_async.process.setup.set_up_logging", lambda *_: None)
    args = RoleArgs(address="", name="learner", incarnation=0, run_dir=tmp_path)
    assert run_process("learner", lambda: main, args, None) == 1


def test_the_sentence_of_the_end_is_this_processs_own(tmp_path: Path) -> None:
    launcher = FailingSupervisor(tmp_path, TRAINING_ERROR)
    child = launcher.add("learner", "learner")
    log = launcher.spawner.log_file("learner")
    log.write_text(
        "t ERROR x: an old story\n"
        f"t INFO x: learner learner, incarnation 1, pid {child.process.pid}\n"
        "t ERROR x: nothing to train on\n"
        "some library says good-bye\n"
    )
    with pytest.raises(RunFailed, match="learner cannot go on: t ERROR x: nothing to train on"):
        launcher.supervise(child, time.monotonic())
    log.write_text(log.read_text().replace("t ERROR x: nothing to train on\n", ""))
    with pytest.raises(RunFailed, match="cannot go on: some library says good-bye"):
        launcher.supervise(child, time.monotonic())


def test_a_lost_evaluation_ends_the_run_with_its_sentence_and_its_own_exit_code(
    tmp_path: Path,
) -> None:
    launcher = FailingSupervisor(tmp_path, EVALUATION_LOST)
    child = launcher.add("learner", "learner")
    launcher.spawner.log_file("learner").write_text(
        f"t INFO x: learner learner, incarnation 1, pid {child.process.pid}\n"
        "t ERROR x: training is done, but the evaluations of versions [2] are lost\n"
    )
    with pytest.raises(RunFailed, match=r"training is done, .* \[2\] are lost$") as failure:
        launcher.supervise(child, time.monotonic())
    assert failure.value.code == EVALUATION_LOST and child.restarts == 0


@pytest.mark.parametrize(("learner_code", "code"), [(0, 0), (STOPPED, 128 + signal.SIGTERM)])
def test_a_signal_during_the_drain_does_not_undo_a_finished_run(
    tmp_path: Path, learner_code: int, code: int
) -> None:
    class Interrupted(FailingSupervisor):
        def start(self) -> None:
            self.add("learner", "learner")
            if learner_code:
                os.kill(os.getpid(), signal.SIGTERM)

        def wait_for_end(self, role: str, running: list[Handle]) -> None:
            if role == "actor":
                os.kill(os.getpid(), signal.SIGTERM)
            super().wait_for_end(role, running)

    assert Interrupted(tmp_path, exit_code=learner_code).run() == code


def test_a_role_that_does_not_end_costs_the_others_none_of_their_time(tmp_path: Path) -> None:
    config = Config()
    config.launch.drain_s = 3.0
    launcher = supervisor(config, tmp_path)
    stuck = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    orderly = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), sys.exit(0)))"
    for role, handler in (("learner", stuck), ("buffer", orderly)):
        head = "import signal, sys, time"
        process = python(f"{head}\n{handler}\nprint(flush=True)\nwhile True: time.sleep(1)")
        assert process.stdout is not None
        process.stdout.readline()  # the handler is there
        launcher.children.append(Child(role, role, process, 0))
    launcher.end()
    codes = {child.role: child.process.returncode for child in launcher.children}
    assert codes == {"learner": -signal.SIGKILL, "buffer": 0}


WRITER = """
import signal, sys, time
from pathlib import Path
from evolver_async.checkpoint.checkpoints import save

def write(directory):
    with open(directory / "model", "wb", buffering=0) as file:
        for _ in range(int(sys.argv[2])):
            file.write(b"x" * 1000)
            time.sleep(0.1)
    while sys.argv[3] == "hangs":
        time.sleep(1)

def stop(*_):
    save(Path(sys.argv[1]) / "checkpoints", 7, write, run_id="run", keep=2)
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
print(flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(("pieces", "end"), [(40, "returns"), (2, "hangs")])
def test_a_checkpoint_is_waited_for_as_long_as_it_moves(
    tmp_path: Path, pieces: int, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config()
    config.launch.drain_s = 2.0  # writing takes 4 s
    launcher = supervisor(config, tmp_path)
    process = python(WRITER, tmp_path, pieces, end)
    assert process.stdout is not None
    process.stdout.readline()  # the handler is there
    launcher.children.append(Child("learner", "learner", process, 0))
    launcher.end()
    if end == "returns":
        assert process.returncode == 0 and "still writing its checkpoint" in caplog.text
        assert load_newest(tmp_path / "checkpoints", "run")[1].step == 7
    else:
        assert process.returncode == -signal.SIGKILL
        assert valid(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(
    ("still_s", "longest_s", "ends"), [(0.0, 90.0, True), (60.0, 90.0, False), (0.0, 0.1, False)]
)
def test_a_stopped_learner_may_compute_for_some_of_its_steps(
    still_s: float,
    longest_s: float,
    ends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervision, "LOOK_S", 0.1)
    monkeypatch.setattr(supervision, "COMPUTES_S", 0.5)
    progress = {"step": 7, "phase": "forward", "still_s": still_s, "longest_s": longest_s}

    class Answered(Supervisor):
        async def status(self, timeout_s: float) -> dict[str, Any] | None:
            return {"progress": progress}

    config = Config()
    config.launch.drain_s = 0.5
    launcher = Answered(config, tmp_path, LocalSpawner(config, tmp_path, "ipc:///none", None))
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), sys.exit(0)))"
    process = python(f"import signal, sys, time\n{slow}\nprint(flush=True)\ntime.sleep(600)")
    assert process.stdout is not None
    process.stdout.readline()  # the handler is there
    launcher.children.append(Child("learner", "learner", process, 0))
    launcher.end()
    assert process.returncode == (0 if ends else -signal.SIGKILL)
    assert "computing step 7" in caplog.text or not ends


SLEEPS = "import time; time.sleep(600)"


def test_a_process_that_hangs_is_killed_at_the_second_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = supervisor(Config(), tmp_path)
    for role, name in (("actor", "actor-0"), ("actor", "actor-1"), ("learner", "learner")):
        launcher.children.append(Child(role, name, python(SLEEPS), 3))
    hung = {"actor-0": 301.0, "actor-1": 299.0, "learner": 1000.0}
    try:
        launcher.end_hung(hung, 0.0)
        launcher.end_hung({}, 6.0)  # it was none: the machine had been suspended
        launcher.end_hung(hung, 12.0)
        assert [child.poll() for child in launcher.children] == [None, None, None]
        launcher.end_hung(hung, 18.0)
        assert launcher.children[0].process.wait() == -signal.SIGKILL
        assert [child.poll() for child in launcher.children[1:]] == [None, None]
        assert "actor-0 has hung for 301 s" in caplog.text
        launcher.config.launch.hung_learner_s = 900.0
        launcher.end_hung(hung, 24.0)
        launcher.end_hung(hung, 30.0)
        assert launcher.children[2].process.wait() == -signal.SIGKILL
    finally:
        for child in launcher.children:
            child.process.kill()
            child.process.wait()


def test_a_stopped_buffer_hangs_and_one_that_computes_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "BUSY_S", 0.02)
    launcher = supervisor(Config(), tmp_path)
    busy = python("while True: pass")
    child = Child("buffer", "buffer", busy, 0)
    launcher.children.append(child)

    def used_s() -> float:
        return sum(psutil.Process(busy.pid).cpu_times()[:2])

    try:
        assert launcher.lifeless(None, 400.0) == {}
        enough_s = used_s() + 0.1
        wait_for(lambda: used_s() > enough_s, "some work")
        assert launcher.lifeless(None, 400.0) == {}
        busy.send_signal(signal.SIGSTOP)
        wait_for(lambda: launcher.lifeless(None, 400.0) == {"buffer": 400.0}, "it is stopped")
    finally:
        busy.kill()
        busy.wait()
    assert launcher.lifeless(None, 400.0) == {}
    stall = {"who": "actor-0", "for_s": 7.0, "about": "life"}
    status = {"stalled": [stall, stall | {"who": "actor-1", "about": "groups"}]}
    assert launcher.lifeless(status, 0.0) == {"actor-0": 7.0}


def test_a_rank_that_stumbles_on_its_way_out_undoes_no_finished_run() -> None:
    ranks = [python(f"raise SystemExit({code})") for code in (0, 1)]
    for rank in ranks:
        rank.wait(DEADLINE_S)
    assert Child("learner", "learner", ranks[0], 0, others=ranks[1:]).poll() == 0


def test_a_first_rank_that_has_stopped_is_not_blamed_on_another() -> None:
    ranks = [python(f"raise SystemExit({code})") for code in (STOPPED, USER_ERROR)]
    for rank in ranks:
        rank.wait(DEADLINE_S)
    assert Child("learner", "learner", ranks[0], 0, others=ranks[1:]).poll() == STOPPED


@pytest.mark.parametrize(("dying", "blamed"), [(0, "learner"), (1, "learner-1")])
def test_ranks_of_a_learner_die_together_and_the_first_to_die_is_blamed(
    dying: int, blamed: str
) -> None:
    ranks = [python("import time; time.sleep(600)") for _ in range(3)]
    child = Child("learner", "learner", ranks[0], 0, others=ranks[1:])
    assert child.poll() is None
    ranks[dying].send_signal(signal.SIGTERM)
    ranks[dying].wait(DEADLINE_S)
    assert child.poll() == -signal.SIGTERM, "not what the others were killed by"
    assert child.poll() == -signal.SIGTERM
    assert child.failed_process == (blamed, ranks[dying].pid)
    assert all(rank.returncode == -signal.SIGKILL for rank in ranks if rank is not ranks[dying])
