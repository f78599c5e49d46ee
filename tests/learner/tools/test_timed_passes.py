"""The pace of a model: what is timed before a start, and for which runs."""

import math
from pathlib import Path

import pytest
from small_models import SIZES

from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.doctor.probes.recipe import pace as probed
from evolver_async.launch.pace import Pace, can_time, step_estimate
from evolver_async.launch.run_directory import CREATING
from evolver_async.model import policy
from evolver_async.process.setup import RoleArgs
from learner.tools import prepare, timed_passes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "policy"
    policy.make_tiny(directory, seed=0, **SIZES)
    return directory


def recipe(model: Path, directory: Path) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(
        f"policy: {{path: {model}, max_length: 128, dtype: float32}}\n"
        "env: {name: bandit}\nrollout: {max_turns: 1, max_tokens: 4}\nstages: [{steps: 3}]\n"
    )
    return path


def config(model: Path, directory: Path, *changes: str) -> Config:
    return load(recipe(model, directory), changes)


@pytest.mark.parametrize("changes", [(), ("policy.lora.rank=2",), ("learner.packing=false",)])
def test_every_part_of_a_step_is_timed(
    model: Path, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    found = prepare.pace_of(config(model, tmp_path, *changes))
    assert found is not None
    times = found.decode_s, found.forward_s, found.backward_s, found.update_s
    assert all(0 < one < math.inf for one in times)
    assert found.rows == 64 and found.prompt > 0
    assert found.shares == ("learner.packing=false" not in changes)


def test_all_layers_run_again_after_a_few_were_timed(model: Path) -> None:
    decoder, _ = policy.split_model(policy.load_model(model, dtype="float32", device="cpu"))
    layers = decoder.config.num_hidden_layers  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError), timed_passes._fewer_layers(decoder):
        raise RuntimeError
    assert decoder.config.num_hidden_layers == layers  # pyright: ignore[reportAttributeAccessIssue]


def test_a_start_times_a_given_model_and_neither_a_change_nor_the_preset(
    model: Path, tmp_path: Path
) -> None:
    def prepared(name: str, path: Path | None, *, new: bool) -> Pace | None:
        run_dir = tmp_path / name
        run_dir.mkdir()
        written = recipe(path or run_dir / "policy", run_dir).read_text()
        (run_dir / "config.yaml").write_text(f"{written}...\n")
        if new:
            (run_dir / CREATING).touch()
        prepare.main(RoleArgs(address="", name="prepare", incarnation=0, run_dir=run_dir))
        return Pace.read(run_dir)

    found = prepared("new", model, new=True)
    assert found is not None
    estimate = step_estimate(config(model, tmp_path), found)
    assert estimate is not None and estimate.step_s > 0
    assert prepared("changed", model, new=False) is None
    assert prepared("preset", None, new=True) is None


@pytest.mark.parametrize(
    "change",
    ["engine.kind=vllm", "engine.device=cuda", "learner.device=cuda", "learner.ranks=2"],
)
def test_what_computes_otherwise_is_not_timed(model: Path, tmp_path: Path, change: str) -> None:
    changed = config(model, tmp_path, change)
    assert not can_time(changed)
    assert prepare.pace_of(changed) is None


def test_doctor_tells_the_time_of_a_step(model: Path, tmp_path: Path) -> None:
    found = probed(str(recipe(model, tmp_path)))
    assert found.works and found.summary.startswith("estimate: a step of 128 episodes")
