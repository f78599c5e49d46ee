"""The vLLM engine keeps what `engine_conformance` asks, and outlives vLLM.

All tests on one architecture share vLLM's processes: starting them takes longer than all the rest.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from engine_conformance import CONFORMANCE, RUNNER, V0, V1, V2, Setting, request, setting
from launches import alive, wait_for
from vllm_engines import TOKENIZER, engine_of, lend, make_model, save, settings

from actors.engines import vllm_options
from actors.engines.engine import Generation
from actors.engines.vllm_core import EngineDied, VllmCore
from actors.engines.vllm_engine import VllmEngine
from actors.engines.vllm_usage import EngineUsage
from evolver_async.config import ConfigError
from evolver_async.memory.vllm_limits import CPU_BLOCK
from evolver_async.model.policy import ModelError
from evolver_async.process import segments
from evolver_async.process.private_directories import PREFIX, claim
from evolver_async.weights.channel.interface import WeightsCorrupt, WeightsGone
from evolver_async.weights.shm import ShmPublisher

pytestmark = pytest.mark.vllm
RESTART_S = 300  # starting takes half a minute, and four times that on a machine with other work


def processes(title: str) -> list[psutil.Process]:
    """Living processes below this one that call themselves so."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            if title in " ".join(one.cmdline()):
                found.append(one)
    return found


def start(directory: Path, name: str, **changes) -> Iterator[Setting]:
    model = make_model(name).eval()
    core = VllmCore(settings(save(model, directory), **changes))
    yield setting(lend(core), model, TOKENIZER, CPU_BLOCK)
    below, mapped = processes("VLLM::"), segments.mapped_below(os.getpid())
    RUNNER.run(core.close())
    wait_for(lambda: not any(map(alive, below)), "vLLM's processes to end")
    assert not [one for one in mapped if (segments.SHARED / one).exists()]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    yield from start(tmp_path_factory.mktemp("qwen2"), "qwen2_tied_grouped", restarts=2)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Over two processes, each with half of every layer."""
    yield from start(tmp_path_factory.mktemp("llama"), "llama", tensor_parallel=2)


@pytest.mark.parametrize("promise", CONFORMANCE, ids=lambda promise: promise.__name__)
def test_conformance(promise, tied: Setting) -> None:
    promise(tied)


def core_of(s: Setting) -> VllmCore:
    return s.engine().core  # pyright: ignore[reportAttributeAccessIssue]


def published(core: VllmCore) -> ShmPublisher:
    assert core.publisher is not None
    return core.publisher


def workers() -> list[psutil.Process]:
    """vLLM's processes that hold a part of the model, all below this one."""
    return processes("VLLM::Worker")


def test_what_cannot_start_leaves_no_directory(tmp_path: Path) -> None:
    claim(tmp_path / f"{PREFIX}engine-of-a-killed-actor").release()
    path = save(make_model("llama"), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"engine\.device"):
        VllmCore(settings(path, directory=str(tmp_path), device="cuda"))
    assert [one.name for one in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ("tensor_parallel", ConfigError, r"^engine\.kind: vllm refuses .* heads .* size \(3\)\.$"),
        (
            "kv_cache_bytes",
            RuntimeError,
            r"^vLLM's processes have failed: ValueError: .* cache blocks",
        ),
    ],
)
def test_a_start_that_fails_gives_vllms_reason(
    tmp_path: Path, change: str, kind: type[Exception], said: str
) -> None:
    path = save(make_model("llama"), tmp_path / "policy")
    with pytest.raises(kind, match=said):
        VllmCore(settings(path, directory=str(tmp_path), **{change: 3}))


def test_the_end_of_the_process_that_inspects_a_model_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be killed for want of memory: the actor is to be started again."""
    from vllm.model_executor.models import registry  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["sh", "-c", "kill -9 $$"])
    registry._try_inspect_model_cls.cache_clear()
    path = save(make_model("llama"), tmp_path / "policy")
    try:
        with pytest.raises(RuntimeError, match="failed to be inspected"):
            VllmCore(settings(path, directory=str(tmp_path)))
    finally:
        registry._try_inspect_model_cls.cache_clear()


def test_the_options_that_are_told_apart_are_options_of_vllm() -> None:
    """Another version could name them otherwise, and would then take what is refused here."""
    known = vllm_options.known_options()
    assert not {*vllm_options.OURS, *vllm_options.REFUSED, *vllm_options.INEXACT} - known


def test_busy_seconds_count_while_generations_run() -> None:
    async def scenario(engine: VllmEngine) -> None:
        async with engine._admission():
            await asyncio.sleep(0.01)
            assert (running := engine.stats()["busy_s"]) >= 0.01
        assert (ended := engine.stats()["busy_s"]) >= running
        await asyncio.sleep(0.01)
        assert engine.stats()["busy_s"] == ended

    core = SimpleNamespace(paused_s=0.0, restarts=0, usage=EngineUsage())
    engine = VllmEngine(core, vocabulary=8, slots=2, max_length=8, in_flight="keep")  # pyright: ignore[reportArgumentType]
    asyncio.run(scenario(engine))


def test_an_update_holds_generations_up_for_a_moment_only(tied: Setting) -> None:
    core = core_of(tied)
    pauses = []
    for version in (V1, V2, V1, V2, V1):
        RUNNER.run(engine_of(core).update(version, tied.versions[version]))
        pauses.append(core.pause_s)
    assert min(pauses) <= 0.1, f"the machine may be busy, but not in all of {pauses}"


def test_an_update_whose_caller_is_cancelled_is_made_to_its_end(tied: Setting) -> None:
    engine, one = engine_of(core_of(tied)), request(tied.prompt(20, 0), "a")

    async def scenario() -> Generation:
        published(engine.core).publish(V1, tied.versions[V1])
        await engine.stage(V1)
        task = asyncio.create_task(engine.adopt(V1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        while engine.weights != V1:
            await asyncio.sleep(0.01)
        return await engine.generate(one)

    out = RUNNER.run(asyncio.wait_for(scenario(), 60))
    assert set(out.weights) == {V1}
    tied.check(one, out)


def test_a_death_is_survived_with_the_newest_weights(tied: Setting) -> None:
    """The worker is killed while it generates: the same tokens come, from another process."""
    engine, one = engine_of(core_of(tied)), request(tied.prompt(20, 0), "a", max_tokens=200)

    async def scenario() -> tuple[Generation, Generation]:
        await engine.update(V2, tied.versions[V2])
        expected = await engine.generate(one)
        running = asyncio.create_task(engine.generate(one))
        sampled = engine.stats()["generated"]
        while engine.stats()["generated"] < sampled + 10:
            await asyncio.sleep(0)
        workers()[0].kill()
        return expected, await running

    mapped = segments.mapped_below(os.getpid())
    expected, out = RUNNER.run(asyncio.wait_for(scenario(), RESTART_S))
    assert engine.core.restarts == 1 and engine.weights == V2
    assert not [one for one in mapped if (segments.SHARED / one).exists()]
    assert out.tokens == expected.tokens and set(out.weights) == {V2}
    tied.check(one, out)


def test_weights_that_cannot_be_staged_leave_the_workers_alone(tied: Setting) -> None:
    core = core_of(tied)
    engine, one = engine_of(core), request(tied.prompt(20, 0), "a")
    before = core.restarts

    async def scenario() -> Generation:
        published(core).publish(V1, tied.versions[V1])
        path = Path(published(core).address) / f"weights-{V1}"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(WeightsCorrupt, match=r"weights-1\.1"):
            await engine.stage(V1)
        with pytest.raises(WeightsGone, match=r"1\.2"):
            await engine.stage(V2)
        return await engine.generate(one)

    out = RUNNER.run(asyncio.wait_for(scenario(), 60))
    assert set(out.weights) == {V0} and core.restarts == before
    tied.check(one, out)


def test_a_worker_that_fails_to_adopt_is_not_trusted(tied: Setting) -> None:
    """The second of the restarts allowed: the worker has not what it is to adopt."""
    core = core_of(tied)
    engine, one = engine_of(core), request(tied.prompt(20, 0), "a")

    async def scenario() -> Generation:
        published(core).publish(V1, tied.versions[V1])
        await engine.stage(V1)
        core._staged = await core.ready(), 1 << 40, V1
        with pytest.raises(ModelError, match=r"1\.1"):
            await engine.adopt(V1)
        assert engine.weights == V0
        return await engine.generate(one)

    out = RUNNER.run(asyncio.wait_for(scenario(), RESTART_S))
    assert core.restarts == 2
    tied.check(one, out)


def test_a_death_too_many_ends_the_engine(tied: Setting) -> None:
    engine, one = engine_of(core_of(tied)), request(tied.prompt(20, 0), "a")

    async def scenario() -> None:
        workers()[0].kill()
        with pytest.raises(EngineDied, match=r"engine\.restarts"):
            await engine.generate(one)

    RUNNER.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(
    "promise",
    [one for one in CONFORMANCE if "turns" in one.__name__ or "keeps" in one.__name__],
    ids=lambda promise: promise.__name__,
)
def test_conformance_over_two_processes(promise, spread: Setting) -> None:
    assert len(workers()) == 2 and segments.mapped_below(os.getpid())
    promise(spread)
