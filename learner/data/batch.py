"""Rows of one learner step, cut into optimizer updates and forward passes.

A row is one sequence as it is trained: stripped, if its trajectory is. A `Batch` keeps all rows
unpadded on the CPU. A `Minibatch` is some of its trajectories; its rows are padded, or packed into
a single row, one micro-batch at a time. `collate` makes batches; nothing changes them afterwards.
`LogProbs` and `Values` are scores of a batch under the weights that its step begins with.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch

from evolver_async.model.projection import TokenMasks
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.context import ContextGroup
from evolver_async.model.rows.prefix_trees import SortedRows
from evolver_async.schema import Array
from learner.data.packing import Layout, RowCost, cut_rows, cut_trees, deal_rows, place, ranges

UNKNOWN_LAG = -1  # of tokens that no version of this run sampled


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass: rows padded on the right, whole trajectories only.

    With `borders` the batch's rows are packed into the only row here, and nothing is padding: `B`
    is 1 for all but row_B and end_B. Rows can share tokens at their beginnings (`branches`).

    tokens_BT int64, attention_BT bool (False on padding). read_K int64: ascending places in the
    flattened tokens_BT whose hidden states are read. Predictions (`_Q`) are the different pairs of
    a token and its context: target_Q int64 (the token), source_Q int64 (index into read_K of the
    token before it). The `_N` tensors hold one entry per ACTION token that has a context to be
    predicted from, row by row: prediction_N int64 (index into `_Q`), index_N int64 (place in the
    batch's `_N` arrays, in host memory), mu_N float32, lag_N int64, abandoned_N bool, swapped_N
    bool, stripped_N bool, trajectory_N int64 (0..trajectories-1 within this micro-batch), length_N
    int64 (ACTION tokens of the token's whole trajectory), position_N int64 (its place among them,
    as written), group_N int64 (index of its group in the batch). row_B int64: the batch's number of
    each row; end_B int64: the index into read_K of its last token. masks_Q: of predictions under a
    grammar, None without any.
    """

    tokens_BT: torch.Tensor
    attention_BT: torch.Tensor
    read_K: torch.Tensor
    target_Q: torch.Tensor
    source_Q: torch.Tensor
    prediction_N: torch.Tensor
    index_N: torch.Tensor
    mu_N: torch.Tensor
    lag_N: torch.Tensor
    abandoned_N: torch.Tensor
    swapped_N: torch.Tensor
    stripped_N: torch.Tensor
    trajectory_N: torch.Tensor
    length_N: torch.Tensor
    position_N: torch.Tensor
    group_N: torch.Tensor
    row_B: torch.Tensor
    end_B: torch.Tensor
    borders: Borders | None
    masks_Q: TokenMasks | None = None

    @property
    def context(self) -> ContextGroup | None:
        """The ranks that compute these rows together, None if this one does so alone."""
        return None if self.borders is None else self.borders.context

    @property
    def masks_N(self) -> TokenMasks | None:
        """Masks of the ACTION tokens."""
        if self.masks_Q is None:
            return None
        return self.masks_Q.of(self.masks_Q.mask_N[self.prediction_N])

    @property
    def source_N(self) -> torch.Tensor:
        """Index into read_K of the token before every ACTION token."""
        return self.source_Q[self.prediction_N]

    def of(self, array_N: Array) -> torch.Tensor:
        """Return the entries of a whole batch's array that belong to these tokens."""
        return torch.from_numpy(array_N[self.index_N.numpy()]).to(self.tokens_BT.device)

    def part(self, kept_N: torch.Tensor) -> "MicroBatch":
        """Return it with these of its ACTION tokens alone, bool[N]: whole trajectories, which are
        numbered anew."""
        kept = {one.name: getattr(self, one.name) for one in fields(self)}
        kept = {name: one[kept_N] for name, one in kept.items() if name.endswith("_N")}
        kept["index_N"] = self.index_N[kept_N.cpu()]
        kept["trajectory_N"] = torch.unique(kept["trajectory_N"], return_inverse=True)[1]
        return replace(self, **kept)


@dataclass(frozen=True)
class Batch:
    """All rows of one learner step, flat; rows without ACTION tokens are left out.

    tokens int32, action bool: the rows one after another, row r at row_start_R[r]:row_start_R[r+1].
    The `_N` arrays hold ACTION tokens in row order, those of row r at
    action_start_R[r]:action_start_R[r+1]: mu_N float32 (behaviour), lag_N int64 (UNKNOWN_LAG of
    rows of files), abandoned_N bool (no line of versions leads from its weights to the present
    ones: past the fork of an abandoned lineage, or of a file), swapped_N bool (sampled by newer
    weights than the first token of its sequence), turn_N int64, trajectory_N int64.
    trajectory_R int64. group_P int64 (index of the group), peer_P int64 (index of the members of
    its group that it is compared with), reward_P float64, length_P int64 (ACTION tokens), lag_P
    int64 (the largest of its tokens, 0 without any), written_P bool (recorded in words: its tokens
    have no behaviour log-probs), guided_P bool (experience was in a sampled context), copied_P bool
    (an action copies from the experience, so it keeps its context), stripped_P bool (experience was
    in the sampled context and is in no row), truncated_P bool (the episode was cut off), overlong_P
    bool (by a limit of tokens or of time).
    turn_start_P int64[P+1]: the turns of trajectory p are turn_start_P[p]:turn_start_P[p+1] of
    turn_reward_U float64, label_U int8.
    mask_N int64 (row of allowed_MW, -1 where no grammar ruled), allowed_MW uint8: see `TokenMasks`;
    None if no turn obeyed a grammar.
    `sampled`: the same trajectories with the rows and ACTION tokens of the stripped ones alone, in
    the contexts that they were sampled in; None if nothing is stripped.
    `taught`: stripped rows of the guided trajectories whose own rows teach them, with `sampled`
    beside them row by row; None if nothing is distilled.
    `whole_groups`: the loss compares the members of a group, so that all of them are in one update
    and in one forward pass.
    Trajectories without ACTION tokens count in their group's rewards and are in no minibatch.

    Two rows, a prompt of two tokens with three ACTION tokens and one of one token with two:

        tokens          p p a a a p a a
        row_start_R     0 5 8
        action_start_R  0 3 5             (of the `_N` arrays, which have five entries)
    """

    tokens: Array
    action: Array
    row_start_R: Array
    action_start_R: Array
    trajectory_R: Array
    mu_N: Array
    lag_N: Array
    abandoned_N: Array
    swapped_N: Array
    turn_N: Array
    trajectory_N: Array
    group_P: Array
    peer_P: Array
    reward_P: Array
    length_P: Array
    lag_P: Array
    written_P: Array
    guided_P: Array
    copied_P: Array
    stripped_P: Array
    truncated_P: Array
    overlong_P: Array
    turn_start_P: Array
    turn_reward_U: Array
    label_U: Array
    mask_N: Array | None = None
    allowed_MW: Array | None = None
    sampled: "Batch | None" = None
    taught: "Batch | None" = None
    whole_groups: bool = False

    @property
    def turn_at_N(self) -> Array:
        """The turn of every ACTION token, as a place among the turns of all trajectories."""
        return self.turn_start_P[self.trajectory_N] + self.turn_N

    @cached_property
    def position_N(self) -> Array:
        """The place of every ACTION token among those of its trajectory, as written, from 0."""
        order_N = np.argsort(self.turn_at_N, kind="stable")  # contexts may take turns
        count_P = np.bincount(self.trajectory_N, minlength=len(self.length_P))
        found_N = np.empty(len(order_N), np.int64)
        found_N[order_N] = np.arange(len(order_N)) - np.repeat(
            np.cumsum(count_P) - count_P, count_P
        )
        return found_N

    @property
    def lag_U(self) -> Array:
        """The largest version lag of the ACTION tokens of every turn, 0 without any; int64."""
        found_U = np.zeros(len(self.turn_reward_U), np.int64)
        np.maximum.at(found_U, self.turn_at_N, self.lag_N)
        found_U[self.turn_at_N[self.lag_N == UNKNOWN_LAG]] = UNKNOWN_LAG
        return found_U

    @property
    def stripped_N(self) -> Array:
        return self.stripped_P[self.trajectory_N]

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
    they were sampled in, 0 for others; None if nothing reads it. fresh_N bool: tokens of the first
    update, whose own forward pass gives their anchor; None if there are none.
    """

    anchor_N: Array
    old_N: Array
    reference_N: Array
    sampled_N: Array | None = None
    fresh_N: Array | None = None


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
    def rows(self) -> Array:
        """The batch's numbers of its rows, ascending."""
        return np.flatnonzero(np.isin(self.batch.trajectory_R, self.members))

    def laid_lengths(self, layout: Layout) -> Array:
        """Return the tokens, prompts included, that each of its rows adds to one pass over all.

        In a tree that is what no row before it in their order has; beginnings that are too short
        to be shared come on top.
        """
        rows = self.rows
        if layout == "tree" and len(rows):
            return SortedRows([_row(self.batch, row) for row in rows.tolist()]).new_R()
        return np.diff(self.batch.row_start_R)[rows]

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
        self, token_budget: int, device: torch.device, layout: Layout = "padded"
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches of at most `token_budget` tokens, padding included, of all rows."""
        shares = self.shared_micro_batches(token_budget, device, layout, 0, 1, RowCost())
        yield from (micro for micro in shares if micro is not None)

    def shared_micro_batches(
        self,
        token_budget: int,
        device: torch.device,
        layout: Layout,
        rank: int,
        ranks: int,
        cost: RowCost,
    ) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches of a rank, of at most `token_budget` tokens, padding included.

        Padded and packed, the longest rows come first, so that a budget beyond the memory fails at
        once. Trees take rows that begin alike together; tokens that rows share count once.
        A trajectory is never split (trajectory-level weights need all its tokens), nor a group with
        `whole_groups`: one whose rows alone exceed the budget gets a micro-batch of its own.
        Of several `ranks` each gets a share, equally many micro-batches, and None where none is
        left. Those of the same place are computed at the same time: packed, all are dealt so that
        they `cost` about the same; otherwise those of one place do.
        """
        batch = self.batch
        unit_P = batch.group_P if batch.whole_groups else np.arange(len(batch.group_P))
        rows_of: dict[int, list[int]] = {int(unit): [] for unit in unit_P[self.members]}
        for row in self.rows.tolist():
            rows_of[int(unit_P[batch.trajectory_R[row]])].append(row)
        units = list(rows_of.values())
        length_R = np.diff(batch.row_start_R)
        if layout == "tree":
            tokens = {row: _row(batch, row) for unit in units for row in unit}
            parts = cut_trees(units, tokens, token_budget)
        elif layout == "packed" and ranks > 1:
            cost_R = cost(length_R, np.diff(batch.action_start_R))
            parts = deal_rows(units, length_R, cost_R, token_budget, ranks)
        else:
            parts = cut_rows(units, length_R, token_budget, layout)
        while some := list(itertools.islice(parts, ranks)):
            yield lay_out(batch, np.array(some[rank]), device, layout) if some[rank:] else None


def _row(batch: Batch, row: int) -> Array:
    return batch.tokens[batch.row_start_R[row] : batch.row_start_R[row + 1]]


def lay_out(batch: Batch, rows_B: Array, device: torch.device, layout: Layout) -> MicroBatch:
    """Lay out the rows `rows_B` of a batch, whole trajectories, as tensors on `device`.

    Tokens of the rows laid end to end (`_A`) get a place in the flattened tokens_BT each.
    """
    starts_B, ends_B = batch.row_start_R[rows_B], batch.row_start_R[rows_B + 1]
    lengths_B = ends_B - starts_B
    index_A = ranges(starts_B, ends_B)
    tokens_A = batch.tokens[index_A].astype(np.int64)
    placed = place(np.split(tokens_A, np.cumsum(lengths_B)[:-1]), device, layout)
    place_A = placed.place_A
    acts_N = np.flatnonzero(batch.action[index_A])
    read = np.concatenate([place_A[acts_N - 1], place_A[np.cumsum(lengths_B) - 1]])
    read_K, found = np.unique(read, return_inverse=True)
    target_N, source_N = tokens_A[acts_N], found[: len(acts_N)]
    index_N = ranges(batch.action_start_R[rows_B], batch.action_start_R[rows_B + 1])
    # Members of a group often predict the same token in the same context. The projection onto the
    # vocabulary, the dearest part, is computed once for these.
    pair_N = source_N * (1 + tokens_A.max()) + target_N
    # equal tokens of equal contexts can be under different masks
    if batch.mask_N is not None and batch.allowed_MW is not None:
        pair_N = pair_N * (1 + len(batch.allowed_MW)) + 1 + batch.mask_N[index_N]
    _, first_Q, prediction_N = np.unique(pair_N, return_index=True, return_inverse=True)
    trajectory_N = batch.trajectory_N[index_N]

    def tensor(array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        tokens_BT=tensor(placed.tokens_BT),
        attention_BT=tensor(placed.real_BT),
        read_K=tensor(read_K),
        target_Q=tensor(target_N[first_Q]),
        source_Q=tensor(source_N[first_Q]),
        prediction_N=tensor(prediction_N),
        index_N=torch.from_numpy(index_N),
        mu_N=tensor(batch.mu_N[index_N]),
        lag_N=tensor(batch.lag_N[index_N]),
        abandoned_N=tensor(batch.abandoned_N[index_N]),
        swapped_N=tensor(batch.swapped_N[index_N]),
        stripped_N=tensor(batch.stripped_P[trajectory_N]),
        trajectory_N=tensor(np.unique(trajectory_N, return_inverse=True)[1]),
        length_N=tensor(batch.length_P[trajectory_N]),
        position_N=tensor(batch.position_N[index_N]),
        group_N=tensor(batch.group_P[trajectory_N]),
        row_B=tensor(rows_B),
        end_B=tensor(found[len(acts_N) :]),
        borders=placed.borders,
        masks_Q=_masks(batch, index_N[first_Q], device),
    )


def _masks(batch: Batch, index_Q: Array, device: torch.device) -> TokenMasks | None:
    """Return the masks of these of the batch's ACTION tokens; None if none has one."""
    if batch.mask_N is None or batch.allowed_MW is None:
        return None
    used, mask_Q = np.unique(batch.mask_N[index_Q], return_inverse=True)
    free = int(used[0] < 0) if len(used) else 0
    if len(used) == free:
        return None
    allowed_MW = torch.from_numpy(batch.allowed_MW[used[free:]])
    return TokenMasks(torch.from_numpy(mask_Q - free).to(device), allowed_MW.to(device))
