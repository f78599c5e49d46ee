"""An update that did not arrive is counted and told of, within the version that was missed."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.engines.torch_engine import TorchEngine
from actors.engines.weight_sync import WeightSync
from actors.failure_counts import FailureCounts
from actors.weights.arrival import ArrivalCheck, EngineLost
from actors.weights.source import FetchedWeights
from evolver_async.config import ActorsConfig
from evolver_async.metrics.activity import ACTOR_LEVELS, ActivityClock
from evolver_async.model import policy
from evolver_async.schema import WeightId
from evolver_async.weights import probe
from evolver_async.weights.shm import ShmPublisher, ShmReceiver

LENGTH = 64


def version(step: int) -> WeightId:
    return WeightId(lineage=1, step=step)


class Learner:
    """A policy that changes a little, and publishes itself with a probe."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.path = directory / "policy"
        policy.make_tiny(
            self.path,
            seed=1,
            hidden_size=32,
            layers=1,
            heads=1,
            intermediate_size=64,
            max_length=LENGTH,
        )
        self.model = policy.load_model(self.path, dtype=dtype, device="cpu")
        self.publisher = ShmPublisher(directory / "w", background=False)
        self.text: list[int] | None = None

    @torch.no_grad()
    def step(self, number: int, size: float) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((size * noise).to(parameter.dtype))
        if self.text is None:
            self.text = probe.write(self.model, 0, LENGTH, packed=False)
        measured = probe.measure(self.model, self.text, packed=False)
        tensors = probe.add(policy.state_tensors(self.model), measured)
        self.publisher.publish(version(number), tensors)


class Deaf(TorchEngine):
    """Takes an update for an update, and changes nothing from the second one on."""

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        if self.weights is None:
            await super().update(weights, tensors)
        self.weights = weights


class Torn(TorchEngine):
    """Leaves one layer's old weights, as a packed copy that nobody renews."""

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        kept = policy.state_tensors(self._model)[name].clone()
        await super().update(weights, tensors | {name: kept})


def checked(
    tmp_path: Path, kind: Callable[..., TorchEngine], dtype: str, size: float
) -> ArrivalCheck:
    """Adopt four versions, `size` apart, and return what was found out."""
    learner = Learner(tmp_path, dtype)

    async def adopt_all() -> ArrivalCheck:
        engine = kind(
            policy.load_model(learner.path, dtype=dtype, device="cpu"),
            policy.load_tokenizer(learner.path),
            weights=None,
            slots=2,
            max_length=LENGTH,
            prefill_tokens=64,
            in_flight="keep",
        )
        arrival = ArrivalCheck(engine, dtype)
        source = FetchedWeights(ShmReceiver(learner.publisher.address), engine)
        clock = ActivityClock(ACTOR_LEVELS)
        ends, counts = (source, engine, arrival), FailureCounts()
        sync = WeightSync(*ends, ActorsConfig(), 0, "actor-0", clock, counts)
        for number in range(4):
            learner.step(number, size)
            await sync.adopt()
            assert engine.weights == version(number)
            while arrival.checked <= number:
                await asyncio.sleep(0.001)
        await sync.adopt()  # the same version is not checked again
        await sync.close()
        await engine.close()
        return arrival

    arrival = asyncio.run(asyncio.wait_for(adopt_all(), 60))
    learner.publisher.close()
    return arrival


SIZES = pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 1e-5), ("float32", 0.05), ("bfloat16", 0.05)]
)


@SIZES
def test_an_engine_that_takes_its_updates_passes(tmp_path: Path, dtype: str, size: float) -> None:
    arrival = checked(tmp_path, TorchEngine, dtype, size)
    assert (arrival.checked, arrival.failed) == (4, 0) and not arrival.noted.is_set()
    counters = arrival.counters()
    assert (counters["weights/checked"], counters["weights/not_arrived"]) == (4, 0)
    assert 0 < counters["weights/differences"] < 4 * probe.TOLERANCE[dtype]


@SIZES
def test_an_update_that_does_nothing_is_told_of_at_once(
    tmp_path: Path, dtype: str, size: float, caplog: pytest.LogCaptureFixture
) -> None:
    arrival = checked(tmp_path, Deaf, dtype, size)
    assert (arrival.checked, arrival.failed) == (4, 3), "all but the first"
    assert arrival.noted.is_set(), "the buffer is told soon"
    assert "weights 1.1 did not arrive in the engine" in caplog.text


def test_an_engine_that_was_lost_in_a_check_is_not_checked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Lost:
        weights, asked = version(1), 0

        async def score(self, tokens: list[int]) -> list[float]:
            self.asked += 1
            raise EngineLost("died")

    engine = Lost()
    arrival = ArrivalCheck(engine, "float32")
    for number in (1, 2):
        asyncio.run(arrival.check(version(number), probe.Probe([1, 2], [-1.0])))
    assert (engine.asked, arrival.checked) == (1, 0)
    assert "1.1: died" in caplog.text


def test_a_layer_that_keeps_its_old_weights_is_seen(tmp_path: Path) -> None:
    assert checked(tmp_path, Torn, "float32", 0.05).failed >= 3
