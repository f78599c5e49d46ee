"""What came through the wire is what was sent, or a WireError that names the field."""

import contextlib
import copy
import pickle
import random
import struct
import tracemalloc
import zlib
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from budget import examples
from episodes import episode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from evolver_async.lineages import Fork
from evolver_async.schema import (
    Group,
    Player,
    Role,
    Sampling,
    Sequence,
    Task,
    Ticket,
    Trajectory,
    VersionRun,
    WeightId,
)
from evolver_async.wire.envelope import (
    LIMITS,
    PARCEL_BYTES,
    SCHEMA_HASH,
    TYPES,
    Envelope,
    MessageLimits,
    MismatchError,
    WireError,
    _check_sizes,
    pack,
    schema_hash,
    unpack,
)
from evolver_async.wire.evaluation_results import EvalResult, SetResult
from evolver_async.wire.failure_totals import FailureTotal
from evolver_async.wire.messages import (
    Ack,
    Beat,
    Contribute,
    Counters,
    Done,
    Dup,
    Fenced,
    GroupReply,
    Groups,
    Guidance,
    Hello,
    Kept,
    Lease,
    Offer,
    Ok,
    Purge,
    Purged,
    Push,
    Pushes,
    Receipts,
    Reject,
    Release,
    Renew,
    Resume,
    Resumed,
    Retrieve,
    Retry,
    Sample,
    Stale,
    StatusReply,
    StatusRequest,
    Tickets,
    Wait,
    Welcome,
)
from evolver_async.wire.trajectory_bytes import Parcel, finish, unwrap, wrap
from evolver_async.wire.transcripts import Transcript, Turn

some = settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
many = settings(some, max_examples=examples(300))

# ---- strategies for the schema types

text = st.text(max_size=8)
count = st.integers(0, 2**40)
number = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
weights = st.builds(WeightId, lineage=count, step=count)
tasks = st.builds(
    Task,
    task_id=text,
    env=text,
    split=text,
    map_seed=count,
    params=st.dictionaries(text, plain, max_size=2),
    origin=st.sampled_from(["original", "synthetic"]),
    reference=st.none() | st.lists(text, max_size=2),
)
members = st.lists(st.integers(0, 64), min_size=1, max_size=4, unique=True)
tickets = st.builds(
    Ticket,
    group_id=count,
    task=tasks,
    kind=st.sampled_from(["rollout", "demo", "branch", "explore", "eval"]),
    stage=count,
    members=members,
    guided=members,
    dynamics_seed=count,
    attempt=count,
    weights=st.none() | weights,
    lease_s=number,
    sampling=st.builds(Sampling, temperature=st.floats(0, 10), max_tokens=st.integers(1, 10**6)),
)


@st.composite
def trajectories(draw: st.DrawFn, member: int = 0) -> Trajectory:
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))
    turns = draw(st.integers(0, 5))
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 40))
        roles = draws.integers(0, 4 if turns else 2, length).astype(np.uint8)
        roles[roles == Role.ACTION] = Role.ACTION if turns else Role.PROMPT
        action = roles == Role.ACTION
        runs = [VersionRun(weights=draw(weights), tokens=int(action.sum()))]
        sequences.append(
            Sequence(
                tokens=draws.integers(0, 2**31 - 1, length).astype(np.int32),
                roles=roles,
                turns=np.where(action, draws.integers(0, max(turns, 1), length), -1).astype("i2"),
                logprobs=np.where(action, -draws.random(length), 0).astype(np.float32),
                versions=runs if action.any() else [],
            )
        )
    return Trajectory(
        group_id=draw(count),
        member=member,
        attempt=draw(count),
        actor=draw(text),
        incarnation=draw(count),
        content=draw(count),
        sequences=sequences,
        reward=draw(number),
        success=draw(st.booleans()),
        terminated=draw(st.booleans()),
        truncated=draw(st.booleans()),
        turn_rewards=draws.random(turns).astype(np.float32),
        turn_flags=draws.integers(0, 4, turns).astype(np.uint8),
        labels=draws.integers(-1, 2, turns).astype(np.int8),
        label_source=draw(text),
        experience_ids=draw(st.lists(count, max_size=3)),
        policy="learned",
        timing=draw(st.dictionaries(text, st.floats(0, 1e9), max_size=3)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    size = draw(st.integers(1, 3))
    return Group(
        group_id=draw(count),
        task=draw(tasks),
        kind="rollout",
        stage=draw(count),
        use=draw(count),
        trajectories=[draw(trajectories(member)) for member in range(size)],
    )


set_results = st.builds(
    SetResult,
    name=text,
    k=count,
    episodes=count,
    success=number,
    reward_mean=number,
    turns_mean=number,
    tasks=count,
    best_success=number,
    best_reward=number,
    distinct=count,
)
evals = st.builds(
    EvalResult,
    weights=weights,
    step=count,
    episodes=count,
    success=number,
    reward_mean=number,
    turns_mean=number,
    distinct=count,
    sets=st.lists(set_results, max_size=2),
)
forks = st.builds(Fork, lineage=count, parent=count, step=count)
failures = st.builds(
    FailureTotal,
    kind=st.sampled_from(["agent", "environment", "policy"]),
    name=text,
    error=text,
    count=st.integers(1, 2**40),
)
ids = st.lists(count, max_size=3)
transcripts = st.builds(
    Transcript,
    trajectory_id=text,
    reward=number,
    success=st.booleans(),
    experience_ids=ids,
    turns=st.lists(st.builds(Turn, observation=text, state=text, action=text), max_size=2),
)
MESSAGES = {
    "hello": st.builds(Hello, role=text, schema_hash=text, tokenizer=st.none() | text),
    "lease": st.builds(Lease, credit=count, weights=st.none() | weights),
    "push": st.builds(Push, trajectory=trajectories()),
    "pushes": st.lists(st.tuples(count, trajectories()), min_size=1, max_size=3).map(
        lambda pairs: Pushes(ids=[*dict(pairs)], trajectories=[*dict(pairs).values()])
    ),
    "receipts": st.builds(
        Receipts,
        ids=ids,
        replies=st.lists(st.just(Ack()) | st.builds(Reject, reason=text), max_size=3),
    ),
    "renew": st.builds(Renew, progress=st.dictionaries(count, count, max_size=4)),
    "release": st.builds(Release, group_id=count, members=ids, reason=text),
    "offer": st.builds(Offer, tasks=st.lists(tasks, max_size=2)),
    "sample": st.builds(Sample, lineage=count, take=count, stage=count),
    "done": st.builds(
        Done,
        lineage=count,
        take=count,
        version=count,
        trained=ids,
        filtered=st.dictionaries(text, ids, max_size=2),
        skipped=st.booleans(),
        episodes=count,
    ),
    "resume": st.builds(Resume, lineage=count, take=count, version=count, process=text),
    "kept": st.builds(Kept, take=count),
    "status": st.just(StatusRequest()),
    "counters": st.builds(
        Counters,
        values=st.dictionaries(text, number, max_size=3),
        failures=st.lists(failures, max_size=2),
    ),
    "beat": st.builds(Beat, role=text, phase=text, count=count, busy=st.booleans(), share=number),
    "retrieve": st.builds(Retrieve, query=text),
    "contribute": st.builds(
        Contribute,
        task_id=text,
        query=text,
        split=text,
        episodes=st.lists(transcripts, max_size=2),
    ),
    "purge": st.builds(Purge, source=text),
    "guidance": st.builds(Guidance, ids=ids, texts=st.lists(text, max_size=3)),
    "purged": st.builds(Purged, count=count),
    "welcome": st.builds(
        Welcome, run_id=text, config=st.dictionaries(text, plain), weights_address=text
    ),
    "reject": st.builds(Reject, reason=text),
    "tickets": st.builds(Tickets, tickets=st.lists(tickets, max_size=2)),
    "wait": st.builds(Wait, reason=text, failures=st.lists(failures, max_size=2)),
    "ack": st.just(Ack()),
    "dup": st.just(Dup()),
    "stale": st.just(Stale()),
    "retry": st.builds(Retry, seconds=number),
    "ok": st.builds(
        Ok, evals=st.lists(evals, max_size=2), counters=st.dictionaries(text, number, max_size=3)
    ),
    "fenced": st.builds(Fenced, reason=text, groups=ids),
    "part": st.builds(GroupReply, group=groups()),
    "groups": st.builds(Groups, count=count),
    "resumed": st.builds(Resumed, lineage=count, forks=st.lists(forks, max_size=3)),
    "status_reply": st.builds(StatusReply, status=st.dictionaries(text, plain, max_size=3)),
}


def plainly(value: object) -> object:
    """A value with its arrays as dtype and list, so that two of them compare."""
    return msgspec.to_builtins(value, enc_hook=lambda array: [array.dtype.name, array.tolist()])


def envelope(message: object) -> Envelope:
    return Envelope("run", "actor-0", 3, 17, message, "5e1f")  # type: ignore[arg-type]


def frames_of(message: object) -> list[bytes]:
    return [bytes(frame) for frame in pack(envelope(message))]


def trajectory(length: int = 24, turns: int = 2) -> Trajectory:
    roles = np.full(length, Role.ACTION, np.uint8)
    roles[0] = Role.PROMPT
    sequence = Sequence(
        tokens=np.arange(length, dtype=np.int32),
        roles=roles,
        turns=np.zeros(length, np.int16),
        logprobs=np.where(roles == Role.ACTION, -0.5, 0).astype(np.float32),
        versions=[VersionRun(weights=WeightId(lineage=1, step=2), tokens=length - 1)],
    )
    return episode(sequence, turns=turns, group_id=1, reward=1.0, timing={"env": 0.5})


def sealed(header: bytes) -> bytes:
    """A header with the right checksum, so that what is in it is looked at."""
    return struct.pack("<I", zlib.crc32(header)) + header


def changed(frames: list[bytes], *path: object, to: object) -> list[bytes]:
    """The same frames with one header value replaced (or a field added)."""
    header = msgpack.unpackb(frames[0][4:], strict_map_key=False)
    node = header
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = to
    return [sealed(msgpack.packb(header)), *frames[1:]]


def resealed(frames: list[bytes], parcel: bytes) -> list[bytes]:
    """A PUSH of this parcel, with the right checksum, so that what is in it is looked at."""
    return changed([frames[0], parcel], "parcels", to=[zlib.crc32(parcel)])


def headed(header: bytes, arrays: bytes = b"") -> bytes:
    """A parcel of these parts."""
    return struct.pack("<I", len(header)) + header + bytes(-(4 + len(header)) % 8) + arrays


def parts(parcel: bytes) -> tuple[bytes, bytes]:
    """The header and the arrays of a parcel."""
    end = 4 + struct.unpack_from("<I", parcel)[0]
    return parcel[4:end], parcel[end + -end % 8 :]


def forged(frames: list[bytes], *path: object, to: object) -> list[bytes]:
    """The same PUSH with one value in the header of its trajectory replaced (or a field added)."""
    header, arrays = parts(frames[1])
    trajectory = msgpack.unpackb(header)
    node = trajectory
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = to
    return resealed(frames, headed(msgpack.packb(trajectory), arrays))


TOKENS = ("sequences", 0, "tokens")


# ---- round trips


def test_every_message_type_has_a_round_trip_test() -> None:
    assert set(MESSAGES) == set(TYPES)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_round_trip(name: str) -> None:
    @some
    @given(message=MESSAGES[name])
    def check(message: object) -> None:
        back = unpack(pack(envelope(message)))
        assert (back.run_id, back.sender, back.nonce) == ("run", "actor-0", "5e1f")
        assert (back.incarnation, back.message_id) == (3, 17)
        assert type(back.message) is type(message)
        assert plainly(back.message) == plainly(message)

    check()


@some
@given(trajectory=trajectories())
def test_parcel_round_trip_and_truncation(trajectory: Trajectory) -> None:
    parcel = wrap(trajectory)
    assert parcel.crc == zlib.crc32(parcel.data)
    assert plainly(unwrap(parcel)) == plainly(trajectory)
    for cut in range(1, len(parcel.data), 37):
        with pytest.raises(WireError):
            unwrap(Parcel(parcel.data[:-cut], 0))
    with pytest.raises(WireError):
        unwrap(Parcel(parcel.data + bytes(8), 0))


def test_a_context_in_every_turn_has_room() -> None:
    """Every context takes about 128 bytes of the header, which the header's limit must follow."""
    context = Sequence(
        tokens=np.full(48, 1 << 16, np.int32),
        roles=np.full(48, Role.ACTION, np.uint8),
        turns=np.zeros(48, np.int16),
        logprobs=np.full(48, -1, np.float32),
        versions=[VersionRun(weights=WeightId(lineage=300, step=1 << 17), tokens=48)],
    )
    for turns in (800, 32767):
        long = replace(trajectory(), sequences=[context] * turns)
        assert len(unwrap(wrap(long)).sequences) == turns


def test_no_header_may_exceed_its_share_of_a_trajectory() -> None:
    (one,) = trajectory().sequences
    for size, tokens in ((100_000, 24_000), (7 << 20, 5 << 20)):
        array = np.zeros(tokens, np.int32)
        roles, turns = np.zeros(tokens, np.uint8), np.full(tokens, -1, np.int16)
        logprobs = np.zeros(tokens, np.float32)
        large = replace(one, tokens=array, roles=roles, turns=turns, logprobs=logprobs, versions=[])
        with pytest.raises(WireError, match=f"header: {size // 1000}.*the limit is"):
            wrap(replace(trajectory(), sequences=[large], label_source="x" * size))


def test_arrays_are_read_only_views_on_the_frames() -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    message = unpack([bytearray(frame) for frame in frames]).message
    assert isinstance(message, Push)
    tokens = message.trajectory.sequences[0].tokens
    assert not tokens.flags.writeable and not tokens.flags.owndata


def test_a_trajectory_that_came_goes_on_as_the_same_bytes() -> None:
    """So its checksum is computed once, and a relay encodes nothing."""
    frames = frames_of(Push(trajectory=trajectory()))
    opened = unpack(frames).message.trajectory  # type: ignore[union-attr]
    assert wrap(opened) == Parcel(frames[1], zlib.crc32(frames[1]))
    group = Group(
        group_id=1,
        task=Task(task_id="t", env="e", split="s", map_seed=0),
        kind="rollout",
        stage=0,
        use=0,
        trajectories=[opened],
    )
    sent = pack(envelope(GroupReply(group=group)))[1]
    assert sent is wrap(opened).data


def test_a_trajectory_that_came_and_was_changed_goes_on_changed() -> None:
    def opened() -> Trajectory:
        return unwrap(wrap(trajectory()))

    one, other, third = opened(), opened(), opened()
    one.reward = 2.0
    other.sequences[0].tokens = other.sequences[0].tokens[::-1]
    third.timing["env"] = 1.5
    for changed in (one, other, third):
        assert plainly(unwrap(wrap(changed))) == plainly(changed) != plainly(trajectory())
    with pytest.raises(ValueError, match="read-only"):
        one.sequences[0].tokens[0] = 1


def test_a_finished_trajectory_goes_on_as_it_came_and_its_copies_as_they_are() -> None:
    came = unwrap(wrap(trajectory()))
    parcel = finish(came)
    assert wrap(came) is parcel and plainly(unwrap(parcel)) == plainly(trajectory())
    for other in (copy.copy(came), msgspec.structs.replace(came)):
        other.reward = 2.0
        assert unwrap(wrap(other)).reward == 2.0
    made = trajectory()
    assert finish(made) == wrap(trajectory()) and wrap(made) is finish(made)


def test_schema_hash_is_the_same_each_time() -> None:
    assert schema_hash() == SCHEMA_HASH


# ---- refusals


@many
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 4))
def test_flipped_bits_are_always_refused(seed: int, flips: int) -> None:
    draws = random.Random(seed)
    frames = [bytearray(frame) for frame in frames_of(Push(trajectory=trajectory()))]
    frame = draws.choice(frames)
    for bit in draws.sample(range(8 * len(frame)), flips):
        frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        unpack(frames)


@many
@given(message=st.one_of(*MESSAGES.values()), seed=st.integers(0, 2**32))
def test_a_forged_header_raises_only_wire_errors(message: object, seed: int) -> None:
    draws = random.Random(seed)
    header, *arrays = frames_of(message)
    for _ in range(20):
        forged = bytearray(header[4:])
        forged[draws.randrange(len(forged))] = draws.randrange(256)
        with contextlib.suppress(WireError):
            assert type(unpack([sealed(bytes(forged)), *arrays]).message) in TYPES.values()


@many
@given(trajectory=trajectories(), seed=st.integers(0, 2**32))
def test_a_forged_trajectory_raises_only_wire_errors(trajectory: Trajectory, seed: int) -> None:
    draws = random.Random(seed)
    frames = frames_of(Push(trajectory=trajectory))
    header, _ = parts(frames[1])
    for _ in range(20):
        forged = bytearray(frames[1])
        forged[draws.randrange(4 + len(header))] = draws.randrange(256)
        with contextlib.suppress(WireError):
            back = unpack(resealed(frames, bytes(forged))).message
            assert pack(envelope(back))[1] == forged


@many
@given(frames=st.lists(st.binary(max_size=60), max_size=5))
def test_random_bytes_raise_only_wire_errors(frames: list[bytes]) -> None:
    for header in (frames[:1], [sealed(frame) for frame in frames[:1]]):
        with pytest.raises(WireError):
            unpack([*header, *frames[1:]])
    for frame in frames:
        for parcel in (frame, headed(frame), headed(frame, bytes(16))):
            with pytest.raises(WireError):
                unwrap(Parcel(parcel, 0))


@many
@given(header=st.dictionaries(text, plain, max_size=8), data=st.data())
def test_random_maps_raise_only_wire_errors(header: dict, data: st.DataObject) -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    with pytest.raises(WireError):
        unpack([sealed(msgpack.packb(header)), *frames[1:]])
    valid = msgpack.unpackb(frames[0][4:])
    name = data.draw(st.sampled_from(sorted(valid)))
    value = data.draw(plain)
    if value != valid[name] and name not in ("run", "sender", "incarnation", "nonce", "id"):
        with pytest.raises(WireError):
            unpack(changed(frames, name, to=value))


def test_truncated_missing_and_extra_frames() -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    for bad in ([], frames[:-1], [*frames, b""], [frames[0]], frames[1:], [b"", *frames]):
        with pytest.raises(WireError):
            unpack(bad)
    for index, frame in enumerate(frames):
        with pytest.raises(WireError, match=r"header|parcels\[0\].crc"):
            unpack([*frames[:index], frame[:-1], *frames[index + 1 :]])
    with pytest.raises(WireError, match="header"):
        unpack([sealed(frames[0][4:] + b"\x00"), *frames[1:]])


@pytest.mark.parametrize(
    ("path", "to", "named"),
    [
        (("parcels",), [1], r"parcels\[0\].crc"),
        (("parcels",), [], "parcels: 0 declared, 1 came"),
        (("parcels",), [1.0], "parcels"),
        (("body", "trajectory"), {}, "trajectory: in the header"),
        (("body", "extra"), 1, "extra"),
        (("body", "extra"), float("nan"), "body.extra"),
        (("body", "extra"), b"\x00", "(?i)bin"),
        (("body", "extra"), b"", "body.extra"),
        (("body", "type"), "exec", "type"),
        (("body", "type"), "kept", "parcels: 1 in a kept"),
        (("body", "type"), ["push"], "type"),
        (("body",), None, "type"),
        (("id",), -1, "id"),
        (("incarnation",), "x", "incarnation"),
        (("surprise",), 1, "surprise"),
    ],
)
def test_a_wrong_value_is_refused_by_name(path: tuple, to: object, named: str) -> None:
    frames = changed(frames_of(Push(trajectory=trajectory())), *path, to=to)
    with pytest.raises(WireError, match=named):
        unpack(frames)


@pytest.mark.parametrize(
    ("path", "to", "named"),
    [
        (TOKENS, 99, "tokens"),
        (TOKENS, [], "tokens"),
        (TOKENS, ["int32"], "tokens"),
        (TOKENS, [["int32"], 24], "tokens"),
        (TOKENS, ["float64", 24], "float64.* is no array"),
        (TOKENS, ["object", 24], "object.* is no array"),
        (TOKENS, ["float32", 24], "tokens"),
        (TOKENS, ["int32", -1], "-1.* is no array"),
        (TOKENS, ["int32", 24.0], "tokens"),
        (TOKENS, ["int32", True], "tokens"),
        (TOKENS, ["int32", "24"], "tokens"),
        (TOKENS, ["int32", 2**62], "tokens"),
        (TOKENS, ["int32", 23], "roles"),
        (TOKENS, ["int32", 24, 1], "tokens"),
        (TOKENS, {"int32": 0, 24: 0}, "tokens"),
        (TOKENS, b"\x00" * 96, "tokens"),
        (("labels",), ["int8", 1], "labels"),
        (("labels",), ["int8", 40], "labels"),
        (("sequences", 0, "versions", 0, "tokens"), -4, "versions"),
        (("sequences", 0, "versions", 0, "colour"), 1, "colour"),
        (("reward",), float("nan"), "reward"),
        (("reward",), "1.0", "reward"),
        (("timing",), {"env": float("inf")}, "timing.env"),
        (("timing",), {1: 1.0}, "timing"),
        (("terms",), {"length": float("nan")}, "terms.length"),
        (("metrics",), {"moves": float("-inf")}, "metrics.moves"),
        (("actor",), b"", "actor"),
        (("actor",), msgpack.ExtType(5, b"x"), "actor"),
        (("member",), -1, "member"),
        (("extra",), 1, "extra"),
        (("group_id",), 1.0, "group_id"),
    ],
)
def test_a_wrong_value_in_a_trajectory_is_refused_by_name(
    path: tuple, to: object, named: str
) -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    assert unpack(forged(frames, "group_id", to=1)).message_id == 17
    with pytest.raises(WireError, match=named):
        unpack(forged(frames, *path, to=to))


def test_every_number_of_a_trajectory_that_may_be_a_fraction_is_finite() -> None:
    """Its header is typed at once, so the types must refuse what is not a finite number."""

    def floats(kind: object, path: str) -> list[str]:
        if isinstance(kind, msgspec.inspect.FloatType):
            return [path]
        if isinstance(kind, msgspec.inspect.StructType):
            return [f for one in kind.fields for f in floats(one.type, f"{path}.{one.name}")]
        inner = [getattr(kind, name, None) for name in ("item_type", "key_type", "value_type")]
        assert not isinstance(kind, msgspec.inspect.AnyType), f"{path}: what is it?"
        return [f for one in inner if one is not None for f in floats(one, f"{path}[]")]

    known = floats(msgspec.inspect.type_info(Trajectory), "")
    assert known == [".reward", ".timing[]", ".terms[]", ".metrics[]", ".players[].reward"], (
        "refuse NaN there as well, and say so here"
    )


def player(name: str, *turns: int, **facts: Any) -> dict[str, Any]:
    """A player as it is in a header."""
    return {"name": name, "reward": 0.5, "success": True, "turns": [*turns]} | facts


def test_the_players_of_a_trajectory_arrive() -> None:
    players = [Player(**player("even", 0, 1)), Player(**player("odd"))]
    sent = msgspec.structs.replace(trajectory(), players=players)
    received = unpack(frames_of(Push(trajectory=sent))).message
    assert isinstance(received, Push) and received.trajectory.players == players


@pytest.mark.parametrize(
    ("players", "named"),
    [
        ([player("even", 0)], r"players\.turns"),  # the other turn is nobody's
        ([player("even", 0, 1), player("odd", 1)], r"players\.turns"),
        ([player("even", 0, 0, 1)], r"players\.turns"),
        ([player("even", 1, 0)], r"players\.turns"),
        ([player("even", 0, 1, 2)], r"players\.turns"),
        ([player("even", -1, 0, 1)], r"players\.turns"),
        ([player("even", 0, 1), player("even")], r"players\.name"),
        ([player("", 0, 1)], r"players\.name"),
        ([player("even", 0, 1, reward=float("nan"))], r"players\.even"),
        ([player("even", 0, 1, reward=float("inf"))], r"players\.even"),
        ([player("even", 0, 1, reward="1")], "reward"),
        ([player("even", 0, 1, colour=1)], "colour"),
    ],
)
def test_players_that_cannot_be_are_refused_by_name(players: list[Any], named: str) -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    unpack(forged(frames, "players", to=[player("even", 0), player("odd", 1)]))
    with pytest.raises(WireError, match=named):
        unpack(forged(frames, "players", to=players))


def test_a_sequence_of_two_players_is_refused() -> None:
    whole = trajectory()
    (sequence,) = whole.sequences
    acting = np.flatnonzero(sequence.roles == Role.ACTION)
    turns = sequence.turns.copy()
    turns[acting[-1]] = 1
    facts: dict[str, Any] = {
        "sequences": [msgspec.structs.replace(sequence, turns=turns)],
        "turn_rewards": np.zeros(2, np.float32),
        "turn_flags": np.zeros(2, np.uint8),
        "labels": np.zeros(2, np.int8),
    }
    one = [Player(**player("even", 0, 1))]
    msgspec.structs.replace(whole, **facts, players=one)
    two = [Player(**player("even", 0)), Player(**player("odd", 1))]
    with pytest.raises(ValueError, match="sequences"):
        msgspec.structs.replace(whole, **facts, players=two)


def test_an_error_carries_the_message_id() -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    bad = changed(frames, "body", to=[])
    damaged = changed(frames, "parcels", to=[0])  # sent again, the message can arrive whole
    for sent, number in ((bad, 17), (damaged, 0), ([b"\xff"], 0)):
        with pytest.raises(WireError) as caught:
            unpack(sent)
        assert caught.value.message_id == number


def test_a_message_without_a_place_for_a_trajectory_may_carry_none() -> None:
    parcel = wrap(trajectory()).data
    frames = changed(frames_of(Kept(take=1)), "parcels", to=[zlib.crc32(parcel)])
    with pytest.raises(WireError, match="parcels: 1 in a kept"):
        unpack([*frames, parcel])
    twice = changed(frames_of(Push(trajectory=trajectory())), "parcels", to=2 * frames[1:])
    with pytest.raises(WireError):
        unpack([*twice, parcel])


def test_bundles_whose_numbers_do_not_fit_are_refused() -> None:
    """Each number is that of one member, and counts once."""
    two = Pushes(ids=[3, 4], trajectories=[trajectory(), trajectory()])
    assert unpack(frames_of(two)).message_id == 17
    for ids, named in (([3], "ids: 1, traj"), ([3, 3], "a number twice"), ([-1, 3], "negative")):
        with pytest.raises(WireError, match=named):
            unpack(changed(frames_of(two), "body", "ids", to=ids))
    with pytest.raises(WireError, match="trajectories: in the header"):
        unpack(changed(frames_of(two), "body", "trajectories", to=[]))


def test_other_versions_are_a_mismatch_that_names_both_sides() -> None:
    frames = frames_of(StatusRequest())
    with pytest.raises(MismatchError, match="protocol: the sender has 2, this side has 3"):
        unpack(changed(frames, "protocol", to=2))
    with pytest.raises(MismatchError, match=f"schema: the sender has 'abc'.*{SCHEMA_HASH}"):
        unpack(changed(frames, "schema", to="abc"))


def test_duplicate_keys_extensions_and_odd_keys_are_refused() -> None:
    for header, named in (
        (b"\x82\xa1a\x01\xa1a\x02", "a key twice"),
        (b"\x81\xa1a\xcc\x01", "shortest"),
        (b"\x81\xa4body\xd4\x05\x00", "(?i)ext"),
        (b"\x81\xa4body\xd6\xff\x00\x00\x00\x00", "(?i)ext|timestamp"),
        (b"\x81\xa4body\xc7\x00\x05", "(?i)ext"),
        (b"\x81\x90\x01", "header: .*list"),
        (b"\x81\xc3\x01", "key"),
        (b"\x81\xcb" + struct.pack(">d", 1.0) + b"\x01", "key"),
        (b"\x81\xa1\xff\x01", "header"),
        (b"\xdd\xff\xff\xff\xff", "header"),
        (b"\xdf\xff\xff\xff\xff", "header"),
        (b"\x91" * 33 + b"\x00", "header"),
        (b"\x81\xa4body" + b"\x91" * 40 + b"\x00", "nested deeper"),
        (b"\x81\xa4body" + b"\x91" * 5000 + b"\x00", "header"),
        (b"\x81\xa4body" * 5000 + b"\x00", "header"),
    ):
        with pytest.raises(WireError, match=named):
            unpack([sealed(header)])


def test_a_trajectory_with_a_key_twice_is_refused() -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    header, arrays = parts(frames[1])
    assert unpack(resealed(frames, headed(header, arrays))).message_id == 17
    assert header[0] == 0xDE, "more than fifteen fields"
    one_more = header[:2] + bytes([header[2] + 1]) + header[3:]
    env = b"\xa3env\xcb" + struct.pack(">d", 0.5)
    for other in (
        one_more + b"\xa6member\x00",
        header.replace(b"\x81" + env, b"\x82" + env + env),
        header.replace(b"\xa8group_id\x01", b"\xa8group_id\xcc\x01"),
    ):
        assert other != header
        with pytest.raises(WireError, match="header: a key twice"):
            unpack(resealed(frames, headed(other, arrays)))
    with pytest.raises(WireError, match="trailing"):
        unpack(resealed(frames, headed(header + b"\x00", arrays)))


def test_whole_numbers_may_stand_for_fractions() -> None:
    """A sum of no rewards is an int in Python; it travels as the fraction that it stands for."""
    sent = msgspec.structs.replace(trajectory(), reward=0, timing={"env": 0})
    assert unwrap(wrap(sent)).reward == 0.0
    graded = unwrap(wrap(sent))
    graded.reward, graded.timing["grade"] = 1, 2
    again = unwrap(wrap(graded))
    assert (again.reward, again.timing) == (1.0, {"env": 0.0, "grade": 2.0})
    frames = frames_of(Push(trajectory=sent))
    header, arrays = parts(frames[1])
    forged = header.replace(b"reward\xcb", b"reward\xcf")
    assert forged != header
    with pytest.raises(WireError, match="shortest form"):
        unpack(resealed(frames, headed(forged, arrays)))


def test_lengths_beyond_the_data_cost_no_memory() -> None:
    frames = frames_of(Push(trajectory=trajectory()))
    header, arrays = parts(frames[1])
    for name, old in (("sequences", b"\x91"), ("timing", b"\x81"), ("experience_ids", b"\x90")):
        for huge in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
            text = msgpack.packb(name)
            bomb = header.replace(text + old, text + huge + b"\xff\xff\xff\xff")
            assert bomb != header
            tracemalloc.start()
            with pytest.raises(WireError):
                unpack(resealed(frames, headed(bomb, arrays)))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 1 << 20
    nested = forged(frames, "extra", to=0)[1]
    for bomb in (b"\x91" * 60_000, b"\x90" * 60_000, b"\xdd\x00\x00\xea\x60" + b"\x90" * 60_000):
        text = msgpack.packb("tokens") + msgpack.packb(["int32", 24])
        assert text in nested
        with pytest.raises(WireError):
            unpack(resealed(frames, headed(header.replace(text, text[:7] + bomb), arrays)))


def test_sizes_are_refused_before_anything_is_read() -> None:
    junk = bytes([0x80])
    with pytest.raises(WireError, match=r"header: .* the limit is"):
        unpack([junk * (LIMITS.header_bytes + 1)])
    with pytest.raises(WireError, match="parcels: 9, the limit is 8"):
        unpack([junk] * 10, MessageLimits(parcels=8))
    with pytest.raises(WireError, match="trajectory: 17 bytes"):
        unpack([junk, bytes(17)], MessageLimits(parcel_bytes=16))
    with pytest.raises(WireError, match="message: 33 bytes"):
        unpack([junk, bytes(16), bytes(16)], MessageLimits(message_bytes=32))


def test_a_trajectory_has_a_smaller_header_than_a_status() -> None:
    big = "x" * (70 << 10)
    assert unpack(pack(envelope(StatusReply(status={"text": big})))).message_id == 17
    sent = msgspec.structs.replace(trajectory(), label_source=big)
    with pytest.raises(WireError, match=r"header: .* the limit is 65536"):
        pack(envelope(Push(trajectory=sent)))
    frames = frames_of(Push(trajectory=trajectory()))
    with pytest.raises(WireError, match=r"header: .* the limit is 65536"):
        unpack(forged(frames, "label_source", to=big))


def test_a_type_without_a_place_is_refused_when_it_is_packed() -> None:
    sent = trajectory()
    sent.timing["env"] = np.zeros(2, np.float64)  # type: ignore[assignment]
    with pytest.raises(WireError, match="no place on the wire"):
        pack(envelope(Push(trajectory=sent)))
    with pytest.raises(WireError, match="no place on the wire"):
        pack(envelope(StatusReply(status={"text": object()})))


def test_a_pickle_is_never_run(tmp_path) -> None:
    target = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (open, (str(target), "w"))

    blob = pickle.dumps(Payload())
    push = frames_of(Push(trajectory=trajectory()))
    for frames in (
        [blob],
        [sealed(blob)],
        [push[0], blob],
        resealed(push, blob),
        resealed(push, headed(blob)),
        changed(push, "body", to=blob.hex()),
    ):
        with pytest.raises(WireError):
            unpack(frames)
    assert not target.exists()


def test_a_group_of_the_largest_trajectories_is_fit_to_be_sent() -> None:
    largest = bytes(PARCEL_BYTES)
    _check_sizes([bytes(LIMITS.header_bytes), *[largest] * LIMITS.parcels], LIMITS)
    with pytest.raises(WireError, match="trajectory: "):
        _check_sizes([b"", largest + b"x"], LIMITS)
