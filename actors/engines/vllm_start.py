"""Start of vLLM's processes by settings and environment, and calls that notice their end."""

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.engines.vllm_failures import first_failure
from actors.engines.vllm_lora import ADAPTER, Adapter
from actors.engines.vllm_usage import EngineUsage
from actors.weights.vllm_channel import WorkerChannel
from evolver_async.config import ConfigError, EngineConfig
from evolver_async.memory.vllm_limits import CPU_BLOCK, CPU_KV_BYTES

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

EXTENSION = "actors.engines.vllm_weights.WorkerExtension"
POLL_S = 0.2  # interval at which a call checks that vLLM is alive
DEATH_POLLS = 15  # until a failed call counts as refused by a vLLM that lives
# in vLLM's ValueError if its process that inspects a model has ended, as by lack of memory
UNINSPECTED = "failed to be inspected"
STREAM_INTERVAL = 8  # new tokens of a request between two outputs of vLLM
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked worker would outlive the actor
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS sets the number of threads
}
_starting = threading.Lock()  # processes inherit the environment, which names their channel


@dataclass(kw_only=True)
class Settings(EngineConfig):
    """Settings of vLLM; `config.EngineConfig` and `config.PolicyConfig` document them.

    `directory`: directory in shared memory, in which a private one is made. `adapter`: the adapter
    whose tensors updates bring; None if they bring whole weights. `cpu_kv_bytes`: size of the KV
    cache of each worker on a CPU.
    """

    path: str
    dtype: str
    directory: str
    max_length: int
    adapter: Adapter | None = None
    cpu_kv_bytes: int = CPU_KV_BYTES


def set_environment() -> None:
    """Set the environment variables that vLLM reads when it is imported, unless they are set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start(settings: Settings, channel: WorkerChannel, usage: EngineUsage) -> "AsyncLLM":
    """Start vLLM with the weights of the policy directory, in processes that end with this one.

    The workers receive versions from `channel` once they are told to join it (`open_channel`).
    `usage` is kept up to date.
    Raise ConfigError if this build of vLLM does not support `settings.device`, or refuses the
    settings or the model; RuntimeError, with its processes' own reason, if they cannot start.
    """
    set_environment()
    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    from actors.engines.vllm_weights import BACKEND, CHANNEL, OWNER

    on_cpu = current_platform.is_cpu()
    if settings.device not in ("auto", "cpu" if on_cpu else "cuda"):
        only = f"{'cpu' if on_cpu else 'cuda'} only, not {settings.device}"
        raise ConfigError(f"engine.device: this build of vLLM supports {only}")
    eager = settings.eager == "always" or (settings.eager == "auto" and on_cpu)
    if on_cpu and eager:
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    arguments = AsyncEngineArgs(
        model=settings.path,
        dtype=settings.dtype,
        max_model_len=settings.max_length,
        max_num_seqs=settings.slots,
        # On CPU vLLM cannot prefill the prompt of a request with a seed in chunks ("CPU Generator
        # does not use offset").
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=max(settings.prefill_tokens, settings.max_length if on_cpu else 0),
        tensor_parallel_size=settings.tensor_parallel,
        gpu_memory_utilization=settings.memory,
        kv_cache_memory_bytes=settings.kv_cache_bytes
        or (settings.cpu_kv_bytes if on_cpu else None),
        block_size=CPU_BLOCK if on_cpu else None,
        enforce_eager=eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        structured_outputs_config={"backend": "xgrammar"},  # vllm_grammar is in its place
        stream_interval=STREAM_INTERVAL,
        weight_transfer_config={"backend": BACKEND},
        worker_extension_cls=EXTENSION,
        **(settings.adapter.arguments(settings.path) if settings.adapter else {}),
        disable_log_stats=True,
        generation_config="vllm",
        **settings.options,
    )
    with _starting:
        os.environ[OWNER] = str(os.getpid())
        os.environ[CHANNEL] = msgspec.json.encode(channel).decode()
        os.environ[ADAPTER] = msgspec.json.encode(settings.adapter).decode()
        try:
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: usage])  # pyright: ignore
        except ValueError as error:
            if UNINSPECTED in (reason := _reason(error)):
                raise RuntimeError(f"vLLM's processes have failed: {reason}") from error
            refused = f"vllm refuses {settings.path} with these settings"
            raise ConfigError(f"engine.kind: {refused}: {reason}") from error
        except RuntimeError as error:
            if reason := first_failure(Path(channel.states)):
                raise RuntimeError(f"vLLM's processes have failed: {reason}") from error
            raise


def _reason(error: ValueError) -> str:
    """Return the sentence of an error, without what pydantic prints around it."""
    text = " ".join(str(error).split())
    return text.partition("Value error, ")[2].partition(" [type=")[0] or text


def end(llm: "AsyncLLM") -> None:
    """Shut down vLLM. Its running requests raise EngineDeadError; else they would wait for ever,
    because a shutdown cancels the task that answers them."""
    try:
        llm.output_processor.propagate_error(llm.dead_error)
    except Exception:
        log.exception("vLLM's running requests cannot be told of its end")
    llm.shutdown()


async def while_alive(llm: "AsyncLLM", call: Coroutine[Any, Any, Any]) -> Any:
    """Await a call. Raise EngineDeadError if vLLM dies before it has answered."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=POLL_S)
            if llm.errored and not task.done():
                raise llm.dead_error
        if task.exception() is not None:
            await _death(llm)
            if llm.errored:
                raise llm.dead_error from task.exception()
        return task.result()
    finally:
        task.cancel()


async def _death(llm: "AsyncLLM") -> None:
    """Wait until vLLM has noticed the death of a worker, which fails a call before that."""
    for _ in range(DEATH_POLLS):
        if llm.errored:
            return
        await asyncio.sleep(POLL_S)
