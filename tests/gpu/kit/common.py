"""What the kit's calls share: figures that are on disk as they come, ceilings of a device."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

TIMES = 10


@dataclass(frozen=True)
class Figures:
    """Writer of a file: {name, value, unit} a line."""

    path: Path

    def __call__(self, name: str, value: float, unit: str) -> None:
        print(f"{name:<60} {value:>12.5g} {unit}", flush=True)
        with open(self.path, "a", encoding="utf-8") as out:
            out.write(json.dumps({"name": name, "value": value, "unit": unit}) + "\n")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    """Mean seconds of a call, after three."""
    for _ in range(3):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(TIMES):
        call()
    synchronize()
    return (time.perf_counter() - start) / TIMES


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes a second that a copy on the device writes."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return size / seconds(lambda: target.copy_(source))


def product_rate(device: torch.device, side: int) -> float:
    """Operations a second of a product of two square matrices in bfloat16."""
    one, other = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: one @ other)
