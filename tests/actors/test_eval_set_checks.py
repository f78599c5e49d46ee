"""Checks of tasks and evaluation sets that need environments and the tokenizer, before a start."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.checks import config as configuration
from actors.checks import prompt_checks
from evolver_async.config.load import load
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import Task

STAGE = "stages=[{kind: rl, steps: 9}]"


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.sets.a.env.name=nowhere"], r"eval\.sets\.a\.env\.name: no environment 'nowhere'"),
        (["eval.sets.a.env.params.sizes=5"], r"eval\.sets\.a\.env\.params\.sizes: frozen_lake has"),
        (["eval.sets.a.env.params.size=99"], r"eval\.sets\.a\.env\.params\.size: 99 is not in"),
        (["eval.sets.a.env.params.size=x"], r"eval\.sets\.a\.env\.params\.size: Expected `int`"),
        (
            [
                "env.name=code",
                "rollout={format: tool_call, max_tokens: 64}",
                "eval.sets.a.env.name=bandit",
            ],
            r"eval\.sets\.a: rollout\.format: tool_call needs tools, which bandit has not",
        ),
    ],
)
def test_an_environment_of_a_set_is_checked_by_its_key(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        configuration.check(load(None, [STAGE, *arguments]))


def test_a_key_of_the_stages_is_not_reported_as_a_key_of_a_set() -> None:
    for arguments in (["env.params.foo=1"], ["env.params.foo=1", "eval.sets.a.split=train"]):
        with pytest.raises(ValueError, match=r"^env\.params\.foo: frozen_lake has"):
            configuration.check(load(None, [STAGE, *arguments]))


def policy(directory: Path, max_length: int) -> str:
    make_tokenizer(max_length).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return f"policy={{path: {directory}, max_length: {max_length}}}"


def test_the_first_prompt_of_a_set_must_leave_room_for_a_turn(tmp_path: Path) -> None:
    run = [STAGE, policy(tmp_path, 80), "env.name=bandit", "rollout.max_tokens=8"]
    prompt_checks.check(load(None, run))
    big = "eval.sets.big.env={name: sokoban, params: {size: 8}}"
    with pytest.raises(ValueError, match=r"^eval\.sets\.big: policy\.max_length: 80 is too short"):
        prompt_checks.check(load(None, [*run, big]))


def test_a_set_without_a_task_is_refused(tmp_path: Path) -> None:
    none = "eval.sets.none.env.params={size: 8, frozen_prob: 0.01, placement: corners}"
    with pytest.raises(ValueError, match=r"^eval\.sets\.none\.env\.name: frozen_lake cannot begin"):
        prompt_checks.check(load(None, [STAGE, policy(tmp_path, 512), none]))


def test_every_part_of_a_mixture_must_begin(tmp_path: Path) -> None:
    none = "{env: frozen_lake, params: {size: 8, frozen_prob: 0.01, placement: corners}}"
    mixture = f"tasks.mixture=[{none}, {{env: frozen_lake, params: {{size: 4}}}}]"
    with pytest.raises(ValueError, match=r"^env\.name: frozen_lake cannot begin"):
        prompt_checks.check(load(None, [STAGE, policy(tmp_path, 512), mixture]))


@pytest.mark.parametrize("kind", ["sft", "world_model"])
def test_a_demonstrated_turn_must_fit_in_a_turn(tmp_path: Path, kind: str) -> None:
    few = [policy(tmp_path, 512), "env.name=workshop_tools", "rollout.format=tool_call"]
    run = [f"stages=[{{kind: {kind}, steps: 1}}]", *few]
    prompt_checks.check(load(None, [*run, "rollout.max_tokens=64"]))
    with pytest.raises(ValueError, match=r"^rollout\.max_tokens: 16 is too small for a demonstrat"):
        prompt_checks.check(load(None, [*run, "rollout.max_tokens=16"]))
    more = f"stages=[{{kind: {kind}, steps: 1, override: {{rollout: {{max_tokens: 64}}}}}}]"
    prompt_checks.check(load(None, [more, *few, "rollout.max_tokens=16"]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"params": {"sizes": 5}, "split": "test"}', r"env\.params\.sizes: frozen_lake has"),
        ('{"env": "nowhere", "split": "test"}', "env\\.name: no environment 'nowhere'"),
    ],
)
def test_tasks_of_a_file_for_evaluation_are_checked_by_line(
    tmp_path: Path, row: str, message: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(f'{{"split": "train"}}\n\n{{"seed": 1, "split": "test"}}\n{row}\n')
    with pytest.raises(ValueError, match=rf"^tasks\.path: .*tasks\.jsonl, line 4: {message}"):
        configuration.check(load(None, [STAGE, f"tasks.path={file}"]))


def test_the_split_of_the_evaluations_must_begin(tmp_path: Path) -> None:
    shop = [STAGE, policy(tmp_path, 4096), "env.name=webshop", "env.params.validation_goals=0"]
    prompt_checks.check(load(None, [*shop, "eval.split=test"]))
    with pytest.raises(ValueError, match=r"^eval\.split: validation: .*webshop cannot begin"):
        prompt_checks.check(load(None, shop))


def test_few_lines_of_a_file_are_begun_however_many_have_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"params": {"max_moves": n}, "split": "train" if n % 2 else "test"} for n in range(9, 49)
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    begun: list[Task] = []

    def begin(*given: Any) -> int:
        begun.append(given[2])
        return 7

    monkeypatch.setattr(prompt_checks, "_check_first", begin)
    prompt_checks.check(load(None, [STAGE, policy(tmp_path, 512), f"tasks.path={file}"]))
    assert [task.split for task in begun] == ["train"] * 8 + ["test"] * 8


def test_an_environment_is_probed_once_however_many_lines_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"params": {"kind": "given", "question": f"{n}?", "answer": "1"}} for n in range(40)]
    for number, line in enumerate(lines):
        line["split"] = "train" if number % 2 else "test"  # type: ignore[assignment]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    probed: list[str] = []
    monkeypatch.setattr(configuration, "probe", lambda name, env: probed.append(name))
    sets = "eval.sets={one: {tasks: 4}, two: {split: train, tasks: 3}}"
    run = ["env.name=code", "rollout.format=tool_call", f"tasks.path={file}", sets]
    configuration.check(load(None, [STAGE, *run]))
    assert probed == ["code"]


def test_random_demonstrations_need_no_expert_that_fits(tmp_path: Path) -> None:
    few = [policy(tmp_path, 512), "env.name=workshop_tools", "rollout.format=tool_call"]
    random = "stages=[{kind: sft, steps: 1, expert_fraction: 0}]"
    prompt_checks.check(load(None, [random, *few, "rollout.max_tokens=16"]))
