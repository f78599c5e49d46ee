"""Gradients of distillation against one plain forward pass per row, with and without experience."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from collated_groups import collated, make_groups
from stripping import stripped
from transformers import PreTrainedModel

from evolver_async.model import policy
from evolver_async.schema import Array, Group, Role
from learner.data.batch import Batch
from learner.data.collate import Internalise, guided
from learner.optimize.distillation import Distillation
from learner.ranks.mesh import alone

TEACHES = Internalise(1.0, 0, teaches=True)

# kind, coef, temperature, chunk, aggregation, norm_tokens, layout, reference
SETTINGS = ("forward", 0.7, 0.8, 4096, "token_mean", 1024, "padded", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path: Path = tmp_path_factory.mktemp("distill") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return policy.load_model(path, dtype="float32", device="cpu")


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [
        torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for one in model.parameters()
    ]
    model.zero_grad(set_to_none=True)
    return found


def naive(
    model: torch.nn.Module, groups: list[Group], batch: Batch, coef: float, allowed: int = 10**6
) -> float:
    """Accumulate the loss and its gradients row by row; every row has both contexts whole.

    Tokens from number `allowed` are masked.
    """
    model.zero_grad(set_to_none=True)
    total, tokens = torch.zeros(()), batch.whole().tokens
    for trajectory in (one for group in groups for one in group.trajectories):
        for sequence in trajectory.sequences if guided(trajectory) else ():
            bare = stripped(sequence)
            with torch.no_grad():
                p_LV = log_probs(model, sequence.tokens, allowed)
            q_LV = log_probs(model, bare.tokens, allowed)
            places = np.flatnonzero(sequence.roles == Role.ACTION)
            for place, own in zip(places, np.flatnonzero(bare.roles == Role.ACTION), strict=True):
                if own:  # the first token of a row is not predicted
                    p_V, q_V = p_LV[place - 1], q_LV[own - 1]
                    total = total + coef / tokens * (p_V.exp() * (p_V - q_V)).sum()
    total.backward()
    return float(total.detach())


def log_probs(model: torch.nn.Module, tokens: Array, allowed: int) -> torch.Tensor:
    tokens_BT = torch.from_numpy(tokens.astype(np.int64))[None]
    logits_LV = model(input_ids=tokens_BT).logits[0, :, :allowed].float()
    return (logits_LV / 0.8).log_softmax(-1)


@pytest.mark.parametrize("chunk", [4096, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradients_match_a_pass_per_row(model, chunk, packed):
    groups = make_groups(4, 4, 3)
    batch = collated(groups, TEACHES)
    assert batch.taught is not None
    expected = naive(model, groups, batch, 0.7)
    theirs = gradients(model)
    distil = Distillation(batch.taught, *SETTINGS)
    distil = replace(distil, chunk=chunk, layout="packed" if packed else "padded")
    loss, terms = distil(model, batch.whole(), alone("cpu"), 64)
    ours = gradients(model)
    assert expected > 1e-6
    assert loss == pytest.approx(expected, rel=1e-4)
    assert terms["loss/distill"] == pytest.approx(loss / 0.7)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert max(float(one.abs().max()) for one in theirs) > 1e-4


@pytest.mark.parametrize("chunk", [4096, 3])
def test_what_a_grammar_excludes_is_masked_in_both_contexts(model, chunk):
    groups = make_groups(4, 4, 3)
    batch = collated(groups, TEACHES)
    taught, size = batch.taught, model.config.vocab_size
    assert taught is not None
    allowed_V = np.arange(size) < size // 2
    masks = {
        "mask_N": np.zeros(taught.whole().tokens, np.int64),
        "allowed_MW": np.packbits(allowed_V, bitorder="little")[None],
    }
    expected = naive(model, groups, batch, 0.7, allowed=size // 2)
    theirs = gradients(model)
    distil = replace(Distillation(replace(taught, **masks), *SETTINGS), chunk=chunk)
    loss, _ = distil(model, batch.whole(), alone("cpu"), 64)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert loss != pytest.approx(naive(model, groups, batch, 0.7), rel=1e-2)
    model.zero_grad(set_to_none=True)
    distil(model, batch.whole(), alone("cpu"), 64)
    for mine, other in zip(gradients(model), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_updates_of_parts_add_up_to_that_of_the_whole(model):
    batch = collated(make_groups(5, 4, 3), TEACHES)
    assert batch.taught is not None
    distil = replace(Distillation(batch.taught, *SETTINGS), aggregation="sequence_sum_norm")
    losses = []
    for part in batch.whole().split(3, key=0):
        loss, _ = distil(model, part, alone("cpu"), 64)
        losses.append(loss * part.trajectories)
    loss, _ = distil(model, batch.whole(), alone("cpu"), 10**6)
    assert sum(losses) == pytest.approx(loss * batch.whole().trajectories, rel=1e-4)


def test_a_batch_without_experience_teaches_nothing():
    groups = make_groups(6, 2, 2)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.sequences = [stripped(one) for one in trajectory.sequences]
    assert collated(groups, TEACHES).taught is None


def test_the_policy_learns_the_answers_of_its_guided_self(model):
    """The KL of the taught tokens falls under its own gradient."""
    ours = policy.load_model(model.config._name_or_path, dtype="float32", device="cpu")
    batch = collated(make_groups(7, 3, 3), TEACHES)
    assert batch.taught is not None
    distil = Distillation(batch.taught, *SETTINGS)
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-3)
    found = []
    for _ in range(30):
        optimizer.zero_grad(set_to_none=True)
        found.append(distil(ours, batch.whole(), alone("cpu"), 512)[1]["experience/distill_kl"])
        optimizer.step()
    assert found[-1] < 0.5 * found[0]
