"""The torch engine keeps what `engine_conformance` asks, on several architectures, and its own."""

import asyncio
import math
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from engine_conformance import (
    CONFORMANCE,
    V0,
    V1,
    Setting,
    generate_all,
    request,
    run,
    setting,
)
from transformers import (
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.decoding.fused import FusedDecoder
from actors.engines.decoding.kv_slots import Slots
from actors.engines.decoding.sampling import Draws, sample
from actors.engines.engine import Generation
from actors.engines.torch_engine import LEAST_TOKENS, TorchEngine
from evolver_async.model.tiny import make_tokenizer

TOKENIZER = make_tokenizer(256)
SHAPE = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=4, head_dim=8),
    "qwen2_tied_grouped": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "llama_grouped": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "neox": GPTNeoXConfig(**SHAPE),  # no lean forward: the module's own
}


def settings(name: str) -> Setting:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").eval()
    return setting(TorchEngine, model, TOKENIZER)


@pytest.mark.parametrize("name", ["qwen3", "neox"])
@pytest.mark.parametrize("promise", CONFORMANCE, ids=lambda promise: promise.__name__)
def test_conformance(promise, name):
    promise(settings(name))


@pytest.mark.parametrize("name", ["qwen2_tied_grouped", "llama_grouped"])
@pytest.mark.parametrize(
    "promise",
    [one for one in CONFORMANCE if "turns" in one.__name__ or "keeps" in one.__name__],
    ids=lambda promise: promise.__name__,
)
def test_conformance_of_other_architectures(promise, name):
    promise(settings(name))


def test_lean_forward_is_used_where_it_fits():
    assert [name for name in CONFIGS if FusedDecoder.fits(settings(name).model)] == [
        "qwen3",
        "qwen2_tied_grouped",
        "llama_grouped",
    ]


def test_models_that_do_not_see_the_whole_context_are_refused():
    sizes = SHAPE | {"num_key_value_heads": 2, "sliding_window": 16}
    model = AutoModelForCausalLM.from_config(MistralConfig(**sizes))
    numbers = {"weights": V0, "slots": 2, "prefill_tokens": 64, "in_flight": "keep"}
    with pytest.raises(ValueError, match="sliding window 16"):
        TorchEngine(model, TOKENIZER, max_length=64, **numbers)
    with pytest.raises(ValueError, match="256 positions"):
        TorchEngine(settings("qwen3").model, TOKENIZER, max_length=512, **numbers)


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, 0.0, -torch.inf, 1.0])
    uniforms = ((torch.arange(4000) + 0.5) / 4000).tolist()
    tokens, logprobs = sample(logits.repeat(4000, 1), [0.5] * 4000, uniforms)
    expected = (logits / 0.5).log_softmax(-1)
    assert torch.allclose(tokens.bincount(minlength=4) / 4000, expected.exp(), atol=1e-3)
    assert torch.allclose(logprobs, expected[tokens], atol=1e-6)
    last, _ = sample(logits[None], [1.0], [1 - 2**-53])
    assert last.item() == 3


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every forward."""
    found: list[int] = []
    batch = Slots.batch

    def counted(
        slots: Slots, chosen: np.ndarray, counts: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        found.append(len(chosen))
        return batch(slots, chosen, counts)

    monkeypatch.setattr(Slots, "batch", counted)
    return found


def test_a_slow_machine_gets_smaller_prefill_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    batch = Slots.batch

    def counted(slots: Slots, chosen: np.ndarray, counts: np.ndarray) -> Any:
        tokens.append(len(counts) * int(counts.max()))
        return batch(slots, chosen, counts)

    monkeypatch.setattr(Slots, "batch", counted)
    s = settings("qwen3")
    first, second = (request(s.prompt(60, seed), str(seed)) for seed in (5, 6))

    async def in_turn(engine: TorchEngine) -> Generation:
        await engine.generate(first)
        tokens.clear()
        return await engine.generate(second)

    for forward_s, longest in ((math.inf, 60), (1e-9, LEAST_TOKENS)):
        engine = s.engine(forward_s=forward_s)
        s.check(second, run(engine, in_turn(engine)))
        assert max(tokens) == longest


@pytest.mark.parametrize("in_flight", ["keep", "keep_kv"])
def test_equal_contexts_are_one_row(rows: list[int], in_flight: str) -> None:
    s = settings("qwen3")
    engine, prompt = s.engine(in_flight=in_flight), s.prompt(60, 5)
    many = [request(prompt, str(member)) for member in range(6)]
    outs = run(engine, generate_all(engine, many))
    for one, out in zip(many, outs, strict=True):
        s.check(one, out)
        assert out.tokens == outs[0].tokens
    assert rows == [1] * len(outs[0].tokens)
    assert engine.stats()["prefilled"] == 60
    assert engine.stats()["reused"] == 5 * 60


def test_contexts_that_part_and_meet_again_are_rows_of_their_own_between(rows: list[int]) -> None:
    s = settings("qwen3")
    engine, prompt, after = s.engine(), s.prompt(60, 5), s.prompt(20, 6)
    many = [request(prompt, str(member), seed=member, max_tokens=4) for member in range(6)]
    later = [request(after, str(member), seed=3, max_tokens=4) for member in range(6)]

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        return await generate_all(engine, many), await generate_all(engine, later)

    for asked, outs in zip((many, later), run(engine, scenario()), strict=True):
        for one, out in zip(asked, outs, strict=True):
            s.check(one, out)
        begun = [len({tuple(out.tokens[:count]) for out in outs}) for count in range(4)]
        assert rows[:4] == begun
        del rows[:4]
    assert not rows


def test_contexts_that_meet_after_an_update_are_one_row(rows: list[int]) -> None:
    """The update makes the shorter one a token longer before the other one goes on."""
    s = settings("qwen3")
    engine, prompt = s.engine(), s.prompt(60, 5)

    async def scenario() -> list[Generation]:
        begun = await engine.generate(request(prompt, "a", temperature=0, max_tokens=1))
        asked = [request(prompt, "a", temperature=0)]
        asked.append(request(prompt + begun.tokens, "b", temperature=0))
        await engine.generate(replace(asked[1], max_tokens=1))
        rows.clear()
        both = asyncio.create_task(generate_all(engine, asked))
        while rows != [2, 2]:
            await asyncio.sleep(0)
        await engine.update(V1, s.versions[V0])
        return await both

    shorter, longer = run(engine, scenario())
    assert shorter.tokens[1:] == longer.tokens[:-1]
    assert set(rows[2:]) == {1}


def test_contexts_over_kv_of_different_weights_are_not_one_row(rows: list[int]) -> None:
    s = settings("qwen3")
    engine, context = s.engine(in_flight="keep_kv"), s.prompt(40, 5)
    later = [request(context + s.prompt(10, 6), name) for name in ("old", "new")]

    async def scenario() -> list[Generation]:
        await engine.generate(request(context, "old", max_tokens=1))
        await engine.update(V1, s.versions[V1])
        await engine.generate(request(context, "new", max_tokens=1))
        rows.clear()
        return await generate_all(engine, later)

    old, new = run(engine, scenario())
    assert rows[0] == 2
    s.check(later[1], new)
    with pytest.raises(AssertionError, match="differ"):
        s.check(later[0], old)


def test_kv_over_older_kv_is_older_kv() -> None:
    """A new session takes nothing from a slot whose own tokens are new and whose prefix is old."""
    s = settings("qwen3")
    engine, prompt, other = s.engine(in_flight="keep_kv", slots=4), s.prompt(40, 5), s.prompt(30, 9)
    middle, end, last = s.prompt(10, 6), s.prompt(10, 8), s.prompt(10, 10)

    async def scenario() -> list[Generation]:
        async def turn(session: str, *parts: list[int]) -> Generation:
            return await engine.generate(request([*chain(*parts)], session, max_tokens=3))

        await turn("gone", other)
        await turn("mixed", prompt)
        await turn("old", other)
        engine.release("gone")
        await engine.update(V1, s.versions[V1])
        await turn("between", other[::-1])
        await turn("new", prompt)  # in the slot of "gone"
        await turn("mixed", prompt, middle, end)  # over its KV of the older weights
        await turn("old", prompt, s.prompt(10, 7))  # its context is rewritten: it borrows of "new"
        engine.release("between")
        newest = [await turn("newest", prompt, middle, end)]
        await turn("old", prompt, middle, end)  # borrows of "mixed"
        contexts = [prompt + middle + end + last]
        asked = [request(*contexts, name, max_tokens=3) for name in ("old", "newest")]
        return newest + (await generate_all(engine, asked))[1:]

    before, after = run(engine, scenario())
    s.check(request(prompt + middle + end, "newest"), before)
    s.check(request(prompt + middle + end + last, "newest"), after)


def test_broken_weights_spare_the_engine_if_a_request_was_cancelled() -> None:
    s = settings("qwen3")
    engine, one, other = s.engine(), request(s.prompt(10, 0), "a"), request(s.prompt(9, 1), "b")
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in s.versions[V1].items()}

    async def scenario() -> None:
        await engine.update(V1, broken)
        cancelled, failing = (asyncio.create_task(engine.generate(it)) for it in (one, other))
        await asyncio.sleep(0)
        cancelled.cancel()  # its slot is still active in the step that comes first
        with pytest.raises(FloatingPointError, match=r"1\.1"):
            await failing
        await engine.update(V0, s.versions[V0])
        s.check(one, await engine.generate(one))

    run(engine, scenario())


def test_draws_are_those_of_a_generator_of_their_own() -> None:
    draws = Draws()
    for seed in (0, 7, 2**63 - 1, 2**64 - 1, 7):
        for count in (1, 3, 40):
            expected = np.random.Generator(np.random.Philox(key=seed)).random(count)
            assert draws.of(seed, count) == expected.tolist()
