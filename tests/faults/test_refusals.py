"""Faults 18 and 19: what cannot work is refused in one sentence that names the key, before a start.

More of the same is in `test_cli` and `test_load`; here each kind of mistake is made once, and it
is looked at that nothing was started and nothing is left.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from invariants import check_leaks, check_named, traces

from evolver_async.cli import main


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = traces()
    yield
    check_leaks(before)


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str) -> str:
    """What `train` says to this mistake."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages: [{kind: rl, steps: 5}]\n")
    runs = tmp_path / "runs"
    assert main(["train", str(recipe), f"run.dir={runs}", argument]) == 2
    assert not runs.exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("argument", "key", "cause"),
    [
        ("learner.minibatches=many", "learner.minibatches", "many"),  # a wrong type
        ("learner.lrr=1", "learner.lrr", "did you mean learner.lr"),  # an unknown key
        ("learner.lr=nan", "learner.lr", "finite"),
        ("policy.layers=-1", "policy.layers", "at least 1"),
        ("buffer.segment_bytes=1", "buffer.segment_bytes", "65536"),
        (
            "actors.weight_lag=9",
            "actors.weight_lag",
            "buffer.max_staleness",
        ),  # excludes another value
    ],
)
def test_18_a_bad_configuration_is_refused_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, key: str, cause: str
) -> None:
    check_named(refused(tmp_path, capsys, argument), key, cause)


@pytest.mark.parametrize(
    ("argument", "key", "cause"),
    [
        ("policy.hidden_size=1048576", "weights.dir", "shared memory"),
        ("learner.token_budget=1000000000", "learner.token_budget", "activations"),
        ("engine.slots=100000000", "engine.slots", "KV cache"),
        ("actors.count=100000", "actors.count", "are available"),
    ],
)
def test_a_run_that_cannot_fit_the_memory_is_refused_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, key: str, cause: str
) -> None:
    check_named(refused(tmp_path, capsys, argument), key, cause)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("frozen_lak", "frozen_lake"),  # the known ones are listed
        ("no_package.no_module:Env", "no_package"),
        ("moody:Cheerful", "Cheerful"),
    ],
)
def test_19_an_environment_that_is_not_there_is_refused_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, cause: str
) -> None:
    check_named(refused(tmp_path, capsys, f"env.name={name}"), "env.name", cause)
