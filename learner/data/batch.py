"""Rows of one learner step, cut into optimizer updates and forward passes.

A row is one sequence as it is trained: stripped, if its trajectory is. A `Batch` keeps all rows
unpadded on the CPU. A `Minibatch` is some of its trajectories; its rows are padded, or packed into
a single row, one micro-batch at a time, where equal rows are computed once. `collate` makes
batches; nothing changes them afterwards. `LogProbs` and `Values` are scores of a batch under the
weights that its step begins with.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from evolver_async.model.attention import Borders
from evolver_async.schema import Array


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass: the distinct rows of whole trajectories, padded on the right.

    With `borders` the distinct rows are packed, one behind the other, into the only row here, and
    nothing is padding: `B` is 1 for all but row_R and end_R.

    tokens_BT int64, attention_BT bool (False on padding), action_BT bool (ACTION tokens that have a
    context to be predicted from). The `_N` tensors hold one entry per ACTION token of all `R` rows,
    in row-major order; `each` lines `logprobs_BT[action_BT]` up with them: index_N int64 (place in
    the batch's `_N` arrays, in host memory), mu_N float32, lag_N int64, abandoned_N bool,
    stripped_N bool, trajectory_N int64 (0..trajectories-1 within this micro-batch), length_N int64
    (ACTION tokens of the token's whole trajectory). row_R int64: the batch's number of each row;
    end_R int64: the place of its last token in the flattened tokens_BT. distinct_N int64: the place
    of each token among the True of `action_BT`; None if no row comes twice.
    """

    tokens_BT: torch.Tensor
    attention_BT: torch.Tensor
    action_BT: torch.Tensor
    index_N: torch.Tensor
    mu_N: torch.Tensor
    lag_N: torch.Tensor
    abandoned_N: torch.Tensor
    stripped_N: torch.Tensor
    trajectory_N: torch.Tensor
    length_N: torch.Tensor
    row_R: torch.Tensor
    end_R: torch.Tensor
    distinct_N: torch.Tensor | None
    borders: Borders | None

    def each(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all N tokens from those of the distinct rows."""
        return values if self.distinct_N is None else values[self.distinct_N]

    def of(self, array_N: Array) -> torch.Tensor:
        """Return the entries of a whole batch's array that belong to these tokens."""
        return torch.from_numpy(array_N[self.index_N.numpy()]).to(self.tokens_BT.device)


@dataclass(frozen=True)
class Batch:
    """All rows of one learner step, flat; rows without ACTION tokens are left out.

    tokens int32, action bool: the rows one after another, row r at row_start_R[r]:row_start_R[r+1].
    The `_N` arrays hold ACTION tokens in row order, those of row r at
    action_start_R[r]:action_start_R[r+1]: mu_N float32 (behaviour), lag_N int64, abandoned_N bool
    (sampled past the fork of an abandoned lineage), turn_N int64, trajectory_N int64.
    trajectory_R int64.
    group_P int64 (index of the group), peer_P int64 (index of the members of its group that it is
    compared with), reward_P float64, length_P int64 (ACTION tokens), lag_P int64 (the largest of
    its tokens, 0 without any), guided_P bool (experience was in a sampled context), copied_P bool
    (an action copies from the experience, so it keeps its context), stripped_P bool (experience was
    in the sampled context and is in no row), truncated_P bool (the episode was cut off).
    turn_start_P int64[P+1]: the turns of trajectory p are turn_start_P[p]:turn_start_P[p+1] of
    turn_reward_U float64, label_U int8.
    `sampled`: the same trajectories with the rows and ACTION tokens of the stripped ones alone, in
    the contexts that they were sampled in; None if nothing is stripped.
    `taught`: stripped rows of the guided trajectories whose own rows teach them, with `sampled`
    beside them row by row; None if nothing is distilled.
    `whole_groups`: the loss compares the members of a group, so that all of them are in one update
    and in one forward pass.
    Trajectories without ACTION tokens count in their group's rewards and are in no minibatch.
    """

    tokens: Array
    action: Array
    row_start_R: Array
    action_start_R: Array
    trajectory_R: Array
    mu_N: Array
    lag_N: Array
    abandoned_N: Array
    turn_N: Array
    trajectory_N: Array
    group_P: Array
    peer_P: Array
    reward_P: Array
    length_P: Array
    lag_P: Array
    guided_P: Array
    copied_P: Array
    stripped_P: Array
    truncated_P: Array
    turn_start_P: Array
    turn_reward_U: Array
    label_U: Array
    sampled: "Batch | None" = None
    taught: "Batch | None" = None
    whole_groups: bool = False

    @property
    def turn_at_N(self) -> Array:
        """The turn of every ACTION token, as a place among the turns of all trajectories."""
        return self.turn_start_P[self.trajectory_N] + self.turn_N

    @property
    def stripped_N(self) -> Array:
        return self.stripped_P[self.trajectory_N]

    @cached_property
    def first_R(self) -> Array:
        """The first row with the same tokens and the same ACTION tokens as each row, int64."""
        first: dict[tuple[bytes, bytes], int] = {}
        cuts = itertools.pairwise(self.row_start_R.tolist())
        equal = [(self.tokens[s:e].tobytes(), self.action[s:e].tobytes()) for s, e in cuts]
        return np.array([first.setdefault(one, row) for row, one in enumerate(equal)], np.int64)

    def whole(self) -> "Minibatch":
        """Return all trajectories that have ACTION tokens as a single minibatch."""
        return self.part(np.ones_like(self.stripped_P))

    def part(self, wanted_P: Array) -> "Minibatch":
        """Return those of the trajectories `wanted_P`, bool[P], that have ACTION tokens."""
        return Minibatch(self, np.flatnonzero(wanted_P & (self.length_P > 0)))


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the N ACTION tokens of a batch, float32.

    anchor_N: under the policy, 0 where nothing reads it. old_N: the log-probs that the data is
    corrected from, mu_N but for stripped tokens (`guided_old`). reference_N: under the KL
    reference, 0 without one. sampled_N: of stripped tokens under the policy in the context that
    they were sampled in, 0 for others; None if nothing reads it.
    """

    anchor_N: Array
    old_N: Array
    reference_N: Array
    sampled_N: Array | None = None


@dataclass(frozen=True)
class Values:
    """Values by a critic: of the N ACTION tokens and behind the last token of each row, float32."""

    value_N: Array
    end_value_R: Array


@dataclass(frozen=True)
class Minibatch:
    """Trajectories of a batch: those of one optimizer update, of a whole step or a scoring pass.

    members int64: indices of trajectories; `tokens`: the number of their ACTION tokens.
    """

    batch: Batch
    members: Array

    @property
    def trajectories(self) -> int:
        return len(self.members)

    @property
    def tokens(self) -> int:
        return int(self.batch.length_P[self.members].sum())

    @property
    def row_lengths(self) -> Array:
        """Tokens of each of its rows, prompts included."""
        batch = self.batch
        return np.diff(batch.row_start_R)[np.isin(batch.trajectory_R, self.members)]

    @property
    def groups(self) -> set[int]:
        """Indices of the groups that have members here."""
        return set(self.batch.group_P[self.members].tolist())

    def split(self, count: int, key: int) -> list["Minibatch"]:
        """Cut it into up to `count` optimizer updates of about equal numbers of trajectories.

        The order of groups is a permutation keyed by `key`. Groups stay whole if there are at least
        `count` of them, or with `whole_groups`. No minibatch is empty, so there may be fewer, or
        none at all.
        """
        if not len(self.members):
            return []
        group_M = self.batch.group_P[self.members]
        order = np.random.Generator(np.random.Philox(key=key)).permutation(np.unique(group_M))
        members = [self.members[group_M == group] for group in order]
        if len(members) < count and not self.batch.whole_groups:
            members = [member[None] for member in np.concatenate(members)]
        count = min(count, len(members))
        ends = np.cumsum([len(member) for member in members])
        cuts = [0]
        for i in range(1, count):
            target = ends[-1] * i / count
            nearest = 1 + int(np.argmin(np.abs(ends - target)))
            cuts.append(min(max(nearest, cuts[-1] + 1), len(members) - (count - i)))
        cuts.append(len(members))
        return [
            Minibatch(self.batch, np.concatenate(members[start:end]))
            for start, end in itertools.pairwise(cuts)
        ]

    def micro_batches(
        self, token_budget: int, device: torch.device, *, packed: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches of at most `token_budget` tokens, padding included, equal rows once.

        The longest rows come first, so that a budget beyond the memory fails at once. A trajectory
        is never split (trajectory-level weights need all its tokens), nor a group with
        `whole_groups`: one whose rows alone exceed the budget gets a micro-batch of its own.
        """
        batch = self.batch
        unit_P = batch.group_P if batch.whole_groups else np.arange(len(batch.group_P))
        rows_of: dict[int, list[int]] = {int(unit): [] for unit in unit_P[self.members]}
        for row in np.flatnonzero(np.isin(batch.trajectory_R, self.members)):
            rows_of[int(unit_P[batch.trajectory_R[row]])].append(int(row))
        lengths_R = np.diff(batch.row_start_R)
        longest_first = sorted(rows_of.values(), key=lambda rows: -int(lengths_R[rows].max()))
        pending, distinct, tokens, width = list[int](), set[int](), 0, 0
        for rows in longest_first:
            firsts = set(batch.first_R[rows].tolist())
            longest, more = int(lengths_R[rows].max()), list(firsts - distinct)
            fits = tokens + int(lengths_R[more].sum())
            padded = (len(distinct) + len(more)) * max(width, longest)
            if pending and (fits if packed else padded) > token_budget:
                yield lay_out(batch, np.array(pending), device, packed=packed)
                pending, distinct, tokens, width = [], set(), 0, 0
                more = list(firsts)
            pending += rows
            distinct |= firsts
            tokens, width = tokens + int(lengths_R[more].sum()), max(width, longest)
        if pending:
            yield lay_out(batch, np.array(pending), device, packed=packed)


def lay_out(batch: Batch, rows_R: Array, device: torch.device, *, packed: bool) -> MicroBatch:
    """Lay out the rows `rows_R` of a batch, whole trajectories, as tensors on `device`."""
    first_R = batch.first_R[rows_R].tolist()
    place_of = {row: place for place, row in enumerate(dict.fromkeys(first_R))}
    rows_B, place_R = np.array(list(place_of)), np.array([place_of[row] for row in first_R])
    starts_B, ends_B = batch.row_start_R[rows_B], batch.row_start_R[rows_B + 1]
    lengths_B = ends_B - starts_B
    places = _ranges(starts_B, ends_B)
    if packed:
        attention_BT = np.ones((1, len(places)), bool)
        end_B = np.cumsum(lengths_B) - 1
    else:
        attention_BT = np.arange(lengths_B.max()) < lengths_B[:, None]
        end_B = np.arange(len(rows_B)) * attention_BT.shape[1] + lengths_B - 1
    tokens_BT = np.zeros(attention_BT.shape, np.int64)
    tokens_BT[attention_BT] = batch.tokens[places]
    action_BT = np.zeros(attention_BT.shape, bool)
    action_BT[attention_BT] = batch.action[places]
    index_N = _ranges(batch.action_start_R[rows_R], batch.action_start_R[rows_R + 1])
    trajectory_N = batch.trajectory_N[index_N]
    count_B = batch.action_start_R[rows_B + 1] - batch.action_start_R[rows_B]
    ends_M = np.cumsum(count_B)
    distinct_N = _ranges((ends_M - count_B)[place_R], ends_M[place_R])

    def tensor(array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        tokens_BT=tensor(tokens_BT),
        attention_BT=tensor(attention_BT),
        action_BT=tensor(action_BT),
        index_N=torch.from_numpy(index_N),
        mu_N=tensor(batch.mu_N[index_N]),
        lag_N=tensor(batch.lag_N[index_N]),
        abandoned_N=tensor(batch.abandoned_N[index_N]),
        stripped_N=tensor(batch.stripped_P[trajectory_N]),
        trajectory_N=tensor(np.unique(trajectory_N, return_inverse=True)[1]),
        length_N=tensor(batch.length_P[trajectory_N]),
        row_R=tensor(rows_R),
        end_R=tensor(end_B[place_R]),
        distinct_N=tensor(distinct_N) if len(rows_B) < len(rows_R) else None,
        borders=Borders.of(lengths_B.tolist(), device) if packed else None,
    )


def _ranges(starts: Array, ends: Array) -> Array:
    """Concatenate the integers of the half-open ranges starts[i]:ends[i]."""
    return np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)])
