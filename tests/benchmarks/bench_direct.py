"""Weights from a learner into two workers of vLLM, beside a bare broadcast of the same bytes.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python tests/benchmarks/bench_direct.py --mb 500 --rounds 5

Rounds of both take turns, and the engine generates meanwhile. A transfer is everything from
`publish` to the last worker's confirmation that it has verified and committed the version. In every
second round the learner computes a forward and a backward pass meanwhile and then needs its weights
for itself: it is blocked for the call of `publish` and for what is left of the copy by then. The
pause is that of generation while the version is adopted. Memory is that of the actor's process.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.engine import Request
from actors.engines.vllm_core import VllmCore
from actors.engines.vllm_engine import VllmEngine
from actors.engines.vllm_start import Settings
from evolver_async.model.policy import state_tensors
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import WeightId
from evolver_async.weights import probe
from evolver_async.weights.ends import ReceiverSettings

MIB, LENGTH = 1 << 20, 256
TIMEOUT = timedelta(seconds=300)
LEARNER = "learner"


def make_model(megabytes: int) -> Any:
    """A Llama of about so many bytes in float32, wide rather than deep."""
    hidden, inner, layers = 1024, 2816, 1
    per_layer = 4 * (4 * hidden * hidden + 3 * hidden * inner)
    layers = max(1, round(megabytes * 1e6 / per_layer))
    tokenizer = make_tokenizer(LENGTH)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=LENGTH,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


def bare_group(store: TCPStore, rank: int) -> Any:
    return ProcessGroupGloo(PrefixStore("bare/", store), rank, 3, TIMEOUT)


def bare(group: Any, bytes_N: Tensor) -> float:
    """Seconds of a broadcast and of everybody's word that it is there."""
    began = time.perf_counter()
    group.broadcast(bytes_N, root=0).wait()
    group.allreduce([torch.zeros(1)]).wait()
    return time.perf_counter() - began


def receive(port: int, rank: int, size: int, over: Event) -> None:
    """A bare receiver; rounds go on until the sender says that there is none left."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    group, number = bare_group(store, rank), 0
    bytes_N = torch.zeros(size, dtype=torch.uint8)
    while not over.is_set():
        if store.check([f"round/{number}"]):
            bare(group, bytes_N)
            number += 1
        time.sleep(0.001)


def learn(path: str, address: str, pipe: Any) -> None:
    """The learner: publishes when told, and answers with the seconds."""
    from evolver_async.model.policy import load_model
    from evolver_async.weights.collective.channel import CollectivePublisher

    torch.set_num_threads(1)
    model = load_model(path, dtype="float32", device="cpu")
    publisher = CollectivePublisher(address)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    group = bare_group(store, 0)
    tensors = state_tensors(model)
    bytes_N = torch.zeros(sum(one.nbytes for one in tensors.values()), dtype=torch.uint8)
    number = 0
    text = probe.write(model, 0, LENGTH, packed=False)
    tokens_1T = torch.zeros(1, LENGTH, dtype=torch.long)
    while (step := pipe.recv()) is not None:
        with torch.no_grad():
            for one in tensors.values():
                one.add_(1e-4)
        began = time.perf_counter()
        measured = probe.measure(model, text, packed=False)
        probed = time.perf_counter() - began
        store.set(f"round/{number}", "")
        number += 1
        seconds = {"bare": bare(group, bytes_N), "probe": probed}
        began = time.perf_counter()
        publisher.publish(WeightId(lineage=1, step=step), probe.add(tensors, measured))
        seconds["call"] = time.perf_counter() - began
        if step % 2:
            model(input_ids=tokens_1T).logits.sum().backward()
            model.zero_grad()
            waited = time.perf_counter()
            publisher.copied()
            seconds["blocked"] = seconds["call"] + time.perf_counter() - waited
            publisher.wait()
            del seconds["bare"]
        else:
            publisher.wait()
            seconds["transfer"] = time.perf_counter() - began
        pipe.send(seconds)
    publisher.close()


def own_memory() -> int:
    """Bytes of this process that it shares with no other."""
    return psutil.Process().memory_full_info().uss


async def generate(engine: VllmEngine, over: asyncio.Event) -> None:
    """Keep two sequences running."""

    async def one(name: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            await engine.generate(
                Request(
                    tokens=list(range(8)),
                    max_tokens=64,
                    temperature=1.0,
                    session=f"{name}",
                    seed=turn,
                )
            )

    await asyncio.gather(one(0), one(1))


async def rounds(engine: VllmEngine, pipe: Any, count: int) -> dict[str, list[float]]:
    """Seconds by name of each round after the first, and growth of this process in bytes."""
    found: dict[str, list[float]] = {}
    over, peak = asyncio.Event(), [0]
    before = 0
    running: asyncio.Task[None] | None = None

    async def watch() -> None:
        while True:
            peak[0] = max(peak[0], own_memory())
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    for step in range(count + 1):
        weights = WeightId(lineage=1, step=step)
        await asyncio.to_thread(pipe.send, step)
        seconds = await asyncio.to_thread(pipe.recv)
        while engine.head() != weights:
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        carried = await engine.stage(weights)
        seconds["stage"] = time.perf_counter() - began
        await engine.adopt(weights)
        seconds["pause"] = engine.core.pause_s
        assert carried is not None
        began = time.perf_counter()
        scored = await engine.score(carried.tokens)
        seconds["score"] = time.perf_counter() - began
        assert probe.fault(probe.ScoredProbe(carried, scored), None, "float32") == ""
        if step == 0:
            running = asyncio.create_task(generate(engine, over))
            before = peak[0] = own_memory()
            continue
        for name, value in seconds.items():
            found.setdefault(name, []).append(value)
    watching.cancel()
    over.set()
    if running is not None:
        await running
    found["memory"] = [float(peak[0] - before)]
    return found


async def measure(path: Path, directory: str, pipe: Any, count: int) -> dict[str, list[float]]:
    settings = Settings(
        path=str(path),
        dtype="float32",
        directory=directory,
        slots=4,
        max_length=LENGTH,
        prefill_tokens=LENGTH,
        tensor_parallel=2,
    )
    channel = ReceiverSettings("collective", f"{directory}/w")
    core = VllmCore(settings, receiver=channel, name="actor-0")
    engine = VllmEngine(
        core, vocabulary=core.vocabulary, slots=4, max_length=LENGTH, in_flight="keep"
    )
    try:
        return await rounds(engine, pipe, count)
    finally:
        await engine.close()


def report(found: dict[str, list[float]], size: int) -> None:
    best = {name: min(values) for name, values in found.items()}
    median = {name: statistics.median(values) for name, values in found.items()}

    def rate(seconds: float) -> str:
        return f"{size / seconds / 1e9:.2f}"

    shares = [one / other for one, other in zip(found["bare"], found["transfer"], strict=True)]
    print(f"{size / 1e6:.0f} MB to two workers of vLLM; best and median of {len(shares)} rounds")
    for name in ("bare", "transfer"):
        print(f"  {name}: {rate(best[name])}, {rate(median[name])} GB/s")
    best_share = best["bare"] / best["transfer"]
    print(
        f"  transfer / bare: {best_share:.0%} of the bests,"
        f" {statistics.median(shares):.0%} median of the rounds' (wanted 70 %)"
    )
    print(
        f"  learner blocked: {1e3 * best['blocked']:.0f}, {1e3 * median['blocked']:.0f} ms,"
        f" in the call alone {1e3 * best['call']:.0f}, {1e3 * median['call']:.0f} ms;"
        f" of the transfer {median['blocked'] / median['transfer']:.0%} (wanted 5 %)"
    )
    for name in ("stage", "pause", "probe", "score"):
        print(f"  {name}: {1e3 * best[name]:.0f}, {1e3 * median[name]:.0f} ms")
    print(f"  the actor's own memory grew by {found['memory'][0] / MIB:.1f} MiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-direct-", dir="/dev/shm") as directory:
        path = Path(directory) / "policy"
        model, tokenizer = make_model(args.mb)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        size = sum(one.nbytes for one in state_tensors(model).values())
        del model
        pipe, theirs = context.Pipe()
        over = context.Event()
        learner = context.Process(
            target=learn, args=(str(path), f"{directory}/w", theirs), name=LEARNER
        )
        learner.start()
        port = pipe.recv()
        receivers = [
            context.Process(target=receive, args=(port, rank, size, over)) for rank in (1, 2)
        ]
        for one in receivers:
            one.start()
        found = asyncio.run(measure(path, directory, pipe, 2 * args.rounds))
        pipe.send(None)
        over.set()
        for one in (learner, *receivers):
            one.join()
    report(found, size)


if __name__ == "__main__":
    main()
