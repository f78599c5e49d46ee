"""The command line: what it refuses, in one sentence, before anything is started or overwritten."""

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest
from buffer_world import World
from launches import COMMAND, DEADLINE_S, alive, wait_for
from serial_recipe import RECIPE as SERIAL

from evolver_async import cli
from evolver_async.checkpoint.checkpoints import save
from evolver_async.cli import main
from evolver_async.commands import training
from evolver_async.config import Config, ConfigError, LaunchConfig, StageConfig
from evolver_async.config.load import dump, load
from evolver_async.extension import find_modules
from evolver_async.launch import creation
from evolver_async.launch.creation import create
from evolver_async.launch.registry import resolve
from evolver_async.launch.resumption import FinishedRun, resume
from evolver_async.launch.run_directory import ACTORS, announce, locked, scale
from evolver_async.metrics.launches import record
from evolver_async.runs.watch.live import exact_values
from evolver_async.runs.watch.runs import end
from evolver_async.study.directory import DEFINITION

RECIPE = "stages: [{kind: rl, steps: 5}]\n"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused; returns what it says."""

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, "one sentence"
        return captured.err.removeprefix("evolver-async: ").strip()

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory as an earlier launch leaves it, without checkpoints."""
    path = tmp_path / "runs" / "earlier"
    path.mkdir(parents=True)
    dump(Config(stages=[StageConfig(steps=5)]), path / "config.yaml")
    return path


HEAVY = ("torch", "transformers", "zmq", "wandb", "rich", "omegaconf", "actors", "learner")


@pytest.mark.process
def test_help_imports_no_heavy_library_and_takes_half_a_second_of_processor_time() -> None:
    program = (
        "import sys, time; from evolver_async.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert time.process_time() < 0.5, time.process_time()\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "COMMAND" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_a_reader_that_has_gone_ends_a_command_quietly() -> None:
    """As `head -1` does, which ends after the first line."""
    process = subprocess.Popen(
        [*COMMAND, "config", "frozen_lake"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert errors == b"" and process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learner.lrr=1"], "learner.lrr: unknown key, did you mean learner.lr?"),
        (["learner.minibatches=many"], "learner.minibatches: "),
        (["learner.lr=nan"], "learner.lr: must be finite, is nan"),
        (["policy.layers=-1"], "policy.layers: must be at least 1, is -1"),
        (["buffer.max_staleness=2", "actors.weight_lag=3"], "actors.weight_lag: "),
        (["rollout.group_size=1"], "rollout.group_size: must be at least 2: adv"),
        (["env.name=frozen_lak"], "env.name: "),
        (["env.name=no_package.no_module:Env"], "env.name: "),
        (["env.params.sise=4"], "env.params.sise: "),
        (["env.params.size=large"], "env.params.size: "),
        (["rollout.format=telegram"], "rollout.format: "),
        (["policy.path=/nowhere"], "policy.path: /nowhere is not a directory"),
        (["weights.dir=/nowhere"], "weights.dir: /nowhere is not a directory"),
        (["buffer.address=tcp://0.0.0.0:4000"], "buffer.address: 0.0.0.0 is not a loopback"),
        (["buffer.address=tcp://127.0.0.1:70000"], "buffer.address: 70000 is not a port"),
        (["buffer.address=ipc:///nowhere/socket"], "buffer.address: /nowhere is not a directory"),
    ],
)
def test_a_bad_configuration_starts_nothing(
    refused: Refused, recipe: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert refused("train", recipe, f"run.dir={tmp_path}/runs", *arguments).startswith(message)
    assert not (tmp_path / "runs").exists()


def test_a_cluster_without_ray_starts_nothing(
    refused: Refused, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evolver_async.launch.start_checks.find_spec", lambda _: None)
    said = refused("train", recipe, f"run.dir={tmp_path}/runs", "launch.kind=ray")
    assert said.startswith("launch.kind: ray needs Ray, which is not installed: run pip install")
    assert not (tmp_path / "runs").exists()


def test_serve_trains_a_recipe_on_conversations(
    refused: Refused, recipe: Path, tmp_path: Path
) -> None:
    said = refused("serve", recipe, f"run.dir={tmp_path}/runs")
    assert said.startswith("rollout.endpoint.key_env: ") and "rollout.agent=users" in said
    assert not (tmp_path / "runs").exists()


def test_a_missing_recipe_is_named(refused: Refused, tmp_path: Path) -> None:
    assert "no.yaml" in refused("train", tmp_path / "no.yaml")
    assert "needs a recipe" in refused("train")


def test_a_port_in_use_starts_nothing(refused: Refused, recipe: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        said = refused("train", recipe, f"buffer.address={address}", f"run.dir={tmp_path}/runs")
    assert said == f"buffer.address: {address}: address already in use"
    assert not (tmp_path / "runs").exists()


def test_a_model_without_tokenizer_starts_nothing(
    refused: Refused, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = refused("train", recipe, f"policy.path={tmp_path}", f"run.dir={tmp_path}/runs")
    assert said == f"policy.path: {tmp_path} has no tokenizer.json"
    assert not (tmp_path / "runs").exists()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["local", "serial"])
def test_a_broken_model_leaves_no_run_directory(
    refused: Refused, recipe: Path, tmp_path: Path, kind: str
) -> None:
    """A serial run prepares its policy in its own process."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("not json")
    runs = tmp_path / "runs"
    broken = f"policy.path={model}"
    said = refused("train", recipe, broken, f"launch.kind={kind}", f"run.dir={runs}", "run.name=x")
    assert said.startswith("policy.path: ")
    assert not (runs / "x").exists()


@pytest.mark.parametrize("kind", ["local", "serial"])
def test_a_fault_that_is_not_the_models_is_not_laid_to_it(
    refused: Refused,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """As where the disk is full when the policy is written."""
    fault = OSError(errno.ENOSPC, "No space left on device")

    def prepare(_: object) -> int:
        raise fault

    def process(*_: object, stdout: IO[bytes], **__: object) -> subprocess.CompletedProcess[bytes]:
        stdout.write(f"Traceback (most recent call last):\nOSError: {fault}\n".encode())
        return subprocess.CompletedProcess([], 1)

    at = "evolver_async.launch.creation"
    found = lambda name: prepare if name == "prepare" else resolve(name)  # noqa: E731
    monkeypatch.setattr(f"{at}.resolve", found)
    monkeypatch.setattr(f"{at}.subprocess.run", process)
    runs = tmp_path / "runs"
    said = refused("train", recipe, f"launch.kind={kind}", f"run.dir={runs}", "run.name=x")
    assert said == f"the policy could not be prepared: OSError: {fault}"
    assert not (runs / "x").exists()


def test_an_existing_run_is_not_overwritten(
    refused: Refused, recipe: Path, run_dir: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    said = refused("train", recipe, f"run.dir={tmp_path}/runs", "run.name=earlier")
    assert said.startswith(f"run.name: {run_dir} exists")
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_resume_needs_a_run_with_a_valid_checkpoint_of_its_own(
    refused: Refused, run_dir: Path, tmp_path: Path
) -> None:
    assert "is not a run directory" in refused("train", "--resume", tmp_path)

    def write(directory: Path) -> None:
        (directory / "model").write_text("weights")

    newest = save(run_dir / "checkpoints", 1, write, run_id="other", keep=2)
    said = refused("train", "--resume", run_dir)
    assert said.startswith(f"{newest}: belongs to run other, not to earlier")
    assert str(run_dir.with_name("other")) in said and "--fork" in said
    (newest / "model").write_text("w")
    assert f"{newest}: model is torn" in refused("train", "--resume", run_dir)
    assert not (run_dir / "logs").exists()
    config = (run_dir / "config.yaml").read_bytes()
    assert "learner.lrr" in refused("train", "--resume", run_dir, "learner.lrr=1")
    assert (run_dir / "config.yaml").read_bytes() == config


def test_a_value_of_a_run_that_is_refused_can_be_replaced_on_resume(
    refused: Refused, run_dir: Path
) -> None:
    """As one of an older version; in a fork as well."""
    config = load(run_dir / "config.yaml")
    config.learner.eps, config.stages[0].override = 0.0, {"loss": {"clip_low": 2.0}}
    dump(config, run_dir / "config.yaml")
    written = f"{run_dir / 'config.yaml'}: "
    said = refused("train", "--resume", run_dir)
    assert said.startswith(f"{written}learner.eps: must be greater than 0, is 0.0; a change KEY=")
    said = refused("train", "--resume", run_dir, "learner.eps=1e-8")
    assert said.startswith("stages[0].override: loss.clip_low: must be")
    said = refused("train", "--resume", run_dir, "learner.eps=-1")
    assert said.startswith("learner.eps: must be greater than 0, is -1")
    changes = ["learner.eps=1e-8", "stages.0.override.loss.clip_low=0.2"]
    assert "holds no checkpoint" in refused(
        "train", "--resume", run_dir, "--fork", "other", *changes
    )
    assert resume(run_dir, changes).learner.eps == 1e-8
    assert load(run_dir / "config.yaml").stages[0].override == {"loss": {"clip_low": 0.2}}


def test_a_change_may_be_longer_than_the_name_of_a_file(refused: Refused, run_dir: Path) -> None:
    prompt = f"override: {{rollout: {{system_prompt: {'x' * 300}}}}}"
    said = refused("train", "--resume", run_dir, f"stages+={{kind: rl, stps: 1, {prompt}}}")
    assert said.startswith("stages+.stps: unknown key")
    assert "is neither a file nor the name of a recipe" in refused("config", "x" * 300)


def test_a_run_in_place_of_a_recipe_is_told_from_a_wrong_name(
    refused: Refused, run_dir: Path
) -> None:
    for command in ("train", "config", "doctor"):
        said = refused(command, run_dir)
        assert said.startswith(f"{run_dir}: is the directory of a run")
        assert said.endswith(f"evolver-async train --resume {run_dir}")


def test_a_recipe_beside_resume_is_refused(refused: Refused, recipe: Path, run_dir: Path) -> None:
    assert f"{recipe}: --resume continues the run's own recipe" in refused(
        "train", recipe, "--resume", run_dir
    )


OVERRIDE = "stages.0.override."


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=9",
        "tasks.train=7",
        "rollout.temperature=0.5",
        f"{OVERRIDE}rollout.temperature=0.5",
    ],
)
def test_a_run_that_has_begun_keeps_what_made_its_data(
    refused: Refused, run_dir: Path, change: str
) -> None:
    before = (run_dir / "config.yaml").read_text()
    said = refused("train", "--resume", str(run_dir), change)
    assert said.startswith(
        f"{change.rpartition('=')[0].removeprefix(OVERRIDE)}: cannot change on resume: "
    )
    assert (run_dir / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["stages.0.override.env.name=bandit"], "env.name"),
        (["stages.0.override.buffer.reuse=2"], "buffer.reuse"),
        (["stages.0.kind=sft"], "stages[0].kind"),
        (["experience.kind=contrast", "stages.0.override.rollout.guided=failed"], "rollout.guided"),
    ],
)
def test_a_stage_that_has_begun_keeps_what_its_replay_depends_on(
    refused: Refused, run_dir: Path, changes: list[str], key: str
) -> None:
    config = Config(stages=[StageConfig(steps=5), StageConfig(steps=5)])
    config.eval.episodes, config.eval.final_episodes = 2, 0
    dump(config, run_dir / "config.yaml")
    resume(run_dir, changes)  # nothing has begun
    dump(config, run_dir / "config.yaml")
    world = World(run_dir / "journal", config)
    world.resume()
    assert world.lease()
    world.store.journal.close()
    before = (run_dir / "config.yaml").read_text()
    assert refused("train", "--resume", run_dir, *changes).startswith(
        f"{key}: cannot change on resume, as stage 0 has begun with "
    )
    assert (run_dir / "config.yaml").read_text() == before
    resume(run_dir, [change.replace("stages.0", "stages.1") for change in changes])


def test_stages_that_have_begun_keep_which_of_them_have_the_same_tasks(
    refused: Refused, run_dir: Path
) -> None:
    """A stage forgets what was known of other tasks, also when the journal is replayed."""
    config = Config(stages=[StageConfig(steps=5), StageConfig(steps=5)])
    dump(config, run_dir / "config.yaml")
    world = World(run_dir / "journal", config)
    world.resume(stage=1)
    world.store.journal.close()
    assert refused(
        "train", "--resume", run_dir, "stages.1.override.env.params={hints: false}"
    ).startswith(
        "env.params: cannot change on resume, as stage 1 has begun with the tasks of stage 0, got"
        " tasks of its own; a fork"
    )
    resume(run_dir, ["env.params={hints: false}"])  # in both


def test_a_finished_run_is_not_resumed(refused: Refused, run_dir: Path) -> None:
    def write(directory: Path) -> None:
        state = {"stage": 0, "stage_take": 0, "take": 5, "stage_tokens": 9, "stage_seconds": 1.0}
        state |= {"eval_success": -1.0, "finished": True, "pending": []}
        (directory / "state.json").write_text(json.dumps(state))

    save(run_dir / "checkpoints", 1, write, run_id="earlier", keep=2)
    assert refused("train", "--resume", run_dir).startswith(f"{run_dir}: is finished")


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ("{steps: 4}", "steps: must be more than 5, which the stage has trained already, is 4"),
        ("{steps: 9, tokens: 80}", "tokens: must be more than 90, which the stage"),
        ("{steps: 9, hours: 0.5}", "hours: must be more than 1, which the stage"),
    ],
)
def test_a_stage_cannot_become_shorter_than_it_is_already(
    refused: Refused, run_dir: Path, stage: str, problem: str
) -> None:
    """It would train one more step."""

    def write(directory: Path) -> None:
        state = {"stage": 0, "stage_take": 0, "take": 5, "stage_tokens": 90, "stage_seconds": 3600}
        state |= {"eval_success": -1.0, "finished": False, "pending": []}
        (directory / "state.json").write_text(json.dumps(state))

    save(run_dir / "checkpoints", 1, write, run_id="earlier", keep=2)
    said = refused("train", "--resume", run_dir, f"stages=[{stage}]")
    assert said.startswith(f"stages[0].{problem}")


@pytest.mark.parametrize("fork", [(), ("--fork", "other")])
@pytest.mark.parametrize(
    "change",
    [
        "policy.lora.alpha=32",
        "policy.lora.rank=8",
        "policy.lora.targets=[q_proj]",
        "policy.dtype=bfloat16",
        "critic.kind=separate",
    ],
)
def test_a_checkpoint_keeps_what_its_weights_depend_on(
    refused: Refused, run_dir: Path, change: str, fork: tuple[str, ...]
) -> None:
    config = Config(stages=[StageConfig(steps=5)])
    config.policy.lora.rank = 4
    dump(config, run_dir / "config.yaml")
    files = ["model.safetensors", "critic.0of2.safetensors"]

    def write(directory: Path) -> None:
        (directory / "state.json").write_text("{}")
        for name in files:
            (directory / name).touch()

    save(run_dir / "checkpoints", 1, write, run_id="earlier", keep=2)
    before = (run_dir / "config.yaml").read_text()
    where = "in a fork" if fork else "on resume"
    said = refused("train", "--resume", run_dir, *fork, change)
    assert said.startswith(
        f"{change.partition('=')[0]}: cannot change {where}: the run was started"
    )
    assert (run_dir / "config.yaml").read_text() == before
    files.pop()
    save(run_dir / "checkpoints", 2, write, run_id="earlier", keep=2)
    if change.startswith("critic") and not fork:  # no critic has been made yet
        assert resume(run_dir, [change]).critic.kind == "separate"


@pytest.mark.process
def test_resume_auto_begins_a_run_then_continues_it_then_says_that_it_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "serial.yaml"
    recipe.write_text(SERIAL.replace("steps: 20", "steps: 2").replace("steps: 25", "steps: 2"))
    command = [
        "train",
        str(recipe),
        f"run.dir={tmp_path}",
        "metrics.panel=none",
        "--resume",
        "auto",
    ]
    assert main(command) == 2, "it needs a name"
    assert "--resume auto: needs run.name" in capsys.readouterr().err
    command.insert(2, "run.name=one")
    assert main(command) == 0
    assert "finished at step 4" in capsys.readouterr().out
    assert main(command) == 0
    assert "one: is finished" in capsys.readouterr().out
    assert main([*command, "--step", "2"]) == 2
    assert "--step: needs a run directory" in capsys.readouterr().err


def test_resume_auto_applies_again_where_processes_run_and_nothing_else(
    run_dir: Path,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    applied = []

    def resumed(directory: Path, changes: list[str]) -> Config:
        applied.extend(changes)
        raise FinishedRun(f"{directory}: is finished")

    monkeypatch.setattr(training, "resume", resumed)
    places = ["weights.address=tcp://127.0.0.1:4001", "weights.kind=collective"]
    others = ["learner.lr=1", "stages+={kind: rl, steps: 1}"]
    names = [f"run.dir={run_dir.parent}", f"run.name={run_dir.name}"]
    assert main(["train", str(recipe), *names, *places, *others, "--resume", "auto"]) == 0
    assert applied == places
    ignored = shlex.join(others)
    assert f"has begun and keeps its recipe, without {ignored}; to" in capsys.readouterr().err
    monkeypatch.chdir(run_dir.parent)
    same = ["run.dir=.", names[1], "launch={drain_s: 9}"]
    assert main(["train", str(recipe), *same, "--resume", "auto"]) == 0
    assert applied[len(places) :] == same[2:]
    said = capsys.readouterr()
    assert said.err == "" and said.out.startswith(f"{run_dir}: is finished")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("x = (", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: "),
        (
            "class Env:\n def __init__(self, *, a: 'Nowhere' = 0): pass\n"
            " reset = step = close = None",
            "NameError: name 'Nowhere'",
        ),
    ],
)
def test_a_broken_environment_module_is_one_sentence(
    refused: Refused, recipe: Path, tmp_path: Path, module: str, said: str
) -> None:
    name = f"broken_{len(module)}"
    (tmp_path / f"{name}.py").write_text(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        message = refused("train", recipe, f"run.dir={tmp_path}/runs", f"env.name={name}:Env")
    assert message.startswith("env.name: ") and said in message


@pytest.mark.process
@pytest.mark.parametrize("kind", ["local", "serial"])
def test_a_context_shorter_than_the_first_prompt_is_refused(
    refused: Refused, recipe: Path, tmp_path: Path, kind: str
) -> None:
    runs = tmp_path / "runs"
    short = ("policy.max_length=20", f"launch.kind={kind}")
    said = refused("train", recipe, f"run.dir={runs}", *short, "run.name=x")
    assert said.startswith("policy.max_length: 20 is too short for a first prompt of ")
    assert not (runs / "x").exists()


@pytest.mark.process
def test_addresses_that_are_none_are_one_sentence(refused: Refused) -> None:
    assert refused("status", "foo://x").startswith("foo://x: no address to connect to")
    done = subprocess.run(
        [sys.executable, "-m", "evolver_async.cli", "actor", "--connect", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--connect: nonsense: no address to connect to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_a_new_run_knows_the_exact_values_of_its_maps(tmp_path: Path) -> None:
    """Every stage has those of its own rules; also a later stage."""
    wider = StageConfig(steps=5, override={"env": {"params": {"size": 6}}})
    config = Config(stages=[StageConfig(steps=5), wider, StageConfig(steps=5)])
    config.run.dir = str(tmp_path)
    config.eval.episodes = 8
    _, made = create(config, None)
    exact = exact_values(made)
    assert sorted(exact) == [(stage, 8) for stage in range(3)]
    for values in exact.values():
        assert 0 <= values["random"] < 0.5 < values["optimal"] <= 1.0
    first, second, third = (exact[stage, 8]["random"] for stage in range(3))
    assert first == third != second
    resume(made, ["stages+={kind: rl, steps: 5}"])
    assert {stage for stage, _ in exact_values(made)} == {0, 1, 2, 3}


@pytest.mark.process
def test_a_context_without_room_or_beyond_the_positions_is_refused_on_resume(
    tmp_path: Path,
) -> None:
    config = Config(stages=[StageConfig(steps=5)], launch=LaunchConfig(kind="serial"))
    config.run.dir, config.eval.episodes, config.eval.final_episodes = str(tmp_path), 4, 4
    _, made = create(config, None)
    before = (made / "config.yaml").read_bytes()
    later = "stages+={kind: rl, steps: 5, override: {policy: {max_length: 20}}}"
    for change in ("policy.max_length=20", later):
        with pytest.raises(ConfigError, match=r"^policy\.max_length: 20 is too short for a first"):
            resume(made, [change])
    with pytest.raises(ConfigError, match=r"^policy\.max_length: is 1025, but .* 1024 positions"):
        resume(made, ["policy.max_length=1025"])
    with pytest.raises(ConfigError, match=rf"^policy\.path: .*{tmp_path.name}"):
        resume(made, [f"policy.path={tmp_path}"])
    assert (made / "config.yaml").read_bytes() == before


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["learner.device=cuda:99"], "learner.device: needs GPU 99"),
        (
            ["learner.packing=false", "learner.prefix_trees=always"],
            "learner.prefix_trees: must not be always without learner.packing",
        ),
    ],
)
def test_what_a_start_would_refuse_is_refused_on_resume(
    changes: list[str], message: str, tmp_path: Path
) -> None:
    config = Config(stages=[StageConfig(steps=5)], launch=LaunchConfig(kind="serial"))
    config.run.dir, config.eval.episodes, config.eval.final_episodes = str(tmp_path), 4, 4
    _, made = create(config, None)
    before = (made / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as refused:
        resume(made, changes)
    assert str(refused.value).startswith(message)
    assert (made / "config.yaml").read_bytes() == before


RESUME = """
import sys
from pathlib import Path
from evolver_async.launch.resumption import resume
try:
    resume(Path(sys.argv[1]), ["policy.max_length=20"])
except ValueError as error:
    print(error)
print("torch" in sys.modules)
"""


@pytest.mark.process
def test_a_launcher_checks_prompts_without_torch(tmp_path: Path) -> None:
    """It would keep hundreds of megabytes for the whole run."""
    config = Config(stages=[StageConfig(steps=5)])
    config.run.dir, config.eval.episodes, config.eval.final_episodes = str(tmp_path), 4, 4
    _, made = create(config, None)
    command = [sys.executable, "-c", RESUME, str(made)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("policy.max_length: 20 is too short for a first")
    assert said.endswith("False\n")


@contextlib.contextmanager
def preparing(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process]]:
    """A `train` whose policy is being prepared, and the process that does, which never ends."""
    recipe, imports = tmp_path / "recipe.yaml", tmp_path / "imports"
    recipe.write_text(RECIPE)
    imports.mkdir()
    path = os.pathsep.join([str(imports), os.environ.get("PYTHONPATH", "")])
    (imports / "torch.py").write_text("import time\n\nwhile True:\n    time.sleep(60)\n")
    options = (
        recipe,
        f"run.dir={tmp_path}/runs",
        "run.name=cut",
        "eval.episodes=4",
        "eval.final_episodes=0",
    )
    train = subprocess.Popen(
        [*COMMAND, "train", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},  # the preparation alone imports torch
    )

    def child() -> psutil.Process | None:
        for one in psutil.Process(train.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "prepare" in one.cmdline():
                    return one
        return None

    try:
        yield train, wait_for(child, "the process that prepares the policy")
    finally:
        train.kill()
        train.communicate()


@pytest.mark.process
def test_a_killed_preparation_is_named_with_its_likely_cause(tmp_path: Path) -> None:
    with preparing(tmp_path) as (train, prepare):
        prepare.kill()
        _, errors = train.communicate(timeout=DEADLINE_S)
    assert train.returncode == 2
    assert "was killed by SIGKILL; most likely memory ran out" in errors
    assert errors.count("\n") == 1 and "INFO" not in errors
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.process
def test_sigterm_while_a_run_is_created_leaves_nothing(tmp_path: Path) -> None:
    with preparing(tmp_path) as (train, prepare):
        train.terminate()
        train.communicate(timeout=DEADLINE_S)
    assert train.returncode == 128 + signal.SIGTERM
    # at the latest it notices by itself that its parent is gone
    wait_for(lambda: not alive(prepare), "the end of the preparation")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.process
def test_a_run_whose_creation_was_killed_is_resumed_or_taken_over(tmp_path: Path) -> None:
    with preparing(tmp_path) as (_, prepare):
        pass  # is killed
    wait_for(lambda: not alive(prepare), "the end of the preparation")
    run_dir = tmp_path / "runs" / "cut"
    (run_dir / "policy").mkdir(exist_ok=True)
    (run_dir / "policy" / "torn").touch()
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(run_dir, copy)
    config = resume(run_dir, ["learner.lr=1e-3"])
    assert config.learner.lr == load(run_dir / "config.yaml").learner.lr == 1e-3
    assert "model.safetensors" in (made := {path.name for path in (run_dir / "policy").iterdir()})
    assert "torn" not in made and (run_dir / "exact.json").exists()

    config.run.name = copy.name
    config.policy.path = ""
    assert create(config, None)[1] == copy
    assert {path.name for path in (copy / "policy").iterdir()} == made
    with pytest.raises(ConfigError, match=r"run\.name: .* exists"):
        create(config, None)


def test_a_directory_that_cannot_be_removed_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the mount point of a volume."""
    config, remove = Config(stages=[StageConfig(steps=5)]), os.rmdir
    config.run.dir, config.run.name = str(tmp_path), "x"

    def rmdir(path: str | Path, **place: int) -> None:
        if Path(path) == tmp_path / "x":
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path, **place)

    def fill(made: Path) -> None:
        (made / "policy").mkdir()
        raise ConfigError("the error")

    monkeypatch.setattr(os, "rmdir", rmdir)
    with pytest.raises(ConfigError, match=r"^the error$"):
        create(config, None, fill)
    assert list((tmp_path / "x").iterdir()) == []


def test_a_removal_that_a_second_signal_ends_leaves_the_mark_of_a_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, remove, removed = Config(stages=[StageConfig(steps=5)]), os.unlink, []
    config.run.dir, config.run.name = str(tmp_path), "x"

    def unlink(path: str | Path, **place: int) -> None:
        removed.append(Path(path).name)
        remove(path, **place)

    def fill(made: Path) -> None:
        for name in ("policy/weights", "origin.json", "a", "z"):
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        create(config, None, fill)
    assert sorted(removed[-2:]) == [".creating", "lock"] and not (tmp_path / "x").exists()


def test_the_actors_that_an_earlier_launch_was_asked_for_are_forgotten(run_dir: Path) -> None:
    scale(run_dir, "5")
    resume(run_dir, [])
    assert not (run_dir / ACTORS).exists()


def test_a_run_without_a_checkpoint_starts_at_its_beginning(run_dir: Path) -> None:
    before = (run_dir / "config.yaml").read_bytes()
    config = resume(run_dir, [])
    assert config.stages[0].steps == 5 and (run_dir / "config.yaml").read_bytes() == before


def test_a_running_run_is_not_resumed(refused: Refused, run_dir: Path) -> None:
    with locked(run_dir):
        assert "is already running" in refused("train", "--resume", run_dir)


def test_commands_on_a_run_need_a_run_directory(refused: Refused, tmp_path: Path) -> None:
    for command in (["eval"], ["watch"], ["status"], ["export", "out"]):
        assert "is not a run directory" in refused(command[0], tmp_path, *command[1:])


def test_a_path_that_is_no_run_directory_is_told_the_run_that_it_may_mean(
    refused: Refused, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parent.parent)
    meant = f"did you mean {run_dir.relative_to(Path.cwd())}?"
    assert refused("status", run_dir.name).endswith(meant)
    assert refused("watch", f"runs/{run_dir.name}x").endswith(meant)
    assert refused("eval", f"runs/{run_dir.name}/metrics.jsonl").endswith(meant)
    assert "did you mean" not in refused("status", "runs/0")
    (study := tmp_path / "a_study").mkdir()
    (study / DEFINITION).touch()
    assert refused("watch", study).endswith(f"it is a study, whose runs are in {study}/runs")
    assert refused("status", "127.0.0.1:3333").endswith("did you mean tcp://127.0.0.1:3333?")


def test_the_runs_of_a_run_are_those_beside_it(refused: Refused, run_dir: Path) -> None:
    said = refused("runs", run_dir)
    assert said == f"{run_dir}: is a run; name the directory that holds it: {run_dir.parent}"


def test_status_says_that_no_buffer_answers(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run_dir)]) == 2
    assert "was never launched" in capsys.readouterr().err
    announce(run_dir, f"ipc://{run_dir}/nobody")
    assert main(["status", str(run_dir)]) == 1
    said = capsys.readouterr().err
    assert f"no buffer answers at ipc://{run_dir}/nobody; the run has ended: killed" in said
    with locked(run_dir):
        assert main(["status", str(run_dir)]) == 1
    assert "nobody; see the run's logs/buffer.log" in capsys.readouterr().err


def test_status_of_a_run_without_a_buffer_says_why(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert main(["status", str(run_dir)]) == 1
        return capsys.readouterr().err

    with locked(run_dir):
        assert "is starting and has no buffer yet" in said()
    serial = Config(stages=[StageConfig(steps=5)], launch=LaunchConfig(kind="serial"))
    dump(serial, run_dir / "config.yaml")
    watched = f"its steps: evolver-async watch --once {run_dir}"
    with locked(run_dir):
        assert f"has no buffer to ask, as launch.kind=serial; {watched}" in said()
    record(run_dir, None, [], {})
    assert "the run has ended: killed" in said()
    for code, text in ((0, "finished"), (3, "failed with exit code 3: it fell apart")):
        end(run_dir, code, "it fell apart")
        assert f"the run has ended: {text}; {watched}" in said()
    announce(run_dir, f"ipc://{run_dir}/nobody")
    assert "the run has ended: failed" in said(), "its buffer is not asked"


def test_watch_shows_what_a_run_wrote(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"lineage": 1, "step": 1}
    rows = [
        one | {"stage_kind": "rl", "time_s": 1.0},
        one | {"eval/success": 0.5, "eval/episodes": 8, "eval/distinct": 3},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["watch", "--once", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "step 1/5" in out and "eval success 0.500 over 8 episodes, 3 distinct" in out


def test_watch_prints_once_or_goes_on_as_text(run_dir: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--once", "--plain", str(run_dir)])
    assert ended.value.code == 2


@pytest.mark.parametrize("arguments", [["train", "--fast"], ["status", "a", "b=c"], []])
def test_unknown_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_a_run_directory_that_cannot_be_made_is_named_by_its_key(capsys):
    recipe = str(Path(__file__).parents[2] / "configs" / "frozen_lake.yaml")
    assert main(["train", recipe, "run.dir=/proc/x", "run.name=y"]) == 2
    said = capsys.readouterr().err
    assert "run.dir: cannot make /proc/x/y: No such file or directory" in said


def test_runs_without_a_name_that_begin_in_one_second_have_directories_of_their_own(
    tmp_path: Path,
) -> None:
    config = Config(stages=[StageConfig(steps=5)])
    config.run.dir = str(tmp_path)
    names = [creation._made(config, "run-1")[0] for _ in range(3)]
    assert names == ["run-1", "run-1-2", "run-1-3"]


@pytest.mark.process
def test_files_of_the_working_directory_do_not_hide_the_wings(tmp_path: Path) -> None:
    for name in ("learner", "actors"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "my_task.py").write_text("found = True")
    script = (
        "from evolver_async.extension import find_modules; find_modules(own=True); import my_task;"
        " import importlib.util;"
        " assert all(map(importlib.util.find_spec, ('learner.checks', 'actors.worker')))"
    )
    variables = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.process
@pytest.mark.parametrize("form", ["-m evolver_async", "-m evolver_async.cli", "script"])
def test_commands_execute_no_file_of_the_working_directory(form: str, tmp_path: Path) -> None:
    """Such as of a folder with runs that someone else has sent."""
    (tmp_path / "run").mkdir()
    dump(load(None, ["stages=[{kind: rl, steps: 5}]"]), tmp_path / "run" / "config.yaml")
    for name in ("yaml", "msgspec", "argparse", "json", "numpy", "zmq", "rich", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"open('executed', 'a').write('{name} ')")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "evolver-async"  # the directory of a script is not that of others
    script.write_text("import sys; from evolver_async.cli import main; sys.exit(main())")
    start = [str(script)] if form == "script" else form.split()
    variables = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    for arguments in (["runs", "."], ["watch", "--once", "run"]):
        command = [sys.executable, *start, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE)
        assert done.returncode == 0, done.stderr.decode()
    assert not (tmp_path / "executed").exists()


def test_modules_of_the_working_directory_come_last_and_for_own_code_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    find_modules(own=False)
    assert str(tmp_path) not in sys.path
    for _ in range(2):
        find_modules(own=True)
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1
