"""Whole serial runs with experience: the pool grows and guides, and equal seeds give equal runs."""

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
import torch
from serial_runs import Finished, trainer

from actors.experience.pool_file import FILE
from actors.formats.chat import CLOSING, OPENING
from evolver_async.cli import main

pytestmark = pytest.mark.process

RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 128, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
tasks: {train: 6}
rollout: {group_size: 8, max_turns: 1, max_tokens: 4}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2}
advantage: {std: batch}
experience: {kind: contrast, similarity: 0.99}
learner: {groups_per_step: 4, minibatches: 2, lr: 3.0e-3, decay: none}
stages:
  - kind: sft
    steps: 15
    expert_fraction: 0.0
    override:
      rollout: {group_size: 1, guided_fraction: 0}
      learner: {groups_per_step: 16, minibatches: 1, lr: 1.0e-2}
  - kind: rl
    steps: 8
eval: {every: 0, episodes: 8, final_episodes: 16}
checkpoint: {every: 8}
launch: {kind: serial}
"""
QUERY = (
    "SELECT when_to_use, content, source, trajectories, uses, utility, retired, when_vector"
    " FROM entries ORDER BY id"
)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("navigating"), RECIPE)


def entries(finished: Finished) -> list[tuple[Any, ...]]:
    """The pool that a run left."""
    return sqlite3.connect(finished.run_dir / "experience" / FILE).execute(QUERY).fetchall()


@pytest.fixture(scope="module")
def guided(train: Callable[..., Finished]) -> Finished:
    return train("guided")


def test_the_pool_grows_and_guides_half_of_every_group(guided: Finished) -> None:
    sizes = guided.rl("experience/pool_size")
    assert sizes[-1] > 0 and guided.rl("experience/contributed")[-1] >= 7 * 4
    assert guided.rl("experience/retrieved_share")[-1] == 0.5
    shares = guided.rl("experience/dedup_share")
    assert 0 < shares[-1] < 1, "tasks come again, so what they teach does too"
    assert sum(uses for *_, uses, _, _, _ in entries(guided)) > 0
    assert not any(name.endswith("outages") and row[name] for row in guided.rows for name in row)


def test_the_pool_guides_at_use_as_well(
    guided: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    before = entries(guided)
    assert main(["guidance", str(guided.run_dir), before[0][0]]) == 0
    opening, *lines, closing = capsys.readouterr().out.splitlines()
    assert (opening, closing) == (OPENING, CLOSING)
    assert lines and set(lines) <= {f"- {content}" for _, content, *_ in before}
    assert main(["guidance", str(guided.run_dir), "9 9 9 9"]) == 1
    assert entries(guided) == before


def test_equal_seeds_give_bit_identical_runs_and_pools(
    guided: Finished, train: Callable[..., Finished]
) -> None:
    again = train("again")
    assert again.numbers() == guided.numbers()
    assert entries(again) == entries(guided)
    for name, tensor in guided.tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name


def test_without_experience_nothing_of_it_is_there(train: Callable[..., Finished]) -> None:
    plain = train("plain", "experience.kind=none", "stages.1.steps=2", "stages.0.steps=2")
    assert not (plain.run_dir / "experience").exists()
    assert main(["guidance", str(plain.run_dir), "a task"]) == 2
    assert not any("experience/pool_size" in row for row in plain.rows)
    assert set(plain.rl("experience/retrieved_share")) <= {0.0}


def test_a_backend_of_ones_own_guides_without_a_pool(train: Callable[..., Finished]) -> None:
    own = train("own", "experience.kind=shelves:shelf", "stages.1.steps=4")
    assert not (own.run_dir / "experience").exists()
    assert max(own.rl("experience/retrieved_share")) > 0.2
    assert not any(own.rl("experience/unguided")) and not any(own.rl("experience/dropped"))


def test_groups_that_failed_are_met_again_guided_and_equal_seeds_still_agree(
    train: Callable[..., Finished],
) -> None:
    first, again = (train(name, "rollout.guided=failed") for name in ("failed", "twin"))
    assert again.numbers() == first.numbers() and entries(again) == entries(first)
    assert 0 < first.rl("guidance/groups")[-1] <= 0.5
    assert 0 < max(first.rl("experience/retrieved_share")) < 0.5
