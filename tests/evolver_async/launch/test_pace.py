"""What a timed pace says of a run: seconds of a step, and adapters where time asks for them."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.launch.pace import FILE, Pace, step_estimate, time_texts

PACE = Pace(
    rows=32,
    decode_s=0.5,
    forward_s=0.01,
    backward_s=0.02,
    update_s=1.0,
    scores=0.5,
    shares=False,
    prompt=40,
)
# 4 groups of 8: one wave of decoding steps of an actor
CHANGES = (
    *("stages=[{steps: 10}]", "learner.groups_per_step=4", "rollout.group_size=8"),
    *("rollout.max_turns=1", "rollout.max_tokens=10", "learner.minibatches=2"),
    *("actors.count=1", "buffer.max_staleness=2", "loss.kl_coef=0"),
)
READ_S, PLAYED_S = 4 * 40 * 0.01, 10 * 0.5
TOKENS = 32 * (40 + 10)
TRAINED_S = TOKENS * (0.01 + 0.02 + 0.005) + 2


def config(*changes: str) -> Config:
    return load(None, [*CHANGES, *changes])


def test_a_step_takes_as_long_as_the_slower_side_where_they_have_processors() -> None:
    found = step_estimate(config(), PACE, cores=2)
    assert found is not None and found.apart and found.episodes == 32
    assert found.playing_s == pytest.approx(PLAYED_S + READ_S)
    assert found.training_s == pytest.approx(TRAINED_S)
    assert found.step_s == pytest.approx(TRAINED_S)


@pytest.mark.parametrize(
    ("changes", "cores"),
    [((), 1), (("buffer.max_staleness=0",), 8), (("launch.kind=serial",), 8)],
)
def test_sides_that_share_a_processor_or_take_turns_add_up(
    changes: tuple[str, ...], cores: int
) -> None:
    found = step_estimate(config(*changes), PACE, cores=cores)
    assert found is not None
    assert found.step_s == pytest.approx(PLAYED_S + READ_S + TRAINED_S)


def test_shared_prompts_are_trained_once_a_group() -> None:
    found = step_estimate(config(), replace(PACE, shares=True), cores=2)
    assert found is not None
    tokens = 4 * 40 + 32 * 10
    assert found.training_s == pytest.approx(tokens * 0.035 + 2)


def test_more_episodes_than_rows_are_played_in_waves() -> None:
    few = step_estimate(config(), replace(PACE, rows=8), cores=2)
    assert few is not None and few.playing_s == pytest.approx(4 * PLAYED_S + READ_S)


def test_a_run_without_rewards_has_no_estimate() -> None:
    supervised = load(None, [*CHANGES, "stages=[{kind: sft, steps: 10}]"])
    assert step_estimate(supervised, PACE) is None
    assert [*time_texts(supervised, PACE)] == []
    assert [*time_texts(config(), None)] == []


@pytest.mark.parametrize(
    ("changes", "pace", "proposed"),
    [
        ((), PACE, True),
        (("policy.lora.rank=4",), PACE, False),
        ((), replace(PACE, decode_s=20.0), False),  # playing is what takes long
        ((), replace(PACE, forward_s=1e-4, backward_s=2e-4), False),  # a step is short anyhow
    ],
)
def test_adapters_are_proposed_where_training_makes_a_long_step(
    changes: tuple[str, ...], pace: Pace, proposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evolver_async.launch.pace.processors", lambda: 4)
    text = " ".join(time_texts(config(*changes), pace))
    assert ("policy.lora.rank=" in text) == proposed


def test_a_pace_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Pace.read(tmp_path) is None
    PACE.write(tmp_path)
    assert Pace.read(tmp_path) == PACE
    (tmp_path / FILE).write_text('{"rows": 32}')  # torn, or of other code
    assert Pace.read(tmp_path) is None
