"""The number of actors: by hand, by what the learner waits for, and as a live run changes it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from invariants import check_journal
from launches import Launch, launching, wait_for

from evolver_async.cli import main
from evolver_async.config import ActorsConfig, Config
from evolver_async.config.load import dump, load
from evolver_async.launch.run_directory import ACTORS, locked, scale
from evolver_async.launch.scaling import ActorScaling, WaitController, running_actors
from evolver_async.metrics.tail import Tail

RECIPE = """
env: {name: bandit}
policy: {max_length: 128, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}
rollout: {group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 1, groups: 2}
advantage: {kind: reinforce}
learner: {groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512}
stages: [{kind: rl, hours: 1}]
eval: {every: 0, episodes: 4}
checkpoint: {every: 20}
metrics: {panel: none}
"""


def controller(
    path: Path, *, low: int = 1, high: int = 16, target: float = 0.1
) -> tuple[WaitController, Callable[[float, int], None]]:
    """A controller, and the writer of steps of a learner that waits a share of each."""

    def steps(waits: float, count: int = 5) -> None:
        with open(path, "a") as file:
            for _ in range(count):
                file.write(
                    json.dumps({"time/wait_s": 1.0, "throughput/learner/data": waits}) + "\n"
                )

    actors = ActorsConfig(count=low, min=low, max=high, target=target, scale_s=30.0)
    return WaitController(actors, Tail(path)), steps


def test_a_learner_that_waits_gets_actors_until_it_waits_as_asked(tmp_path: Path) -> None:
    """Groups come at a rate in proportion to the actors; a step needs 1 s of the learner."""
    one, steps = controller(tmp_path / "rows", target=0.1)
    count, now, seen = 1, 0.0, []
    for _ in range(12):
        one.wanted(count, now)
        waits = max(0.0, 1 - count / 9)  # nine actors make as many groups as it takes
        steps(waits, 5)
        now += 31
        count = one.wanted(count, now)
        seen.append(count)
    assert seen[:3] == [2, 4, 8] and set(seen[3:]) == {8, 9}, seen


def test_a_learner_that_never_waits_lets_actors_go_one_at_a_time(tmp_path: Path) -> None:
    one, steps = controller(tmp_path / "rows", low=2, high=8)
    count, now = 8, 0.0
    for expected in (7, 6, 5, 4, 3, 2, 2):
        one.wanted(count, now)
        steps(0.0)
        now += 31
        count = one.wanted(count, now)
        assert count == expected


@pytest.mark.parametrize(
    ("waits", "steps_seen", "passed_s"), [(0.08, 5, 31), (0.9, 2, 31), (0.9, 9, 29)]
)
def test_nothing_changes_within_the_band_or_without_evidence(
    tmp_path: Path, waits: float, steps_seen: int, passed_s: float
) -> None:
    one, steps = controller(tmp_path / "rows")
    one.wanted(4, 0.0)
    steps(waits, steps_seen)
    assert one.wanted(4, passed_s) == 4


def test_without_bounds_the_number_is_the_configured_one(tmp_path: Path) -> None:
    one, steps = controller(tmp_path / "rows", low=3, high=3)
    one.wanted(3, 0.0)
    steps(0.9)
    assert one.wanted(3, 99.0) == 3


def test_what_scale_asks_for_holds_until_it_is_given_back(tmp_path: Path) -> None:
    scaling = ActorScaling(Config(), tmp_path)
    assert scaling.wanted(0.0) == 2
    scale(tmp_path, "5")
    assert scaling.wanted(1.0) == 5
    assert ActorScaling(Config(), tmp_path).wanted(1.0) == 5, "asked for before it was there"
    scale(tmp_path, "auto")
    assert scaling.wanted(2.0) == 2 == scaling.wanted(3.0), "no bounds, so no controller"
    config = Config(actors=ActorsConfig(max=8))
    scaling = ActorScaling(config, tmp_path)
    scale(tmp_path, "5")
    assert scaling.wanted(4.0) == 5
    scale(tmp_path, "auto")
    assert scaling.wanted(5.0) == 5, "the controller goes on from there"


@pytest.mark.parametrize("content", [b"", b"many", b"-3", b"0", b"1e3", b"9" * 5000, b"\xff\xfe"])
def test_a_file_that_says_no_number_changes_nothing(tmp_path: Path, content: bytes) -> None:
    scaling = ActorScaling(Config(), tmp_path)
    (tmp_path / ACTORS).write_bytes(content)
    assert scaling.wanted(0.0) == 2
    scale(tmp_path, "5")
    assert scaling.wanted(1.0) == 5
    (tmp_path / ACTORS).write_bytes(content)
    assert scaling.wanted(2.0) == 5
    (tmp_path / ACTORS).write_bytes(b" 3\n")
    assert scaling.wanted(3.0) == 3


def test_steps_with_actors_that_were_asked_for_by_hand_do_not_count(tmp_path: Path) -> None:
    _, steps = controller(tmp_path / "metrics.jsonl")
    scaling = ActorScaling(Config(actors=ActorsConfig(max=8, scale_s=30.0)), tmp_path)
    scale(tmp_path, "1")
    assert scaling.wanted(0.0) == 1
    steps(0.9)
    scale(tmp_path, "5")
    assert scaling.wanted(100.0) == 5
    scale(tmp_path, "auto")
    assert scaling.wanted(101.0) == 5
    steps(0.08)
    assert scaling.wanted(132.0) == 5


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ("actors=0", [], "must be a number from 1 or auto"),
        ("many", [], "must be a number from 1 or auto"),
        ("9", ["actors.max=4"], r"within actors.min and actors.max \(1 to 4\)"),
        ("3", ["launch.gpus.actors=[0, 1]", "engine.device=cuda"], "names 2 GPUs, too few for 3"),
        ("3", ["launch.kind=serial"], "launch.kind: serial has a fixed number"),
        ("3", [], "is not running; set actors.count when you resume it"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, changes: list[str], message: str
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    dump(load(None, ["stages=[{steps: 1}]", *changes]), run_dir / "config.yaml")
    assert main(["scale", str(run_dir), given]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert not (run_dir / ACTORS).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], r"2 actors again \(actors\.count\)"),
        (["actors.max=4"], "the controller chooses the number of actors"),
    ],
)
def test_scale_auto_says_what_determines_the_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    dump(load(None, ["stages=[{steps: 1}]", *changes]), run_dir / "config.yaml")
    with locked(run_dir):
        assert main(["scale", str(run_dir), "auto"]) == 0
    assert re.search(message, capsys.readouterr().out)


@pytest.mark.parametrize("given", ["5", "auto"])
def test_actors_without_memory_for_them_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    dump(load(None, ["stages=[{steps: 1}]", "actors.count=5"]), run_dir / "config.yaml")
    monkeypatch.setattr("evolver_async.memory.host_memory.available_bytes", lambda: 1 << 20)
    with locked(run_dir):
        monkeypatch.setattr("evolver_async.commands.control.running_actors", lambda _: 5)
        assert main(["scale", str(run_dir), given]) == 0, "they run already"
        (run_dir / ACTORS).unlink()
        monkeypatch.setattr("evolver_async.commands.control.running_actors", lambda _: 3)
        assert main(["scale", str(run_dir), given]) == 2
    assert "actors: 2 more need" in capsys.readouterr().err
    assert not (run_dir / ACTORS).exists()


@pytest.mark.process
def test_the_actors_of_a_launcher_are_counted_by_their_command(tmp_path: Path) -> None:
    program = "import time, sys; print(0, flush=True); time.sleep(600)"
    (tmp_path / "evolver_async").mkdir()
    (tmp_path / "evolver_async" / "__init__.py").touch()
    (tmp_path / "evolver_async" / "cli.py").write_text(program)
    command = [sys.executable, "-m", "evolver_async.cli"]
    started = [
        subprocess.Popen([*command, role], cwd=tmp_path, env={}, stdout=subprocess.PIPE)
        for role in ("actor", "learner", "actor")
    ]
    try:
        for one in started:
            assert one.stdout is not None and one.stdout.readline()
        assert running_actors(os.getpid()) == 2 and running_actors(0) == 0
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start


def actors(run: Launch) -> set[str]:
    return {name for name in run.children() if name.startswith("actor-")}


@pytest.mark.process
def test_a_live_run_grows_and_shrinks_and_loses_nothing(
    tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE + f"run: {{dir: {tmp_path}, name: run}}\n")
    run = launch(run_dir, recipe)
    run.wait_for_steps(1)
    assert actors(run) == {"actor-0"}
    assert main(["scale", str(run_dir), "actors=3"]) == 0
    joined = {"actor-0", "actor-1", "actor-2"}
    wait_for(lambda: joined <= run.status()["actors"].keys(), "three actors that answer")
    run.wait_for_steps(2)
    assert main(["scale", str(run_dir), "1"]) == 0
    wait_for(lambda: actors(run) == {"actor-0"}, "the end of two actors")
    run.wait_for_steps(2)
    assert main(["scale", str(run_dir), "2"]) == 0, "a name comes back under a later incarnation"
    again = wait_for(lambda: run.children().get("actor-1"), "actor-1")
    line = again.cmdline()
    assert line[line.index("--incarnation") + 1] == "1001"
    run.wait_for_steps(1)
    said = run.status()
    run.process.terminate()
    code, errors = run.end()
    assert (code, errors) == (143, "")
    log = (run_dir / "logs" / "launcher.log").read_text()
    assert "actors: 3, before 1 (evolver-async scale)" in log and "killed" not in log
    check_journal(run_dir / "journal", load(run_dir / "config.yaml"), "run", [])
    print(said["ledger"])
