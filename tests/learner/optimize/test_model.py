"""A learner's models and the checkpoints that they are restored from."""

from pathlib import Path

import pytest
from updates import config, updater

from evolver_async.checkpoint.checkpoints import CheckpointError
from evolver_async.config import LoraConfig, StageConfig
from evolver_async.model import policy
from learner.state import LearnerState
from learner.step import Updater


def learner_of(directory: Path, seed: int, size: int, rank: int) -> Updater:
    """A learner of a model in `directory`, which `seed` draws, with adapters of `rank`."""
    shape = {"layers": 1, "heads": 2, "intermediate_size": 32, "max_length": 64}
    policy.make_tiny(directory / "policy", seed=seed, hidden_size=size, **shape)
    settings = config(directory / "policy", [StageConfig(kind="rl", steps=1)])
    settings.policy.lora = LoraConfig(rank=rank)
    return updater(settings, directory)


@pytest.mark.parametrize(
    ("seed", "size", "rank", "reason"),
    [
        (0, 32, 0, r"weight \S+ has shape"),
        (0, 32, 2, "other weights than those that the adapters were trained on"),
        (1, 16, 2, "other weights than those that the adapters were trained on"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_key_that_names_the_model(
    tmp_path: Path, seed: int, size: int, rank: int, reason: str
) -> None:
    """`policy.path` may change on resume, because directories move."""
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    learner_of(tmp_path / "first", 0, 16, rank).save(saved, LearnerState())
    other = learner_of(tmp_path / "other", seed, size, rank)
    with pytest.raises(CheckpointError, match=rf"^policy\.path: .* {saved}: .*({reason})"):
        other.restore(saved)
    moved = learner_of(tmp_path / "moved", 0, 16, rank)
    assert moved.restore(saved) == LearnerState()
