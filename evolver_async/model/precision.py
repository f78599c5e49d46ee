"""Precision of a policy: the meaning of `policy.dtype` on a device, and the choice of `auto`.

On a GPU bfloat16 is the type of weights and activations. On a CPU weights stay float32, as do
logits, norms, rotations, attention and the optimizer; the products of the decoder's linear maps are
in bfloat16 (`products.ShortLinear`). Mixtures of experts without linear modules stay float32.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from evolver_async.model.cpu.products import SHORT, shorten
from evolver_async.model.policy import load_model, split_model

FASTER = 1.5  # times as fast as float32 from which bfloat16 pays for what it rounds
DECODED_ROWS, LEARNED_ROWS = (16, 64), (1024,)  # of the products that are timed
MOST_NUMBERS = 1 << 29  # products of numbers of one timed call: larger layers get fewer rows
ROUNDS = 3


def on_gpu(device: str) -> bool:
    """True if a device (auto, cpu, cuda, cuda:N) means a GPU in this process."""
    return "cuda" in device or (device == "auto" and torch.cuda.is_available())


def stored_dtype(dtype: str, device: str) -> str:
    """Return the type of the weights of a policy of type `dtype` in the memory of a device."""
    return dtype if on_gpu(device) else "float32"


def load_policy(
    directory: str | Path, *, dtype: str, device: str, sharded: bool = False
) -> PreTrainedModel:
    """Load the model of a run in the precision that `dtype`, decided, means on a device.

    `sharded`: it is loaded to be sharded over ranks, which cast whole layers, on a CPU, too.
    ModelError as in `load_model`.
    """
    stored = dtype if sharded else stored_dtype(dtype, device)
    model = load_model(directory, dtype=stored, device=device)
    if stored != dtype:
        shorten(split_model(model)[0])
    return model


def gains(model: PreTrainedModel) -> tuple[float, float]:
    """Time the products of a decoder's layer in float32 and bfloat16, on one thread of this CPU.

    Return how many times as fast bfloat16 is with the rows of a decoding step, and of a training
    pass; the latter is 0, unmeasured, if decoding does not gain enough: where bfloat16 has no
    instructions a training pass of it takes seconds.
    """
    decoder, _ = split_model(model)
    shapes = {
        tuple(one.weight.shape)
        for one in decoder.modules()
        if isinstance(one, torch.nn.Linear) and one.weight.ndim == 2
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        decoding = _gain(shapes, DECODED_ROWS)
        return decoding, _gain(shapes, LEARNED_ROWS) if decoding >= FASTER else 0.0
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _gain(shapes: set[tuple[int, ...]], rows: tuple[int, ...]) -> float:
    """Return the time of all products in float32 over that in bfloat16, casts included."""
    exact_s = short_s = 0.0
    for outputs, inputs in shapes:
        weight_OI = torch.randn(outputs, inputs)
        rounded_OI = weight_OI.to(SHORT)
        for count in rows:
            x_NI = torch.randn(max(1, min(count, MOST_NUMBERS // weight_OI.numel())), inputs)
            exact_s += _fastest(lambda x=x_NI, w=weight_OI: F.linear(x, w))
            short_s += _fastest(lambda x=x_NI, w=rounded_OI: F.linear(x.to(SHORT), w).float())
    return exact_s / short_s if short_s else 0.0


def _fastest(compute: Callable[[], Tensor]) -> float:
    """Return the least seconds of a few calls behind a first one."""
    compute()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Time a block: what is yielded returns its seconds, afterwards.

    These are of the processor if one thread computes, which other programs disturb less.
    """
    start, worked = time.perf_counter(), time.process_time()
    passed = list[float]()
    yield lambda: passed[0]
    passed.append(min(time.perf_counter() - start, time.process_time() - worked))
