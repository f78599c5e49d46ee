"""Memory that vLLM's workers take for a publish, and its speed beside a bare broadcast.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python tests/benchmarks/bench_vllm_weights.py --mib 480

Two workers share a model (tensor parallel) and receive each version over gloo. Memory is anonymous
memory: before the first publish, at its peak, and when all is adopted. In the middle of the rounds
the engine goes back to a version before the newest, as for an evaluation. A publish lasts from the
call to the last worker's confirmation; the bare broadcast of `bench_weights` is its comparison.
"""

import argparse
import asyncio
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from bench_weights import MIB
from bench_weights import measure as measure_bare
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.vllm_core import VllmCore
from actors.engines.vllm_start import Settings
from evolver_async.model.policy import state_tensors
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import WeightId
from evolver_async.weights.collective.channel import CollectivePublisher
from evolver_async.weights.ends import ReceiverSettings

HIDDEN, INNER, LENGTH, WORKERS = 768, 3072, 256, 2
LAYER_BYTES = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
SAMPLE_S = 0.002


def anonymous(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) << 10


class Peaks:
    """Anonymous memory of the workers, sampled by a thread until `end`."""

    def __init__(self) -> None:
        below = psutil.Process().children(recursive=True)
        self.workers = [one for one in below if "VLLM::Worker" in " ".join(one.cmdline())]
        assert len(self.workers) == WORKERS
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def now(self) -> int:
        return max(map(anonymous, self.workers))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.peak = max(self.peak, self.now())


async def reach(core: VllmCore, weights: WeightId) -> None:
    while weights not in core.available():
        await asyncio.sleep(SAMPLE_S)
    await core.stage(weights)
    await core.adopt(weights)


async def rounds_of(
    core: VllmCore, publisher: CollectivePublisher, weights: dict[str, torch.Tensor], rounds: int
) -> tuple[dict[str, int], list[float]]:
    """Publish and adopt; return bytes by moment, and seconds of each publish but the first."""
    await core.ready()
    peaks = Peaks()
    held, seconds, retained = {"started": peaks.now()}, [], WeightId(lineage=1, step=rounds // 2)
    for step in range(rounds + 1):
        version, began = WeightId(lineage=1, step=step), time.perf_counter()
        await asyncio.to_thread(publisher.publish, version, weights, version == retained)
        await asyncio.to_thread(publisher.wait)
        seconds.append(time.perf_counter() - began)
        await reach(core, version)
        if version.step == 1:
            held |= {"adopted": peaks.now(), "peak without an evaluation": peaks.peak}
        if version.step == retained.step + 1:
            await reach(core, retained)
            publisher.release(retained)
            await reach(core, version)
    held |= {"adopted, after an evaluation": peaks.now(), "peak": peaks.peak}
    peaks.end()
    return held, seconds[1:]


def lines(held: dict[str, int], seconds: list[float], size: int) -> Iterable[str]:
    yield f"a version: {size / MIB:.0f} MiB; anonymous memory of the larger worker, in MiB:"
    for name, value in held.items():
        more = (value - held["started"]) / size
        yield f"  {name}: {value / MIB:.0f} (+{more:.2f} versions)"
    speeds = [size / 1e9 / one for one in (statistics.median(seconds), min(seconds))]
    yield f"publish: median {speeds[0]:.2f} GB/s, best {speeds[1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(LENGTH)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=round(args.mib * MIB / LAYER_BYTES),
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=LENGTH,
    )
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as directory:
        model, address = LlamaForCausalLM(config), f"{directory}/w"
        weights = state_tensors(model)
        size = sum(tensor.nbytes for tensor in weights.values())
        model.save_pretrained(f"{directory}/model")
        tokenizer.save_pretrained(f"{directory}/model")
        publisher = CollectivePublisher(address, keep=1)
        settings = Settings(
            path=f"{directory}/model",
            dtype="float32",
            directory=directory,
            max_length=LENGTH,
            slots=8,
            prefill_tokens=64,
            tensor_parallel=WORKERS,
        )
        core = VllmCore(settings, receiver=ReceiverSettings("collective", address, keep=1))

        async def scenario() -> tuple[dict[str, int], list[float]]:
            found = await rounds_of(core, publisher, weights, args.rounds)
            await core.close()
            return found

        held, seconds = asyncio.run(scenario())
        publisher.close()
        for line in lines(held, seconds, size):
            Console().print(line)
        bare = measure_bare(f"{directory}/bare", round(size / MIB), WORKERS, args.rounds, 64)
        median, best = (size / 1e9 / bare[f"bare_{name}"] for name in ("median", "best"))
        Console().print(f"bare broadcast: median {median:.2f} GB/s, best {best:.2f}")


if __name__ == "__main__":
    main()
