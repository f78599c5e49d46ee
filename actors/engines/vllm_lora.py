"""Adapter of a run as vLLM serves it: unmerged, on the base weights of the policy directory.

An adapter has the name of its run, so that vLLM never mixes those of several runs on one base
model. `AdapterLoader` runs in vLLM's workers, all else in the actor.
"""

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig

from evolver_async.config import Config
from evolver_async.model import lora
from evolver_async.model.lora import BASE
from evolver_async.model.policy import ModelError, check_shapes, empty_model

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

ADAPTER = "EVOLVER_ENGINE_ADAPTER"  # environment variable with an Adapter, or null
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's MaxLoRARanks
NUMBERS = (1 << 31) - 1  # vLLM keeps the number of an adapter in a signed integer, from 1


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Name, rank and alpha of an adapter; `dtype`: that of the base weights.

    `targets`: see `policy.lora.targets`.
    """

    name: str
    rank: int
    alpha: float
    dtype: str = "float32"
    targets: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """The number by which vLLM finds the adapter; it follows from the name."""
        return 1 + zlib.crc32(self.name.encode()) % NUMBERS

    def arguments(self, path: str) -> dict[str, Any]:
        """Return the engine arguments under which vLLM serves this adapter and no other.

        Its layers for adapters replace the adapted linears of the model at `path` alone: the one
        of the output projection, which it gives some models, fails where log-probs of a prompt are
        asked for beside other requests, and it takes vocabularies of 258,048 tokens at most.
        """
        model = empty_model(AutoConfig.from_pretrained(path, local_files_only=True))
        shapes = lora.shapes(model, rank=self.rank, targets=self.targets)
        return {
            "enable_lora": True,
            "max_lora_rank": min(one for one in RANKS if one >= self.rank),
            "max_loras": 1,
            "max_cpu_loras": 1,
            "lora_target_modules": sorted({name.split(".")[-2] for name in shapes if name != BASE}),
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
        dtype=config.policy.decided_dtype,
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


class AdapterLoader:
    """Replacement of the one adapter of a worker of vLLM, in its process.

    The adapter keeps its number and its place in the layers' stacked tensors, so running requests
    continue under the new one, and captured CUDA graphs read it. `path`: policy directory;
    `shapes`: those of its weights; `model`: vLLM's.
    """

    def __init__(
        self, adapter: Adapter, path: str, shapes: Mapping[str, torch.Size], model: Any
    ) -> None:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        self._shapes = lora.shapes(empty_model(config), rank=adapter.rank, targets=adapter.targets)
        self._base = lora.fingerprint_of(path, shapes, adapter.dtype)
        self._adapter = adapter
        self._model = model

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return a function that puts an adapter in the place of the one before it.

        `tensors` have the names of `policy.state_tensors`. Raise ModelError if they are not those
        of an adapter of the policy directory, or vLLM serves none of their linears.
        """
        from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
        from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

        check_shapes(self._shapes, tensors)
        lora.check_base(tensors, self._base)
        one, manager = self._adapter, self._model.lora_manager
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            one.number,
            {
                # Copies, because vLLM scales them in place.
                f"base_model.model.{name}.weight": tensor.clone()
                for name, tensor in tensors.items()
                if name != BASE
            },
            PEFTHelper(r=one.rank, lora_alpha=one.alpha, target_modules=[]),  # pyright: ignore
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        parts = {part for packed in manager.packed_modules.values() for part in packed}
        for name in sorted(adapter.loras.keys() - manager.modules.keys() - parts):
            raise ModelError(
                f"policy.lora.targets: vLLM serves no adapter of {name}: name other linears, or"
                " set engine.merge_lora=true"
            )
        return partial(self._replace, adapter)

    def _replace(self, adapter: Any) -> None:
        """Replace the adapter in place.

        `LoRAModelManager.activate_adapter` copies this worker's part of the tensors into the
        layers' stacked ones.
        """
        manager = self._model.lora_manager
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
