"""Default engine: continuous batching over KV slots, on the Hugging Face module's own weights.

One step is one forward: either the pending context of some requests (prefill; first, so that more
rows decode together) or one token of every running request (decode). The loop yields between two
steps. Only then do requests start and end and weights change, never during a step.

Requests get slots in the order of arrival; if none is free, the least recently used one of an idle
session is taken. Equal contexts are one row of a forward: members of a group often stand in the
same state, at their prompt at least. If contexts only begin alike, the first one is prefilled, and
the others copy its KV one step later.
"""

import asyncio
import math
import time
from collections import deque
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from actors.engines.decoding.adoption import adopt
from actors.engines.decoding.forward import SlotModel
from actors.engines.decoding.kv_slots import Slots, check_model
from actors.engines.decoding.prefill import choose_prefill
from actors.engines.decoding.sampling import Draws, sample
from actors.engines.decoding.stops import StopStrings
from actors.engines.engine import Generation, Request, RunningRequest
from evolver_async.model import grammar
from evolver_async.model.grammar import GrammarError, Grammars
from evolver_async.model.policy import pair_state
from evolver_async.model.projection import masked
from evolver_async.schema import WeightId

FIRST_TOKENS = 512  # of the first prefill step, as its speed is unknown
LEAST_TOKENS = 16  # of any: a slower machine is not made faster by smaller steps


class TorchEngine:
    """Engine on a Hugging Face causal language model; see `actors.engines.engine.Engine`.

    `slots`: number of concurrent sequences; `max_length`: tokens of context; `prefill_tokens`:
    tokens of one prefill step, padding included, and at most those of `forward_s` seconds by the
    speed of the last one; `in_flight`: "keep", "keep_kv" or "wait". Raise ValueError if a layer
    does not attend to the whole context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weights: WeightId | None,
        slots: int,
        max_length: int,
        prefill_tokens: int,
        in_flight: str,
        forward_s: float = math.inf,
    ) -> None:
        check_model(model.config, max_length)
        self.weights = weights
        self._model = model
        self._tokenizer = tokenizer
        self._forward_pass = SlotModel(model, max_length)
        self._stops = StopStrings(tokenizer)
        self._draws = Draws()
        self._slots = Slots(slots, max_length, model.dtype, model.device, in_flight == "keep_kv")
        self._prefill_tokens = prefill_tokens
        self._forward_s = forward_s
        self._tokens_per_s = FIRST_TOKENS / forward_s  # of prefill steps
        self._waits_for_drain = in_flight == "wait"
        self._runs: dict[str, RunningRequest] = {}  # by session, waiting ones included
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest | None] = [None] * slots
        self._active = np.zeros(slots, bool)
        self._searching = np.zeros(slots, bool)  # slots that can still copy KV of another slot
        self._clock = 0  # counts arrivals and departures
        self._order = np.zeros(slots, np.int64)  # clock at which each slot was last taken or left
        self._owner: list[str | None] = [None] * slots
        self._slot_of: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._updating = asyncio.Lock()
        self._holding = self._loading = False  # loading: a thread copies weights, no step may run
        self._loop: asyncio.Task[None] | None = None
        self._stats: dict[str, float] = dict.fromkeys(
            ("generated", "prefilled", "reused", "stale", "steps", "busy_s", "forward_s"), 0.0
        )

    @property
    def obeys_grammars(self) -> bool:
        return grammar.installed()

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Raise ValueError for invalid tokens or a busy session, GrammarError as
        `Engine.generate`."""
        if self.weights is None:
            raise RuntimeError("the engine has no weights yet")
        context = np.asarray(request.tokens, np.int32)
        vocabulary = self._model.config.vocab_size
        if not len(context) or context.min() < 0 or context.max() >= vocabulary:
            raise ValueError(f"tokens must be 1 or more ids below {vocabulary}")
        if request.session in self._runs:
            raise ValueError(f"session {request.session} is already generating")
        limit = min(request.max_tokens, self._slots.max_length - len(context))
        if limit <= 0:
            return Generation(finish="length")
        completers = self._stops.completers(request.stop_strings)
        draws = self._draws.of(request.seed, limit)
        rule = None
        if request.grammar:
            rule = self._grammars.state(request.grammar, request.stop_tokens)
        future = asyncio.get_running_loop().create_future()
        run = RunningRequest(request, context, limit, completers, draws, rule, future)
        if self._loop is None:
            self._loop = asyncio.create_task(self._work(), name="engine")
        elif self._loop.done():
            raise RuntimeError("the engine has ended")
        self._runs[request.session] = run
        self._waiting.append(run)
        self._wake.set()
        try:
            return await future
        finally:
            del self._runs[request.session]
            if run in self._waiting:
                self._waiting.remove(run)
            elif run in self._running:
                self._leave(self._running.index(run))

    def release(self, session: str) -> None:
        """Free the session's slot; other sessions can copy its KV until it is taken."""
        slot = self._slot_of.pop(session, None)
        if slot is not None:
            self._owner[slot] = None

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        """Swap the weights between two steps. Raise ModelError, keeping the old ones, if unfit."""
        async with self._updating:
            self._holding = self._waits_for_drain
            try:
                while self._holding and self._active.any():
                    self._drained.clear()
                    await self._drained.wait()
                self._loading = True
                await adopt(pair_state(self._model, tensors), lambda: self._renew(weights))
            finally:
                self._resume()

    def _renew(self, weights: WeightId) -> None:
        self.weights = weights
        self._forward_pass.renew()
        self._slots.start_epoch()
        self._searching |= self._active
        self._resume()

    def _resume(self) -> None:
        self._holding = self._loading = False
        self._wake.set()

    async def score(self, tokens: list[int]) -> list[float]:
        """Score the tokens at once, between two steps."""
        logprobs = self._forward_pass.score(tokens)
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(f"weights {self.weights}: {min(logprobs)}")
        return logprobs

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    async def _work(self) -> None:
        try:
            while True:
                due = self._active.any() or (self._waiting and not self._holding)
                if self._loading or not due:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            for run in self._runs.values():
                if not run.future.done():
                    run.future.set_exception(error)
        finally:
            for run in self._runs.values():
                run.future.cancel()
            self._active[:] = False
            self._drained.set()

    @torch.inference_mode()
    def _step(self) -> None:
        start = time.perf_counter()
        self._admit()
        slots, counts = self._plan()
        if len(slots):
            logits_BV = self._forward(slots, counts)
            whole = self._slots.cached[slots] == self._slots.total[slots]
            if not whole.all():
                logits_BV = logits_BV[torch.from_numpy(np.flatnonzero(whole)).to(logits_BV.device)]
            self._advance(slots[whole], logits_BV)
        self._stats["steps"] += 1
        self._stats["busy_s"] += time.perf_counter() - start

    def _admit(self) -> None:
        """Assign slots to waiting requests in the order of arrival."""
        while self._waiting and not self._holding:
            run = self._waiting[0]
            slot = self._slot_of.get(run.request.session)
            if slot is None:
                slot = self._vacant()
                if slot is None:
                    return
                if (evicted := self._owner[slot]) is not None:
                    del self._slot_of[evicted]
                self._owner[slot] = run.request.session
                self._slots.oldest[slot] = self._slots.epoch
                self._slot_of[run.request.session] = slot
            self._waiting.popleft()
            before = self._slots.cached[slot]
            known = self._slots.assign(slot, run.context)
            self._stats["reused"] += known
            self._searching[slot] = known == 0 or known < before
            self._running[slot] = run
            self._active[slot] = True
            self._clock += 1
            self._order[slot] = self._clock

    def _leave(self, slot: int) -> None:
        """End the slot's generation; its session keeps the slot until it is released."""
        self._running[slot] = None
        self._active[slot] = False
        self._clock += 1
        self._order[slot] = self._clock
        if not self._active.any():
            self._drained.set()

    def _vacant(self) -> int | None:
        """Return an unused slot, else the least recently used free or idle one; None if all run."""
        idle = np.flatnonzero(~self._active)
        if not len(idle):
            return None
        owned = np.array([self._owner[slot] is not None for slot in idle])
        filled = self._slots.cached[idle] > 0
        rank = np.lexsort((np.where(filled, self._order[idle], idle), filled, owned))
        return int(idle[rank[0]])

    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of the next forward, ascending, and their numbers of tokens."""
        pending = self._slots.total - self._slots.cached
        behind = np.flatnonzero(self._active & (pending > 1))
        if len(behind):
            self._stats["reused"] += self._slots.borrow(behind[self._searching[behind]])
            pending = self._slots.total - self._slots.cached
            behind = behind[pending[behind] > 1]
        if not len(behind):
            slots = np.flatnonzero(self._active)
            return slots, np.ones(len(slots), np.int64)
        limit = self._prefill_tokens
        if math.isfinite(self._forward_s):
            # A forward holds up the loop of the actor, and with it RENEW: a long one would cost the
            # leases.
            limit = min(limit, max(LEAST_TOKENS, int(self._tokens_per_s * self._forward_s)))
        slots = choose_prefill(self._slots, behind, self._order, self._searching, limit)
        self._searching[slots] = False
        return slots, np.minimum(pending[slots], limit)

    def _forward(self, slots: np.ndarray, counts: np.ndarray) -> Tensor:
        """Run the next `counts` tokens of the slots, equal ones once; return logits [B, V]."""
        start = time.perf_counter()
        firsts, same_B = self._slots.distinct(slots, counts)
        ran = counts[firsts]
        if counts.max() > 1:
            self._stats["prefilled"] += float(ran.sum())
            self._stats["reused"] += float(counts.sum() - ran.sum())
        inputs, last = self._slots.batch(slots[firsts], ran)
        hidden_ND = self._forward_pass(self._slots, inputs).flatten(0, 1)
        logits_BV = self._forward_pass.head(hidden_ND if last is None else hidden_ND[last]).float()
        self._slots.write(slots, counts, firsts, same_B)
        if len(firsts) < len(slots):
            logits_BV = logits_BV[torch.from_numpy(same_B).to(logits_BV.device)]
        spent_s = time.perf_counter() - start
        self._stats["forward_s"] += spent_s
        if counts.max() > 1:
            self._tokens_per_s = float(len(ran) * ran.max()) / max(spent_s, 1e-6)
        return logits_BV

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._tokenizer, self._model.config.vocab_size)

    def _advance(self, slots: np.ndarray, logits_BV: Tensor) -> None:
        """Sample one token per slot and end complete generations."""
        runs = [run for slot in slots if (run := self._running[slot]) is not None]
        if not runs or (weights := self.weights) is None:
            return
        draws = [run.draws[len(run.out.tokens)] for run in runs]
        logits_BV = _ruled(logits_BV, runs)
        tokens_B, logprobs_B = sample(logits_BV, [run.request.temperature for run in runs], draws)
        self._stats["generated"] += len(runs)
        self._stats["stale"] += self._slots.stale(slots)
        tokens = tokens_B.tolist()
        self._slots.append(slots, tokens)
        drawn = zip(slots.tolist(), runs, tokens, logprobs_B.tolist(), strict=True)
        for slot, run, token, logprob in drawn:
            if not math.isfinite(logprob):
                self._leave(slot)
                if not run.future.done():
                    run.future.set_exception(FloatingPointError(f"weights {weights}: {logprob}"))
                self._slots.erase()  # KV of broken weights
                self._searching |= self._active
                continue
            if run.grammar is not None:
                try:
                    run.grammar.accept(token)
                except GrammarError:  # all tokens were masked
                    self._leave(slot)
                    if not run.future.done():
                        problem = f"no token can follow {run.out.tokens[-8:]}"
                        run.future.set_exception(GrammarError(problem))
                    continue
            out = run.out
            out.tokens.append(token)
            out.logprobs.append(logprob)
            out.weights.append(weights)
            if token in run.request.stop_tokens or (
                token in run.completers and self._stops.found(out.tokens, run.request.stop_strings)
            ):
                out.finish = "stop"
            elif len(out.tokens) < run.limit:
                continue
            self._leave(slot)
            if not run.future.done():
                run.future.set_result(out)


def _ruled(logits_BV: Tensor, runs: list[RunningRequest]) -> Tensor:
    """Mask what the grammars of the runs exclude."""
    if all(run.grammar is None for run in runs):
        return logits_BV
    masks_B = [None if run.grammar is None else run.grammar.allowed() for run in runs]
    masks_MW = [mask_W for mask_W in masks_B if mask_W is not None]
    if not masks_MW:
        return logits_BV
    ruled_B = np.array([mask_W is not None for mask_W in masks_B])
    mask_B = np.where(ruled_B, np.cumsum(ruled_B) - 1, -1)
    device = logits_BV.device
    return masked(
        logits_BV,
        torch.from_numpy(mask_B).to(device),
        torch.from_numpy(np.stack(masks_MW)).to(device),
    )
