"""The local launcher with real processes: who dies is replaced, who ends leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launches import COMMAND, DEADLINE_S, Launch, alive, launching, wait_for

from evolver_async.checkpoint import valid
from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.launch.directory import address_of, last_lines
from evolver_async.launch.local import Child, Launcher, RunFailed
from evolver_async.launch.roles import (
    CHECKS,
    PROCESSES,
    ROLES,
    TRAINING_ERROR,
    resolve,
    weights_dir,
)

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


def test_a_dead_actor_is_replaced_until_its_budget_is_spent(
    recipe: Path, launch: Callable[..., Launch]
) -> None:
    run_dir = recipe.parent / "run"
    run = launch(run_dir, recipe)
    run.wait_for_steps(1)
    first = run.children()
    assert set(first) == {"buffer", "learner", "actor-0", "actor-1"}
    assert first["actor-0"].environ()["OMP_NUM_THREADS"] == "1"
    first["actor-0"].kill()
    second = wait_for(
        lambda: (found := run.children().get("actor-0")) and found != first["actor-0"] and found,
        "a new actor-0",
    )
    line = second.cmdline()
    assert line[line.index("--incarnation") + 1] == "1001"
    run.wait_for_steps(2)
    second.kill()
    code, errors = run.end()
    assert code == 1
    assert "actor-0 was killed by SIGKILL, restart 1 of 1" in errors
    assert "actor-0 was killed by SIGKILL and is not started again" in errors
    assert last_lines(run_dir / "logs" / "actor-0.log", 1) in errors
    assert not any(alive(child) for child in [*first.values(), second])


def test_sigterm_leaves_a_checkpoint_and_nothing_else(
    recipe: Path, launch: Callable[..., Launch]
) -> None:
    run_dir = recipe.parent / "run"
    before = valid(run_dir / "checkpoints")[-1][1].step
    run = launch(run_dir, "--resume", run_dir)
    run.wait_for_steps(2)
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
    recipe: Path, launch: Callable[..., Launch]
) -> None:
    run_dir = recipe.parent / "run"
    run = launch(run_dir, "--resume", run_dir)
    children = wait_for(lambda: len(found := run.children()) == 4 and found, "all processes")
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not any(alive(child) for child in children.values()), "the end of all")


def test_every_name_of_a_role_leads_to_a_function() -> None:
    for name in (*ROLES, *CHECKS):
        assert callable(resolve(name))
    assert set(PROCESSES) <= set(ROLES)


def test_a_child_whose_parent_is_gone_ends() -> None:
    command = [*COMMAND, "actor", "--connect", "ipc:///tmp/none"]
    done = subprocess.run(
        [*command, "--parent", str(os.getpid() + 1)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1 and "is gone" in done.stderr


def python(program: str, *arguments: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_training_that_cannot_go_on_is_not_started_again(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from evolver_async.launch import roles

def give_up(args):
    raise roles.TrainingError("five steps in a row had nothing to train on")

roles.resolve = lambda role: give_up
args = roles.RoleArgs(address="", name="learner", incarnation=0, run_dir=Path(sys.argv[1]))
sys.exit(roles.run_process("learner", args, args.run_dir / "logs" / "learner.log"))
"""
    process = python(program, tmp_path)
    assert process.wait(DEADLINE_S) == TRAINING_ERROR
    launcher = Launcher(Config(), tmp_path, "ipc:///none")
    child = Child("learner", "learner", process, 0)
    with pytest.raises(RunFailed, match=r"learner cannot go on: .*five steps") as failure:
        launcher.tend(child, time.monotonic())
    assert failure.value.code == TRAINING_ERROR
    assert "\n" not in str(failure.value) and child.restarts == 0


def test_a_role_that_does_not_end_costs_the_others_none_of_their_time(tmp_path: Path) -> None:
    config = Config()
    config.launch.drain_s = 1.0
    launcher = Launcher(config, tmp_path, "ipc:///none")
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
