"""What the vLLM engine sampled, as the learner sees it: the torch engine's test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_conformance import RUNNER
from parity import (
    CASES,
    LENGTH,
    WEIGHTS,
    Taught,
    test_the_learner_gives_every_token_the_log_prob_it_was_sampled_with,
)
from vllm_engines import engine_of, settings

from actors.engines.engine import Engine
from actors.engines.vllm_core import VllmCore
from evolver_async.model.policy import make_tiny, state_tensors

pytestmark = pytest.mark.vllm
__all__ = ["test_the_learner_gives_every_token_the_log_prob_it_was_sampled_with"]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCore]:
    path = tmp_path_factory.mktemp("parity")
    make_tiny(
        path, seed=1, hidden_size=32, layers=1, heads=1, intermediate_size=64, max_length=LENGTH
    )
    core = VllmCore(settings(path, max_length=LENGTH))
    yield core
    RUNNER.run(core.close())


@pytest.fixture
def taught(request: pytest.FixtureRequest, tmp_path: Path, core: VllmCore) -> Taught:
    assert request.param in CASES

    class OnVllm(Taught):
        heads = 1  # vLLM's CPU attention wants them at least 32 wide

        def engine(self) -> Engine:
            engine = engine_of(core, max_length=LENGTH)
            RUNNER.run(engine.update(WEIGHTS, state_tensors(self.model)))
            return engine

    return OnVllm(tmp_path / "policy", *request.param)
