"""Adapter of a run as vLLM serves it: unmerged, on the base weights of the policy directory.

An adapter has the name of its run, so that vLLM never mixes those of several runs on one base
model. All but `AdapterWorker` runs in the actor.
"""

import logging
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from transformers import AutoConfig

from evolver_async.config import Config
from evolver_async.model.lora import BASE

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's MaxLoRARanks
NUMBERS = (1 << 31) - 1  # vLLM keeps the number of an adapter in a signed integer, from 1


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Name, rank and alpha of an adapter; `targets`: see `policy.lora.targets`."""

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """The number by which vLLM finds the adapter; it follows from the name."""
        return 1 + zlib.crc32(self.name.encode()) % NUMBERS

    def arguments(self) -> dict[str, Any]:
        """Return the engine arguments under which vLLM serves this adapter and no other."""
        rank = min(one for one in RANKS if one >= self.rank)
        return {
            "enable_lora": True,
            "max_lora_rank": rank,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "worker_extension_cls": f"{__name__}.{AdapterWorker.__name__}",
        }

    def request(self) -> "LoRARequest":
        """Return what addresses a request to the adapter.

        vLLM reads no file: its workers have the adapter from an update, under the same number.
        """
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        return LoRARequest(self.name, self.number, lora_path=f"in memory: {self.name}")


def adapter_of(config: Config) -> Adapter | None:
    """Return the adapter that vLLM serves unmerged; None if updates bring whole weights."""
    settings = config.policy.lora
    if not settings.rank or config.engine.merge_lora:
        return None
    problem = _problem(config.policy.path, settings.rank)
    if problem:
        log.warning("policy.lora: %s, so adapters are merged into whole weights", problem)
        return None
    return Adapter(
        name=config.run.name or "policy",
        rank=settings.rank,
        alpha=settings.alpha,
        targets=tuple(settings.targets),
    )


def _problem(path: str, rank: int) -> str:
    """Return why vLLM cannot serve adapters of this model and rank; "" if it can."""
    from vllm.model_executor.models import (  # pyright: ignore[reportMissingImports]
        ModelRegistry,
        supports_lora,
    )

    if rank > RANKS[-1]:
        return f"vLLM serves adapters of rank {RANKS[-1]} at most, not {rank}"
    architectures = AutoConfig.from_pretrained(path, local_files_only=True).architectures or []
    for name in architectures:
        model = ModelRegistry._try_load_model_cls(name)
        if model is not None and not supports_lora(model):
            return f"vLLM serves no adapters on {name}"
    return ""


class AdapterWorker:
    """Extension of vLLM's worker, in its process: each update replaces the one adapter's tensors.

    The adapter keeps its number and its place in the layers' stacked tensors, so running requests
    continue under the new one, and captured CUDA graphs read it. This is not a
    `WeightTransferEngine`, because after each of its updates vLLM removes all adapters
    (`Worker.finish_weight_update`).
    """

    vllm_config: Any
    model_runner: Any

    def replace_adapter(self, path: str, wiped: bool, number: int, rank: int, alpha: float) -> None:
        """Put an adapter in the place of the one before it; ValueError for unknown linears.

        `path`: safetensors file with the tensors under the names of `policy.state_tensors`;
        `wiped`: see `vllm_weights.WeightsFile`; `number`, `rank`, `alpha`: those of
        `vllm_lora.Adapter`.

        `LoRAModelManager.activate_adapter` copies this worker's part of the tensors into the
        layers' stacked ones, in place.
        """
        from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
        from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

        from actors.engines.vllm_weights import wipe

        with safe_open(path, framework="pt", device="cpu") as file:
            # Copies, because vLLM scales them in place.
            tensors = {
                f"base_model.model.{name}.weight": file.get_tensor(name).clone()
                for name in file.keys()  # noqa: SIM118
                if name != BASE
            }
        model = self.model_runner.get_model()
        manager = model.lora_manager
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            number,
            tensors,
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),  # pyright: ignore
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        parts = {part for packed in manager.packed_modules.values() for part in packed}
        for name in sorted(adapter.loras.keys() - manager.modules.keys() - parts):
            raise ValueError(
                f"policy.lora.targets: vLLM serves no adapter of {name}: name other linears, or"
                " set engine.merge_lora=true"
            )
        manager.remove_adapter(number)
        manager.add_adapter(adapter)
        manager.activate_adapter(number)
        if wiped:
            wipe(self.vllm_config)
