"""Collation of groups into a batch: the only place where lists of trajectories become arrays.

Stripping happens here: the EXPERIENCE tokens of a guided trajectory leave its rows, and the context
that it was sampled in is kept beside them, because some corrections compare the two. Distillation
keeps the rows and has the stripped ones beside them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from evolver_async.config import ExperienceConfig
from evolver_async.errors import Inconsistency
from evolver_async.lineages import Fork, version_lag
from evolver_async.model.grammar import GrammarError, Grammars
from evolver_async.randomness import uniform
from evolver_async.schema import Array, Group, Role, Sequence, Trajectory, WeightId
from learner.data.batch import UNKNOWN_LAG, Batch

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Lag:
    """Version lag of a token.

    `abandoned`: its weights are past the fork of an abandoned lineage, so that no line of versions
    leads from them to the present.
    """

    versions: int
    abandoned: bool = False


def lag_table(groups: list[Group], head: WeightId, forks: dict[int, Fork]) -> dict[WeightId, Lag]:
    """Return the lag of every weight id that sampled a token of `groups`, which are of one take.

    It counts from the weights that the take was first chosen for; for a new take these are `head`.
    """
    head = groups[0].head or head
    sampled = {
        run.weights
        for group in groups
        for trajectory in group.trajectories
        for sequence in trajectory.sequences
        for run in sequence.versions
    }
    versions = {weights: version_lag(head, weights, forks) for weights in sampled}
    return {
        weights: Lag(count, abandoned=count != head.step - weights.step)
        for weights, count in versions.items()
    }


@dataclass(frozen=True)
class Internalise:
    """Rule by which a `fraction` of the guided trajectories train the context without experience.

    They are stripped or, if it `teaches`, keep their rows and have stripped ones beside them; with
    `solved` only the successful ones teach. With `withheld` guided trajectories were sampled
    without their experience: all train without it, and their contexts with it teach. The draw is
    keyed by the group and the member, so that every use of a group and every repetition of a step
    strips the same ones. `copies`: True for trajectories that are not internalised, because an
    action copies from the experience; None if all may be.
    """

    fraction: float
    seed: int
    teaches: bool = False
    solved: bool = False
    withheld: bool = False
    copies: Callable[[Trajectory], bool] | None = None

    def __call__(self, trajectory: Trajectory) -> bool:
        """Draw for one trajectory, whatever it copies."""
        if not self.fraction or not guided(trajectory):
            return False
        if self.solved and not trajectory.success:
            return False
        draw = uniform(self.seed, "strip", trajectory.group_id, trajectory.member)
        return draw < self.fraction


@dataclass(frozen=True)
class Collator:
    """Collation by the settings of a stage. `decode`: text of tokens; `grammars`: see `collate`."""

    seed: int
    decode: Decode
    grammars: Callable[[], Grammars]

    def __call__(
        self,
        groups: list[Group],
        experience: ExperienceConfig,
        head: WeightId,
        forks: dict[int, Fork],
        *,
        whole: bool,
    ) -> Batch:
        """Make the batch of a take's groups, at least one. head, forks: see `lag_table`."""
        none, copied = experience.internalise == "none", None
        if experience.keep_copied and not none:
            copied = partial(copies, decode=self.decode, least=experience.keep_copied)
        internalise = Internalise(
            fraction=0.0 if none else experience.strip_fraction,
            seed=self.seed,
            teaches=experience.internalise == "distill",
            solved=experience.distill_on == "solved",
            withheld=experience.distill_on == "bare",
            copies=copied,
        )
        lags = lag_table(groups, head, forks)
        return collate(groups, lags, internalise, whole_groups=whole, grammars=self.grammars)


def guided(trajectory: Trajectory) -> bool:
    """Return True if some context of the trajectory holds EXPERIENCE tokens."""
    return any(sequence.guided for sequence in trajectory.sequences)


def copies(trajectory: Trajectory, decode: Decode, least: int) -> bool:
    """Return True if some action repeats `least` characters known from the experience alone.

    A password or a map that changes with the task is of no use in the weights: a policy that trains
    without the experience would memorise it.
    """
    return any(_copies(sequence, decode, least) for sequence in trajectory.sequences)


def _copies(sequence: Sequence, decode: Decode, least: int) -> bool:
    """Compare every passage of `least` characters; its runs of one role are decoded apart.

    A passage counts if an experience before the action holds it and no prompt or observation
    before the action does.
    """
    if not sequence.guided:
        return False
    runs = list(_runs(sequence, decode))
    experience = {
        one for role, text in runs if role == Role.EXPERIENCE for one in _passages(text, least)
    }
    shown: set[str] = set()
    elsewhere: set[str] = set()
    for role, text in runs:
        found = experience.intersection(_passages(text, least))
        if role == Role.EXPERIENCE:
            shown |= found
        elif role == Role.ACTION and found & shown - elsewhere:
            return True
        elif role in (Role.PROMPT, Role.OBSERVATION):
            elsewhere |= found
    return False


def _runs(sequence: Sequence, decode: Decode) -> Iterator[tuple[Role, str]]:
    """Yield the role and the text of every run of tokens of one role."""
    starts = np.flatnonzero(np.diff(sequence.roles, prepend=255)).tolist()
    for start, end in zip(starts, [*starts[1:], len(sequence)], strict=True):
        yield Role(int(sequence.roles[start])), decode(sequence.tokens[start:end].tolist())


def _passages(text: str, length: int) -> Iterator[str]:
    """Yield the substrings of `length` characters that neither begin nor end with a space."""
    parts = (text[start : start + length] for start in range(len(text) - length + 1))
    return (part for part in parts if not (part[0].isspace() or part[-1].isspace()))


def collate(
    groups: list[Group],
    lags: dict[WeightId, Lag],
    internalise: Internalise,
    *,
    whole_groups: bool = False,
    grammars: Callable[[], Grammars] | None = None,
) -> Batch:
    """Internalise and flatten the sequences of `groups` (at least one group).

    `lags`: the version lag of every weight id that sampled a token (`lag_table`); tokens of a
    scripted policy have lag 0 and behaviour log-prob 0, those of files no known lag.
    `whole_groups`: see `Batch`. `grammars`: called if some turn obeyed a grammar; GrammarError if
    its tokens do not.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    group_P = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    guided_P = np.array([guided(trajectory) for trajectory in trajectories], bool)
    copied_P = np.zeros_like(guided_P)
    if (copies := internalise.copies) is not None:
        copied_P = np.array([copies(trajectory) for trajectory in trajectories], bool)
    drawn_P = np.array([internalise(trajectory) for trajectory in trajectories], bool) & ~copied_P
    stripped_P = drawn_P & (not internalise.teaches)
    withheld = internalise.teaches and internalise.withheld

    def rows_of(wanted_P: Array, stripped_P: Array) -> _Rows:
        wanted = np.flatnonzero(wanted_P).tolist()
        sequences = [trajectories[index].sequences for index in wanted]
        trajectory_S = np.repeat(wanted, [len(some) for some in sequences])
        of_S = [trajectories[index] for index in trajectory_S]
        masks = None
        if any(one.grammars for one in of_S):
            if grammars is None:
                raise Inconsistency("there are turns that obeyed a grammar, and no compiler")
            masks = _masks([*chain(*sequences)], of_S, grammars())
        of_files = [one.policy in ("recorded", "logged") for one in of_S]
        given = lags, of_files, trajectory_S, stripped_P[trajectory_S], masks
        return _Rows([*chain(*sequences)], *given)

    facts = {
        "group_P": group_P,
        # Contexts with and without experience are two policies, unless training makes them one.
        "peer_P": 2 * group_P + guided_P if internalise.teaches and not withheld else group_P,
        "reward_P": np.array([trajectory.reward for trajectory in trajectories], np.float64),
        "written_P": np.array([one.policy == "recorded" for one in trajectories], bool),
        "guided_P": guided_P,
        "copied_P": copied_P,
        "stripped_P": stripped_P,
        "truncated_P": np.array([trajectory.truncated for trajectory in trajectories], bool),
        "overlong_P": np.array([trajectory.overlong for trajectory in trajectories], bool),
        "turn_start_P": _starts([len(trajectory.turn_rewards) for trajectory in trajectories]),
        "turn_reward_U": _joined([one.turn_rewards for one in trajectories], np.float64),
        "label_U": _joined([trajectory.labels for trajectory in trajectories], np.int8),
    }
    taught = None
    if internalise.teaches and drawn_P.any():
        bare = rows_of(drawn_P, drawn_P)
        if bare.count_S.any():
            taught = bare.batch({**facts, "stripped_P": drawn_P})
    rows = rows_of(np.ones_like(guided_P), guided_P if withheld else stripped_P)
    batch = rows.batch(facts, taught=taught, whole_groups=whole_groups)
    return replace(batch, sampled=None) if withheld else batch


class _Rows:
    """Rows of sequences `S`, whose tokens `T` are laid end to end.

    trained_T: ACTION tokens that have a context to be predicted from. kept_T: tokens of the rows as
    they train, those of `stripped_S` without EXPERIENCE. count_S: the trained tokens `N` of each.
    of_files: whether each is of a file.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        lags: dict[WeightId, Lag],
        of_files: list[bool],
        trajectory_S: Array,
        stripped_S: Array,
        masks: tuple[Array, Array] | None,
    ) -> None:
        self.trajectory_S, self.stripped_S = trajectory_S, stripped_S
        self.length_S = np.array([len(one) for one in sequences], np.int64)
        role_T = _joined([one.roles for one in sequences], np.uint8)
        action_T = role_T == Role.ACTION
        self.kept_T = ~np.repeat(stripped_S, self.length_S) | (role_T != Role.EXPERIENCE)
        self.trained_T = action_T.copy()
        kept_S = self._sums(self.kept_T)  # the first tokens of rows have no prediction
        self.trained_T[np.flatnonzero(self.kept_T)[_starts(kept_S)[:-1][kept_S > 0]]] = False
        self.count_S = self._sums(self.trained_T)
        self.token_T = _joined([one.tokens for one in sequences], np.int32)
        joined = {
            "mu_N": _joined([one.logprobs for one in sequences], np.float32),
            "turn_N": _joined([one.turns for one in sequences], np.int64),
        }
        self.allowed_MW = None
        if masks is not None:
            joined["mask_N"], self.allowed_MW = masks
        self.of_N = {name: array_T[self.trained_T] for name, array_T in joined.items()}
        trained_A = self.trained_T[action_T]
        runs = _of_runs(sequences, lags, of_files, self._sums(action_T).tolist())
        self.of_N |= {name: array_A[trained_A] for name, array_A in runs.items()}
        self.of_N["trajectory_N"] = np.repeat(trajectory_S, self.count_S)

    def batch(self, facts: dict[str, Array], **others: Any) -> Batch:
        """Make the batch of the rows that train, with `sampled` if some are stripped."""
        some_S = self.count_S > 0
        whole = self._arrays(some_S, self.kept_T, facts)
        stripped_S, sampled = some_S & self.stripped_S, None
        if stripped_S.any():
            sampled = Batch(**self._arrays(stripped_S, np.ones_like(self.kept_T), facts))
        return Batch(**whole, **others, sampled=sampled)

    def _arrays(self, wanted_S: Array, within_T: Array, facts: dict[str, Array]) -> dict[str, Any]:
        """Return the arrays of a `Batch`: `facts`, and what follows from the sequences wanted."""
        tokens_T = within_T & np.repeat(wanted_S, self.length_S)
        wanted_N = np.repeat(wanted_S, self.count_S)
        of_N = {name: array_N[wanted_N] for name, array_N in self.of_N.items()}
        trajectories, trajectory_N = len(facts["group_P"]), of_N["trajectory_N"]
        lag_P = np.zeros(trajectories, np.int64)
        np.maximum.at(lag_P, trajectory_N, of_N["lag_N"])
        lag_P[trajectory_N[of_N["lag_N"] == UNKNOWN_LAG]] = UNKNOWN_LAG
        return {
            **facts,
            "tokens": self.token_T[tokens_T],
            "action": self.trained_T[tokens_T],
            "row_start_R": _starts(self._sums(tokens_T)[wanted_S]),
            "action_start_R": _starts(self.count_S[wanted_S]),
            "trajectory_R": self.trajectory_S[wanted_S],
            **of_N,
            "allowed_MW": self.allowed_MW,
            "length_P": np.bincount(trajectory_N, minlength=trajectories),
            "lag_P": lag_P,
        }

    def _sums(self, wanted_T: Array) -> Array:
        """Count the wanted tokens of every sequence."""
        return np.add.reduceat(wanted_T, _starts(self.length_S)[:-1], dtype=np.int64)


def _of_runs(
    sequences: list[Sequence],
    lags: dict[WeightId, Lag],
    of_files: list[bool],
    counts: list[int],
) -> dict[str, Array]:
    """Return the lag of every ACTION token, and whether newer weights than its sequence's first
    ones, or those of an abandoned lineage, sampled it.
    """
    runs: list[tuple[int, int, bool, bool]] = []
    for sequence, of_file, count in zip(sequences, of_files, counts, strict=True):
        if not sequence.versions:  # a scripted policy's, or of a file
            runs.append((count, UNKNOWN_LAG if of_file else 0, of_file, False))
            continue
        first = sequence.versions[0].weights
        for run in sequence.versions:
            lag = lags[run.weights]
            runs.append((run.tokens, lag.versions, lag.abandoned, run.weights != first))
    tokens, *values = zip(*runs, strict=True)
    names = {"lag_N": np.int64, "abandoned_N": np.bool_, "swapped_N": np.bool_}
    return {
        name: np.repeat(np.array(value, dtype), tokens)
        for (name, dtype), value in zip(names.items(), values, strict=True)
    }


def _masks(
    sequences: list[Sequence], of_S: list[Trajectory], compiler: Grammars
) -> tuple[Array, Array]:
    """Walk the grammars over the tokens that obeyed them. `of_S`: the sequences' trajectories.

    Return mask_T int64 (row of the second, -1 where all tokens were allowed) and the different
    masks allowed_MW, of `GrammarState.allowed`. GrammarError if a token was not allowed.
    """
    mask_T = np.full(sum(map(len, sequences)), -1, np.int64)
    masks: dict[bytes, int] = {}
    start = 0
    for sequence, trajectory in zip(sequences, of_S, strict=True):
        action_L = sequence.roles == Role.ACTION
        for grammar, turn in ((one, turn) for one in trajectory.grammars for turn in one.turns):
            places = np.flatnonzero(action_L & (sequence.turns == turn))
            if not len(places):
                continue
            state = compiler.state(grammar.text, grammar.stops)
            try:
                for place in places.tolist():
                    if (mask_W := state.allowed()) is not None:
                        mask_T[start + place] = masks.setdefault(mask_W.tobytes(), len(masks))
                    state.accept(int(sequence.tokens[place]))
            except GrammarError as error:
                where = f"trajectory {trajectory.trajectory_id}, turn {turn}"
                advice = "have actors and learner the same version of xgrammar?"
                raise GrammarError(f"{where}: {error}: {advice}") from None
        start += len(sequence)
    width = len(next(iter(masks), b""))
    return mask_T, np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), width)


def _joined(arrays: list[Array], dtype: type) -> Array:
    return np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype)


def _starts(lengths: list[int] | Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
