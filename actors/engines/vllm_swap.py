"""Calls by which vLLM's workers adopt what they have staged, while generation is paused.

`request`: number of the staging. `wipe`: overwrite the KV cache, which broken weights have filled.
"""

from typing import TYPE_CHECKING

from actors.engines.vllm_start import while_alive
from evolver_async.schema import WeightId

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]


async def swap_weights(llm: "AsyncLLM", weights: WeightId, request: int, wipe: bool) -> None:
    """Adopt whole weights."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferUpdateRequest,
    )

    info = {"request": request, "wipe": wipe}
    await while_alive(llm, llm.start_weight_update())
    await while_alive(llm, llm.update_weights(WeightTransferUpdateRequest(info)))
    await while_alive(llm, llm.finish_weight_update(str(weights)))


async def swap_adapter(llm: "AsyncLLM", weights: WeightId, request: int, wipe: bool) -> None:
    """Adopt an adapter."""
    await while_alive(llm, llm.collective_rpc("adopt_adapter", args=(request, wipe)))
    await while_alive(llm, llm.update_weight_version(str(weights)))
