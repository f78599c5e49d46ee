"""AgentEvolver's three mechanisms in one serial run: each does its part, and the run repeats."""

from collections.abc import Callable

import pytest
import torch
from serial_runs import Finished, trainer

RECIPE = """
env: {name: frozen_lake, params: {size: 3, slippery: false, grid: first}}
policy: {max_length: 320, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
tasks: {train: 8, synthetic: 0.5}
rollout: {group_size: 4, max_turns: 5, max_tokens: 4}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2}
experience: {kind: contrast, similarity: 0.99}
judge: {kind: rule}
questioning: {kind: goals, every: 2, max_turns: 6}
advantage: {kind: adca}
learner: {groups_per_step: 4, minibatches: 2, lr: 3.0e-3, decay: none, token_budget: 2048}
stages:
  - kind: sft
    steps: 30
    expert_fraction: 0.5
    override:
      experience: {internalise: none}
      rollout: {group_size: 2, guided_fraction: 0.5}
      learner: {groups_per_step: 16, minibatches: 1, lr: 1.0e-2}
  - kind: rl
    steps: 8
eval: {every: 0, episodes: 8, final_episodes: 16}
checkpoint: {every: 8}
launch: {kind: serial}
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("evolving"), RECIPE)


@pytest.fixture(scope="module")
def evolved(train: Callable[..., Finished]) -> Finished:
    return train("evolved")


def test_tasks_of_its_own_making_enter_the_pool_and_are_tried(evolved: Finished) -> None:
    assert evolved.rl("questioning/pool_size")[-1] > 0
    assert evolved.rl("questioning/tried")[-1] > 0
    explored, turns = (evolved.rl(f"questioning/{name}") for name in ("explored", "explored_turns"))
    assert explored[-1] >= 4 and explored[-1] <= turns[-1] <= 6 * explored[-1]


def test_every_turn_that_trains_is_judged(evolved: Finished) -> None:
    assert set(evolved.rl("judge/labelled_share")) == {1.0}
    assert set(evolved.rl("advantage/unlabelled_groups")) == {0.0}
    assert any(0 < share < 1 for share in evolved.rl("judge/good_share"))


def test_the_actors_counters_are_in_the_rows_of_a_serial_run(evolved: Finished) -> None:
    for name in ("judge/labelled", "questioning/accepted", "experience/unguided"):
        totals = [row[name] for row in evolved.rows if name in row]
        assert len(totals) > 1 and totals == sorted(totals), name
    assert evolved.rl("judge/labelled")[-1] > 0 and evolved.rl("questioning/accepted")[-1] > 0


def test_experience_is_found_used_and_stripped(evolved: Finished) -> None:
    assert evolved.rl("experience/pool_size")[-1] > 0
    assert any(share > 0 for share in evolved.rl("experience/retrieved_share"))
    assert evolved.rl("offpolicy_guided/tokens"), "nothing that trained was stripped"


def test_equal_seeds_give_bit_identical_runs(
    evolved: Finished, train: Callable[..., Finished]
) -> None:
    again = train("again")
    assert again.numbers() == evolved.numbers()
    for name, tensor in evolved.tensors.items():
        assert torch.equal(tensor, again.tensors[name]), name
