"""Plugin inside vLLM's processes: loads new weights and ends the process with the actor.

vLLM calls `register` in each of its processes, as pyproject.toml names it as a plugin. `vllm_core`
is its counterpart in the actor.
"""

import os
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "evolver_snapshot"
OWNER = "EVOLVER_ENGINE_OWNER"  # environment variable with the actor's process id


def register() -> None:
    """Register the backend, and end this process with its owner if it has one."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SnapshotTransfer)
    owner = int(os.environ.get(OWNER, 0))
    if owner not in (0, os.getpid()):
        threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()


def _end_with(owner: int) -> None:
    """Kill this process when `owner` has ended."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        pass
    else:
        select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class NoInfo(WeightTransferInitInfo):
    """Empty: the backend needs no initialisation."""


@dataclass
class WeightsFile(WeightTransferUpdateInfo):
    """Safetensors file with all weights under the names of the Hugging Face model.

    `wipe`: True if the previous weights were broken. Then the KV cache is overwritten, because
    attention multiplies masked positions by 0, and NaN times 0 is NaN.
    """

    path: str
    wipe: bool


class SnapshotTransfer(WeightTransferEngine[NoInfo, WeightsFile]):
    """Weight transfer that loads a file into this worker's part of the model, in place.

    The file is memory-mapped: a tensor-parallel worker reads only its own part.
    """

    init_info_cls = NoInfo
    update_info_cls = WeightsFile

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: WeightsFile) -> None:
        with safe_open(update_info.path, framework="pt", device="cpu") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        if update_info.wipe:
            wipe(self.vllm_config)

    def finish_weight_update(self) -> None:
        # `_layerwise_process` in vllm/model_executor/model_loader/reload/layerwise.py copies the
        # new weights into the tensors that the layers had before (`_copy_and_restore_kernel_
        # tensors`), so captured CUDA graphs, which hold their addresses, read the new weights.
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPU a layer uses a packed copy of its weights. A head that shares the embedding's
        # weights was not loaded itself, so its copy must be refreshed.
        for module in self.model.modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Do nothing: no resources are held between updates."""


@torch.inference_mode()
def wipe(vllm_config: Any) -> None:
    """Overwrite the KV cache of this worker with zeros."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)  # layers of experts have none
        if isinstance(cache, torch.Tensor):
            cache.zero_()
