"""Types that two processes must agree on: tasks, tickets, sequences, trajectories, groups.

They hold facts only; advantages, ratios and staleness are derived elsewhere, and nothing here does
I/O. `protocol/messages.py` has the requests and replies that carry these types,
`protocol/envelope.py` their encoding.

`L` is the length of a sequence in tokens, `K` the number of agent turns of a trajectory.
"""

import enum
import math
from typing import Any, Literal

import msgspec
import numpy as np

Array = np.ndarray
Kind = Literal["rollout", "demo", "branch", "explore", "eval"]
Policy = Literal["learned", "scripted", "recorded", "logged"]
SCRIPTED: tuple[Kind, ...] = ("demo", "branch")  # their episodes are not sampled from a policy


class Role(enum.IntEnum):
    """Role of a token; only ACTION tokens are sampled from the policy, and trained."""

    PROMPT = 0
    EXPERIENCE = 1
    ACTION = 2
    OBSERVATION = 3


_INT8, _UINT8, _INT16, _INT32 = map(np.dtype, (np.int8, np.uint8, np.int16, np.int32))
_FLOAT32 = np.dtype(np.float32)
# Arrays are short, so that the overhead of a call matters: an array of no dimension is compared in
# half the time of a number, and `in` finds a byte of the result faster than a maximum.
_ACTION, _LAST_ROLE = np.array(Role.ACTION, _UINT8), np.array(max(Role), _UINT8)
_ZERO, _NO_TURN, _NO_TOKEN = np.array(0, _FLOAT32), np.array(0, _INT16), np.array(0, _INT32)
_TRUE, _FALSE = b"\1", b"\0"
_EXPERIENCE_BYTE = bytes([Role.EXPERIENCE])
_LABELS = np.array([-1, 0, 1], _INT8).tobytes()
_count = np.count_nonzero
LEAST_LOGPROB = -1e4  # less likely tokens are never sampled; their ratios would overflow
GREATEST_LOGPROB = 1e-3  # above 0 for rounding
REWARD_ROUNDING = 1 + 1e-6  # rewards are sums of float32s, each rounded, perhaps beyond their bound
_LEAST, _GREATEST = np.array(LEAST_LOGPROB, _FLOAT32), np.array(GREATEST_LOGPROB, _FLOAT32)


class TurnFlag(enum.IntFlag):
    """Facts about a turn."""

    FORMAT_ERROR = 1  # it could not be parsed
    TOOL_ERROR = 2  # of a TOOL_CALL
    INVALID_ACTION = 4  # an action did not exist
    TOOL_CALL = 8
    CUT = 16  # it reached `max_tokens` without an end of its own
    FULL = 32  # the last one of an episode whose context had no room for another
    OBSERVATION_CUT = 64  # the policy was shown only a part of an observation after it
    LATE = 128  # the last one of an episode that `env.episode_timeout_s` ended


FAILED_CALL = TurnFlag.TOOL_CALL | TurnFlag.TOOL_ERROR  # with FORMAT_ERROR: one that is unreadable


class WeightId(msgspec.Struct, kw_only=True, frozen=True, order=True, forbid_unknown_fields=True):
    """Identity of a set of weights, ordered lexicographically.

    `lineage` is assigned by the buffer and grows with every start of the learner, so step 105
    before a crash and step 105 after it are different weights. `step` counts published versions.
    As text: "2.105".
    """

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"


class Sampling(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sampling of tokens. Temperature 0 is greedy; `max_tokens` is the limit of one turn.

    Training needs the log-probs of the sampled distribution, so there is no top_p and no top_k.
    """

    temperature: float
    max_tokens: int

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature)
        _require(self.max_tokens > 0, "max_tokens", self.max_tokens)


class Task(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One problem for an environment.

    `map_seed` numbers the maps of a split: the environment draws maps from it until one's ground
    hashes into `split`, so the same map never appears in two splits. `reference` is a solution, if
    one is known. `query` is the request, if the environment does not state it itself. A task of a
    user's own rows has the chat messages of its `prompt` ({"role", "content"}, the last one from
    the user), and in `row` all columns of the row, which rewards read. One that is `recorded` is a
    row to learn from, or a group of such rows, and `query` what is wrong with it. A numbered task
    has an id such as "frozen_lake/train/17", here with the map seed 17.
    """

    task_id: str
    env: str
    split: str
    map_seed: int
    params: dict[str, Any] = {}
    origin: Literal["original", "synthetic", "recorded"] = "original"
    reference: list[str] | None = None
    query: str = ""
    prompt: list[dict[str, Any]] = []
    row: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _require(self.map_seed >= 0, "map_seed", self.map_seed)


class Ticket(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Permission for one actor to run the named members of one group.

    `weights` are the oldest allowed ones; for `eval` tickets exactly these. `attempt` counts
    reissues.
    """

    group_id: int
    task: Task
    kind: Kind
    stage: int
    members: list[int]
    guided: list[int]
    dynamics_seed: int
    attempt: int
    weights: WeightId | None
    lease_s: float
    sampling: Sampling

    def __post_init__(self) -> None:
        _require(self.group_id >= 0, "group_id", self.group_id)
        _require(len(set(self.members)) == len(self.members) > 0, "members", self.members)


class VersionRun(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Run of consecutive ACTION tokens that the same weights sampled."""

    weights: WeightId
    tokens: int


class Sequence(msgspec.Struct, kw_only=True, eq=False, forbid_unknown_fields=True):
    """One append-only token stream, exactly as the model processed it.

    tokens int32[L]; roles uint8[L] (`Role`); turns int16[L] (agent turn index, -1 outside a turn);
    logprobs float32[L] (of the sampled distribution, 0 if the role is not ACTION; at most 0 except
    for rounding, at least LEAST_LOGPROB);
    versions: run-length weights over the ACTION tokens (empty for a scripted policy).
    Raises ValueError, naming the field, if these do not fit together.

    A prompt of two tokens, a turn of three during which new weights came, and the next observation:

        tokens    10 11 20 21  2 12
        roles      P  P  A  A  A  O     (P PROMPT, A ACTION, O OBSERVATION)
        turns     -1 -1  0  0  0 -1
        logprobs   0  0 -.7 -.1 -.2 0
        versions  2 tokens by 1.4, then 1 token by 1.5
    """

    tokens: Array
    roles: Array
    turns: Array
    logprobs: Array
    versions: list[VersionRun]

    def __post_init__(self) -> None:
        length = len(self.tokens)
        _check_array("tokens", self.tokens, _INT32, length)
        _check_array("roles", self.roles, _UINT8, length)
        _check_array("turns", self.turns, _INT16, length)
        _check_array("logprobs", self.logprobs, _FLOAT32, length)
        _require(length > 0, "tokens", "empty")
        logprobs, action = self.logprobs, self.roles == _ACTION
        _require(_TRUE not in (self.tokens < _NO_TOKEN).tobytes(), "tokens", "negative id")
        _require(_TRUE not in (self.roles > _LAST_ROLE).tobytes(), "roles", "unknown role")
        # a NaN is neither
        if _FALSE in ((logprobs >= _LEAST) & (logprobs <= _GREATEST)).tobytes():
            _refuse_logprobs(logprobs)
        written = logprobs != _ZERO
        _require(_TRUE not in (written > action).tobytes(), "logprobs", "non-zero outside ACTION")
        outside = (self.turns < _NO_TURN) & action
        _require(_TRUE not in outside.tobytes(), "turns", "ACTION token outside a turn")
        if self.versions:
            runs = [run.tokens for run in self.versions]
            _require(min(runs) > 0, "versions", "empty run")
            _require(sum(runs) == _count(action), "versions", runs)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def action_tokens(self) -> int:
        if self.versions:
            return sum([run.tokens for run in self.versions])
        return int(_count(self.roles == _ACTION))

    @property
    def guided(self) -> bool:
        """True if experience was in the context."""
        return _EXPERIENCE_BYTE in self.roles.tobytes()


class Grammar(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Grammar that the policy was held to in some turns of a trajectory.

    At each of their ACTION tokens the tokens that it excludes were masked; log-probs are those of
    the masked distribution. `text`: a structural tag of xgrammar, as JSON; `stops`: the tokens that
    end a turn. `model/grammar.py` derives the masks.
    """

    text: str
    stops: list[int]
    turns: list[int]


class Player(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One of several players of an episode: its turns, and its own outcome.

    `reward` includes the penalties of its turns. `turns` ascend; there are none if it never moved.
    """

    name: str
    reward: float
    success: bool
    turns: list[int]


class Trajectory(msgspec.Struct, kw_only=True, eq=False, dict=True, forbid_unknown_fields=True):
    """One finished episode of one group member.

    turn_rewards float32[K]; labels int8[K] (+1 GOOD, -1 BAD, 0 unlabelled);
    turn_flags uint8[K] (`TurnFlag`).
    `grammars`: those of constrained turns, each of which has one.
    `content` is a hash of the task that was played, the same for every number that gives it;
    `policy`: what wrote it: the one that is trained, a script, or others, in a file; `logged`:
    these with the log-probs of their tokens, but without versions of this run.
    `reward` is the outcome including penalties; `terms` its parts by name, without their weights;
    `metrics` the environment's own numbers; `timing` holds seconds by phase. What `vars` holds is
    not part of the episode (see `protocol/trajectories.py`).
    `players`: those of an episode of several, in the order of the configuration; each turn is one
    player's, and so are all turns of a sequence. `reward` is then the mean of theirs.
    `conversation`: number of the conversation of people that this is, which the buffer takes once;
    not sent for an episode that was played.
    """

    group_id: int
    member: int
    attempt: int
    actor: str
    incarnation: int
    content: int
    sequences: list[Sequence]
    reward: float
    success: bool
    terminated: bool
    truncated: bool
    turn_rewards: Array
    turn_flags: Array
    labels: Array
    label_source: str
    experience_ids: list[int]
    policy: Policy
    timing: dict[str, float]
    terms: dict[str, float] = {}
    metrics: dict[str, float] = {}
    grammars: list[Grammar] = []
    players: list[Player] = []
    conversation: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        turns = len(self.turn_rewards)
        _check_array("turn_rewards", self.turn_rewards, _FLOAT32, turns)
        _check_array("turn_flags", self.turn_flags, _UINT8, turns)
        _check_array("labels", self.labels, _INT8, turns)
        others = self.labels.tobytes().translate(None, _LABELS)
        _require(not others, "labels", "neither 1, -1 nor 0")
        _require(math.isfinite(self.reward), "reward", self.reward)
        total = sum(self.turn_rewards.tolist())
        _require(math.isfinite(total), "turn_rewards", "not finite")
        for phase, seconds in self.timing.items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"timing.{phase}: {seconds}")
        for field in ("terms", "metrics"):
            for name, value in getattr(self, field).items():
                _require(math.isfinite(value), f"{field}.{name}", value)
        ruled = [turn for grammar in self.grammars for turn in grammar.turns]
        fits = len(set(ruled)) == len(ruled) and all(0 <= turn < turns for turn in ruled)
        _require(fits, "grammars", ruled)
        _require(len(self.sequences) > 0, "sequences", "empty")
        _require(self.member >= 0, "member", self.member)
        _require(self.attempt >= 0, "attempt", self.attempt)
        for sequence in self.sequences:
            beyond = _TRUE in (sequence.turns >= turns).tobytes()
            _require(not beyond, "turns", "beyond the last turn reward")
            if self.policy == "learned" and not sequence.versions:
                _require(not sequence.action_tokens, "versions", "missing")
        if self.players:
            self._check_players(turns)

    def _check_players(self, turns: int) -> None:
        """Raise ValueError unless every turn, and every sequence, is one player's."""
        names = [player.name for player in self.players]
        _require(all(names) and len(set(names)) == len(names), "players.name", names)
        owner_K = np.full(turns, -1)
        for index, player in enumerate(self.players):
            _require(math.isfinite(player.reward), f"players.{player.name}", player.reward)
            given = player.turns
            fits = given == sorted(set(given)) and all(0 <= turn < turns for turn in given)
            _require(fits, "players.turns", given)
            _require(bool((owner_K[given] < 0).all()), "players.turns", "one of two players")
            owner_K[given] = index
        _require(bool((owner_K >= 0).all()), "players.turns", "a turn is no player's")
        for sequence in self.sequences:
            owners = owner_K[sequence.turns[sequence.roles == _ACTION]]
            _require(len(set(owners.tolist())) <= 1, "sequences", "one of two players")

    @property
    def part(self) -> str:
        """Name of the player whose part of an episode this is, "" for a whole episode."""
        return self.players[0].name if len(self.players) == 1 else ""

    def player_of(self, sequence: Sequence) -> str:
        """Return the player whose turns a sequence holds, "" if it has none or there is one."""
        turns = sequence.turns[sequence.roles == _ACTION][:1].tolist()
        return next((one.name for one in self.players if set(turns) & set(one.turns)), "")

    @property
    def trajectory_id(self) -> str:
        """Group, member and attempt, such as 12/3/0."""
        return f"{self.group_id}/{self.member}/{self.attempt}"

    @property
    def action_tokens(self) -> int:
        return sum([sequence.action_tokens for sequence in self.sequences])

    @property
    def overlong(self) -> bool:
        """True if a limit of tokens or time ended it: within its last turn, or before another."""
        cut = TurnFlag.CUT | TurnFlag.FULL | TurnFlag.LATE
        return len(self.turn_flags) > 0 and bool(int(self.turn_flags[-1]) & cut)

    @property
    def oldest(self) -> WeightId | None:
        """Oldest weights of the ACTION tokens, None for a scripted policy."""
        sampled = [run.weights for sequence in self.sequences for run in sequence.versions]
        return min(sampled, default=None)


class Group(msgspec.Struct, kw_only=True, eq=False, forbid_unknown_fields=True):
    """All members of one ticket in member order, as the learner receives them.

    The learner makes groups of the players' parts of episodes, which may hold several of a member.

    `use` counts from 0 under reuse. `head` are the newest weights at the choice of the learner's
    take; a take that is repeated after a RESUME keeps them, so that its lags are unchanged. None
    stands for the learner's present weights.
    """

    group_id: int
    task: Task
    kind: Kind
    stage: int
    use: int
    trajectories: list[Trajectory]
    head: WeightId | None = None

    def __post_init__(self) -> None:
        members = [one.member for one in self.trajectories]
        parts = {(one.member, one.part) for one in self.trajectories}
        fits = members == sorted(members) and len(parts) == len(members) > 0
        _require(fits, "trajectories", members)


def _refuse_logprobs(logprobs: Array) -> None:
    _require(bool(np.isfinite(logprobs).all()), "logprobs", "not finite")
    _require(logprobs.max() <= GREATEST_LOGPROB, "logprobs", "positive")
    raise ValueError(f"logprobs: {logprobs.min():g} is below {LEAST_LOGPROB:g}")


def _require(holds: bool, field: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{field}: {value}")


def _check_array(field: str, array: Array, dtype: np.dtype, length: int) -> None:
    if array.dtype != dtype or array.shape != (length,):
        raise ValueError(f"{field}: {array.dtype}{array.shape}")
