"""Weights reach vLLM's workers straight from the learner, whole, and are seen to have arrived."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from engine_conformance import RUNNER, request
from launches import fair_time
from torch import Tensor
from vllm_engines import engine_of, make_model, save, settings

from actors.engines import vllm_start
from actors.engines.engine import Generation
from actors.engines.vllm_core import VllmCore
from actors.engines.vllm_engine import VllmEngine
from actors.engines.weight_sync import WeightSync
from actors.failure_counts import FailureCounts
from actors.weights.arrival import ArrivalCheck
from evolver_async.config import ActorsConfig
from evolver_async.metrics.activity import ACTOR_LEVELS, ActivityClock
from evolver_async.model import lora
from evolver_async.model.policy import load_model, load_state, state_tensors, token_logprobs
from evolver_async.schema import WeightId
from evolver_async.weights import probe
from evolver_async.weights.collective.channel import CollectivePublisher
from evolver_async.weights.collective.sender import ROLL_S
from evolver_async.weights.ends import ReceiverSettings
from evolver_async.weights.shm import ShmPublisher

pytestmark = pytest.mark.vllm
DEADLINE_S = 5.0
RESTART_S = 400  # starting takes half a minute, and more on a machine with other work
SMALL = 1 << 16  # bytes: no file of this size holds a version
LENGTH = 256


class Learner:
    """A policy that changes from version to version, and its end of the channel."""

    def __init__(self, path: Path, publisher: CollectivePublisher | ShmPublisher) -> None:
        self.model = load_model(path, dtype="float32", device="cpu")
        self.publisher = publisher
        self.text: list[int] | None = None
        self.versions: dict[WeightId, dict[str, Tensor]] = {}

    @torch.no_grad()
    def publish(
        self, step: int, lineage: int = 1, size: float = 0.05, retain: bool = False
    ) -> WeightId:
        weights = WeightId(lineage=lineage, step=step)
        generator = torch.Generator().manual_seed(step)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
        tensors = state_tensors(self.model)
        self.versions[weights] = {name: tensor.clone() for name, tensor in tensors.items()}
        if self.text is None:
            self.text = probe.write(self.model, 0, LENGTH, packed=False)
        measured = probe.measure(self.model, self.text, packed=False)
        self.publisher.publish(weights, probe.add(tensors, measured), retain)
        return weights

    def check(self, tokens: list[int], out: Generation) -> None:
        """Every token has the log-prob of the weights it is labelled with."""
        row = torch.tensor([tokens + out.tokens])
        for weights in set(out.weights):
            load_state(self.model, self.versions[weights])
            with torch.no_grad():
                logprobs_BT, _ = token_logprobs(self.model, row, torch.ones_like(row))
            mine = torch.tensor([label == weights for label in out.weights])
            got = torch.tensor(out.logprobs)[mine]
            assert (got - logprobs_BT[0, len(tokens) :][mine]).abs().max() <= 1e-4, weights
        load_state(self.model, self.versions[next(reversed(self.versions))])


def following(engine: VllmEngine) -> WeightSync:
    arrival, clock = ArrivalCheck(engine, "float32"), ActivityClock(ACTOR_LEVELS)
    ends, counts = (engine, engine, arrival), FailureCounts()
    return WeightSync(*ends, ActorsConfig(), 0, "actor-0", clock, counts)


async def reaches(sync: WeightSync, weights: WeightId, deadline_s: float = RESTART_S) -> None:
    async with asyncio.timeout(deadline_s):
        while sync.engine.weights != weights:
            await sync.adopt()
            await asyncio.sleep(0.01)
        assert sync._checking is not None
        await sync._checking


def workers() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "VLLM::Worker" in " ".join(one.cmdline()):
                found.append(one)
    return found


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broadcast")


@pytest.fixture(scope="module")
def broadcast(place: Path, policy_dir: Path) -> Iterator[tuple[Learner, VllmEngine]]:
    """A learner and an engine over two workers, each with a receiver of its own, for the last
    tests; all files of both are in `place`."""
    address = str(place / "w")
    publisher = CollectivePublisher(address, 1, deadline_s=DEADLINE_S, bucket_bytes=1 << 16)
    learner = Learner(policy_dir, publisher)
    channel = ReceiverSettings("collective", address, deadline_s=DEADLINE_S, keep=1)
    core = VllmCore(
        settings(policy_dir, tensor_parallel=2, restarts=3, directory=str(place)),
        receiver=channel,
        name="actor-0",
    )
    yield learner, engine_of(core)
    RUNNER.run(core.close())
    learner.publisher.close()


def test_a_worker_that_keeps_its_packed_weights_is_told_of_within_the_version(
    tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_start, "EXTENSION", "deaf_workers.DeafExtension")
    learner = Learner(policy_dir, ShmPublisher(tmp_path / "w", background=False))
    core = VllmCore(
        settings(policy_dir, directory=str(tmp_path)),
        receiver=ReceiverSettings("shm", learner.publisher.address),
    )
    engine = engine_of(core)
    sync = following(engine)

    async def scenario() -> None:
        for step, size in ((1, 0.0), (2, 1e-4), (3, 0.05)):
            await reaches(sync, learner.publish(step, size=size))
            assert (sync.arrival.checked, sync.arrival.failed) == (step, step - 1)

    try:
        RUNNER.run(asyncio.wait_for(scenario(), RESTART_S))
    finally:
        RUNNER.run(core.close())
        learner.publisher.close()


def test_adapters_are_merged_in_the_worker(tmp_path: Path) -> None:
    model = make_model("qwen3")
    path = save(model, tmp_path / "policy")
    learner = Learner(path, ShmPublisher(tmp_path / "w", background=False))
    lora.inject(learner.model, rank=4, alpha=8.0, targets=[], seed=0)
    receiver = ReceiverSettings("shm", learner.publisher.address, base=str(path), scale=2.0)
    core = VllmCore(settings(path, directory=str(tmp_path)), receiver=receiver)
    engine = engine_of(core)
    sync, prompt = following(engine), list(range(20))

    async def scenario() -> None:
        for step in (1, 2):
            weights = learner.publish(step)
            assert not any("embed" in name for name in learner.versions[weights])
            await reaches(sync, weights)
            learner.check(prompt, await engine.generate(request(prompt, f"{step}")))
        assert (sync.arrival.checked, sync.arrival.failed) == (2, 0)

    try:
        RUNNER.run(asyncio.wait_for(scenario(), RESTART_S))
    finally:
        RUNNER.run(core.close())
        learner.publisher.close()


def test_two_workers_receive_by_broadcast_and_no_file_holds_weights(
    broadcast: tuple[Learner, VllmEngine], place: Path
) -> None:
    learner, engine = broadcast
    sync, prompt = following(engine), list(range(20))

    async def scenario() -> None:
        first = learner.publish(1, retain=True)
        await reaches(sync, first)
        one = request(prompt, "a", max_tokens=200)
        running = asyncio.create_task(engine.generate(one))
        while engine.stats()["generated"] < 10:
            await asyncio.sleep(0)
        await reaches(sync, learner.publish(2))
        learner.check(prompt, await running)
        after = await engine.generate(request(prompt, "b"))
        assert set(after.weights) == {WeightId(lineage=1, step=2)}
        learner.check(prompt, after)
        sync.pinned = first  # as for an evaluation; the workers have it no longer
        await reaches(sync, first)
        learner.check(prompt, await engine.generate(request(prompt, "c")))
        sync.pinned = None
        await reaches(sync, WeightId(lineage=1, step=2))
        learner.check(prompt, await engine.generate(request(prompt, "d")))
        assert (sync.arrival.checked, sync.arrival.failed) == (4, 0)
        learner.publisher.release(first)

    RUNNER.run(asyncio.wait_for(scenario(), RESTART_S))
    files = [path for path in place.rglob("*") if path.is_file()]
    assert (
        max(path.stat().st_size for path in files)
        < SMALL
        < sum(tensor.nbytes for tensor in learner.versions[WeightId(lineage=1, step=1)].values())
    )


@pytest.mark.time_limit(1500)  # two or three starts of vLLM
def test_workers_and_learner_die_around_broadcasts_and_all_comes_back(
    broadcast: tuple[Learner, VllmEngine],
) -> None:
    learner, engine = broadcast
    sync, prompt = following(engine), list(range(20))

    async def publish(step: int, lineage: int = 1) -> WeightId:
        """Publish beside the engine; a lost receiver costs no more than deadline and roll call."""
        began = fair_time()
        weights = await asyncio.to_thread(learner.publish, step, lineage)
        await asyncio.to_thread(learner.publisher.wait)
        assert fair_time() - began < DEADLINE_S + ROLL_S + 2
        return weights

    async def scenario() -> None:
        await reaches(sync, await publish(3))
        for step, victim, busy in ((4, 0, True), (5, 1, False)):
            running = []
            if busy:
                running = [engine.generate(request(prompt, "a", max_tokens=200))]
            running = [asyncio.create_task(one) for one in running]
            sending = asyncio.create_task(publish(step))
            await asyncio.sleep(0.02 * (step - 2))
            workers()[victim].kill()
            weights = await sending
            for generation in running:
                learner.check(prompt, await generation)
            await reaches(sync, weights)  # idle engines are replaced as well
            learner.check(prompt, await engine.generate(request(prompt, f"{step}")))
        learner.publisher.close()
        learner.publisher = CollectivePublisher(
            learner.publisher.address, 1, deadline_s=DEADLINE_S, bucket_bytes=1 << 16
        )
        held = await engine.generate(request(prompt, "between"))
        learner.check(prompt, held)
        await reaches(sync, await publish(1, lineage=2))
        learner.check(prompt, await engine.generate(request(prompt, "last")))
        assert engine.core.restarts == 2 and sync.arrival.failed == 0

    RUNNER.run(asyncio.wait_for(scenario(), 2 * RESTART_S))
