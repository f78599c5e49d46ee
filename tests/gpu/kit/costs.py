"""What learner steps, their memory and publishing cost: `costs.py FOLDER` writes its figures there.

Where there is no GPU, a small model on the CPU goes the same way, and the exit code is 77.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from common import Figures, copy_rate, product_rate, synchronize
from gpu_models import HALF_BILLION, SMALL
from gpu_steps import SIZES, config_of, lengths_of, measure, write_policy
from ipc_memory import Files
from transformers import PretrainedConfig, Qwen2Config

from evolver_async.config.shape import shape_of
from evolver_async.memory.plan import memory_plan
from evolver_async.model.tokenizer import ModelError
from evolver_async.schema import WeightId
from evolver_async.weights.cuda_ipc import CudaMemory, IpcPublisher
from evolver_async.weights.shm import ShmPublisher

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LIMIT_S = float(os.environ.get("LIMIT_S", "540"))
PUBLISHED, VERSIONS = (3 << 30, 6) if GPU else (1 << 24, 6)
SHAPES: dict[str, PretrainedConfig] = {"tiny": SMALL}
if GPU:  # those of Qwen2.5
    SHAPES = {"0.5B": HALF_BILLION} | {
        name: Qwen2Config(
            vocab_size=151936,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
        for name, hidden, intermediate, layers, heads in (
            ("1.5B", 1536, 8960, 28, 12),
            ("3B", 2048, 11008, 36, 16),
        )
    }
LEARNERS = {
    "packed": {"packing": True},
    "packed, layers recomputed": {"packing": True, "gradient_checkpointing": True},
    "packed, inputs of layers offloaded": {
        "packing": True,
        "gradient_checkpointing": True,
        "offload_activations": True,
    },
}
COMPILED = {"packed, compiled": {"packing": True, "compile": True}}


def operations(shape: PretrainedConfig, parameters: int, lengths: list[int]) -> float:
    """Of a forward and backward pass: 6 a parameter and token, and those of causal attention, half
    of 12 a layer, dimension and pair of tokens (PaLM, appendix B)."""
    pairs = sum(length**2 for length in lengths)
    attention = 6 * shape.num_hidden_layers * shape.hidden_size * pairs
    return 6 * parameters * sum(lengths) + attention


def steps(
    name: str,
    shape: PretrainedConfig,
    directory: Path,
    peak: float,
    figure: Figures,
    learners: Mapping[str, dict[str, bool]],
) -> None:
    """Measure steps of a model: their rate, the share of the card's rate, and memory."""
    size = SIZES[DEVICE.type]
    policy = write_policy(shape, directory / name, DEVICE.type, size.dtype)
    lengths = lengths_of(size)
    for how, learner in learners.items():
        run_dir = directory / f"{name}-{how.replace(' ', '-')}"
        run_dir.mkdir()
        one = measure(DEVICE, policy, run_dir, **learner)
        figure(f"{name}, {how}: step", one.seconds, "s")
        figure(f"{name}, {how}: rate", sum(lengths) / one.seconds, "tokens/s")
        done = operations(shape, one.parameters, lengths)
        figure(f"{name}, {how}: of the peak rate (MFU)", done / one.seconds / peak, "")
        if GPU:
            config = config_of(DEVICE, policy, **learner)
            found = shape_of(config)
            plan = memory_plan(config, found, learner_gpu=True, actor_gpu=True)
            predicted = next(part.gpu for part in plan.processes if part.role == "learner")
            figure(f"{name}, {how}: peak memory", one.peak / 2**30, "GiB")
            figure(f"{name}, {how}: peak memory of doctor's", one.peak / predicted, "")
            figure(f"{name}, {how}: held", one.held, "bytes a parameter")


def publishing(directory: Path, figure: Figures) -> None:
    """Measure both channels beside a copy of the same bytes."""
    tensors = {
        f"matrix{number}": torch.zeros(PUBLISHED // 8 // 2, dtype=torch.bfloat16, device=DEVICE)
        for number in range(8)
    }
    size = sum(one.nbytes for one in tensors.values())
    copy = copy_rate(DEVICE, size) / 1e9
    figure("copy of the weights on the device", copy, "GB/s")
    memory = CudaMemory("cuda:0") if GPU else Files()
    ipc, shm = IpcPublisher(directory / "ipc", memory), ShmPublisher(str(directory / "shm"))
    for name, publisher in (("cuda_ipc", ipc), ("shm", shm)):
        spent = []
        for step in range(VERSIONS):
            start = time.perf_counter()
            publisher.publish(WeightId(lineage=1, step=step), tensors)
            synchronize()
            getattr(publisher, "wait", synchronize)()
            spent.append(time.perf_counter() - start)
        rate = size / min(spent) / 1e9
        figure(f"publish by {name}", rate, "GB/s")
        figure(f"publish by {name}, of the copy", rate / copy, "")
        publisher.close()


def main(folder: Path) -> int:
    figure, began = Figures(folder / "costs.jsonl"), time.monotonic()
    where = torch.cuda.get_device_name() if GPU else "the CPU"
    print(f"{where}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        publishing(Path(directory), figure)
        peak = product_rate(DEVICE, 8192 if GPU else 256)
        figure("bfloat16 product", peak / 1e12, "TFLOP/s")
        for name, shape in SHAPES.items():
            if time.monotonic() - began > LIMIT_S / 2:
                print(f"{name} is left out: half of {LIMIT_S:.0f} s are over")
                continue
            steps(name, shape, Path(directory), peak, figure, LEARNERS)
        if GPU and time.monotonic() - began < LIMIT_S / 2:  # compiling takes long
            try:
                steps("0.5B", HALF_BILLION, Path(directory), peak, figure, COMPILED)
            except ModelError as error:
                print(f"no compiled layers: {error}")
    print(f"figures are in {figure.path}")
    return 0 if GPU else 77


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
