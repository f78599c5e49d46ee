"""Rows held out of training: what they say of the policy, and that it never learns them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_groups import same, tensors
from msgspec.structs import replace
from preference_groups import data
from transformers import AutoModelForCausalLM
from updates import FORKS, config, updater

from actors.scripted.recorded import held_out_groups
from evolver_async.buffer.tasks.data_files import DataTasks, data_tasks
from evolver_async.config import Config, DataConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.schema import Group, Role
from learner.schedule import Stages
from learner.state import LearnerState

SHAPE = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32, "max_length": 64}
WORDS = ("up", "down", "left", "right")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("validation") / "policy"
    policy.make_tiny(path, seed=0, **SHAPE)
    return path


def learning(tiny: Path, rows: Path, kind: str) -> tuple[Config, DataTasks]:
    """A stage of this kind over the rows of a directory; all of them."""
    settings = config(tiny, [StageConfig(kind=kind, steps=9)])
    settings.data = DataConfig(path=str(rows))
    tasks = data_tasks(settings.data, "bandit", {})
    assert isinstance(tasks, DataTasks)
    return settings, tasks


def test_the_loss_of_sft_is_the_library_s_on_the_same_rows(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} {b}", "completion": a} for a in WORDS for b in WORDS]
    rows.append({"prompt": "down " * 100, "completion": "up"})  # beyond policy.max_length
    for name, some in (("train", rows[:1]), ("validation", rows)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    settings, tasks = learning(tiny, tmp_path, "sft")
    stage, state = Stages(settings)(0), LearnerState(lineage=1)
    made = updater(settings, tmp_path)
    before = tensors(made.model)
    groups = held_out_groups(tasks, stage, 0, "sft")
    found = made.validate("sft", stage, groups, state)
    tokenizer, model = load_tokenizer(str(tiny)), AutoModelForCausalLM.from_pretrained(tiny)
    losses, guessed = list[float](), list[bool]()
    for row in rows[:-1]:
        asked = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        begin = len(tokenizer.encode(prompt, add_special_tokens=False))
        (text,) = [
            one for group in groups for one in group.trajectories if group.task.row == row
        ]  # what is learnt of it is checked where it is rendered
        tokens = torch.from_numpy(text.sequences[0].tokens).long()
        assert tokenizer.decode(tokens[:begin]) == prompt
        assert tokenizer.decode(tokens[begin:]).split()[0].startswith(row["completion"])
        logps = model(tokens[None]).logits[0, begin - 1 : -1].log_softmax(-1)
        guessed += (logps.argmax(-1) == tokens[begin:]).tolist()
        losses += (-logps.gather(1, tokens[begin:, None])).flatten().tolist()
    assert found["validation/rows"] == len(rows) - 1
    assert found["validation/loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert found["validation/perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert found["validation/token_accuracy"] == pytest.approx(np.mean(guessed), abs=1e-6)
    assert made.validate("sft", stage, groups, state) == found
    assert same(before, tensors(made.model)) and not made.optimizer.state


def test_rows_are_bounded_and_spread_and_always_the_same(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "completion": "up", "n": n} for n in range(10)]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings, tasks = learning(tiny, tmp_path, "sft")
    settings.eval.rows = 5
    stage = Stages(settings)(0)
    for _ in range(2):
        groups = held_out_groups(tasks, stage, 0, "sft")
        assert [group.task.row["n"] for group in groups] == [0, 2, 4, 6, 8]


def turned(groups: list[Group]) -> list[Group]:
    """The same pairs with the other member as the better one."""
    found = []
    for group in groups:
        members = [
            replace(one, reward=-one.reward, success=not one.success) for one in group.trajectories
        ]
        found.append(replace(group, trajectories=members))
    return found


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_what_was_learnt_is_right_and_its_opposite_wrong(
    kind: str, tiny: Path, tmp_path: Path
) -> None:
    settings, state = config(tiny, [StageConfig(kind=kind, steps=30)]), LearnerState(lineage=1)
    made, stage = updater(settings, tmp_path), stage_config(settings, 0)
    made.enter(stage, state)
    groups = [
        replace(group, trajectories=[*map(replace, group.trajectories[:2])]) for group in data()
    ]
    for one in (one for group in groups for one in group.trajectories):
        one.success = one.reward > 0.9
    first = made.validate(kind, stage, groups, state)
    if kind != "reward_model":
        assert first["validation/accuracy"] <= 0.5, "policy and reference are one: no pair is won"
    for _ in range(30):
        made.step(kind, stage, groups, state, FORKS, 30)
        state.take += 1
    before, moments = tensors(made.model), len(made.optimizer.state)
    after, against = (made.validate(kind, stage, one, state) for one in (groups, turned(groups)))
    assert after["validation/accuracy"] == 1 and against["validation/accuracy"] == 0
    assert after["validation/loss"] < first["validation/loss"] < against["validation/loss"]
    if kind != "kto":
        assert after["validation/margin"] == pytest.approx(-against["validation/margin"], rel=1e-4)
    assert after["validation/rows"] == len(groups)
    assert same(before, tensors(made.model)) and len(made.optimizer.state) == moments


def test_rows_without_anything_to_learn_measure_nothing(tiny: Path, tmp_path: Path) -> None:
    settings = config(tiny, [StageConfig(kind="dpo", steps=1)])
    made, stage, state = updater(settings, tmp_path), stage_config(settings, 0), LearnerState()
    made.enter(stage, state)
    groups = data()
    for one in (one for group in groups for one in group.trajectories):
        one.sequences[0].roles[:] = Role.PROMPT
    assert made.validate("dpo", stage, groups, state) == {}
