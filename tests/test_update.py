"""One step on a tiny model: the KL reference, non-finite updates, the optimizer and its state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buffer_world import trajectory

from evolver_async import policy
from evolver_async.config import (
    Advantage,
    Config,
    Learner,
    Loss,
    Metrics,
    Policy,
    Stage,
)
from evolver_async.config.load import stage_config
from evolver_async.metrics import Timers
from evolver_async.schema import Fork, Group, Sampling, Task, Ticket, WeightId
from learner import update as under_test
from learner.state import Asked, State, load_optimizer, save
from learner.update import Updater

FORKS = {1: Fork(lineage=1, parent=0, step=0)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("update") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return path


def config(tiny: Path, stages: list[Stage], minibatches: int = 1, **loss: Any) -> Config:
    return Config(
        policy=Policy(path=str(tiny), max_length=64),
        advantage=Advantage(kind="reinforce"),
        learner=Learner(minibatches=minibatches, warmup_steps=0, decay="none", lr=1e-2),
        loss=Loss(**loss),
        metrics=Metrics(samples=0),
        stages=stages,
    )


def updater(settings: Config, run_dir: Path) -> Updater:
    return Updater(settings, run_dir, Timers())


def groups(count: int, length: int = 4) -> list[Group]:
    """`count` groups of one member each, numbered from 10, rewards 0, 1, 0, …"""
    found = []
    for index in range(count):
        ticket = Ticket(
            group_id=10 + index,
            task=Task(task_id="t", env="t", split="train", map_seed=0),
            kind="rollout",
            stage=0,
            members=[0],
            guided=[],
            dynamics_seed=0,
            attempt=0,
            weights=WeightId(lineage=1, step=0),
            lease_s=1.0,
            sampling=Sampling(temperature=1.0, max_tokens=4),
        )
        made = trajectory(ticket, 0, length=length, reward=float(index % 2))
        found.append(
            Group(
                group_id=10 + index,
                task=ticket.task,
                kind="rollout",
                stage=0,
                use=0,
                trajectories=[made],
            )
        )
    return found


def drift(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    ours, theirs = policy.state_tensors(left), policy.state_tensors(right)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_reference_is_taken_where_the_first_stage_with_a_kl_begins(tiny, tmp_path):
    stages = [
        Stage(kind="sft", steps=1),
        Stage(kind="rl", steps=1),
        Stage(kind="rl", steps=1),
        Stage(kind="rl", steps=1, refresh_reference=True),
    ]
    settings = config(tiny, stages, kl_coef=0.1)
    made = updater(settings, tmp_path)
    made.begin_stage(stage_config(settings, 0), 0)
    assert made.reference is None
    drift(made.model)
    made.begin_stage(stage_config(settings, 1), 1)
    assert made.reference is not None and same(made.reference, made.model)
    drift(made.model)
    made.begin_stage(stage_config(settings, 2), 2)
    made.ensure_reference(stage_config(settings, 2), 2)
    assert not same(made.reference, made.model)
    made.begin_stage(stage_config(settings, 3), 3)
    assert same(made.reference, made.model)


def test_a_kl_switched_on_at_a_resume_gets_a_reference(tiny, tmp_path):
    settings = config(tiny, [Stage(kind="rl", steps=1)], kl_coef=0.1)
    made = updater(settings, tmp_path)
    stage = stage_config(settings, 0)
    with pytest.raises(AssertionError, match="reference"):
        made.rl(stage, groups(2), State(lineage=1), FORKS, 1)
    made.ensure_reference(stage, 0)  # the stage itself began without a KL
    outcome = made.rl(stage, groups(2), State(lineage=1), FORKS, 1)
    assert outcome.metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_kl_in_the_reward_is_that_of_the_present_policy(tiny, tmp_path):
    settings = config(tiny, [Stage(kind="rl", steps=1)], kl="k1", kl_coef=0.1, kl_place="reward")
    settings.correction.kind = "ppo"  # which needs no anchor of its own
    made = updater(settings, tmp_path)
    stage = stage_config(settings, 0)
    made.ensure_reference(stage, 0)
    outcome = made.rl(stage, groups(2), State(lineage=1), FORKS, 1)
    # policy and reference are the same weights, although mu is far from them
    assert outcome.metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    drift(made.model)
    outcome = made.rl(stage, groups(2), State(lineage=1), FORKS, 1)
    assert outcome.batch is not None
    expected = (outcome.batch.anchor_N - outcome.batch.reference_N).mean()
    assert outcome.metrics["loss/kl"] == pytest.approx(float(expected), rel=1e-4)
    assert abs(expected) > 1e-4


def test_groups_without_an_applied_update_are_reported_and_not_measured(
    tiny, tmp_path, monkeypatch
):
    settings = config(tiny, [Stage(kind="rl", steps=1)], minibatches=2)
    made = updater(settings, tmp_path)
    calls = []
    original = under_test.update

    def second_is_not_finite(*arguments: Any, loss: float, **options: Any) -> Any:
        calls.append(loss)
        return original(*arguments, loss=loss if len(calls) == 1 else np.nan, **options)

    monkeypatch.setattr(under_test, "update", second_is_not_finite)
    state = State(lineage=1)
    outcome = made.rl(stage_config(settings, 0), groups(4), state, FORKS, 1)
    assert outcome.updates == 1 and state.bad_steps == 1
    left_out = outcome.filtered["non_finite"]
    assert len(left_out) == len(outcome.trained) == 2
    assert sorted(left_out + outcome.trained) == [10, 11, 12, 13]
    assert outcome.tokens == outcome.metrics["offpolicy/tokens"] == 2 * 3
    assert outcome.metrics["loss/policy"] == pytest.approx(calls[0], rel=1e-4)
    assert list((tmp_path / "bad").glob("*.npz"))


def test_when_nothing_is_applied_everything_is_left_out(tiny, tmp_path):
    settings = config(tiny, [Stage(kind="rl", steps=1)])
    made = updater(settings, tmp_path)
    with torch.no_grad():
        next(made.model.parameters()).fill_(float("nan"))
    outcome = made.rl(stage_config(settings, 0), groups(2), State(lineage=1), FORKS, 1)
    assert (outcome.trained, outcome.tokens, outcome.updates) == ([], 0, 0)
    assert outcome.filtered == {"non_finite": [10, 11]}
    assert "loss/policy" not in outcome.metrics and "offpolicy/ess" not in outcome.metrics


def test_a_checkpoint_gives_back_numbers_and_moments(tiny, tmp_path):
    settings = config(tiny, [Stage(kind="rl", steps=1)])
    made = updater(settings, tmp_path)
    state = State(lineage=1, take=3, pending=[Asked(version=2, stage=0, episodes=8)])
    assert made.rl(stage_config(settings, 0), groups(2), state, FORKS, 1).updates == 1
    (tmp_path / "c").mkdir()
    made.save(tmp_path / "c", state)
    again = updater(settings, tmp_path)
    assert again.restore(tmp_path / "c") == state
    for one, other in zip(made.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
        for slot, value in made.optimizer.state[one].items():
            assert torch.equal(value, again.optimizer.state[other][slot])


def test_moments_are_restored_to_the_device_of_their_parameter(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save(tmp_path, State(), model, optimizer, None)
    elsewhere = torch.nn.Linear(2, 2, device="meta")  # any device but the file's
    target = torch.optim.AdamW(elsewhere.parameters())
    load_optimizer(elsewhere, target, tmp_path / "optimizer.safetensors")
    slots = target.state[elsewhere.weight]
    assert {name: slot.device.type for name, slot in slots.items()} == {
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
        "step": "meta",
    }
