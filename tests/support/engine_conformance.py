"""What every engine must keep, as functions over a factory; each engine's test file runs them all.

A factory makes an engine for a model: `factory(model, tokenizer, weights=, slots=, max_length=,
prefill_tokens=, in_flight=)`. The oracle is `policy.token_logprobs` on the whole sequence.
"""

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from actors.engines.decoding.stops import UNDECODED
from actors.engines.engine import Engine, Generation, Request
from actors.weights.source import LocalEngine
from evolver_async.model.grammar import GrammarError, Grammars
from evolver_async.model.policy import ModelError, load_state, state_tensors, token_logprobs
from evolver_async.schema import WeightId

TOLERANCE = 1e-4
ATTEMPTS = 10  # on a busy machine the generations can be over before the update comes
DEADLINE_S = 300  # of a scenario: a second on a quiet machine, a minute beside much other work
RUNNER = asyncio.Runner()  # one loop for all scenarios, which may share an engine's processes
V0, V1, V2 = (WeightId(lineage=1, step=step) for step in range(3))


class TestedEngine(Engine, LocalEngine, Protocol):
    """An engine that takes weights of the test."""


@dataclass
class Setting:
    """A model with three versions of its weights, and how to make an engine for it.

    `model` is the oracle's copy; engines get copies of their own. KV is reused in pieces of `block`
    tokens.
    """

    factory: Callable[..., TestedEngine]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    versions: dict[WeightId, dict[str, Tensor]]
    block: int = 1

    def engine(self, **numbers: Any) -> TestedEngine:
        load_state(self.model, self.versions[V0])
        numbers = {
            "weights": V0,
            "slots": 8,
            "max_length": 256,
            "prefill_tokens": 512,
            "in_flight": "keep",
        } | numbers
        return self.factory(copy.deepcopy(self.model), self.tokenizer, **numbers)

    def prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, len(self.tokenizer), (length,), generator=generator).tolist()

    def reusable(self, tokens: int) -> int:
        """Of so many tokens that two contexts have in common."""
        return tokens // self.block * self.block

    def check(self, request: Request, generation: Generation) -> None:
        """Every log-prob equals the oracle's under the weights that the token is tagged with."""
        count = len(generation.tokens)
        assert count == len(generation.logprobs) == len(generation.weights) > 0
        tokens = torch.tensor([request.tokens + generation.tokens])
        for weights in set(generation.weights):
            load_state(self.model, self.versions[weights])
            with torch.no_grad():
                logprobs, _ = token_logprobs(
                    self.model, tokens, torch.ones_like(tokens), request.temperature
                )
            mine = torch.tensor([tag == weights for tag in generation.weights])
            got = torch.tensor(generation.logprobs)[mine]
            worst = (got - logprobs[0, -count:][mine]).abs().max()
            assert worst <= TOLERANCE, f"log-probs of {weights} differ by {worst}"

    def check_over_stale_kv(self, request: Request, generation: Generation) -> None:
        """Every log-prob equals that of a forward pass which keeps its KV over the updates.

        The pass that samples a token with some weights computes the KV of the token before it.
        """
        cache, tokens = DynamicCache(), request.tokens + generation.tokens
        place = len(request.tokens) - 1  # of the next token to read
        for weights, run in itertools.groupby(generation.weights):
            count = len(list(run))
            start = place if cache.get_seq_length() else 0
            load_state(self.model, self.versions[weights])
            with torch.no_grad():
                read = torch.tensor([tokens[start : place + count]])
                logits = self.model(read, past_key_values=cache).logits[0, -count:]
            expected = (logits / request.temperature).log_softmax(-1)
            sampled = torch.tensor(tokens[place + 1 : place + 1 + count])
            done = place + 1 - len(request.tokens)
            got = torch.tensor(generation.logprobs[done : done + count])
            worst = (got - expected[torch.arange(count), sampled]).abs().max()
            assert worst <= TOLERANCE, f"log-probs of {weights} over stale KV differ by {worst}"
            place += count


def setting(
    factory: Callable[..., TestedEngine],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    block: int = 1,
) -> Setting:
    """The model's own weights as V0, and two perturbed versions."""
    versions = {V0: {name: tensor.clone() for name, tensor in state_tensors(model).items()}}
    for version in (V1, V2):
        generator = torch.Generator().manual_seed(version.step)
        versions[version] = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in versions[V0].items()
        }
    return Setting(factory, model, tokenizer, versions, block)


def request(tokens: list[int], session: str, **changes: Any) -> Request:
    return replace(
        Request(tokens=tokens, max_tokens=12, temperature=1.0, session=session, seed=7), **changes
    )


def run(engine: Engine, scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a scenario to its end, with a deadline, and close the engine."""

    async def whole() -> Any:
        try:
            return await asyncio.wait_for(scenario, DEADLINE_S)
        finally:
            await engine.close()

    return RUNNER.run(whole())


async def generate_all(engine: Engine, requests: list[Request]) -> list[Generation]:
    return list(await asyncio.gather(*(engine.generate(one) for one in requests)))


def single_matches(s: Setting) -> None:
    engine, one = s.engine(), request(s.prompt(20, 0), "a")
    (out,) = run(engine, generate_all(engine, [one]))
    assert len(out.tokens) == 12 and out.finish == "length" and set(out.weights) == {V0}
    s.check(one, out)


def batch_of_different_lengths_matches(s: Setting) -> None:
    engine = s.engine()
    many = [request(s.prompt(5 + 17 * i, i), str(i), max_tokens=3 + 5 * i) for i in range(6)]
    for one, out in zip(many, run(engine, generate_all(engine, many)), strict=True):
        assert len(out.tokens) == one.max_tokens
        s.check(one, out)


def prompt_beyond_the_prefill_budget_matches(s: Setting) -> None:
    engine = s.engine(prefill_tokens=32)
    many = [request(s.prompt(100, 1), "long"), request(s.prompt(30, 2), "short")]
    for one, out in zip(many, run(engine, generate_all(engine, many)), strict=True):
        s.check(one, out)


def turns_reuse_kv_and_match(s: Setting) -> None:
    engine = s.engine()

    async def episode(index: int) -> None:
        context = s.prompt(40, index)
        for turn in range(4):
            one = request(context, str(index), max_tokens=2 + (index + turn) % 3, seed=turn)
            out = await engine.generate(one)
            s.check(one, out)
            context = context + out.tokens + s.prompt(9, 100 * index + turn)

    async def scenario() -> None:
        await asyncio.gather(*(episode(index) for index in range(6)))

    run(engine, scenario())
    # Three later turns of six episodes find at least their first 40 tokens.
    assert engine.stats()["reused"] >= 3 * 6 * s.reusable(40)


def changed_history_is_not_reused(s: Setting) -> None:
    engine, context = s.engine(), s.prompt(40, 3)
    other = context[:25] + s.prompt(20, 4)
    first, second = request(context, "a"), request(other, "a")

    async def scenario() -> list[Generation]:
        return [await engine.generate(first), await engine.generate(second)]

    for one, out in zip((first, second), run(engine, scenario()), strict=True):
        s.check(one, out)


def group_shares_its_prompt_and_matches(s: Setting) -> None:
    engine, prompt = s.engine(), s.prompt(60, 5)
    many = [request(prompt, str(i), seed=i) for i in range(6)]
    many.append(request(prompt[:45] + s.prompt(10, 6), "cousin"))
    for one, out in zip(many, run(engine, generate_all(engine, many)), strict=True):
        s.check(one, out)
    assert engine.stats()["reused"] >= 5 * s.reusable(50)


def more_requests_than_slots_all_finish_and_match(s: Setting) -> None:
    engine = s.engine(slots=3)
    many = [request(s.prompt(10 + i, i), str(i), max_tokens=2 + i % 5) for i in range(11)]

    async def scenario() -> None:
        outs = await generate_all(engine, many)
        for one, out in zip(many, outs, strict=True):
            s.check(one, out)
        # All sessions are still open: their next turns take turns in the slots.
        later = [
            replace(one, tokens=one.tokens + out.tokens)
            for one, out in zip(many, outs, strict=True)
        ]
        for one, out in zip(later, await generate_all(engine, later), strict=True):
            s.check(one, out)

    run(engine, scenario())


def update_while_idle_drops_old_kv(s: Setting) -> None:
    engine, context = s.engine(), s.prompt(50, 8)

    async def scenario() -> None:
        first = request(context, "a")
        out = await engine.generate(first)
        await engine.update(V1, s.versions[V1])
        assert engine.weights == V1
        # The session's own KV, a released one, and another session's same prompt: all stale.
        engine.release("gone")
        many = [replace(first, tokens=context + out.tokens), request(context, "b")]
        for one, got in zip(many, await generate_all(engine, many), strict=True):
            assert set(got.weights) == {V1}
            s.check(one, got)

    run(engine, scenario())


async def _update_midway(s: Setting, engine: TestedEngine, many: list[Request]) -> list[Generation]:
    """Start generations, update twice while they run, return what they gave."""
    running = asyncio.create_task(generate_all(engine, many))
    for version in (V1, V2):
        target = engine.stats()["generated"] + 20
        while engine.stats()["generated"] < target and not running.done():
            await asyncio.sleep(0)
        await engine.update(version, s.versions[version])
    return await running


def update_in_flight_keeps_generations_and_tags_versions(s: Setting) -> None:
    shared = s.prompt(30, 9)
    many = [request(s.prompt(20 + i, i), str(i), max_tokens=100) for i in range(4)]
    many += [request(shared, f"shared{i}", max_tokens=100, seed=i) for i in range(3)]
    for _ in range(ATTEMPTS):
        engine = s.engine(in_flight="keep")
        outs = run(engine, _update_midway(s, engine, many))
        for one, out in zip(many, outs, strict=True):
            assert out.weights == sorted(out.weights)
            s.check(one, out)
        if all(set(out.weights) == {V0, V1, V2} for out in outs):
            return
    pytest.fail("no generation went on through two updates")


def update_in_flight_keeps_kv_of_sessions_alone(s: Setting) -> None:
    """Tokens after an update come from the new weights over the KV of the older ones."""
    shared = s.prompt(64, 9)
    many = [request(s.prompt(20 + i, i), str(i), max_tokens=100, seed=i) for i in range(3)]
    many += [request(shared, f"shared{i}", max_tokens=100, seed=i) for i in range(3)]

    async def scenario(engine: TestedEngine) -> tuple[list[Generation], list[Generation]]:
        outs = await _update_midway(s, engine, many)
        reused = engine.stats()["reused"]
        later = [
            replace(one, tokens=one.tokens + out.tokens + s.prompt(5, 3))
            for one, out in zip(many, outs, strict=True)
        ]
        later += [request(shared, "new")]
        found = await generate_all(engine, later)
        # The KV of a session, all but that of its last token, and nothing for the new one.
        known = [len(one.tokens) + len(out.tokens) - 1 for one, out in zip(many, outs, strict=True)]
        assert engine.stats()["reused"] - reused == sum(map(s.reusable, known))
        return outs, found

    for _ in range(ATTEMPTS):
        engine = s.engine(in_flight="keep_kv")
        outs, found = run(engine, scenario(engine))
        if all(set(out.weights) == {V0, V1, V2} for out in outs):
            break
    else:
        pytest.fail("no generation went on through two updates")
    stale = [out.weights[i] != out.weights[0] for out in outs for i in range(len(out.weights))]
    for one, out in zip(many, outs, strict=True):
        assert out.weights == sorted(out.weights)
        s.check_over_stale_kv(one, out)
        with pytest.raises(AssertionError, match="differ"):
            s.check(one, out)
    # All tokens of the later turns, and none of the new session, which a check of exactness shows.
    assert engine.stats()["stale"] == sum(stale) + sum(len(out.tokens) for out in found[:-1])
    s.check(request(shared, "new"), found[-1])


def update_with_kept_kv_leaves_no_broken_kv(s: Setting) -> None:
    engine, one = s.engine(in_flight="keep_kv"), request(s.prompt(40, 0), "a")
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in s.versions[V1].items()}

    async def scenario() -> None:
        await engine.generate(one)
        await engine.update(V1, broken)
        with pytest.raises(FloatingPointError, match=r"1\.1"):
            await engine.generate(one)
        await engine.update(V0, s.versions[V0])
        s.check(one, await engine.generate(one))

    run(engine, scenario())


def update_in_flight_waits_for_generations(s: Setting) -> None:
    many = [request(s.prompt(20 + i, i), str(i), max_tokens=100) for i in range(7)]
    for _ in range(ATTEMPTS):
        engine = s.engine(in_flight="wait", slots=3)
        outs = run(engine, _update_midway(s, engine, many))
        for one, out in zip(many, outs, strict=True):
            assert len(set(out.weights)) == 1
            s.check(one, out)
        if {out.weights[0] for out in outs} >= {V0, V2}:
            return
    pytest.fail("no generation waited for an update")


def same_seed_gives_same_tokens_whatever_runs_beside(s: Setting) -> None:
    one = request(s.prompt(25, 10), "a", seed=42, max_tokens=20)
    alone = s.engine()
    (expected,) = run(alone, generate_all(alone, [one]))
    crowded = s.engine(slots=4)
    many = [request(s.prompt(5 + 9 * i, i), str(i), seed=i, max_tokens=5 + i) for i in range(6)]
    outs = run(crowded, generate_all(crowded, [*many, one]))
    assert outs[-1].tokens == expected.tokens
    again = s.engine()
    (other,) = run(again, generate_all(again, [replace(one, seed=43)]))
    assert other.tokens != expected.tokens


def greedy_takes_the_most_likely(s: Setting) -> None:
    engine = s.engine()
    many = [request(s.prompt(20, 0), "a", temperature=0.0), request(s.prompt(20, 0), "b", seed=1)]
    greedy, drawn = run(engine, generate_all(engine, many))
    with torch.no_grad():
        logits = s.model(torch.tensor([many[0].tokens + greedy.tokens])).logits[0]
    assert logits.argmax(-1)[19:-1].tolist() == greedy.tokens
    for one, out in zip(many, (greedy, drawn), strict=True):
        s.check(one, out)


def other_temperatures_match(s: Setting) -> None:
    engine = s.engine()
    many = [request(s.prompt(20, i), str(i), temperature=t) for i, t in enumerate((0.5, 1.0, 2.0))]
    for one, out in zip(many, run(engine, generate_all(engine, many)), strict=True):
        s.check(one, out)


def stops_at_tokens_and_strings(s: Setting) -> None:
    one = request(s.prompt(20, 11), "a", temperature=0.0, max_tokens=20)
    engine = s.engine()

    async def scenario() -> None:
        free = await engine.generate(one)
        token = free.tokens[7]
        cut = free.tokens.index(token) + 1
        stopped = await engine.generate(replace(one, stop_tokens=frozenset([token])))
        assert stopped.tokens == free.tokens[:cut] and stopped.finish == "stop"
        # A string that spans two tokens ends the generation with the token that completes it.
        texts = [s.tokenizer.decode(free.tokens[: i + 1]) for i in range(20)]
        pairs = [(texts[i - 1], texts[i + 1]) for i in range(7, 19)]
        spanning = next(
            after[len(before) :]
            for before, after in pairs
            if after.startswith(before) and UNDECODED not in after[len(before) - 1 :]
        )
        cut = next(i for i, text in enumerate(texts) if spanning in text) + 1
        stopped = await engine.generate(replace(one, stop_strings=("never there", spanning)))
        assert stopped.tokens == free.tokens[:cut] and stopped.finish == "stop"
        missed = await engine.generate(replace(one, stop_strings=("never there",)))
        assert missed.tokens == free.tokens and missed.finish == "length"

    run(engine, scenario())


def a_grammar_masks_what_it_excludes(s: Setting) -> None:
    """Beside requests without one; log-probs are those of a naive masked softmax."""
    schema = {
        "type": "object",
        "properties": {
            "where": {"enum": ["left", "right", "up"]},
            "name": {"type": "string", "minLength": 2, "maxLength": 4},
            "steps": {"type": "integer", "minimum": 1, "maximum": 30},
        },
        "required": ["where", "name", "steps"],
    }
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    text = json.dumps({"type": "structural_tag", "format": form})
    (stop,) = s.tokenizer.encode("<|end|>")
    other: dict[str, Any] = {
        "max_tokens": 100,
        "temperature": 1.3,
        "stop_tokens": frozenset([stop]),
    }
    prompts = [s.prompt(9 + index, seed=index) for index in range(4)]
    plain = [request(prompt, f"free-{index}") for index, prompt in enumerate(prompts)]
    ruled = [
        request(prompt, f"ruled-{index}", grammar=text, seed=index, **other)
        for index, prompt in enumerate(prompts)
    ]
    engine = s.engine()
    found = run(engine, generate_all(engine, [*plain, *ruled]))
    for one, generation in zip(plain, found[:4], strict=True):
        s.check(one, generation)
    compiler = Grammars(s.tokenizer, s.model.config.vocab_size)
    for one, generation in zip(ruled, found[4:], strict=True):
        assert generation.finish == "stop" and generation.tokens[-1] == stop
        assert generation.logprobs[-1] == 0.0, "nothing but the end may follow"
        value = json.loads(s.tokenizer.decode(generation.tokens[:-1]))
        assert value["where"] in ("left", "right", "up") and 1 <= value["steps"] <= 30
        assert 2 <= len(value["name"]) <= 4
        with torch.no_grad():
            logits = s.model(torch.tensor([one.tokens + generation.tokens])).logits[0]
        state = compiler.state(text, [stop])
        for index, token in enumerate(generation.tokens):
            mask = state.allowed()
            assert mask is not None
            allowed = torch.from_numpy(np.unpackbits(mask, bitorder="little").astype(bool))
            row = logits[len(one.tokens) - 1 + index] / one.temperature
            row = row.masked_fill(~allowed[: len(row)], -torch.inf).log_softmax(-1)
            assert abs(row[token].item() - generation.logprobs[index]) < 1e-5
            state.accept(token)


def grammars_that_cannot_be_obeyed_are_refused(s: Setting) -> None:
    """And the engine goes on."""
    engine, stops = s.engine(), frozenset(s.tokenizer.encode("<|end|>"))
    tab = {"type": "string", "pattern": "^\t$"}  # control characters are never allowed

    async def scenario() -> None:
        for index, schema in enumerate(({"type": "banana"}, tab)):
            form = {"type": "json_schema", "json_schema": schema}
            text = json.dumps({"type": "structural_tag", "format": form})
            one = request(s.prompt(5, seed=1), f"bad-{index}", grammar=text, stop_tokens=stops)
            with pytest.raises(GrammarError):
                await engine.generate(one)
        one = request(s.prompt(5, seed=2), "good")
        s.check(one, await engine.generate(one))

    run(engine, scenario())


def full_context_ends_with_length(s: Setting) -> None:
    engine = s.engine(max_length=32)
    near, full = request(s.prompt(28, 0), "a", max_tokens=50), request(s.prompt(32, 1), "b")
    out, nothing = run(engine, generate_all(engine, [near, full]))
    assert len(out.tokens) == 4 and out.finish == "length"
    s.check(near, out)
    assert nothing.tokens == [] and nothing.finish == "length"


def released_and_cancelled_sessions_leave_room(s: Setting) -> None:
    engine = s.engine(slots=2)

    async def scenario() -> None:
        long = [request(s.prompt(9, i), f"long{i}", max_tokens=200) for i in range(2)]
        tasks = [asyncio.create_task(engine.generate(one)) for one in long]
        while engine.stats()["generated"] < 4:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        for index in range(6):
            one = request(s.prompt(20, index), f"short{index}")
            s.check(one, await engine.generate(one))
            engine.release(one.session)
            engine.release(one.session)

    run(engine, scenario())


def foreign_weights_are_refused_and_the_old_ones_stay(s: Setting) -> None:
    engine, one = s.engine(), request(s.prompt(10, 0), "a")
    name = next(reversed(s.versions[V1]))
    torn = s.versions[V1] | {name: s.versions[V1][name][:-1]}

    async def scenario() -> None:
        with pytest.raises(ModelError, match=name):
            await engine.update(V1, torn)
        assert engine.weights == V0
        s.check(one, await engine.generate(one))

    run(engine, scenario())


def scores_match_before_and_after_an_update(s: Setting) -> None:
    engine, tokens = s.engine(), s.prompt(24, 12)

    async def scenario() -> None:
        for version in (V0, V1, V1):
            await engine.update(version, s.versions[version])
            # A generation with the same context leaves KV that must not be used.
            await engine.generate(request(tokens, "a", max_tokens=2))
            load_state(s.model, s.versions[version])
            with torch.no_grad():
                row = torch.tensor([tokens])
                logprobs, _ = token_logprobs(s.model, row, torch.ones_like(row))
            assert await engine.score(tokens) == pytest.approx(
                logprobs[0, 1:].tolist(), abs=TOLERANCE
            )

    run(engine, scenario())


def broken_weights_fail_the_generation_and_leave_no_trace(s: Setting) -> None:
    engine, one = s.engine(), request(s.prompt(10, 0), "a")
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in s.versions[V1].items()}

    async def scenario() -> None:
        await engine.update(V1, broken)
        with pytest.raises(FloatingPointError, match=r"1\.1"):
            await engine.generate(one)
        await engine.update(V0, s.versions[V0])
        s.check(one, await engine.generate(one))

    run(engine, scenario())


def bad_requests_are_refused(s: Setting) -> None:
    engine = s.engine()

    async def scenario() -> None:
        for tokens in ([], [len(s.tokenizer)], [-1]):
            with pytest.raises(ValueError, match="tokens"):
                await engine.generate(request(tokens, "a"))
        busy = asyncio.create_task(engine.generate(request(s.prompt(5, 0), "a")))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="session a"):
            await engine.generate(request(s.prompt(5, 0), "a"))
        await busy

    run(engine, scenario())


CONFORMANCE: list[Callable[[Setting], None]] = [
    single_matches,
    batch_of_different_lengths_matches,
    prompt_beyond_the_prefill_budget_matches,
    turns_reuse_kv_and_match,
    changed_history_is_not_reused,
    group_shares_its_prompt_and_matches,
    more_requests_than_slots_all_finish_and_match,
    update_while_idle_drops_old_kv,
    update_in_flight_keeps_generations_and_tags_versions,
    update_in_flight_keeps_kv_of_sessions_alone,
    update_with_kept_kv_leaves_no_broken_kv,
    update_in_flight_waits_for_generations,
    same_seed_gives_same_tokens_whatever_runs_beside,
    greedy_takes_the_most_likely,
    other_temperatures_match,
    stops_at_tokens_and_strings,
    a_grammar_masks_what_it_excludes,
    grammars_that_cannot_be_obeyed_are_refused,
    full_context_ends_with_length,
    released_and_cancelled_sessions_leave_room,
    foreign_weights_are_refused_and_the_old_ones_stay,
    scores_match_before_and_after_an_update,
    broken_weights_fail_the_generation_and_leave_no_trace,
    bad_requests_are_refused,
]
