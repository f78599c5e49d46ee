"""Load of adapters inside vLLM's processes: each update replaces the tensors of one adapter.

The adapter keeps its number and its place in the layers' stacked tensors, so running requests
continue under the new one, and captured CUDA graphs read it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

from actors.engines.vllm_weights import NoInfo, wipe
from evolver_async.model.lora import BASE

BACKEND = "evolver_adapter"


def register() -> None:
    """Register the backend."""
    WeightTransferEngineFactory.register_engine(BACKEND, AdapterTransfer)


@dataclass
class AdapterFile(WeightTransferUpdateInfo):
    """Safetensors file with adapters under the names of `policy.state_tensors`.

    `number`, `rank`, `alpha`: those of `vllm_lora.Adapter`; `wipe`: as in `WeightsFile`.
    """

    path: str
    wipe: bool
    number: int
    rank: int
    alpha: float


class AdapterTransfer(WeightTransferEngine[NoInfo, AdapterFile]):
    """Weight transfer that replaces the one adapter of this worker and leaves the base weights."""

    init_info_cls = NoInfo
    update_info_cls = AdapterFile

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing: the base weights stay."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: AdapterFile) -> None:
        with safe_open(update_info.path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if name != BASE]  # noqa: SIM118
            # Copies, because vLLM scales them in place.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        _replace(self.model, update_info, tensors)
        if update_info.wipe:
            wipe(self.vllm_config)

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing: no resources are held between updates."""


def _replace(model: Any, info: AdapterFile, tensors: dict[str, Tensor]) -> None:
    """Put an adapter in the place of the one before it; ValueError for unknown linears.

    `LoRAModelManager.activate_adapter` copies the tensors into the layers' stacked ones
    (`set_lora`), in this worker's part of them.
    """
    manager = model.lora_manager
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        info.number,
        {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()},
        PEFTHelper(r=info.rank, lora_alpha=info.alpha, target_modules=[]),  # pyright: ignore
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    parts = {part for packed in manager.packed_modules.values() for part in packed}
    for name in sorted(adapter.loras.keys() - manager.modules.keys() - parts):
        raise ValueError(
            f"policy.lora.targets: vLLM serves no adapter of {name}: name other linears, or set"
            " engine.merge_lora=true"
        )
    manager.remove_adapter(info.number)
    manager.add_adapter(adapter)
    manager.activate_adapter(info.number)
