"""Preparation of a policy: what is laid to the model's directory, and what is not."""

import errno
from pathlib import Path

import pytest

from actors.envs.bandit import Bandit
from evolver_async.config import ConfigError
from evolver_async.config.load import dump, load
from evolver_async.model import policy
from evolver_async.process.setup import RoleArgs
from learner.tools import prepare


def arguments(run_dir: Path, *changes: str) -> RoleArgs:
    dump(load(None, ["stages.0.steps=1", *changes]), run_dir / "config.yaml")
    return RoleArgs(address="", name="prepare", incarnation=0, run_dir=run_dir)


def test_a_disk_that_is_full_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(policy, "make_tiny", full)
    with pytest.raises(OSError, match="No space left"):
        prepare.main(arguments(tmp_path, f"policy.path={tmp_path / 'policy'}"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("policy.lora.targets: no linear is named x", "policy.lora.targets: no linear is named x"),
        ("learner.prefix_trees: must not be always", "learner.prefix_trees: must not be always"),
        ("policy.v1 has no weights", "policy.path: policy.v1 has no weights"),
    ],
)
def test_a_model_error_names_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: str
) -> None:
    def refuse(_: object) -> None:
        raise policy.ModelError(said)

    monkeypatch.setattr(policy, "load_tokenizer", refuse)
    with pytest.raises(ConfigError) as refused:
        prepare.main(arguments(tmp_path, "policy.path=anywhere"))
    assert str(refused.value) == expected


def test_an_error_of_a_library_is_laid_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("expected value\nat line 1")

    monkeypatch.setattr(policy, "load_tokenizer", refuse)
    with pytest.raises(ConfigError, match=r"^policy\.path: RuntimeError: expected value at line 1"):
        prepare.main(arguments(tmp_path, "policy.path=anywhere"))


def test_the_preset_knows_the_words_of_the_environments(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    shop = "{kind: rl, steps: 1, override: {env: {name: webshop, params: {}}}}"
    stages = f"stages=[{{kind: rl, steps: 1}}, {shop}]"
    prepare.main(arguments(tmp_path, f"policy.path={path}", "policy.max_length=2048", stages))
    tokenizer = policy.load_tokenizer(str(path))
    text = "search[lightweight headphones] Umber hoodie, breathable mesh"
    assert [tokenizer.decode([token]).strip() for token in tokenizer.encode(text)] == [
        *("search", "[", "lightweight", "headphones", "]"),
        *("Umber", "hoodie", ",", "breathable", "mesh"),
    ]


class Speechless(Bandit):
    def vocabulary(self) -> list[str]:
        raise RuntimeError("no dictionary")


def test_an_environment_that_cannot_name_its_words_is_named(tmp_path: Path) -> None:
    name = f"{Speechless.__module__}:Speechless"
    with pytest.raises(ConfigError, match=r"^env\.name: .*Speechless' cannot name its words: Run"):
        prepare.main(arguments(tmp_path, f"policy.path={tmp_path / 'policy'}", f"env.name={name}"))
