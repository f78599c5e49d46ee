"""Minibatches and micro-batches against the batches they are cut from."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from budget import examples
from collated_groups import VOCABULARY, collated, make_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_batches import actions

from evolver_async.config import CorrectionConfig
from evolver_async.config.shape import DecoderShape
from evolver_async.model.rows import prefix_trees
from evolver_async.schema import Group, Role
from learner.data.batch import Batch
from learner.data.packing import RowCost, deal_rows
from learner.loss.correction import ActionTokens, decoupled
from learner.loss.terms import clipped_objective, policy_loss, token_scale

CPU = torch.device("cpu")
Scored = tuple[Batch, np.ndarray, np.ndarray]  # with anchor_N and advantage_N


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6))
def test_minibatches_partition_the_trajectories_evenly(seed, count, members, updates):
    batch = collated(make_groups(seed, count, members))
    trains = np.flatnonzero(batch.length_P).tolist()
    minibatches = batch.whole().split(updates, key=seed)
    assert sorted(m for minibatch in minibatches for m in minibatch.members) == trains
    assert len(minibatches) == min(updates, len(trains))
    assert all(minibatch.trajectories > 0 for minibatch in minibatches)
    assert sum(minibatch.tokens for minibatch in minibatches) == len(batch.mu_N)
    groups = [set(batch.group_P[minibatch.members]) for minibatch in minibatches]
    if len(set(batch.group_P[trains])) >= updates:
        assert sum(map(len, groups)) == len(set().union(*groups))  # groups stay whole
    if len(trains) == count * members and count % updates == 0:
        assert {m.trajectories for m in minibatches} == {count * members // updates}


def test_minibatch_order_is_keyed():
    batch = collated(make_groups(1, 8, 2))

    def order(key: int) -> list[list[int]]:
        return [minibatch.members.tolist() for minibatch in batch.whole().split(4, key)]

    assert order(5) == order(5)
    assert order(5) != order(6)


def test_a_batch_without_action_tokens_has_no_minibatches():
    groups = make_groups(0, 1, 1, sequences=1)
    sequence = groups[0].trajectories[0].sequences[0]
    sequence.roles[:] = Role.PROMPT
    sequence.logprobs[:] = 0
    sequence.versions.clear()
    batch = collated(groups)
    assert batch.whole().split(4, key=0) == []
    assert list(batch.whole().micro_batches(64, CPU)) == []
    assert batch.lag_P.tolist() == [0] and len(batch.reward_P) == 1


@settings(max_examples=examples(50))
@given(st.integers(0, 10**6), st.integers(1, 200))
def test_micro_batches_fit_the_budget_and_hold_every_token_once(seed, budget):
    batch = collated(make_groups(seed, 3, 3))
    places_N = np.arange(len(batch.mu_N), dtype=np.float32)
    micro_batches = list(batch.whole().micro_batches(budget, CPU))
    index = torch.cat([micro.index_N for micro in micro_batches]).numpy()
    assert sorted(index) == list(range(len(batch.mu_N)))
    widths = [micro.tokens_BT.shape[1] for micro in micro_batches]
    assert all(a >= b for a, b in pairwise(widths))
    labels = batch.tokens[batch.action]
    seen: set[int] = set()
    for micro in micro_batches:
        at = micro.index_N.numpy()
        own = set(batch.trajectory_N[at].tolist())
        assert not own & seen  # trajectories are never split
        seen |= own
        assert micro.tokens_BT.numel() <= budget or len(own) == 1
        assert micro.attention_BT.sum(1).max() == micro.tokens_BT.shape[1]
        assert not (actions(micro) & ~micro.attention_BT).any()
        assert micro.tokens_BT[actions(micro)].tolist() == labels[at].tolist()
        assert micro.mu_N.tolist() == batch.mu_N[at].tolist()
        assert micro.of(places_N).tolist() == at.tolist()
        assert micro.stripped_N.tolist() == batch.stripped_P[batch.trajectory_N[at]].tolist()
        assert micro.length_N.tolist() == batch.length_P[batch.trajectory_N[at]].tolist()
        assert sorted(own) == torch.tensor(sorted(own))[micro.trajectory_N.unique()].tolist()


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@settings(max_examples=examples(30))
@given(st.integers(0, 10**6), st.integers(1, 120), st.integers(2, 5))
def test_ranks_share_every_token_in_equally_many_micro_batches(layout, seed, budget, ranks):
    batch = collated(make_groups(seed, 3, 3))
    shares = [
        list(batch.whole().shared_micro_batches(budget, CPU, layout, rank, ranks, RowCost()))
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    held = [micro for share in shares for micro in share if micro is not None]
    assert sorted(torch.cat([one.index_N for one in held])) == list(range(len(batch.mu_N)))
    for micro in held:
        assert micro.tokens_BT.numel() <= budget or len(micro.trajectory_N.unique()) == 1
    assert all(some[0] is not None for some in zip(*shares, strict=True)), "none waits for nothing"


# The smallest and the largest Qwen2.5 that trains on one host.
SHAPES = (
    DecoderShape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    DecoderShape(28, 3584, 18944, 28, 4, 128, 152064),
)


@pytest.mark.parametrize(("shape", "bound"), [(SHAPES[0], 1.15), (SHAPES[1], 1.08)])
def test_packed_rows_are_dealt_so_that_no_rank_waits_long_for_the_dearest(shape, bound):
    """Log-normal lengths as episodes have them; all ranks wait for the dearest part of a round.

    Cut one behind the other and dealt out in turn, 8 ranks need 1.3 times the mean.
    """
    cost, ranks, budget = RowCost.of(shape), 8, 16384
    found = []
    for seed in range(5):
        draws = np.random.default_rng(seed)
        length_R = draws.lognormal(np.log(2500), 0.8, 128).clip(200, budget).astype(int)
        cost_R = cost(length_R, (length_R * draws.uniform(0.2, 0.6, 128)).astype(int))
        units = [[row] for row in range(128)]
        parts = list(deal_rows(units, length_R, cost_R, budget, ranks))
        rounds = -(-len(parts) // ranks)
        assert rounds <= -(-length_R.sum() // (budget * ranks)) + 1
        # ordered by cost, so the first part of each round is its dearest
        slowest = sum(cost_R[parts[first]].sum() for first in range(0, len(parts), ranks))
        found.append(slowest * ranks / cost_R.sum())
        assert parts == list(deal_rows(units, length_R, cost_R, budget, ranks))
    assert np.mean(found) < bound


def test_the_price_of_a_row_is_what_its_pass_multiplies():
    """Per token of 0.5B: 358 million in the layers, 136 million in the projection of an action, and
    21,504 for each token that it attends to, half of the row on average."""
    small, _ = SHAPES
    cost, layers = RowCost.of(small), 24 * 14_909_440
    expected = 1000 * layers + 24 * 896 * 1000**2 + 300 * 151936 * 896
    assert layers * cost(np.array([1000]), np.array([300])) == pytest.approx(expected)


def sharing_groups(seed: int) -> list[Group]:
    """Groups whose sequences share beginnings; some are equal."""
    groups = make_groups(seed, 3, 3)
    rng = np.random.default_rng(seed)
    for group in groups:
        for trajectory in group.trajectories:
            for sequence in trajectory.sequences:
                sequence.tokens[:] = rng.integers(2) + np.arange(len(sequence.tokens)) // 9
    return groups


@settings(max_examples=examples(50))
@given(st.integers(0, 10**6), st.integers(1, 200), st.booleans())
def test_trees_fit_the_budget_and_as_few_passes_as_it_allows(seed, budget, whole_groups):
    batch = replace(collated(sharing_groups(seed)), whole_groups=whole_groups)
    whole = batch.whole()
    found = list(whole.micro_batches(budget, CPU, "tree"))
    index = torch.cat([micro.index_N for micro in found]).numpy()
    assert sorted(index) == list(range(len(batch.mu_N)))
    unit_P = batch.group_P if whole_groups else np.arange(len(batch.group_P))
    seen: set[int] = set()
    for micro in found:
        at = micro.index_N.numpy()
        own = set(unit_P[batch.trajectory_N[at]].tolist())
        assert not own & seen
        seen |= own
        assert micro.tokens_BT.numel() <= budget or len(own) == 1
        tokens_N = micro.tokens_BT.view(-1)[micro.read_K[micro.source_N]]
        before = batch.tokens[np.flatnonzero(batch.action)[at] - 1]
        assert tokens_N.tolist() == before.tolist()
        pairs = [*zip(micro.source_Q.tolist(), micro.target_Q.tolist(), strict=True)]
        assert len(set(pairs)) == len(pairs)
        target_N = micro.target_Q[micro.prediction_N]
        assert target_N.tolist() == batch.tokens[batch.action][at].tolist()
    (everything,) = whole.micro_batches(1 << 20, CPU, "tree")
    laid = everything.tokens_BT.numel()
    assert laid >= whole.laid_lengths("tree").sum()
    assert len(list(whole.micro_batches(laid, CPU, "tree"))) == 1


@settings(max_examples=examples(50))
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_a_pass_takes_all_rows_of_a_tree_that_fit(seed, budget):
    batch = collated(sharing_groups(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_trees, "LEAST_SAVED", 1)  # then more rows never need fewer tokens
        found = list(batch.whole().micro_batches(budget, CPU, "tree"))
    for one, following in pairwise(found):
        first = batch.trajectory_R[following.row_B[0]]
        more = [row for row in following.row_B.tolist() if batch.trajectory_R[row] == first]
        rows = [
            batch.tokens[batch.row_start_R[row] : batch.row_start_R[row + 1]].tolist()
            for row in [*one.row_B.tolist(), *more]
        ]
        assert len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}) > budget


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6))
def test_what_members_predict_from_one_context_is_one_prediction(seed):
    (group,) = make_groups(seed, 1, 1)
    twin = msgspec.structs.replace(group.trajectories[0], member=1)
    twins = msgspec.structs.replace(group, trajectories=[*group.trajectories, twin])
    alone, both = (
        [*collated([one]).whole().micro_batches(1 << 20, CPU, "tree")] for one in (group, twins)
    )
    for one, two in zip(alone, both, strict=True):
        assert one.target_Q.tolist() == two.target_Q.tolist()
        assert len(two.prediction_N) == 2 * len(one.prediction_N) > 0


class Bigram(torch.nn.Module):
    """Log-probs that depend on the previous token only: a policy small enough to see through."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(
            torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        )

    def forward(self, contexts_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        logprobs_BTV = self.table.log_softmax(-1)[contexts_BT[:, :-1]]
        found = logprobs_BTV.gather(-1, labels_BT[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(found, (1, 0))


def update_loss(
    scored: Scored, budget: int, aggregation: str, level: str, noise: int | None = None
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one optimizer update; `noise` perturbs the labels of other tokens."""
    model = Bigram()
    batch, anchor_N, advantage_N = scored
    total = 0.0
    (minibatch,) = batch.whole().split(1, key=0)
    for micro in minibatch.micro_batches(budget, CPU):
        labels_BT = micro.tokens_BT
        if noise is not None:
            labels_BT = torch.where(
                actions(micro), labels_BT, (labels_BT + noise).remainder(VOCABULARY)
            )
        theta_N = model(micro.tokens_BT, labels_BT)[actions(micro)]
        tokens = ActionTokens(
            theta_N,
            micro.mu_N,
            micro.of(anchor_N),
            micro.of(advantage_N),
            micro.trajectory_N,
            torch.ones_like(theta_N),
            *[micro.lag_N, micro.position_N, micro.group_N],
        )
        settings = CorrectionConfig(kind="decoupled", level=level, w_max=5.0)
        corrected = decoupled(tokens, settings)
        clipped = clipped_objective(
            corrected.ratio_N, micro.of(advantage_N), clip_low=0.9, clip_high=2.0, dual_clip=3.0
        )
        scale_N = token_scale(
            aggregation,
            micro.length_N,
            tokens=minibatch.tokens,
            trajectories=minibatch.trajectories,
            norm_tokens=100,
        )
        loss, _ = policy_loss(
            corrected.weight_N * clipped.objective_N,
            scale_N,
            kl_N=None,
            kl_coef=0.0,
            entropy_N=-theta_N,
            entropy_coef=0.01,
            tokens=minibatch.tokens,
        )
        loss.backward()
        total += float(loss.detach())
    assert model.table.grad is not None
    return total, model.table.grad


def scored(seed: int) -> Scored:
    """A batch with random anchors and advantages."""
    batch = collated(make_groups(seed, 4, 3))
    rng = np.random.default_rng(seed)
    anchor_N = batch.mu_N + rng.normal(0, 0.3, len(batch.mu_N)).astype(np.float32)
    return batch, anchor_N, rng.normal(size=len(batch.mu_N)).astype(np.float32)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_norm"])
@pytest.mark.parametrize("level", ["token", "trajectory"])
def test_the_token_budget_changes_neither_loss_nor_gradient(aggregation, level):
    batch = scored(3)
    loss, gradient = update_loss(batch, 10**6, aggregation, level)
    for budget in (1, 40, 150):
        other_loss, other_gradient = update_loss(batch, budget, aggregation, level)
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-5, atol=1e-7)


def test_other_tokens_than_actions_leave_the_loss_bit_identical():
    batch = scored(4)
    loss, gradient = update_loss(batch, 100, "token_mean", "token")
    for noise in (1, 5, 11):
        other_loss, other_gradient = update_loss(batch, 100, "token_mean", "token", noise)
        assert other_loss == loss
        assert torch.equal(other_gradient, gradient)
