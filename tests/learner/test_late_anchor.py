"""The anchor of a step's first update, which its own forward pass gives."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from updates import config, groups, guided_config, guided_groups, step, tiny, updater

from evolver_async.config import AdvantageConfig, CorrectionConfig, LossConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from learner import step as step_module
from learner.data.batch import LogProbs
from learner.step import Updater

__all__ = ["tiny"]

KINDS = [
    ("decoupled", "token"),
    ("decoupled", "trajectory"),
    ("icepop", "token"),
    ("gspo", "token"),
]


def trained(
    tiny: Path, run_dir: Path, kind: str, level: str, minibatches: int, samples: int = 0
) -> tuple[Updater, dict[str, float]]:
    settings = config(tiny, [StageConfig(kind="rl", steps=3)], minibatches)
    settings.correction = CorrectionConfig(kind=kind, level=level)
    settings.metrics.samples, settings.metrics.samples_every = samples, 1
    made = updater(settings, run_dir)
    step(made, groups(6, length=9))
    return made, step(made, groups(6, length=9), 1).metrics


@pytest.mark.parametrize(("kind", "level"), KINDS)
@pytest.mark.parametrize("minibatches", [1, 3])
def test_it_is_that_of_a_pass_of_its_own(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    level: str,
    minibatches: int,
) -> None:
    late, found = trained(tiny, tmp_path, kind, level, minibatches)
    monkeypatch.setattr(step_module, "comes_late", lambda *_: False)
    before, expected = trained(tiny, tmp_path, kind, level, minibatches)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    theirs = policy.state_tensors(before.model)
    for name, tensor in policy.state_tensors(late.model).items():
        # Adam moves a weight by its rate wherever a gradient is about 0, as that of keys' biases.
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=0)


def test_samples_change_no_bit_of_the_training(tiny: Path, tmp_path: Path) -> None:
    one, two = (trained(tiny, tmp_path, "decoupled", "token", 3, samples)[0] for samples in (0, 4))
    ours, theirs = policy.state_tensors(one.model), policy.state_tensors(two.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_only_what_trains_later_is_scored(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    seen, left = [], []
    late = step_module.late_anchor

    def late_anchor(*given: Any) -> LogProbs:
        left.append(late(*given))
        seen.append(deepcopy(left[-1]))
        return left[-1]

    monkeypatch.setattr(step_module, "late_anchor", late_anchor)
    trained(tiny, tmp_path, "decoupled", "token", minibatches)
    for found in seen:
        assert found.fresh_N is not None and found.fresh_N.any()
        assert found.fresh_N.all() == (minibatches == 1)
        assert ((found.anchor_N != 0) == ~found.fresh_N).all()
    for found in left:  # the first update has recorded its own
        assert found.fresh_N is not None and not found.fresh_N.any()
        assert (found.anchor_N != 0).all()
    assert len(seen) == 2


READERS = {  # sections that read the anchor before the loss does
    "kl in the reward": {"loss": LossConfig(kl_coef=0.1, kl_place="reward")},
    "opob": {"advantage": AdvantageConfig(kind="opob")},
    "vtrace": {
        "advantage": AdvantageConfig(kind="vtrace"),
        "correction": CorrectionConfig(kind="none"),
    },
    "m2po": {"correction": CorrectionConfig(kind="m2po")},
}


@pytest.mark.parametrize("reader", READERS)
def test_an_anchor_that_is_read_before_the_loss_does_not_come_late(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    monkeypatch.delattr(step_module, "late_anchor")
    settings = config(tiny, [StageConfig(kind="rl", steps=3)])
    for section, value in READERS[reader].items():
        setattr(settings, section, value)
    made, data = updater(settings, tmp_path), groups(4)
    made.begin_stage(stage_config(settings, 0), 0)
    read, assign = [], step_module.assign

    def assigned(batch: Any, logprobs: LogProbs, *given: Any, **more: Any) -> Any:
        read.append(logprobs.anchor_N.copy())
        return assign(batch, logprobs, *given, **more)

    monkeypatch.setattr(step_module, "assign", assigned)
    assert step(made, data).updates == 1
    (anchor_N,) = read
    assert (anchor_N != 0).all()


def test_stripped_contexts_are_scored_before(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(step_module, "late_anchor")
    made = updater(guided_config(tiny, "strip", kind="decoupled"), tmp_path)
    assert step(made, guided_groups(4)).updates == 2
