"""Collation, stripping, minibatches and micro-batches against the sequences they came from."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evolver_async.schema import (
    Fork,
    Group,
    Role,
    Sequence,
    Task,
    Trajectory,
    VersionRun,
    WeightId,
)
from learner.batch import Batch, collate, lag_table
from learner.loss import clipped_objective, policy_loss, token_scale
from learner.offpolicy import correct

CPU = torch.device("cpu")
VOCABULARY = 17


def make_sequence(rng: np.random.Generator, length: int, guided: bool, scripted: bool) -> Sequence:
    low = 0 if guided else 2
    roles = rng.choice(
        [Role.EXPERIENCE, Role.PROMPT, Role.ACTION, Role.OBSERVATION][0 if guided else 1 :],
        size=length,
    ).astype(np.uint8)
    roles[0] = Role.EXPERIENCE if guided and low == 0 else Role.PROMPT
    roles[-1] = Role.OBSERVATION  # something is left after stripping
    action = roles == Role.ACTION
    runs, left = [], int(action.sum())
    while left and not scripted:
        tokens = int(rng.integers(1, left + 1))
        weights = WeightId(lineage=1, step=int(rng.integers(0, 9)))
        runs.append(VersionRun(weights=weights, tokens=tokens))
        left -= tokens
    return Sequence(
        tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        roles=roles,
        turns=np.where(action, rng.integers(0, 3, length), -1).astype(np.int16),
        logprobs=np.where(action, -rng.exponential(2, length), 0).astype(np.float32),
        versions=runs,
    )


def make_groups(
    seed: int, groups: int, members: int, *, sequences: int = 2, scripted: bool = False
) -> list[Group]:
    rng = np.random.default_rng(seed)

    def trajectory(group: int, member: int) -> Trajectory:
        return Trajectory(
            group_id=group,
            member=member,
            attempt=0,
            actor="actor-0",
            incarnation=0,
            sequences=[
                make_sequence(rng, int(rng.integers(2, 20)), bool(rng.random() < 0.5), scripted)
                for _ in range(rng.integers(1, sequences + 1))
            ],
            reward=float(rng.normal()),
            success=False,
            terminated=True,
            truncated=False,
            turn_rewards=np.zeros(3, np.float32),
            turn_flags=np.zeros(3, np.uint8),
            labels=np.zeros(3, np.int8),
            label_source="",
            experience_ids=[],
            policy="scripted" if scripted else "learned",
            timing={},
        )

    task = Task(task_id="t", env="bandit", split="train", map_seed=0)
    return [
        Group(
            group_id=group,
            task=task,
            kind="rollout",
            stage=0,
            use=0,
            trajectories=[trajectory(group, member) for member in range(members)],
        )
        for group in range(groups)
    ]


def lags_of(groups: list[Group]) -> dict[WeightId, int]:
    return lag_table(groups, WeightId(lineage=1, step=9), {1: Fork(lineage=1, parent=0, step=0)})


def collated(groups: list[Group]) -> Batch:
    return collate(groups, lags_of(groups))


def expected_rows(groups: list[Group]) -> list[tuple]:
    """(trajectory, guided, stripped tokens, [(label, mu, lag, turn) of ACTION tokens])."""
    rows = []
    trajectories = [t for group in groups for t in group.trajectories]
    for index, trajectory in enumerate(trajectories):
        for sequence in trajectory.sequences:
            lags = [9 - run.weights.step for run in sequence.versions for _ in range(run.tokens)]
            tokens, actions, guided = [], [], False
            for t in range(len(sequence)):
                if sequence.roles[t] == Role.EXPERIENCE:
                    guided = True
                    continue
                if sequence.roles[t] == Role.ACTION:
                    lag = lags.pop(0) if sequence.versions else 0
                    if tokens:
                        turn = int(sequence.turns[t])
                        actions.append((int(sequence.tokens[t]), sequence.logprobs[t], lag, turn))
                tokens.append(int(sequence.tokens[t]))
            if actions:
                rows.append((index, guided, tokens, actions))
    return rows


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_collation_strips_experience_and_keeps_every_action_token(seed, count, members, scripted):
    groups = make_groups(seed, count, members, scripted=scripted)
    batch = collated(groups)
    rows = expected_rows(groups)
    assert len(batch.trajectory_R) == len(rows)
    for r, (trajectory, guided, tokens, actions) in enumerate(rows):
        row = slice(batch.row_start_R[r], batch.row_start_R[r + 1])
        own = slice(batch.action_start_R[r], batch.action_start_R[r + 1])
        assert batch.trajectory_R[r] == trajectory and batch.guided_R[r] == guided
        assert batch.tokens[row].tolist() == tokens
        labels = batch.tokens[row][batch.action[row]]
        found = zip(labels, batch.mu_N[own], batch.lag_N[own], batch.turn_N[own], strict=True)
        assert list(found) == actions
        assert (batch.trajectory_N[own] == trajectory).all()
    for p in range(len(batch.reward_P)):
        own_lags = [a[2] for row in rows if row[0] == p for a in row[3]]
        assert batch.length_P[p] == len(own_lags)
        assert batch.lag_P[p] == max(own_lags, default=0)
    assert batch.group_P.tolist() == [g for g in range(count) for _ in range(members)]


def test_lag_is_counted_across_a_fork():
    groups = make_groups(0, 1, 2)
    forks = {
        1: Fork(lineage=1, parent=0, step=0),
        2: Fork(lineage=2, parent=1, step=4),
    }
    lags = lag_table(groups, WeightId(lineage=2, step=6), forks)
    for weights, lag in lags.items():
        assert lag == (6 - weights.step if weights.step <= 4 else 2 + weights.step - 4)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6))
def test_minibatches_partition_the_trajectories_evenly(seed, count, members, updates):
    batch = collated(make_groups(seed, count, members))
    trains = np.flatnonzero(batch.length_P).tolist()
    minibatches = batch.minibatches(updates, key=seed)
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
        return [minibatch.members.tolist() for minibatch in batch.minibatches(4, key)]

    assert order(5) == order(5)
    assert order(5) != order(6)


def test_a_batch_without_action_tokens_has_no_minibatches():
    groups = make_groups(0, 1, 1, sequences=1)
    sequence = groups[0].trajectories[0].sequences[0]
    sequence.roles[:] = Role.PROMPT
    sequence.logprobs[:] = 0
    sequence.versions.clear()
    batch = collated(groups)
    assert batch.minibatches(4, key=0) == []
    assert list(batch.whole().micro_batches(64, CPU)) == []
    assert batch.lag_P.tolist() == [0] and len(batch.reward_P) == 1


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 200))
def test_micro_batches_fit_the_budget_and_hold_every_token_once(seed, budget):
    batch = collated(make_groups(seed, 3, 3))
    batch.anchor_N = np.arange(len(batch.mu_N), dtype=np.float32)
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
        assert not (micro.action_BT & ~micro.attention_BT).any()
        assert micro.tokens_BT[micro.action_BT].tolist() == labels[at].tolist()
        assert micro.mu_N.tolist() == batch.mu_N[at].tolist()
        assert micro.anchor_N.tolist() == at.tolist()
        assert micro.length_N.tolist() == batch.length_P[batch.trajectory_N[at]].tolist()
        assert sorted(own) == torch.tensor(sorted(own))[micro.trajectory_N.unique()].tolist()


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
    batch: Batch, budget: int, aggregation: str, level: str, noise: int | None = None
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one optimizer update; `noise` perturbs the labels of other tokens."""
    model = Bigram()
    total = 0.0
    (minibatch,) = batch.minibatches(1, key=0)
    for micro in minibatch.micro_batches(budget, CPU):
        labels_BT = micro.tokens_BT
        if noise is not None:
            labels_BT = torch.where(
                micro.action_BT, labels_BT, (labels_BT + noise).remainder(VOCABULARY)
            )
        theta_N = model(micro.tokens_BT, labels_BT)[micro.action_BT]
        corrected = correct(
            theta_N,
            micro.mu_N,
            micro.anchor_N,
            micro.trajectory_N,
            kind="decoupled",
            level=level,
            w_max=5.0,
        )
        clipped = clipped_objective(
            corrected.ratio_N, micro.advantage_N, clip_low=0.9, clip_high=2.0, dual_clip=3.0
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
        )
        loss.backward()
        total += float(loss.detach())
    assert model.table.grad is not None
    return total, model.table.grad


def scored(seed: int) -> Batch:
    batch = collated(make_groups(seed, 4, 3))
    rng = np.random.default_rng(seed)
    batch.anchor_N = batch.mu_N + rng.normal(0, 0.3, len(batch.mu_N)).astype(np.float32)
    batch.spread_advantages(rng.normal(size=len(batch.reward_P)))
    return batch


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


def test_advantages_reach_the_tokens_of_their_trajectory():
    batch = collated(make_groups(2, 3, 2))
    batch.spread_advantages(np.arange(6.0))
    assert batch.advantage_N.tolist() == batch.trajectory_N.tolist()
