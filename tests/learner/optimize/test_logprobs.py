"""Anchors, and `old` of guided tokens, against one plain forward pass per sequence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from collated_groups import ALWAYS, NEVER, collated, make_groups
from stripping import stripped

from evolver_async.model import policy
from evolver_async.schema import Group, Role, Sequence
from learner.data.batch import Batch
from learner.data.collate import Internalise
from learner.optimize.logprobs import Scorer, anchor_and_old, anchored
from learner.ranks.mesh import alone

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    path: Path = tmp_path_factory.mktemp("scoring") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return policy.load_model(path, dtype="float32", device="cpu")


@torch.no_grad()
def of_actions(model: torch.nn.Module, sequence: Sequence) -> np.ndarray:
    """Log-probs of a sequence's ACTION tokens, by themselves; 0 for one at its very beginning."""
    tokens_BT = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
    logprobs_BT, _ = policy.token_logprobs(
        model, tokens_BT, torch.ones_like(tokens_BT), TEMPERATURE
    )
    return logprobs_BT[0].numpy()[sequence.roles == Role.ACTION]


def expected(
    model: torch.nn.Module, groups: list[Group], strip: Internalise
) -> tuple[np.ndarray, ...]:
    """anchor, anchor_e of the ACTION tokens that have something before them, in order."""
    anchor, anchor_e = [], []
    for group in groups:
        for trajectory in group.trajectories:
            for sequence in trajectory.sequences:
                if not (sequence.roles == Role.ACTION).any():
                    continue
                trained = stripped(sequence) if strip(trajectory) else sequence
                skip = int(trained.roles[0] == Role.ACTION)
                anchor.append(of_actions(model, trained)[skip:])
                anchor_e.append(of_actions(model, sequence)[skip:])
    return np.concatenate(anchor), np.concatenate(anchor_e)


def scored(
    model: torch.nn.Module, groups: list[Group], strip: Internalise, everywhere: bool, guided: str
) -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch, its anchor and its `old`."""
    batch = collated(groups, strip)
    score = Scorer(TEMPERATURE, token_budget=64, chunk=16, ranks=alone("cpu"))
    wanted_P = anchored(batch, everywhere=everywhere, guided=guided, leans=False, abandoned=False)
    return batch, *anchor_and_old(score, model, batch, wanted_P, guided, leans=False)[:2]


@pytest.mark.parametrize("strip", [ALWAYS, NEVER, Internalise(0.5, 0)])
def test_contexts_are_scored_as_trained_and_as_sampled(model, strip):
    groups = make_groups(1, 4, 3)
    anchor, anchor_e = expected(model, groups, strip)
    for guided in ("stale", "anchor", "behaviour"):
        batch, anchor_N, old_N = scored(model, groups, strip, True, guided)
        np.testing.assert_allclose(anchor_N, anchor, atol=1e-5)
        stripped = batch.stripped_N
        assert stripped.any() == (strip is not NEVER)
        old = {"stale": anchor - anchor_e + batch.mu_N, "anchor": anchor, "behaviour": batch.mu_N}
        np.testing.assert_allclose(old_N[stripped], old[guided][stripped], atol=1e-5)
        assert (old_N[~stripped] == batch.mu_N[~stripped]).all()
        if strip is NEVER:
            assert old_N is batch.mu_N


def test_experience_changes_what_is_expected_of_the_actions(model):
    """Else the tests above could not tell the two contexts apart."""
    anchor, anchor_e = expected(model, make_groups(1, 4, 3), ALWAYS)
    assert np.abs(anchor - anchor_e).max() > 1e-3


def test_data_that_the_anchor_itself_sampled_has_weight_one_once_stale(model):
    """No lag and no difference of engines: what is left of the weight is 1, guided or not."""
    groups = make_groups(2, 4, 3)
    for group in groups:
        for trajectory in group.trajectories:
            for sequence in trajectory.sequences:
                at = sequence.roles == Role.ACTION
                sequence.logprobs[at] = np.minimum(of_actions(model, sequence), 0)
    batch, anchor_N, old_N = scored(model, groups, ALWAYS, True, "stale")
    assert batch.stripped_N.any() and not batch.stripped_N.all()
    np.testing.assert_allclose(np.exp(anchor_N - old_N), 1, atol=1e-4)
    behaviour, anchor_N, old_N = scored(model, groups, ALWAYS, True, "behaviour")
    w = np.exp(anchor_N - old_N)
    assert np.abs(w[behaviour.stripped_N] - 1).max() > 1e-3


@pytest.mark.parametrize("guided", ["stale", "anchor", "behaviour"])
def test_where_no_anchor_is_read_only_stripped_trajectories_are_scored(model, guided):
    groups = make_groups(3, 4, 3)
    _, _, full_N = scored(model, groups, ALWAYS, True, guided)
    forwards = []
    hook = policy.split_model(model)[0].register_forward_hook(
        lambda _module, _inputs, output: forwards.append(output.last_hidden_state.shape[0])
    )
    try:
        batch, anchor_N, old_N = scored(model, groups, ALWAYS, False, guided)
    finally:
        hook.remove()
    np.testing.assert_allclose(old_N, full_N, atol=1e-5)
    assert not anchor_N[~batch.stripped_N].any()
    rows = int(batch.stripped_P[batch.trajectory_R].sum())
    assert sum(forwards) == {"stale": 2 * rows, "anchor": rows, "behaviour": 0}[guided]
