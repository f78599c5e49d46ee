"""Second copy of a worker's part of the model, in which new weights are prepared. For CPU.

On CPU a layer computes with a packed copy of its weights, and packing takes longer than loading.
So new weights are loaded and packed beside generation, in modules that do not run, as at vLLM's
start; adopting them exchanges references. Nothing is exchanged before all is prepared.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.quantization.base_config import (  # pyright: ignore[reportMissingImports]
    QuantizeMethodBase,
)
from vllm.model_executor.model_loader.utils import (  # pyright: ignore[reportMissingImports]
    initialize_model,
)
from vllm.utils.torch_utils import set_default_torch_dtype  # pyright: ignore[reportMissingImports]

from evolver_async.process.garbage import trim

PACKED = "cpu_linear"  # attribute of a layer: the function that computes with packed weights


class ShadowModel:
    """Modules like those of `live`, empty between two updates."""

    def __init__(self, live: nn.Module, config: VllmConfig) -> None:
        self._live = live
        config = copy.copy(config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}  # layers register themselves
        config.compilation_config.static_all_moe_layers = []
        self._config = config
        with set_default_torch_dtype(config.model_config.dtype):
            self._modules = initialize_model(config)
        if [*dict(self._modules.named_modules())] != [*dict(live.named_modules())]:
            raise RuntimeError("a second copy of the model has other modules than the first")
        # Packing replaces parameters, and with them the loaders that know this worker's part.
        self._parameters = [
            (module, name, parameter, parameter.shape)
            for module in self._modules.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._empty()

    @torch.no_grad()
    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Load whole weights of the model, and pack this worker's part of them."""
        trim()  # of the weights before, which `exchange` has freed in haste
        for module, name, parameter, shape in self._parameters:
            if parameter.shape != shape:  # shared ones come twice
                parameter.data = torch.empty(shape, dtype=parameter.dtype)
            module.register_parameter(name, parameter)
        self._modules.load_weights(iter(tensors.items()))
        for module in self._modules.modules():
            method: Any = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
        trim()  # of what was not packed

    @torch.no_grad()
    def exchange(self) -> None:
        """Give the prepared weights to the model that runs, and drop its old ones."""
        for live, ready in zip(self._live.modules(), self._modules.modules(), strict=True):
            for name, parameter in ready.named_parameters(recurse=False, remove_duplicate=False):
                live.get_parameter(name).data = parameter.data
            if PACKED in vars(ready):
                function: Any = getattr(ready, PACKED)
                setattr(live, PACKED, function)
        self._empty()

    def _empty(self) -> None:
        for module, name, parameter, _ in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
            module.register_parameter(name, parameter)
            vars(module).pop(PACKED, None)
