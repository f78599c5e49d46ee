"""Plugin inside vLLM's processes: receives and adopts weights, and ends the process with its actor.

vLLM calls `register` in each of its processes, as pyproject.toml names it as a plugin. Every worker
has an end of the weight channel (`vllm_channel`). `vllm_core` is its counterpart in the actor.
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig
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

from actors.engines import vllm_grammar
from actors.engines.vllm_failures import FailureFile
from actors.engines.vllm_lora import ADAPTER, Adapter, AdapterLoader
from actors.weights.vllm_channel import StagingThread, WorkerChannel
from actors.weights.vllm_shadow import ShadowModel
from evolver_async.model.policy import check_shapes, weight_shapes
from evolver_async.process import segments

BACKEND = "evolver_channel"
OWNER = "EVOLVER_ENGINE_OWNER"  # environment variable with the actor's process id
CHANNEL = "EVOLVER_ENGINE_CHANNEL"  # environment variable with a WorkerChannel


def register() -> None:
    """Register the backend, and that of structured output.

    If this process has an owner, keep its first error, and end with it.
    """
    vllm_grammar.install()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChannelTransfer)
    owner = int(os.environ.get(OWNER, 0))
    if owner not in (0, os.getpid()):
        logging.getLogger("vllm").addHandler(FailureFile(Path(_channel().states)))
        threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()


def _channel() -> WorkerChannel:
    return msgspec.json.decode(os.environ[CHANNEL], type=WorkerChannel)


def _end_with(owner: int) -> None:
    """Kill this process when `owner` has ended; nothing else removes its shared memory then."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        pass
    else:
        select.select([descriptor], [], [])
    segments.remove(segments.mapped(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class NoInfo(WeightTransferInitInfo):
    """Empty: the channel is known when the worker starts."""


@dataclass
class StagedWeights(WeightTransferUpdateInfo):
    """Number of the request by which the weights to adopt were staged.

    `wipe`: True if the previous weights were broken. Then the KV cache is overwritten, because
    attention multiplies masked positions by 0, and NaN times 0 is NaN.
    """

    request: int
    wipe: bool


class WorkerExtension:
    """Methods that vLLM adds to its workers, to be called by the actor."""

    weight_transfer_engine: "ChannelTransfer"

    def open_channel(self) -> None:
        """Join the weight channel."""
        self.weight_transfer_engine.join()

    def stage_weights(self, request: int, weights: str) -> None:
        """Begin to stage a version; the worker's state tells the end."""
        self.weight_transfer_engine.staging.stage(request, weights)

    def adopt_adapter(self, request: int, wipe: bool) -> None:
        """Adopt a staged adapter.

        Not by an update of the `WeightTransferEngine`, because after each of those vLLM removes all
        adapters (`Worker.finish_weight_update`).
        """
        self.weight_transfer_engine.receive_weights(StagedWeights(request, wipe))


class ChannelTransfer(WeightTransferEngine[NoInfo, StagedWeights]):
    """Weight transfer whose receiver lives in this worker.

    It joins when the actor asks, which is behind the capture of CUDA graphs: calls of CUDA by the
    receiver's threads would end that.
    """

    init_info_cls = NoInfo
    update_info_cls = StagedWeights

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        path = vllm_config.model_config.model
        self._shapes = weight_shapes(AutoConfig.from_pretrained(path, local_files_only=True))
        adapter = msgspec.json.decode(os.environ[ADAPTER], type=Adapter | None)
        self._adapters = AdapterLoader(adapter, path, self._shapes, model) if adapter else None
        eager = vllm_config.model_config.enforce_eager
        # Compiled code keeps references to the weights, so there they are loaded in place.
        shadowed = device.type == "cpu" and eager and adapter is None
        self._shadow = ShadowModel(model, vllm_config) if shadowed else None
        self._staging: StagingThread | None = None

    @property
    def staging(self) -> StagingThread:
        assert self._staging is not None, "the channel is not open"
        return self._staging

    def join(self) -> None:
        """Make the receiver and the thread that stages."""
        rank = self.vllm_config.parallel_config.rank
        self._staging = StagingThread(_channel(), rank, str(self.device), self._prepare)

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing: the staged version is taken first, as it may have been withdrawn."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: StagedWeights) -> None:
        adopt: Callable[[], None] = self.staging.take(update_info.request)
        adopt()
        if update_info.wipe:
            self._wipe()

    def finish_weight_update(self) -> None:
        """Do nothing: adopted weights are complete."""

    def shutdown(self) -> None:
        if self._staging is not None:
            self._staging.close()

    def _prepare(self, tensors: dict[str, Tensor]) -> Callable[[], None]:
        """Return a function that swaps the weights, which does as little as possible."""
        if self._adapters is not None:
            return self._adapters.prepare(tensors)
        check_shapes(self._shapes, tensors)
        if self._shadow is None:
            return partial(self._load, tensors)
        self._shadow.prepare(tensors)
        return self._shadow.exchange

    def _load(self, tensors: dict[str, Tensor]) -> None:
        """Load whole weights in place, layer by layer."""
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))
        # `_layerwise_process` in vllm/model_executor/model_loader/reload/layerwise.py copies the
        # new weights into the tensors that the layers had before (`_copy_and_restore_kernel_
        # tensors`), so captured CUDA graphs, which hold their addresses, read the new weights.
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPU a layer uses a packed copy of its weights. A head that shares the embedding's
        # weights was not loaded itself, so its copy must be refreshed.
        for module in self.model.modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)

    @torch.inference_mode()
    def _wipe(self) -> None:
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)  # layers of experts have none
            if isinstance(cache, torch.Tensor):
                cache.zero_()
