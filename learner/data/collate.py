"""Collation of groups into a batch: the only place where lists of trajectories become arrays.

Stripping happens here: the EXPERIENCE tokens of a guided trajectory leave its rows, and the context
that it was sampled in is kept beside them, because some corrections compare the two. Distillation
keeps the rows and has the stripped ones beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evolver_async.lineages import Fork, version_lag
from evolver_async.randomness import uniform
from evolver_async.schema import Array, Group, Role, Sequence, Trajectory, WeightId
from learner.data.batch import Batch


@dataclass(frozen=True)
class Lag:
    """Version lag of a token.

    `abandoned`: its weights are past the fork of an abandoned lineage, so that no line of versions
    leads from them to the present.
    """

    versions: int
    abandoned: bool = False


def lag_table(groups: list[Group], now: WeightId, forks: dict[int, Fork]) -> dict[WeightId, Lag]:
    """Return the lag of every weight id that sampled a token of `groups`, which are of one take.

    It counts from the weights that the take was first chosen for; for a new take these are `now`.
    """
    head = groups[0].head or now
    sampled = {
        run.weights
        for group in groups
        for trajectory in group.trajectories
        for sequence in trajectory.sequences
        for run in sequence.versions
    }
    return {weights: _lag(head, weights, forks) for weights in sampled}


def _lag(head: WeightId, weights: WeightId, forks: dict[int, Fork]) -> Lag:
    versions = version_lag(head, weights, forks)
    return Lag(versions, abandoned=versions != head.step - weights.step)


@dataclass(frozen=True)
class Internalise:
    """Rule by which a `fraction` of the guided trajectories train the context without experience.

    They are stripped or, if it `teaches`, keep their rows and have stripped ones beside them. The
    draw is keyed by the group and the member, so that every use of a group and every repetition of
    a step strips the same ones. `copies`: True for trajectories that are not internalised, because
    an action copies from the experience; None if all may be.
    """

    fraction: float
    seed: int
    teaches: bool = False
    copies: Callable[[Trajectory], bool] | None = None

    def __call__(self, trajectory: Trajectory) -> bool:
        """Draw for one trajectory, whatever it copies."""
        if not guided(trajectory):
            return False
        draw = uniform(self.seed, "strip", trajectory.group_id, trajectory.member)
        return draw < self.fraction


def guided(trajectory: Trajectory) -> bool:
    """Return True if some context of the trajectory holds EXPERIENCE tokens."""
    return any(sequence.guided for sequence in trajectory.sequences)


def collate(
    groups: list[Group],
    lags: dict[WeightId, Lag],
    internalise: Internalise,
    *,
    whole_groups: bool = False,
) -> Batch:
    """Internalise and flatten the sequences of `groups` (at least one group).

    `lags`: the version lag of every weight id that sampled a token (`lag_table`); tokens of a
    scripted policy have lag 0 and behaviour log-prob 0. `whole_groups`: see `Batch`.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    group_P = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    guided_P = np.array([guided(trajectory) for trajectory in trajectories], bool)
    copied_P = np.zeros_like(guided_P)
    if (copies := internalise.copies) is not None:
        copied_P = np.array([copies(trajectory) for trajectory in trajectories], bool)
    drawn_P = np.array([internalise(trajectory) for trajectory in trajectories], bool) & ~copied_P
    stripped_P = drawn_P & (not internalise.teaches)

    def rows_of(wanted_P: Array, stripped_P: Array) -> list[_Row]:
        return [
            row
            for index in np.flatnonzero(wanted_P).tolist()
            for sequence in trajectories[index].sequences
            if (row := _row(sequence, lags, index, bool(stripped_P[index]))) is not None
        ]

    rows = rows_of(np.ones_like(guided_P), stripped_P)
    facts = {
        "group_P": group_P,
        # Contexts with and without experience are two policies, unless training makes them one.
        "peer_P": 2 * group_P + guided_P if internalise.teaches else group_P,
        "reward_P": np.array([trajectory.reward for trajectory in trajectories], np.float64),
        "guided_P": guided_P,
        "copied_P": copied_P,
        "stripped_P": stripped_P,
        "truncated_P": np.array([trajectory.truncated for trajectory in trajectories], bool),
        "turn_start_P": _starts([len(trajectory.turn_rewards) for trajectory in trajectories]),
        "turn_reward_U": _joined([one.turn_rewards for one in trajectories], np.float64),
        "label_U": _joined([trajectory.labels for trajectory in trajectories], np.int8),
    }
    taught = None
    if internalise.teaches and (bare := rows_of(drawn_P, drawn_P)):
        stripped = {**facts, "stripped_P": drawn_P}
        taught = _batch(bare, stripped, sampled=_sampled(bare, stripped))
    return _batch(
        rows, facts, sampled=_sampled(rows, facts), taught=taught, whole_groups=whole_groups
    )


def _batch(rows: "list[_Row]", facts: dict[str, Array], **others: Any) -> Batch:
    return Batch(**_layout(rows, len(facts["group_P"])), **facts, **others)


def _sampled(rows: "list[_Row]", facts: dict[str, Array]) -> Batch | None:
    """Return the stripped ones of `rows` in the contexts that they were sampled in, if any."""
    contexts = [row.sampled for row in rows if row.sampled is not None]
    return _batch(contexts, facts) if contexts else None


@dataclass
class _Row:
    """One sequence: tokens[L], action[L], and mu, lag, abandoned, swapped and turn of its N ACTION
    tokens.

    `sampled`: the row before it was stripped; None if it was not.
    """

    tokens: Array
    action: Array
    mu_N: Array
    lag_N: Array
    abandoned_N: Array
    swapped_N: Array
    turn_N: Array
    trajectory: int
    sampled: "_Row | None" = None


def _row(
    sequence: Sequence, lags: dict[WeightId, Lag], trajectory: int, strip: bool
) -> _Row | None:
    """Make the row of a sequence; None if it has no token to train."""
    written = sequence.roles == Role.ACTION
    if not written.any():
        return None
    trained = sequence.stripped() if strip else sequence
    action = trained.roles == Role.ACTION if strip else written
    if sequence.versions:
        tokens = [run.tokens for run in sequence.versions]
        found = [lags[run.weights] for run in sequence.versions]
        lag_N = np.repeat(np.array([lag.versions for lag in found], np.int64), tokens)
        abandoned_N = np.repeat(np.array([lag.abandoned for lag in found], bool), tokens)
        first = sequence.versions[0].weights
        swapped_N = np.repeat([run.weights != first for run in sequence.versions], tokens)
    else:
        lag_N = np.zeros(int(action.sum()), np.int64)
        abandoned_N = swapped_N = np.zeros(len(lag_N), bool)
    if action[0]:  # it has no context to be predicted from
        written[written.argmax()] = False
        action[0] = False
        lag_N, abandoned_N, swapped_N = lag_N[1:], abandoned_N[1:], swapped_N[1:]
        if not len(lag_N):
            return None
    row = _Row(
        tokens=trained.tokens,
        action=action,
        mu_N=trained.logprobs[action],
        lag_N=lag_N,
        abandoned_N=abandoned_N,
        swapped_N=swapped_N,
        turn_N=trained.turns[action].astype(np.int64),
        trajectory=trajectory,
    )
    if strip:
        row.sampled = replace(row, tokens=sequence.tokens, action=written)
    return row


def _layout(rows: list[_Row], trajectories: int) -> dict[str, Array]:
    """Return the arrays of a `Batch` that follow from its rows."""
    counts_R = np.array([len(row.mu_N) for row in rows], np.int64)
    trajectory_R = np.array([row.trajectory for row in rows], np.int64)
    trajectory_N = np.repeat(trajectory_R, counts_R)
    lag_N = _joined([row.lag_N for row in rows], np.int64)
    lag_P = np.zeros(trajectories, np.int64)
    np.maximum.at(lag_P, trajectory_N, lag_N)
    return {
        "tokens": _joined([row.tokens for row in rows], np.int32),
        "action": _joined([row.action for row in rows], np.bool_),
        "row_start_R": _starts([len(row.tokens) for row in rows]),
        "action_start_R": _starts(counts_R.tolist()),
        "trajectory_R": trajectory_R,
        "mu_N": _joined([row.mu_N for row in rows], np.float32),
        "lag_N": lag_N,
        "abandoned_N": _joined([row.abandoned_N for row in rows], np.bool_),
        "swapped_N": _joined([row.swapped_N for row in rows], np.bool_),
        "turn_N": _joined([row.turn_N for row in rows], np.int64),
        "trajectory_N": trajectory_N,
        "length_P": np.bincount(trajectory_N, minlength=trajectories),
        "lag_P": lag_P,
    }


def _joined(arrays: list[Array], dtype: type) -> Array:
    return np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype)


def _starts(lengths: list[int]) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
