"""A whole serial run whose policy is taught by the export of another one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from serial_recipe import RECIPE
from serial_runs import Finished, trainer

from evolver_async.cli import main

pytestmark = pytest.mark.process

# A student that writes answers, with no arm above the other, before its teacher speaks.
ALONE = (
    "stages=[{kind: sft, steps: 25, expert_fraction: 0.0, override: {rollout: {group_size: 1},"
    " learner: {groups_per_step: 16, lr: 1.0e-2}, teacher: {coef: 0}}}, {kind: rl, steps: 20}]"
)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    return trainer(tmp_path_factory.mktemp("teacher"), RECIPE)


def test_a_student_comes_to_play_as_its_teacher(train: Callable[..., Finished], tmp_path: Path):
    """No reward trains it."""
    teacher = train("teacher", "stages.1.steps=30")
    assert main(["export", str(teacher.run_dir), str(tmp_path / "exported")]) == 0
    student = train(
        "student",
        ALONE,
        f"teacher={{path: {tmp_path / 'exported'}, loss_coef: 0}}",
        "policy.hidden_size=16",
        "policy.intermediate_size=32",
        "advantage={kind: reinforce}",
    )
    kl = student.rl("teacher/kl")
    assert len(kl) == 20 and sum(kl[-3:]) < 0.3 * sum(kl[:3])
    assert set(student.rl("teacher/share")) == {1.0}
    wise, naive = teacher.rl("train/success"), student.rl("train/success")
    assert sum(naive[-5:]) - sum(naive[:5]) > 0.5 * (sum(wise[-5:]) - sum(wise[:5]))
