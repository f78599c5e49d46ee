"""Paths of a configuration: each is named if it is missing or not writable."""

from pathlib import Path

import pytest
from refusals import STEPS

from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.config.paths import check_paths, directory_of, with_absolute_paths
from evolver_async.launch.start_checks import check_start, check_teachers


@pytest.mark.parametrize("key", ["policy.path", "weights.dir"])
def test_a_missing_directory_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: /nowhere is not a directory"):
        check_paths(load(None, [STEPS, f"{key}=/nowhere"]))


def test_a_model_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"policy\.path: .* has no tokenizer\.json"):
        check_paths(load(None, [STEPS, f"policy.path={tmp_path}"]))


def test_a_teacher_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path, lacks in (("/nowhere", "config"), (tmp_path, "tokenizer")):
        with pytest.raises(ConfigError, match=rf"teacher\.path: .* has no {lacks}\.json"):
            check_teachers(load(None, [STEPS, f"teacher.path={path}"]))
    other = "stages=[{steps: 1}, {steps: 1, override: {teacher: {path: nowhere}}}]"
    with pytest.raises(ConfigError, match=r"teacher\.path: .*nowhere has no"):
        check_teachers(with_absolute_paths(load(None, [other])))


def test_a_weights_directory_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match=r"weights\.dir: /proc cannot be written to"):
        check_paths(load(None, [STEPS, "weights.dir=/proc"]))


def test_paths_are_read_again_from_wherever_a_later_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "one").mkdir(parents=True)
    keys = ("policy.path", "experience.embedder", "questioning.profile", "security.keys")
    config = load(None, [STEPS, *(f"{key}=models/one" for key in keys), "weights.dir=here"])
    made = with_absolute_paths(config)
    one = str(tmp_path / "models" / "one")
    assert [made.policy.path, made.experience.embedder] == [one, one]
    assert [made.questioning.profile, made.security.keys] == [one, one]
    assert made.weights.dir == str(tmp_path / "here")
    assert with_absolute_paths(made) == made
    own = f"stages=[{{steps: 1, override: {{tasks: {{path: {tmp_path}/x/../b.jsonl}}}}}}]"
    tasks = with_absolute_paths(load(None, ["tasks.path=a.jsonl", own]))
    assert tasks.tasks.path == str(tmp_path / "a.jsonl")
    assert tasks.stages[0].override["tasks"]["path"] == str(tmp_path / "b.jsonl")
    refers = "stages.0.override={tasks: {path: '${oc.env:DATA}/c.jsonl'}}"
    monkeypatch.setenv("DATA", str(tmp_path))
    override = with_absolute_paths(load(None, [STEPS, refers])).stages[0].override
    assert override["tasks"]["path"] == str(tmp_path / "c.jsonl")
    bare = load(None, [STEPS])
    assert with_absolute_paths(bare) == bare, "what is empty, hash or absolute stays"
    summarised = with_absolute_paths(load(None, [STEPS, "questioning.profile=auto"]))
    assert summarised.questioning.profile == "auto"


def test_the_home_directory_is_that_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(None, [STEPS, "run.dir=~/runs", "tasks.path=~/a.jsonl"])
    assert directory_of(config, "one") == tmp_path / "runs" / "one"
    assert with_absolute_paths(config).tasks.path == str(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=rf"policy\.path: {tmp_path}/gone is not a directory"):
        check_start(load(None, [STEPS, "policy.path=~/gone"]))
