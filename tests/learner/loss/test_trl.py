"""Losses of preferences are TRL's on the same batch: `tests/benchmarks/peers/trl_losses.py`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from critic_groups import WEIGHTS
from drawn_models import drawn_classifier, drawn_policy
from preference_groups import group_of
from updates import FORKS, config, updater

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.schema import Group, Role, Sequence, VersionRun
from learner.state import LearnerState

MEASURED = json.loads((Path(__file__).parents[2] / "data" / "trl_losses.json").read_text())


def sequence(prompt: list[int], completion: list[int]) -> Sequence:
    acts = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return Sequence(
        tokens=np.array(prompt + completion, np.int32),
        roles=np.where(acts, Role.ACTION, Role.PROMPT).astype(np.uint8),
        turns=np.where(acts, 0, -1).astype(np.int16),
        logprobs=np.where(acts, -0.5, 0.0).astype(np.float32),
        versions=[VersionRun(weights=WEIGHTS, tokens=len(completion))],
    )


def groups(rows: list[dict[str, Any]], kind: str) -> list[Group]:
    """A pair, the worse member first, or a single judgement a group."""
    found = []
    for number, row in enumerate(rows):
        single = [(row["completion_ids"], row["label"])] if kind == "kto" else []
        members = single or [(row["rejected_ids"], False), (row["chosen_ids"], True)]
        group = group_of(number, [float(good) for _, good in members])
        for one, (completion, good) in zip(group.trajectories, members, strict=True):
            one.sequences, one.success = [sequence(row["prompt_ids"], completion)], good
        found.append(group)
    return found


def settings_of(kind: str, path: Path, numbers: dict[str, float]) -> Config:
    settings = config(path, [StageConfig(kind=kind, steps=1)])  # pyright: ignore[reportArgumentType]
    loss = settings.loss
    if kind == "dpo":
        loss.dpo_beta = numbers["beta"]
    elif kind == "kto":
        loss.kto_beta, loss.kto_desirable = numbers["beta"], numbers["desirable_weight"]
        loss.kto_undesirable = numbers["undesirable_weight"]
    else:
        settings.reward_model.centre_coef = numbers["centre_coef"]
    return settings


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_the_loss_of_a_step_is_trls(kind, tmp_path):
    numbers = MEASURED[kind]
    settings = settings_of(kind, drawn_policy(tmp_path / "1", 1), numbers)
    if kind == "reward_model":
        settings.reward_model.path = str(drawn_classifier(tmp_path / "2", 2))
    made, stage = updater(settings, tmp_path), stage_config(settings, 0)
    state = LearnerState(lineage=1)
    made.enter(stage, state)
    if made.reference is not None:
        other = policy.load_model(drawn_policy(tmp_path / "0", 0), dtype="float32", device="cpu")
        policy.load_state(made.reference, policy.state_tensors(other))
    rows = MEASURED["judged" if kind == "kto" else "pairs"]
    metrics = made.step(kind, stage, groups(rows, kind), state, FORKS, 1).metrics
    named = "loss/reward_model" if kind == "reward_model" else "loss/policy"
    assert metrics[named] == pytest.approx(numbers["loss"], abs=1e-5)
    if kind == "kto":
        assert metrics["kto/kl"] == pytest.approx(numbers["kl"], abs=1e-5)
