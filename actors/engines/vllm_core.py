"""vLLM's processes: started, given weights, started again when they die, ended with the actor.

    call      produces                     consumes         waits for           unblocked by
    ready     an AsyncLLM with weights     the one held     a start, if dead    vLLM
    update    weights in vLLM's workers    named tensors    earlier updates     the workers

What is asked of them is the matter of `vllm_engine`, what runs inside them of `vllm_weights`.
"""

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from evolver_async.model.policy import ModelError
from evolver_async.process.private_directories import PREFIX, claim, sweep
from evolver_async.schema import WeightId

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

CPU_KV_BYTES = 128 << 20
CPU_BLOCK = 32  # tokens whose KV is shared or not; the smallest that vLLM's CPU kernels like
STREAM = 8  # vLLM tells of new tokens once a request has so many
LOOK_S = 0.2  # how often a call looks whether vLLM is still alive
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would not end with its owner
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says
}


class EngineDied(RuntimeError):
    """vLLM's processes have died more often than `engine.restarts` allows, or were ended."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What vLLM is started with; see `config.Engine` and `config.Policy` for what each means.

    `directory`: in shared memory, the parent of the private one that weights go through.
    """

    path: str
    dtype: str
    directory: str
    slots: int
    max_length: int
    prefill_tokens: int
    device: str = "auto"
    tensor_parallel: int = 1
    memory: float = 0.9
    kv_cache_bytes: int = 0
    eager: bool = True
    restarts: int = 3


class VllmCore:
    """An AsyncLLM that holds `weights`: `tensors` where these are given, else the directory's.

    Token ids are below `vocabulary`. `pause_s` is how long the last update held generations up,
    `restarts` how often vLLM was started again, `broken` whether the weights held gave what is no
    number: whoever sees that sets it. Starting takes half a minute. Raises ValueError for
    what cannot be.
    """

    def __init__(
        self,
        settings: Settings,
        weights: WeightId | None = None,
        tensors: dict[str, Tensor] | None = None,
    ) -> None:
        self.restarts = 0
        self.pause_s = 0.0
        self.broken = False
        self._settings = settings
        model = AutoConfig.from_pretrained(settings.path, local_files_only=True)
        self.vocabulary: int = model.vocab_size
        self._shapes = _shapes(model)
        if tensors is not None:
            self.check(tensors)
        self._held: tuple[WeightId | None, Path | None] = (weights, None)
        self._numbers = itertools.count()
        self._settled = False  # whether the AsyncLLM has the weights held
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
            self._llm = _start(settings)
        except BaseException:
            shutil.rmtree(self._directory)
            raise

    @property
    def weights(self) -> WeightId | None:
        return self._held[0]

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raises ModelError, naming the tensor, unless these are whole weights of the model."""
        for name in self._shapes.keys() ^ tensors.keys():
            raise ModelError(f"weight {name} is {'missing' if name in self._shapes else 'unknown'}")
        for name, tensor in tensors.items():
            if tensor.shape != self._shapes[name]:
                shapes = f"{list(tensor.shape)}, not {list(self._shapes[name])}"
                raise ModelError(f"weight {name} has shape {shapes}")

    async def ready(self) -> "AsyncLLM":
        """The AsyncLLM with the weights held, started again if need be; EngineDied at the end."""
        while self._llm is None or self._llm.errored or not self._settled:
            if self._recovery is None or self._recovery.done():
                self._recovery = asyncio.create_task(self._recover(), name="vllm")
            await asyncio.shield(self._recovery)
        return self._llm

    def lose(self, llm: "AsyncLLM") -> None:
        """This one is dead, or cannot be trusted any more: the next `ready` starts another."""
        if llm is self._llm:
            self._llm, self._settled = None, False
            llm.shutdown()

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        """Swap the weights; ModelError, with the old ones in place, where vLLM takes them not."""
        async with self._updating:
            path = await asyncio.to_thread(self._store, weights, tensors)
            try:
                await self._bring(weights, path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            (_, old), self._held = self._held, (weights, path)
            if old is not None:
                old.unlink(missing_ok=True)

    async def close(self) -> None:
        """End vLLM's processes and remove what went to them."""
        self._closed = True
        if self._recovery is not None:
            await asyncio.wait([self._recovery])
        if self._llm is not None:
            self.lose(self._llm)
        self._claim.remove()

    async def _bring(self, weights: WeightId, path: Path) -> None:
        """Swap the weights of whichever AsyncLLM lives long enough."""
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
                # Some workers may have taken a part of them.
                self.lose(llm)
                raise ModelError(f"vLLM took no weights {weights}: {error}") from error

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
                log.error("vLLM took no weights %s: %s", weights, error)
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
            "vLLM has died and is started again with weights %s (%d of %d)",
            *(self.weights, self.restarts, self._settings.restarts),
        )
        try:
            self._llm = await asyncio.to_thread(_start, self._settings)
            return self._llm
        except Exception as error:
            log.error("vLLM does not start: %s", error)
            return await self._start_again()

    async def _swap(self, llm: "AsyncLLM", weights: WeightId | None, path: Path) -> None:
        """Have the workers read `path`; generations stand still meanwhile and their KV is lost."""
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferUpdateRequest,
        )

        start = time.perf_counter()
        snapshot = WeightTransferUpdateRequest(update_info={"path": str(path), "wipe": self.broken})
        await _while_alive(llm, llm.pause_generation(mode="keep", clear_cache=True))
        await _while_alive(llm, llm.start_weight_update())
        await _while_alive(llm, llm.update_weights(snapshot))
        await _while_alive(llm, llm.finish_weight_update(str(weights)))
        await _while_alive(llm, llm.resume_generation())
        self.broken = False
        self.pause_s = time.perf_counter() - start

    def _store(self, weights: WeightId, tensors: dict[str, Tensor]) -> Path:
        """A snapshot of the weights as a file of its own. They were verified when fetched."""
        path = self._directory / f"weights-{weights}-{next(self._numbers)}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except BaseException:  # /dev/shm is full, for instance: what is there would stay
            path.unlink(missing_ok=True)
            raise
        return path


def _start(settings: Settings) -> "AsyncLLM":
    """vLLM with the weights of the policy directory, in processes that end with this one."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    from actors.engines.vllm_weights import BACKEND, OWNER

    os.environ[OWNER] = str(os.getpid())
    on_cpu = current_platform.is_cpu()
    if settings.device not in ("auto", "cpu" if on_cpu else "cuda"):
        raise ValueError(
            f"engine.device: this vLLM is built for {'cpu' if on_cpu else 'cuda'} alone,"
            f" not for {settings.device}"
        )
    if on_cpu and settings.eager:
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    arguments = AsyncEngineArgs(
        model=settings.path,
        dtype=settings.dtype,
        max_model_len=settings.max_length,
        max_num_seqs=settings.slots,
        # On CPU no prompt can be read in pieces: vLLM does not manage to rewind the draws of a
        # request with a seed there ("CPU Generator does not use offset").
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=max(settings.prefill_tokens, settings.max_length if on_cpu else 0),
        tensor_parallel_size=settings.tensor_parallel,
        gpu_memory_utilization=settings.memory,
        kv_cache_memory_bytes=settings.kv_cache_bytes or (CPU_KV_BYTES if on_cpu else None),
        block_size=CPU_BLOCK if on_cpu else None,
        enforce_eager=settings.eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        stream_interval=STREAM,
        weight_transfer_config={"backend": BACKEND},
        disable_log_stats=True,
        generation_config="vllm",
    )
    return AsyncLLM.from_engine_args(arguments)


async def _while_alive(llm: "AsyncLLM", call: Coroutine[Any, Any, Any]) -> Any:
    """What a call gives; EngineDeadError where vLLM dies without having answered it."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            if llm.errored and not task.done():
                raise llm.dead_error
        return task.result()
    finally:
        task.cancel()


def _shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Of every tensor of the model's weights, by the names of `policy.state_tensors`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    everything = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unique = {name for name, _ in model.named_parameters()}
    return {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if name in unique or name not in everything
    }
