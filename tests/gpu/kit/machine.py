"""What this machine is and reaches: `machine.py FOLDER` writes its figures, and exits with 77 if
there is no GPU."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import Figures, copy_rate, product_rate


def main(folder: Path) -> int:
    """Measure the ceilings that other figures are shares of; reduce among one rank by NCCL."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or "the CPU alone"
        print(f"there is no GPU: torch {torch.__version__}, built for {built}, sees none")
        return 77
    figure, card = Figures(folder / "machine.jsonl"), torch.device("cuda")
    about = torch.cuda.get_device_properties(0)
    print(f"{about.name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    figure("memory of the card", about.total_memory / 2**30, "GiB")
    figure("copy on the card, read and written", 2 * copy_rate(card, 4 << 30) / 1e9, "GB/s")
    figure("bfloat16 product", product_rate(card, 8192) / 1e12, "TFLOP/s")
    store = dist.FileStore(str(folder / "nccl-store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    reduced = torch.ones(1 << 20, device=card)
    dist.all_reduce(reduced)
    assert bool((reduced == 1).all())
    dist.destroy_process_group()
    print("NCCL", torch.cuda.nccl.version(), "reduces among one rank")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
