"""A probe travels with its weights, and tells whether an engine computes with them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.decoding.forward import SlotModel
from evolver_async.model.policy import load_model, make_tiny, state_tensors, token_logprobs
from evolver_async.schema import WeightId
from evolver_async.weights.probe import (
    LENGTH,
    NOISE,
    TOLERANCE,
    Probe,
    ScoredProbe,
    add,
    fault,
    measure,
    separate,
    write,
)
from evolver_async.weights.shm import ShmPublisher, ShmReceiver

TOKENS = list(range(9))
LOGPROBS = st.lists(st.floats(-20.0, 0.0), min_size=8, max_size=8)


def scored(theirs: list[float], mine: list[float]) -> ScoredProbe:
    return ScoredProbe(Probe(TOKENS, theirs), mine)


def moved(logprobs: list[float], by: float) -> list[float]:
    return [value - by for value in logprobs]


@given(LOGPROBS, st.sampled_from(["float32", "bfloat16"]), st.floats(0.0, 0.9))
def test_what_arrived_is_never_suspected(theirs: list[float], dtype: str, share: float) -> None:
    noise = share * NOISE[dtype] / 2
    before = scored(moved(theirs, 3.0), moved(theirs, 3.0 + noise))
    assert fault(scored(theirs, moved(theirs, noise)), None, dtype) == ""
    assert fault(scored(theirs, moved(theirs, noise)), before, dtype) == ""
    assert fault(scored(theirs, theirs), scored(theirs, theirs), dtype) == "", "no step between"


@given(LOGPROBS, st.sampled_from(["float32", "bfloat16"]), st.floats(1.1, 100.0))
def test_an_engine_with_far_other_weights_is_seen_without_a_version_before(
    theirs: list[float], dtype: str, factor: float
) -> None:
    other = moved(theirs, factor * TOLERANCE[dtype])
    assert "differ" in fault(scored(theirs, other), None, dtype)


@given(LOGPROBS, st.sampled_from(["float32", "bfloat16"]), st.floats(1e-6, 5.0))
def test_an_engine_that_kept_its_weights_is_seen_however_small_the_step(
    old: list[float], dtype: str, step: float
) -> None:
    before = scored(old, old)
    assert fault(scored(moved(old, step), old), before, dtype) != ""


@given(LOGPROBS, st.sampled_from(["float32", "bfloat16"]), st.floats(3.0, 9.0))
def test_an_engine_whose_kernels_repeat_nothing_exactly_is_seen_by_the_nearer_version(
    old: list[float], dtype: str, factor: float
) -> None:
    before = scored(old, moved(old, NOISE[dtype] / 4))
    still = scored(moved(old, factor * NOISE[dtype]), moved(old, NOISE[dtype] / 3))
    assert fault(still, before, dtype) != ""


def test_a_log_prob_that_is_not_finite_is_a_fault() -> None:
    assert fault(scored([-1.0] * 8, [float("nan")] * 8), None, "float32") != ""


def test_the_other_text_of_another_run_is_not_compared() -> None:
    before = ScoredProbe(Probe([1] * 9, [-1.0] * 8), [-2.0] * 8)
    assert fault(scored([-2.0] * 8, [-2.0] * 8), before, "float32") == ""


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    path = tmp_path / "policy"
    make_tiny(path, seed=1, hidden_size=32, layers=1, heads=1, intermediate_size=64, max_length=64)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_probe_is_of_the_model_and_of_the_seed(policy_dir: Path, packed: bool) -> None:
    model = load_model(policy_dir, dtype="float32", device="cpu")
    text = write(model, 3, 64, packed=packed)
    probe = measure(model, text, packed=packed)
    assert len(probe.tokens) == LENGTH == len(probe.logprobs) + 1
    row = torch.tensor([probe.tokens])
    plain = load_model(policy_dir, dtype="float32", device="cpu")
    with torch.no_grad():
        logprobs_BT, _ = token_logprobs(plain, row, torch.ones_like(row))
    assert probe.logprobs == pytest.approx(logprobs_BT[0, 1:].tolist(), abs=1e-5)
    assert measure(model, write(model, 3, 64, packed=packed), packed=packed) == probe
    assert write(model, 4, 64, packed=packed) != probe.tokens
    assert len(write(model, 3, 8, packed=packed)) == 7, "an engine samples one more"


def test_the_text_of_a_probe_is_one_that_the_policy_writes(policy_dir: Path) -> None:
    """Where a token is unlikely, log-probs in bfloat16 are rounded more than any tolerance."""
    model = load_model(policy_dir, dtype="bfloat16", device="cpu")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(64)
    vocabulary = model.config.vocab_size
    for seed in range(3):
        own = measure(model, write(model, seed, 64, packed=False), packed=False)
        drawn = torch.randint(0, vocabulary, (LENGTH,), generator=torch.Generator()).tolist()
        other = measure(model, drawn, packed=False)
        assert sum(own.logprobs) > sum(other.logprobs) / 4
        engine = SlotModel(model, 64)
        assert ScoredProbe(own, engine.score(own.tokens)).difference() < TOLERANCE["bfloat16"] / 2


def test_a_probe_comes_through_a_channel_beside_the_weights(
    policy_dir: Path, tmp_path: Path
) -> None:
    model = load_model(policy_dir, dtype="float32", device="cpu")
    probe = measure(model, list(range(9)), packed=False)
    publisher = ShmPublisher(tmp_path / "w", background=False)
    weights = WeightId(lineage=1, step=1)
    publisher.publish(weights, add(state_tensors(model), probe))
    tensors, found = separate(ShmReceiver(publisher.address).fetch(weights))
    publisher.close()
    assert found is not None and found.tokens == probe.tokens
    assert found.logprobs == pytest.approx(probe.logprobs, abs=1e-6)
    assert tensors.keys() == state_tensors(model).keys()
    assert separate(state_tensors(model))[1] is None
