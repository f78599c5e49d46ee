"""Ranks that were started with other code or settings than the first."""

from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from evolver_async.config import Config, ConfigError, StageConfig
from learner.ranks.agreement import agree, facts_of


def meet(directory: Path, theirs: Config, ours: Config, **changes: dict[str, object]) -> None:
    """Rank 0 with the one and rank 2 with the other configuration; `changes` of its facts."""
    stores = [FileStore(str(directory / "meeting"), 3) for _ in range(2)]
    facts = facts_of(ours)
    agree(stores[0], 0, facts_of(theirs))
    agree(stores[1], 2, facts | {kind: facts[kind] | some for kind, some in changes.items()})


def settings(lr: float = 1e-3, steps: int = 5) -> Config:
    made = Config(stages=[StageConfig(kind="rl", steps=steps)])
    made.learner.lr, made.learner.ranks = lr, 3
    return made


def test_ranks_that_are_alike_agree(tmp_path: Path) -> None:
    meet(tmp_path, settings(), settings())


@pytest.mark.parametrize(
    ("ours", "changes", "named"),
    [
        (settings(lr=2e-3), {}, ["learner.lr", "0.002", "0.001"]),
        (settings(steps=6), {}, ["stages.0.steps", "6", "5"]),
        (settings(), {"versions": {"torch": "1.0"}}, ["torch", "1.0"]),
        (settings(), {"files": {"my_loss.py": "0123456789abcdef"}}, ["my_loss.py", "nothing"]),
    ],
)
def test_a_rank_that_differs_is_refused_by_its_number_and_by_what_differs(
    ours: Config, changes: dict[str, dict[str, object]], named: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        meet(tmp_path, settings(), ours, **changes)
    assert all(word in str(refused.value) for word in ["rank 2", *named]), refused.value
