"""Lifecycle of vLLM's processes: start, weight updates, restart after a crash, shutdown.

    call      produces                     consumes          waits for           unblocked by
    ready     an AsyncLLM with weights     the one held      a start, if dead    vLLM
    stage     a version in the workers     what they hold    its verification    the workers
    adopt     weights in vLLM's workers    what is staged    earlier updates     the workers

`vllm_start` starts the processes, `vllm_engine` sends requests to them, and `vllm_weights` runs
inside them: weights come to the workers from the learner, none pass through this process.
"""

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor
from transformers import AutoConfig

from actors.engines.vllm_failures import first_failure
from actors.engines.vllm_start import Settings, end, start, while_alive
from actors.engines.vllm_swap import swap_adapter, swap_weights
from actors.engines.vllm_usage import EngineUsage
from actors.weights.vllm_channel import WorkerChannel, WorkerStates
from evolver_async.errors import Unrecoverable
from evolver_async.model.policy import ModelError, check_shapes, weight_shapes
from evolver_async.process import segments
from evolver_async.process.private_directories import PREFIX, claim, sweep
from evolver_async.schema import WeightId
from evolver_async.weights.channel.interface import WeightsGone
from evolver_async.weights.ends import ReceiverSettings
from evolver_async.weights.probe import Probe
from evolver_async.weights.shm import ShmPublisher

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

LOOK_S = 0.01  # interval at which the workers' states are read


class EngineDied(RuntimeError):
    """Crash of vLLM beyond `engine.restarts`, or a call after shutdown."""


class EngineUseless(Unrecoverable):
    """Crashes of vLLM beyond `engine.restarts`, none of which let a single turn end."""


class VllmCore:
    """Owner of an AsyncLLM, and the source of its weights; see `weights.source.VersionSource`.

    The first weights are `tensors` if given, else, under the name `weights`, those of the policy
    directory; further ones come to vLLM's workers from `receiver`, or else from `publisher`, an own
    one. With `settings.adapter` versions are adapters. `name`: the actor's. `tell`: is given the
    cause of every death of vLLM. Token ids are below `vocabulary`. `pause_s`: seconds for which the
    last update paused generation; `paused_s`: all updates; `updates`: number of updates;
    `restarts`: number of restarts; `keeps_kv`: updates leave the KV cache as it is;
    `broken`: set by the caller if the current weights gave a log-prob that is not finite;
    `served`: set by it once a turn has ended. A start takes half a minute. Raise ConfigError for
    settings or a model that vLLM refuses.
    """

    def __init__(
        self,
        settings: Settings,
        weights: WeightId | None = None,
        tensors: dict[str, Tensor] | None = None,
        *,
        receiver: ReceiverSettings | None = None,
        name: str = "engine",
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.restarts = 0
        self.updates = 0
        self.usage = EngineUsage()
        self.keeps_kv = settings.in_flight == "keep_kv"
        self.adapter = settings.adapter
        self.pause_s = self.paused_s = 0.0
        self.broken = False
        self.served = False
        self._settings = settings
        self.path = settings.path
        speculative = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
        self.obeys_grammars = not any(settings.options.get(name) for name in speculative)
        self._tell = tell
        model = AutoConfig.from_pretrained(settings.path, local_files_only=True)
        self.vocabulary: int = model.vocab_size
        if tensors is not None and self.adapter is None:  # an adapter is checked by the workers
            check_shapes(weight_shapes(model), tensors)
        self.weights = weights  # those of the workers, or, after a restart, those they shall have
        self._received = tensors is not None  # True if `weights` come over the channel
        self._settled = False  # True if the AsyncLLM has them
        self._closed = False
        self._staged: tuple[AsyncLLM, int, WeightId] | None = None
        self._numbers = itertools.count(1)  # of starts and of requests to stage
        self._updating = asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        self._llm: AsyncLLM | None = None
        self.publisher: ShmPublisher | None = None
        sweep(Path(settings.directory))  # of actors that were killed
        self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}engine-", dir=settings.directory))
        try:
            self._claim = claim(self._directory)
            if receiver is None:
                self.publisher = ShmPublisher(self._directory / "weights", background=False)
                receiver = ReceiverSettings("shm", self.publisher.address)
                if weights is not None and tensors is not None:
                    self.publisher.publish(weights, tensors)
            self._channel = WorkerChannel(receiver, "", name)
            self._states = self._new_states()
            self._llm = self._start()
        except BaseException:
            shutil.rmtree(self._directory)
            raise

    @property
    def lora_request(self) -> "LoRARequest | None":
        """Address of the adapter for requests; None without one and before its first update."""
        return self.adapter.request() if self.adapter and self._received else None

    def head(self) -> WeightId | None:
        """Return the newest version that all workers know of.

        Workers that have not joined or are dead learn of none, which this mends. Raise EngineDied.
        """
        if self._llm is None or self._llm.errored or not self._settled:
            if self._recovery is not None and self._recovery.done():
                self._recovery.result()
            self._recovering()
        return self._states.head()

    def available(self) -> list[WeightId]:
        return self._states.available()

    async def ready(self) -> "AsyncLLM":
        """Return the AsyncLLM with current weights; restart it if necessary. Raise EngineDied."""
        while self._llm is None or self._llm.errored or not self._settled:
            await asyncio.shield(self._recovering())
        return self._llm

    def lose(self, llm: "AsyncLLM") -> None:
        """Discard an AsyncLLM that is dead or in an unknown state; `ready` starts another."""
        if llm is self._llm:
            self._llm, self._settled = None, False
            end(llm)
            segments.remove_noted(self._directory)

    async def stage(self, weights: WeightId) -> Probe | None:
        """Bring a version into all workers, beside the weights that generate.

        Raise WeightsGone, WeightsCorrupt, or ModelError if it does not fit.
        """
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        while True:
            llm = await self.ready()
            try:
                return await self._stage(llm, weights)
            except EngineDeadError:
                self.lose(llm)

    async def adopt(self, weights: WeightId) -> None:
        """Swap the weights for staged ones. Raise ModelError and keep the old ones if vLLM fails.

        A version that was staged in processes that died meanwhile is staged again.
        """
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        async with self._updating:
            while True:
                llm = await self.ready()
                try:
                    if self._staged is None or (self._staged[0], self._staged[2]) != (llm, weights):
                        await self._stage(llm, weights)
                    await self._swap(llm, weights)
                except EngineDeadError:
                    self.lose(llm)
                else:
                    self.weights, self._received = weights, True
                    self.updates += 1
                    return

    async def close(self) -> None:
        """End vLLM's processes and remove the directory; a second call changes nothing."""
        if self._closed:
            return
        self._closed = True
        if self._recovery is not None:
            await asyncio.wait([self._recovery])
        if self._llm is not None:
            self.lose(self._llm)
        if self.publisher is not None:
            self.publisher.close()
        self._claim.remove()

    def _recovering(self) -> "asyncio.Task[None]":
        """Return the task that makes the AsyncLLM ready, which this begins if necessary."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(), name="vllm")
        return self._recovery

    async def _recover(self) -> None:
        while True:
            if self._closed:
                raise EngineDied("the engine has ended")
            llm = self._llm
            if llm is None or llm.errored:
                llm = await self._start_again()
            try:
                # The first request asks for this, and would wait for ever if vLLM died meanwhile.
                await while_alive(llm, llm.get_supported_tasks())
                # CUDA graphs are captured by now. Calls of CUDA by the threads of a receiver would
                # end a capture.
                await while_alive(llm, llm.collective_rpc("open_channel"))
                if self._received:
                    await self._restore(llm)
                elif self.weights is not None:
                    await while_alive(llm, llm.update_weight_version(str(self.weights)))
            except Exception as error:
                log.error("vLLM does not go on with weights %s: %s", self.weights, error)
                self.lose(llm)
            else:
                self._settled = True
                return

    async def _restore(self, llm: "AsyncLLM") -> None:
        """Bring the weights held before, or else the newest, into processes that have begun anew.

        A version that an evaluation needs is kept by the learner, so it is found again.
        """
        while True:
            while (head := self.head()) is None:
                if self._closed:
                    raise EngineDied("the engine has ended")
                await while_alive(llm, asyncio.sleep(LOOK_S))
            weights = self.weights if self.weights in self.available() else head
            try:
                await self._stage(llm, weights)
            except WeightsGone:
                continue
            if weights != self.weights:
                log.warning("weights %s are gone: vLLM goes on with %s", self.weights, weights)
            await self._swap(llm, weights)
            self.weights = weights
            return

    async def _start_again(self) -> "AsyncLLM":
        if self._llm is not None:
            self.lose(self._llm)
        cause = first_failure(self._states.directory) or "it logged no error, as if killed"
        if self._tell is not None:
            self._tell(cause)
        if self.restarts >= self._settings.restarts:
            died = f"vLLM has died {self.restarts + 1} times (engine.restarts)"
            if not self.served:
                raise EngineUseless(f"engine.kind: {died} before its first turn had ended: {cause}")
            raise EngineDied(f"{died}: {cause}")
        self.restarts += 1
        log.error(
            "vLLM has died (%s): it is restarted with weights %s (%d of %d restarts)",
            *(cause, self.weights, self.restarts, self._settings.restarts),
        )
        self._states = self._new_states()
        try:
            self._llm = await asyncio.to_thread(self._start)
            return self._llm
        except Exception as error:
            log.error("vLLM does not start: %s", error)
            return await self._start_again()

    def _new_states(self) -> WorkerStates:
        """Make the directory for the states of workers that are to be started."""
        directory = self._directory / f"workers-{next(self._numbers)}"
        directory.mkdir(mode=0o700)
        return WorkerStates(directory, self._settings.tensor_parallel)

    def _start(self) -> "AsyncLLM":
        states = str(self._states.directory)
        channel = msgspec.structs.replace(self._channel, states=states)
        llm = start(self._settings, channel, self.usage)
        segments.note(self._directory, segments.mapped_below(os.getpid()))
        return llm

    async def _stage(self, llm: "AsyncLLM", weights: WeightId) -> Probe | None:
        """Let the workers of `llm` stage a version, and wait until all of them have it."""
        request = next(self._numbers)
        arguments = request, str(weights)
        await while_alive(llm, llm.collective_rpc("stage_weights", args=arguments))
        while (state := self._states.staged(request)) is None:
            await while_alive(llm, asyncio.sleep(LOOK_S))
        self._staged = llm, request, weights
        return state.probe

    async def _swap(self, llm: "AsyncLLM", weights: WeightId) -> None:
        """Adopt what is staged; this pauses generation.

        After a failure some workers may hold a part of the new weights, so they are replaced.
        """
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        assert self._staged is not None
        (_, request, _), self._staged = self._staged, None
        clear, began = self.broken or not self.keeps_kv, time.perf_counter()
        swap = swap_weights if self.adapter is None else swap_adapter
        try:
            await while_alive(llm, llm.pause_generation(mode="keep", clear_cache=clear))
            await swap(llm, weights, request, self.broken)
            await while_alive(llm, llm.resume_generation())
        except EngineDeadError:
            raise
        except Exception as error:
            self.lose(llm)
            raise ModelError(f"vLLM rejected weights {weights}: {error}") from error
        self.broken = False
        self.pause_s = time.perf_counter() - began
        self.paused_s += self.pause_s
