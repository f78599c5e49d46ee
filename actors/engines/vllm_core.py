"""Lifecycle of vLLM's processes: start, weight updates, restart after a crash, shutdown.

    call      produces                     consumes         waits for           unblocked by
    ready     an AsyncLLM with weights     the one held     a start, if dead    vLLM
    update    weights in vLLM's workers    named tensors    earlier updates     the workers

`vllm_start` starts the processes, `vllm_engine` sends requests to them, and `vllm_weights` runs
inside them.
"""

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actors.engines.vllm_start import Settings, start
from evolver_async.model import lora
from evolver_async.model.policy import ModelError
from evolver_async.process.private_directories import PREFIX, claim, sweep
from evolver_async.schema import WeightId

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

POLL_S = 0.2  # interval at which a call checks that vLLM is alive


class EngineDied(RuntimeError):
    """Crash of vLLM beyond `engine.restarts`, or a call after shutdown."""


class VllmCore:
    """Owner of an AsyncLLM with `weights`: `tensors` if given, else those of the policy directory.

    With `settings.adapter` the tensors are an adapter's. Token ids are below `vocabulary`.
    `pause_s`: seconds for which the last update paused generation; `updates`: number of updates;
    `restarts`: number of restarts; `keeps_kv`: updates leave the KV cache as it is; `broken`: set
    by the caller if the current weights gave a log-prob that is not finite. A start takes half a
    minute. Raise ValueError for invalid settings.
    """

    def __init__(
        self,
        settings: Settings,
        weights: WeightId | None = None,
        tensors: dict[str, Tensor] | None = None,
    ) -> None:
        self.restarts = 0
        self.updates = 0
        self.keeps_kv = settings.in_flight == "keep_kv"
        self.adapter = settings.adapter
        self.pause_s = 0.0
        self.broken = False
        self._settings = settings
        model = AutoConfig.from_pretrained(settings.path, local_files_only=True)
        self.vocabulary: int = model.vocab_size
        self._shapes, self._base = _shapes(model), None
        if (adapter := settings.adapter) is not None:
            self._base = lora.fingerprint_of(settings.path, self._shapes, settings.dtype)
            empty = _empty(model)
            self._shapes = lora.shapes(empty, rank=adapter.rank, targets=adapter.targets)
        if tensors is not None:
            self.check(tensors)
        self._held: tuple[WeightId | None, Path | None] = (weights, None)
        self._numbers = itertools.count()
        self._settled = False  # True if the AsyncLLM has the weights in `_held`
        self._closed = False
        self._updating = asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        self._llm: AsyncLLM | None = None
        sweep(Path(settings.directory))  # of actors that were killed
        self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}engine-", dir=settings.directory))
        try:
            self._claim = claim(self._directory)
            if weights is not None and tensors is not None:
                self._held = weights, self._store(weights, tensors)
            self._llm = start(settings)
        except BaseException:
            shutil.rmtree(self._directory)
            raise

    @property
    def weights(self) -> WeightId | None:
        return self._held[0]

    @property
    def lora_request(self) -> "LoRARequest | None":
        """Address of the adapter for requests; None without one and before its first update."""
        return self.adapter.request() if self.adapter and self._held[1] else None

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raise ModelError, which names the tensor, unless these are all weights of the model, or
        all tensors of its adapter."""
        for name in self._shapes.keys() ^ tensors.keys():
            raise ModelError(f"weight {name} is {'missing' if name in self._shapes else 'unknown'}")
        for name, tensor in tensors.items():
            if tensor.shape != self._shapes[name]:
                shapes = f"{list(tensor.shape)}, not {list(self._shapes[name])}"
                raise ModelError(f"weight {name} has shape {shapes}")
        if self._base is not None:
            lora.check_base(tensors, self._base)

    async def ready(self) -> "AsyncLLM":
        """Return the AsyncLLM with current weights; restart it if necessary. Raise EngineDied."""
        while self._llm is None or self._llm.errored or not self._settled:
            if self._recovery is None or self._recovery.done():
                self._recovery = asyncio.create_task(self._recover(), name="vllm")
            await asyncio.shield(self._recovery)
        return self._llm

    def lose(self, llm: "AsyncLLM") -> None:
        """Discard an AsyncLLM that is dead or in an unknown state; `ready` starts another."""
        if llm is self._llm:
            self._llm, self._settled = None, False
            llm.shutdown()

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        """Swap the weights. Raise ModelError and keep the old ones if vLLM rejects them."""
        async with self._updating:
            path = await asyncio.to_thread(self._store, weights, tensors)
            try:
                await self._swap_or_restart(weights, path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            (_, old), self._held = self._held, (weights, path)
            self.updates += 1
            if old is not None:
                old.unlink(missing_ok=True)

    async def close(self) -> None:
        """End vLLM's processes and remove the weight files."""
        self._closed = True
        if self._recovery is not None:
            await asyncio.wait([self._recovery])
        if self._llm is not None:
            self.lose(self._llm)
        self._claim.remove()

    async def _swap_or_restart(self, weights: WeightId, path: Path) -> None:
        """Swap the weights; after a crash repeat that with the restarted AsyncLLM."""
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        while True:
            llm = await self.ready()
            try:
                return await self._swap(llm, weights, path)
            except EngineDeadError:
                self.lose(llm)
            except Exception as error:
                # Some workers may hold a part of the new weights.
                self.lose(llm)
                raise ModelError(f"vLLM rejected weights {weights}: {error}") from error

    async def _recover(self) -> None:
        while True:
            if self._closed:
                raise EngineDied("the engine has ended")
            llm = self._llm
            if llm is None or llm.errored:
                llm = await self._start_again()
            weights, path = self._held
            try:
                if path is not None:
                    await self._swap(llm, weights, path)
                elif weights is not None:
                    await _while_alive(llm, llm.update_weight_version(str(weights)))
            except Exception as error:
                log.error("vLLM rejected weights %s: %s", weights, error)
                self.lose(llm)
            else:
                self._settled = True
                return

    async def _start_again(self) -> "AsyncLLM":
        if self._llm is not None:
            self.lose(self._llm)
        if self.restarts >= self._settings.restarts:
            raise EngineDied(f"vLLM has died {self.restarts + 1} times (engine.restarts)")
        self.restarts += 1
        log.error(
            "vLLM has died: it is restarted with weights %s (%d of %d restarts)",
            *(self.weights, self.restarts, self._settings.restarts),
        )
        try:
            self._llm = await asyncio.to_thread(start, self._settings)
            return self._llm
        except Exception as error:
            log.error("vLLM does not start: %s", error)
            return await self._start_again()

    async def _swap(self, llm: "AsyncLLM", weights: WeightId | None, path: Path) -> None:
        """Load `path` in the workers; this pauses generation and clears the KV cache, unless it is
        to be kept and is not broken."""
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferUpdateRequest,
        )

        began = time.perf_counter()
        snapshot = WeightTransferUpdateRequest(update_info={"path": str(path), "wipe": self.broken})
        clear = self.broken or not self.keeps_kv
        await _while_alive(llm, llm.pause_generation(mode="keep", clear_cache=clear))
        if (one := self.adapter) is not None:
            arguments = str(path), self.broken, one.number, one.rank, one.alpha
            await _while_alive(llm, llm.collective_rpc("replace_adapter", args=arguments))
            await _while_alive(llm, llm.update_weight_version(str(weights)))
        else:
            await _while_alive(llm, llm.start_weight_update())
            await _while_alive(llm, llm.update_weights(snapshot))
            await _while_alive(llm, llm.finish_weight_update(str(weights)))
        await _while_alive(llm, llm.resume_generation())
        self.broken = False
        self.pause_s = time.perf_counter() - began

    def _store(self, weights: WeightId, tensors: dict[str, Tensor]) -> Path:
        """Write the weights, which were verified when fetched, to a new file."""
        path = self._directory / f"weights-{weights}-{next(self._numbers)}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except BaseException:  # for instance if /dev/shm is full
            path.unlink(missing_ok=True)
            raise
        return path


async def _while_alive(llm: "AsyncLLM", call: Coroutine[Any, Any, Any]) -> Any:
    """Await a call. Raise EngineDeadError if vLLM dies before it has answered."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=POLL_S)
            if llm.errored and not task.done():
                raise llm.dead_error
        return task.result()
    finally:
        task.cancel()


def _shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Return the shapes of the model's weights by the names of `policy.state_tensors`."""
    model = _empty(config)
    everything = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unique = {name for name, _ in model.named_parameters()}
    return {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if name in unique or name not in everything
    }


def _empty(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
