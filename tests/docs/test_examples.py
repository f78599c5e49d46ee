"""The examples of the tutorials run as they stand."""

import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from arm_agent import make_policy
from launches import free_port, is_step, launching
from serial_runs import Finished, trainer

from actors.checks.config import check as check_rollouts
from evolver_async.cli import main
from evolver_async.config.load import load
from evolver_async.metrics.tail import Tail
from evolver_async.model.tiny import make_tiny
from evolver_async.schema import Task
from examples.guess import Guess

pytestmark = pytest.mark.process

FIRST_STEP_S = 300.0  # on a busy machine most of it is the import of torch in each process
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def guessed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of the first example that begins with a model of one's own."""
    directory = tmp_path_factory.mktemp("guess")
    model = directory / "my-model"
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64}
    make_tiny(model, seed=3, max_length=128, **sizes)
    train = trainer(directory, (EXAMPLES / "guess.yaml").read_text())
    return train("run", f"policy.path={model}", "stages.1.steps=4")


def test_the_own_environment_is_trained_on(guessed: Finished) -> None:
    assert fmean(guessed.rl("train/format_errors")) < 0.1
    assert fmean(guessed.rl("train/success")) > 0.25  # random guesses reach .58
    evaluated = [row for row in Tail(guessed.run_dir / "metrics.jsonl").rows() if not is_step(row)]
    assert evaluated[-1]["eval/distinct"] == 4, "one for each number"


def test_the_own_environment_answers_whatever_a_policy_writes() -> None:
    env = Guess()
    env.reset(Task(task_id="t", env="guess", split="train", map_seed=0), 0)
    for action in ("", "one", "-1", "1.0", "\u00b2", "\u2462"):  # the last are digits, no numbers
        assert not env.step(action).info.valid
    assert env.step(env.solve()[0]).info.success


def test_the_own_model_is_evaluated_exported_and_asked(
    guessed: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "my-export")
    assert main(["eval", str(guessed.run_dir), "--step", "best", "--episodes", "8"]) == 0
    assert "success" in capsys.readouterr().out
    assert main(["export", str(guessed.run_dir), out, "--step", "best"]) == 0

    arguments = ["reply.py", out, Guess.instructions, "a number from 0 to 3"]
    monkeypatch.setattr(sys, "argv", arguments)
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / "reply.py"), run_name="__main__")
    answer = capsys.readouterr().out.strip()
    assert answer.endswith("</answer>")
    assert answer.removesuffix("</answer>").strip().isdigit()


@pytest.mark.slow
def test_the_async_environment_with_tools_trains(tmp_path: Path) -> None:
    rows = train(
        "prices",
        tmp_path,
        "eval.episodes=4",
        "eval.final_episodes=4",
        "stages.0.steps=30",
        "stages.1.steps=2",
        steps=32,
    )
    trained = [row for row in rows if row.get("stage_kind") == "rl"]
    assert trained and all(row["train/turns_mean"] > 1 for row in trained)


@pytest.mark.slow
def test_the_agent_with_a_tool_trains(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    make_policy(policy, steps=120)
    small = [f"policy.path={policy}", "policy.max_length=192", "stages.0.steps=4"]
    small += [
        "eval.episodes=4",
        "eval.final_episodes=4",
        "buffer.warn_s=4",
    ]  # counters come every second
    rows = train("arms", tmp_path, *small, steps=4)
    (counted,) = [row for row in rows if "agent/episodes" in row][-1:]
    assert counted["agent/exceptions"] == counted["agent/refused"] == 0
    assert counted["agent/calls"] > counted["agent/episodes"] > 0


@pytest.mark.slow
def test_an_agent_elsewhere_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which cannot import anything of ours."""
    port = free_port()
    monkeypatch.setenv("EPISODES_KEY", "a-key-of-the-test")
    variables = {"ENDPOINT": f"http://127.0.0.1:{port}", "EPISODES_KEY": "a-key-of-the-test"}
    program = [sys.executable, "-I", str(EXAMPLES / "elsewhere.py")]
    agent = subprocess.Popen(program, env=variables, cwd=tmp_path)
    try:
        small = ["policy.hidden_size=32", "stages.0.steps=2", "rollout.group_size=4"]
        small += ["learner.groups_per_step=2", "eval.episodes=2", "eval.final_episodes=2"]
        small += [f"rollout.endpoint.port={port}", "buffer.warn_s=4"]
        rows = train("elsewhere", tmp_path, *small, steps=2)
        assert agent.poll() is None
    finally:
        agent.kill()
        agent.wait()
    (counted,) = [row for row in rows if "agent/episodes" in row][-1:]
    assert counted["agent/exceptions"] == counted["agent/late"] == 0
    assert counted["agent/episodes"] > 0  # by the last report, which may lag behind the steps
    assert all(0 < row["train/reward_mean"] <= 1 for row in rows if is_step(row))


def train(name: str, directory: Path, *changes: str, steps: int) -> list[dict]:
    """Train an example's recipe with processes of its own; the rows of its metrics."""
    changes = (*changes, f"run.dir={directory}", f"run.name={name}", "metrics.panel=none")
    recipe = EXAMPLES / f"{name}.yaml"
    check_rollouts(load(recipe, list(changes)))
    with launching() as launch:
        one = launch(directory / name, recipe, *changes)
        one.wait_for_row(is_step, "the first step", FIRST_STEP_S)
        one.wait_for_steps(steps - 1)
        code, errors = one.end()
        assert code == 0, (errors, one.logs())
    return Tail(directory / name / "metrics.jsonl").rows()
