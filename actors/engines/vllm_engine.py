"""Engine on vLLM: samples tokens with their log-probs and weights.

A request that was running when vLLM died is sampled again from its start. `vllm_core` manages
vLLM's processes and their weights.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from actors.engines.engine import Generation, Request
from actors.engines.vllm_core import VllmCore
from actors.weights.arrival import EngineLost
from evolver_async.model.grammar import GrammarError, Grammars
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.schema import WeightId
from evolver_async.weights.probe import Probe

if TYPE_CHECKING:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.outputs import CompletionOutput  # pyright: ignore[reportMissingImports]

SEED_LIMIT = 1 << 63  # vLLM's seeds are below it


class VllmEngine:
    """Engine that owns a VllmCore; see `base.Engine` and `source.VersionSource`.

    Token ids are below `vocabulary`. `slots`: number of concurrent sequences if `in_flight` is
    "wait", in which case new requests queue here. `max_length`: tokens of context, at most the
    core's.

    With keep_kv the core keeps its KV cache over updates. Each session has a salt of its own time,
    so that it finds the KV that it and the sessions begun under the same weights have computed, and
    none that is older: the KV of a new session is all of the weights that it starts with, which
    makes evaluations exact. So no session begins during an update, and one that has no token yet
    begins again after it: its prompt can be waiting, or be half computed.
    """

    def __init__(
        self, core: VllmCore, *, vocabulary: int, slots: int, max_length: int, in_flight: str
    ) -> None:
        self.core = core
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._keeps_kv = in_flight == "keep_kv"
        self._begun: dict[str, _Begin] = {}  # sessions not yet released, with keep_kv
        self._beginning: set[asyncio.Timeout] = set()  # turns of sessions without a token
        self._room = asyncio.Semaphore(slots) if in_flight == "wait" else None
        self._open = asyncio.Event()  # cleared while an update holds back new generations
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sampling = 0
        self._since = 0.0
        self._sessions: dict[str, asyncio.Task[Generation] | None] = {}
        self._updating = asyncio.Lock()
        self._numbers = itertools.count()
        self._stats: dict[str, float] = dict.fromkeys(
            ("generated", "prefilled", "reused", "stale", "busy_s"), 0.0
        )

    @property
    def weights(self) -> WeightId | None:
        return self.core.weights

    @property
    def obeys_grammars(self) -> bool:
        """Return True without speculative decoding: vLLM itself needs xgrammar."""
        return self.core.obeys_grammars

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Raise ValueError for invalid tokens or a busy session, GrammarError as
        `Engine.generate`."""
        if self.weights is None:
            raise RuntimeError("the engine has no weights yet")
        tokens = request.tokens
        if not tokens or min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise ValueError(f"tokens must be 1 or more ids below {self._vocabulary}")
        if request.session in self._sessions:
            raise ValueError(f"session {request.session} is already generating")
        limit = min(request.max_tokens, self._max_length - len(tokens))
        if limit <= 0:
            return Generation(finish="length")
        if request.grammar:  # one that vLLM cannot compile would end the request without a reason
            self._grammars.state(request.grammar, request.stop_tokens)
        self._sessions[request.session] = asyncio.current_task()
        try:
            async with self._admission():
                return await self._sample(request, limit)
        finally:
            del self._sessions[request.session]

    def release(self, session: str) -> None:
        """Forget the session; vLLM evicts the least recently used KV itself."""
        self._begun.pop(session, None)

    def head(self) -> WeightId | None:
        return self.core.head()

    def available(self) -> list[WeightId]:
        return self.core.available()

    async def stage(self, weights: WeightId) -> Probe | None:
        """Bring a version into vLLM's workers while generation goes on."""
        return await self.core.stage(weights)

    async def adopt(self, weights: WeightId) -> None:
        """Swap the weights. Raise ModelError and keep the old ones if vLLM rejects them.

        Cancelling the call does not stop the swap, which is never left incomplete.
        """
        await asyncio.shield(asyncio.ensure_future(self._adopt(weights)))

    async def _adopt(self, weights: WeightId) -> None:
        async with self._updating:
            if self._room is not None:
                self._open.clear()
                await self._idle.wait()
            elif self._keeps_kv:
                self._open.clear()
                while self._beginning:
                    self._beginning.pop().reschedule(asyncio.get_running_loop().time())
            try:
                await self.core.adopt(weights)
            finally:
                self._open.set()

    async def score(self, tokens: list[int]) -> list[float]:
        """Score the tokens as a prompt, without cached KV. Raise EngineLost if vLLM dies meanwhile:
        a request that may have killed it is not repeated."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        # A prompt whose log-probs are asked for is computed as a whole.
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        scored = []
        llm = await self.core.ready()
        number, adapter = f"{next(self._numbers)}", self.core.lora_request
        try:
            async for output in llm.generate(
                tokens_input(tokens), params, number, lora_request=adapter
            ):
                scored = output.prompt_logprobs or scored
        except EngineDeadError as error:
            self.core.lose(llm)
            raise EngineLost("vLLM has died while it scored tokens") from error
        pairs = zip(tokens[1:], scored[1:], strict=True)
        logprobs = [position[token].logprob for token, position in pairs]
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(f"weights {self.weights}: {min(logprobs)}")
        return logprobs

    async def close(self) -> None:
        tasks = [task for task in self._sessions.values() if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.core.close()

    def stats(self) -> dict[str, float]:
        running_s = time.perf_counter() - self._since if self._sampling else 0.0
        core, usage = self.core, self.core.usage
        return self._stats | {
            "busy_s": self._stats["busy_s"] + running_s,
            "pause_s": core.paused_s,
            "restarts": float(core.restarts),
            "preemptions": float(usage.preemptions),
            "waiting": float(usage.waiting),
            "kv_use": usage.kv_use,
        }

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(load_tokenizer(self.core.path), self._vocabulary)

    @contextlib.asynccontextmanager
    async def _admission(self) -> AsyncIterator[None]:
        async with self._room or contextlib.nullcontext():
            while self._room is not None and not self._open.is_set():
                await self._open.wait()
            if not self._sampling:
                self._since = time.perf_counter()
                self._idle.clear()
            self._sampling += 1
            try:
                yield
            finally:
                self._sampling -= 1
                if not self._sampling:
                    self._stats["busy_s"] += time.perf_counter() - self._since
                    self._idle.set()

    async def _sample(self, request: Request, limit: int) -> Generation:
        from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        params, begun = _sampling(request, limit), self._begun.get(request.session)
        begins = self._keeps_kv and (begun is None or begun.weights is None)
        while True:
            llm = await self.core.ready()
            if begins and not self._open.is_set():
                await self._open.wait()
                continue
            if begins:
                begun = self._begun[request.session] = _Begin(f"{self.core.updates}")
            prompt = tokens_input(request.tokens, cache_salt=begun and begun.salt)
            out, read = Generation(), False
            number, adapter = f"{next(self._numbers)}", self.core.lora_request
            try:
                async with self._until_update(begins) as beginning:
                    async for output in llm.generate(prompt, params, number, lora_request=adapter):
                        self._beginning.discard(beginning)
                        if not read:
                            reused = output.num_cached_tokens or 0
                            self._stats["reused"] += reused
                            self._stats["prefilled"] += len(request.tokens) - reused
                            read = True
                        piece = output.outputs[0]
                        self._stats["generated"] += len(piece.token_ids)
                        out.tokens.extend(piece.token_ids)
                        out.logprobs.extend(piece.logprobs.logprobs)
                        if output.finished:
                            if request.grammar and piece.finish_reason == "error":
                                raise GrammarError(f"no token can follow {out.tokens[-8:]}")
                            self._whole(out, piece)
                            self.core.served = True
                            if begun is not None:
                                self._stats["stale"] += begun.count_stale(out)
                            return out
            except EngineDeadError:
                self.core.lose(llm)

    @contextlib.asynccontextmanager
    async def _until_update(self, begins: bool) -> AsyncIterator[asyncio.Timeout]:
        """Run a turn; end it without an error at an update that comes while it has no token."""
        turn = asyncio.timeout(None)
        try:
            async with turn:
                if begins:
                    self._beginning.add(turn)
                yield turn
        except TimeoutError:
            if not turn.expired():
                raise
        finally:
            self._beginning.discard(turn)

    def _whole(self, out: Generation, last: "CompletionOutput") -> None:
        """Complete `out` with the finish reason and the weights of each token."""
        for span in last.weight_versions or ():
            lineage, step = span.version.split(".")
            weights = WeightId(lineage=int(lineage), step=int(step))
            out.weights.extend([weights] * (span.end - span.start))
        if last.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a generation: {last.finish_reason}")
        if not len(out.tokens) == len(out.logprobs) == len(out.weights):
            counts = f"{len(out.logprobs)} log-probs, {len(out.weights)} versions"
            raise RuntimeError(f"vLLM gave {counts} for {len(out.tokens)} tokens")
        if not all(map(math.isfinite, out.logprobs)):
            self.core.broken = True
            raise FloatingPointError(f"weights {out.weights[-1]}: {min(out.logprobs)}")
        out.finish = last.finish_reason


@dataclass
class _Begin:
    """Start of a session: the salt of its KV, and the weights of its first token, None before its
    first turn has ended."""

    salt: str
    weights: WeightId | None = None

    def count_stale(self, out: Generation) -> int:
        """Count the tokens that attended to KV of older weights.

        Too many if vLLM ran out of KV meanwhile and computed some again.
        """
        if self.weights is None and out.weights:
            self.weights = out.weights[0]
        return sum(weights != self.weights for weights in out.weights)


def _sampling(request: Request, limit: int) -> "SamplingParams":
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
        RequestOutputKind,
        StructuredOutputsParams,
    )

    grammar = StructuredOutputsParams(structural_tag=request.grammar) if request.grammar else None
    return SamplingParams(
        temperature=request.temperature,
        max_tokens=limit,
        seed=request.seed % SEED_LIMIT,
        stop=list(request.stop_strings),
        stop_token_ids=sorted(request.stop_tokens),
        include_stop_str_in_output=True,
        detokenize=bool(request.stop_strings),
        skip_special_tokens=False,
        structured_outputs=grammar,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )
