"""Trees of rows with a common beginning, and the lean forward pass, against a pass per row.

The oracle is transformers' own forward pass over each row alone.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from evolver_async.config import Config
from evolver_async.model import flash, layers, lora, policy, row_checks
from evolver_async.model.cpu import lean
from evolver_async.model.rows import tree_spans
from evolver_async.model.rows.borders import Borders, Sequences
from evolver_async.model.rows.prefix_trees import LEAST_SAVED, Merged, SortedRows, merge
from evolver_async.model.tokenizer import ModelError
from learner.optimize.model import layout_of

CPU = torch.device("cpu")
SPANS = st.sampled_from([(tree_spans.SPAN, tree_spans.NEAR), (24, 60), (10, 20), (1, 0)])
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 50,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "llama": LlamaConfig(**SHAPE),
    "biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
}
WINDOWED = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1)


def made(shape: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()
    with torch.no_grad():  # norms and biases that a mistake would not survive
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@st.composite
def forests(draw: st.DrawFn) -> list[np.ndarray]:
    """Rows that grow from random nodes of random trees, in any order; some are equal."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    nodes = [np.zeros(0, np.int64)]
    for _ in range(draw(st.integers(1, 12))):
        stem = nodes[int(rng.integers(len(nodes)))]
        nodes.append(np.concatenate([stem, rng.integers(0, 50, int(rng.integers(1, 40)))])[:200])
    rows = [nodes[int(index)] for index in rng.integers(1, len(nodes), int(rng.integers(1, 9)))]
    return [rows[int(index)] for index in rng.permutation(len(rows))]


def gradients(model: torch.nn.Module) -> torch.Tensor:
    found = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    model.zero_grad()
    return found


def each_alone(model: Any, rows: list[np.ndarray], weights_AM: torch.Tensor) -> torch.Tensor:
    """Hidden states of the rows laid end to end, by transformers; with the gradient of a sum."""
    tokens = [torch.from_numpy(row)[None] for row in rows]
    hidden_AM = torch.cat([policy.hidden_states(model, one)[0] for one in tokens])
    (hidden_AM * weights_AM).sum().backward()
    return hidden_AM.detach()


def compare(
    model: Any,
    rows: list[np.ndarray],
    borders: Borders,
    tokens_T: Any,
    place_A: Any,
    rounded: float = 1e-6,
):
    weights_AM = torch.randn(len(place_A), 16, generator=torch.manual_seed(1)) / len(place_A)
    expected_AM = each_alone(model, rows, weights_AM)
    theirs = gradients(model)
    place_A = torch.from_numpy(place_A)
    read_K, index_A = place_A.unique(return_inverse=True)
    found_KM = policy.hidden_states(model, torch.from_numpy(tokens_T)[None], borders, read_K)
    found_AM = found_KM.index_select(0, index_A)
    (found_AM * weights_AM).sum().backward()
    torch.testing.assert_close(found_AM, expected_AM, atol=5e-6, rtol=1e-5)
    ours = gradients(model)
    assert (ours - theirs).norm() <= rounded * theirs.norm()
    torch.testing.assert_close(ours, theirs, atol=rounded, rtol=1e-5)


def merged_by(rows: list[np.ndarray], span: int, near: int) -> Merged:
    """Merge rows with other bounds of a span."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_spans, "SPAN", span)
        patch.setattr(tree_spans, "NEAR", near)
        merged = merge(rows, CPU)
        assert merged.borders.calls.blocks  # made when they are asked for
        return merged


@settings(max_examples=examples(40))
@given(forests(), st.sampled_from(sorted(CONFIGS)), SPANS)
def test_rows_of_a_tree_have_the_states_and_gradients_of_each_alone(rows, name, bounds):
    model, merged = made(CONFIGS[name]), merged_by(rows, *bounds)
    assert lean.acts(policy.split_model(model)[0])
    tokens_T = np.concatenate(rows)[merged.source_T]
    compare(model, rows, merged.borders, tokens_T, merged.place_A)


@settings(max_examples=examples(10))
@given(forests())
def test_transformers_forward_takes_trees_as_well(rows):
    model, merged = made(CONFIGS["qwen3"]), merge(rows, CPU)
    lora.inject(model, rank=2, alpha=4.0, targets=[], seed=0)
    model.requires_grad_(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean, "FAMILIES", ())
        tokens_T = np.concatenate(rows)[merged.source_T]
        compare(model, rows, merged.borders, tokens_T, merged.place_A)


def flash_forward(q, k, v, starts, key_starts, longest, most, dropout, causal, debug, *, scale):
    """What torch's flash kernel returns for sequences of varying length: outputs, normalisers."""
    assert (dropout, debug) == (0.0, False) and (starts.dtype, key_starts.dtype) == (
        torch.int32,
    ) * 2
    assert longest == starts.diff().max() and most == key_starts.diff().max()
    outs, norms = [], []
    for first, last, above, end in zip(
        starts[:-1], starts[1:], key_starts[:-1], key_starts[1:], strict=True
    ):
        scores = of_heads(q[first:last], k[above:end], causal, scale)
        norms.append(scores.logsumexp(2))
        value = v[above:end].repeat_interleave(q.shape[1] // v.shape[1], 1)
        outs.append((scores.softmax(2) @ value.transpose(0, 1)).transpose(0, 1))
    return torch.cat(outs), torch.cat(norms, 1), None, None, None


def flash_rows(q, k, v, starts, _, longest, most, *, scale, window_size, enable_gqa=False):
    assert window_size == (-1, 0)
    return flash_forward(q, k, v, starts, starts, longest, most, 0.0, True, False, scale=scale)[0]


def of_heads(query: Any, key: Any, causal: bool, scale: float) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = scale * query.transpose(0, 1) @ key.permute(1, 2, 0)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf) if causal else scores


def flash_backward(
    grad, q, k, v, out, norm, starts, key_starts, longest, most, dropout, causal, seed, at, *, scale
):
    """Gradients of the same, by the probabilities that outputs and normalisers imply."""
    assert norm.shape == (q.shape[1], q.shape[0]) and all(x.is_contiguous() for x in (grad, norm))
    assert (seed.dtype, at.shape) == (torch.uint64, (2,)) and dropout == 0.0
    shared = q.shape[1] // k.shape[1]
    found = [torch.zeros_like(one) for one in (q, k, v)]
    for first, last, above, end in zip(
        starts[:-1], starts[1:], key_starts[:-1], key_starts[1:], strict=True
    ):
        scores = of_heads(q[first:last], k[above:end], causal, scale)
        weights = (scores - norm[:, first:last, None]).exp()
        grad_HLD = grad[first:last].transpose(0, 1)
        along = (grad_HLD * out[first:last].transpose(0, 1)).sum(2, keepdim=True)
        value = v[above:end].repeat_interleave(shared, 1)
        inner = weights * (grad_HLD @ value.permute(1, 2, 0) - along) * scale
        key = k[above:end].repeat_interleave(shared, 1)
        found[0][first:last] = (inner @ key.transpose(0, 1)).transpose(0, 1)
        for whole, part in (
            (found[1], inner.transpose(1, 2) @ q[first:last].transpose(0, 1)),
            (found[2], weights.transpose(1, 2) @ grad_HLD),
        ):
            whole[above:end] = part.unflatten(0, (-1, shared)).sum(1).transpose(0, 1)
    return tuple(found)


@settings(max_examples=examples(20))
@given(forests(), st.sampled_from(["qwen2", "qwen3"]))
def test_a_tree_through_the_kernel_of_gpus_has_the_gradients_of_each_row(rows, name):
    model, merged = made(CONFIGS[name]), merge(rows, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean, "FAMILIES", ())
        patch.setattr(flash, "fits", lambda query: True)
        patch.setattr(flash, "varlen_attn", flash_rows)
        patch.setattr(flash, "_forward", flash_forward)
        patch.setattr(flash, "_backward", flash_backward)
        tokens_T = np.concatenate(rows)[merged.source_T]
        compare(model, rows, merged.borders, tokens_T, merged.place_A, 5e-6)
        row_checks.check_tree_attention(model, CPU)
        patch.setattr(flash, "_backward", lambda *given, **_: given[1:4])
        with pytest.raises(ModelError, match=r"learner\.prefix_trees"):
            row_checks.check_tree_attention(model, CPU)


def test_the_kernel_of_gpus_is_called_by_its_signature():
    """On meta tensors, which have shapes and types and no values."""
    rows = [np.append(np.arange(40), place) for place in range(3)]
    borders = merge(rows, torch.device("meta")).borders
    query, key, value = (
        torch.empty(43, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    )
    out = flash.attend(query, key, value, borders, 0.125)
    out.sum().backward()
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    for one in (query, key, value):
        assert one.grad is not None and one.grad.shape == one.shape


@settings(max_examples=examples(100))
@given(forests())
def test_a_token_attends_by_levels_once_to_each_token_before_it_in_its_rows(rows):
    merged = merge(rows, CPU)
    tokens = len(merged.source_T)
    found = np.zeros((tokens, tokens), int)
    for start, end in itertools.pairwise(merged.borders.starts):
        found[start:end, start:end] += np.tri(end - start, dtype=int)
    for level in merged.borders.levels:
        for (first, last), (above, end) in zip(
            *map(bounds_of, (level.below, level.above)), strict=True
        ):
            found[np.ix_(level.below.source_N[first:last], level.above.source_N[above:end])] += 1
    assert (found == attended(rows, merged)).all()


def bounds_of(sequences: Sequences) -> list[tuple[int, int]]:
    return [*itertools.pairwise(sequences.starts_S1.tolist())]


def attended(rows: list[np.ndarray], merged: Merged) -> np.ndarray:
    """Which tokens [T, T] attend to which in rows of their own."""
    found = np.zeros((len(merged.source_T),) * 2, int)
    for row_L in np.split(merged.place_A, np.cumsum([len(row) for row in rows])[:-1]):
        for end, place in enumerate(row_L.tolist()):
            found[place, row_L[: end + 1]] = 1
    return found


def test_contexts_that_only_grow_are_one_sequence():
    rows = [np.arange(length) % 50 for length in (40, 80, 120)]
    borders = merge(rows, CPU).borders
    assert borders.starts == (0, 120) and not borders.branches
    forked = [*rows, np.append(np.arange(80) % 50, [1, 2])]
    borders = merge(forked, CPU).borders
    assert len(borders.branches) == 1 and borders.branches[0].end == 80


@settings(max_examples=examples(100))
@given(forests())
def test_a_tree_holds_every_row_once_and_shares_what_pays(rows):
    merged = merge(rows, CPU)
    laid_A = np.concatenate(rows)
    tokens_T, position_T = laid_A[merged.source_T], merged.borders.position_1T[0].numpy()
    assert (tokens_T[merged.place_A] == laid_A).all()
    positions = np.concatenate([np.arange(len(row)) for row in rows])
    assert (position_T[merged.place_A] == positions).all()
    assert set(merged.place_A.tolist()) == set(range(len(tokens_T)))
    for branch in merged.borders.branches:
        assert branch.start < branch.end < branch.last <= len(tokens_T)
    assert len(tokens_T) <= sum(map(len, {row.tobytes(): row for row in rows}.values()))


@settings(max_examples=examples(100))
@given(forests(), SPANS)
def test_a_token_attends_once_to_each_token_before_it_in_its_rows(rows, bounds):
    merged = merged_by(rows, *bounds)
    borders, tokens = merged.borders, len(merged.source_T)
    found = np.zeros((tokens, tokens), int)
    for block in borders.calls.blocks:
        query_RL, key_RL = (
            one.fill_T.view(one.rows, one.longest).numpy() for one in (block.queries, block.keys)
        )
        causal = np.tri(block.queries.longest, block.keys.longest, dtype=bool)
        allowed = causal[None] if block.mask is None else block.mask[:, 0].isfinite().numpy()
        real_RL = np.zeros(query_RL.size, bool)
        real_RL[block.queries.index_T.numpy()] = True
        for row in range(block.queries.rows):
            for at in np.flatnonzero(real_RL.reshape(query_RL.shape)[row]):
                keys = key_RL[row][allowed[row % len(allowed)][at]]
                np.add.at(found, (query_RL[row, at], keys), 1)
    for branch in borders.calls.far:
        found[branch.end : branch.last, branch.start : branch.end] += 1
    assert (found == attended(rows, merged)).all()


@settings(max_examples=examples(100))
@given(forests(), st.integers(1, 255))
def test_the_size_of_a_tree_is_known_before_it_is_made(rows, drawn):
    order = SortedRows(rows)
    chosen = [index for index in range(len(rows)) if drawn >> index & 1] or [0]
    merged = merge([rows[index] for index in chosen], CPU)
    assert order.size(np.array(chosen)) == len(merged.source_T)
    prefixes = {row[: end + 1].tobytes() for row in rows for end in range(len(row))}
    assert order.new_R().sum() == len(prefixes)


def test_members_share_their_prompt_and_contexts_their_history():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 40)
    history = np.concatenate([prompt, rng.integers(0, 50, LEAST_SAVED)])
    answers = [rng.integers(0, 50, 7) for _ in range(4)]
    rows = [
        np.concatenate([start, one])
        for start, one in zip([prompt, prompt, history, history], answers, strict=True)
    ]
    assert len(merge(rows, CPU).source_T) == 40 + LEAST_SAVED + 4 * 7
    short = [np.concatenate([prompt[: LEAST_SAVED - 1], one]) for one in answers[:2]]
    merged = merge(short, CPU)
    assert not merged.borders.branches and len(merged.source_T) == sum(map(len, short))


def test_short_segments_attend_in_few_calls_and_long_ones_copy_nothing():
    """Twenty states of a map, two answers each; a prompt with eight long answers; their mixture."""
    rng = np.random.default_rng(0)

    def tree(stem: int, branches: int, length: int, answers: int) -> list[np.ndarray]:
        root = rng.integers(0, 50, stem)
        states = [np.concatenate([root, rng.integers(0, 50, length)]) for _ in range(branches)]
        leaves = [np.append(one, [answer, 0]) for one in states for answer in range(answers)]
        return leaves or states

    short, long = tree(30, 20, 35, 2), tree(256, 8, 64, 0)
    calls = merge(short, CPU).borders.calls
    assert not calls.far and len(calls.blocks) <= 3
    calls = merge(long, CPU).borders.calls
    assert len(calls.far) == 1 and all(block.mask is None for block in calls.blocks)
    for block in merge([*short, *tree(230, 2, 20, 0)], CPU).borders.calls.blocks:
        keys = (block.keys.index_T // block.keys.longest).bincount()
        assert block.mask is None or block.keys.longest < 2 * keys.min()


def test_contexts_that_grow_by_turns_copy_few_keys():
    """Contexts of 100 turns, each of which continues the one before."""
    history, rows = np.zeros(0, np.int64), []
    rng = np.random.default_rng(0)
    for _ in range(100):
        history = np.concatenate([history, rng.integers(0, 50, 40)])
        rows.append(np.concatenate([history, rng.integers(0, 50, 30)]))
    borders = merge(rows, CPU).borders
    copied = sum(len(block.keys.source_T) for block in borders.calls.blocks)
    assert copied <= 3 * borders.position_1T.shape[1]


@pytest.mark.parametrize("adapted", [False, True])
def test_recomputed_layers_and_adapters_change_nothing(adapted):
    rows = [np.arange(30), np.concatenate([np.arange(25), np.arange(9)])]
    found = []
    for recomputed in (False, True):
        model, merged = made(CONFIGS["qwen3"]), merge(rows, CPU)
        if recomputed:
            layers.checkpoint_layers(model)
        if adapted:
            lora.inject(model, rank=2, alpha=4.0, targets=["q_proj", "up_proj"], seed=0)
        assert lean.acts(policy.split_model(model)[0]) and merged.borders.branches
        tokens_T = np.concatenate(rows)[merged.source_T]
        hidden = policy.hidden_states(model, torch.from_numpy(tokens_T)[None], merged.borders)
        hidden.square().sum().backward()
        found.append(gradients(model))
    assert torch.equal(*found)


def test_the_lean_pass_leaves_other_models_alone():
    windowed = made(WINDOWED)
    assert not lean.acts(policy.split_model(windowed)[0])
    assert not lean.acts(policy.split_model(made(CONFIGS["llama"]).bfloat16())[0])
    gelu = made(LlamaConfig(**SHAPE, hidden_act="gelu"))
    assert not lean.acts(policy.split_model(gelu)[0])
    with pytest.raises(ModelError, match=r"learner\.prefix_trees"):
        row_checks.check_prefix_trees(windowed, gpu=False)
    with pytest.raises(ModelError, match=r"learner\.prefix_trees"):
        row_checks.check_prefix_trees(made(CONFIGS["llama"]).bfloat16(), gpu=False)


@pytest.mark.parametrize(
    ("shape", "windowed"),
    [
        (MistralConfig(**SHAPE, sliding_window=6), True),
        (MixtralConfig(**SHAPE, sliding_window=6, num_local_experts=2), True),
        (MistralConfig(**SHAPE, sliding_window=None), False),
        (Qwen2Config(**SHAPE, use_sliding_window=False, sliding_window=6), False),
    ],
)
def test_a_window_that_a_model_reads_from_its_configuration_forbids_trees(
    shape: Any, windowed: bool
) -> None:
    model = made(shape)
    if windowed:
        with pytest.raises(ModelError, match="a layer sees a part of its context"):
            row_checks.check_prefix_trees(model, gpu=False)
    else:
        row_checks.check_prefix_trees(model, gpu=False)


@pytest.mark.parametrize(
    ("device", "dtype", "trees", "expected"),
    [
        ("cpu", "float32", "auto", "tree"),
        ("cpu", "bfloat16", "auto", "packed"),
        ("cuda", "float32", "auto", "packed"),
        ("cuda", "bfloat16", "auto", "packed"),
        ("cuda", "bfloat16", "always", "tree"),
        ("cuda", "float32", "always", None),
        ("cpu", "bfloat16", "always", None),
    ],
)
def test_the_layout_is_that_of_the_learners_device_wherever_the_model_is(
    device: str, dtype: str, trees: Any, expected: str | None
) -> None:
    config = Config()
    config.learner.device, config.learner.prefix_trees = device, trees
    model = made(CONFIGS["qwen2"]).to(getattr(torch, dtype))
    if expected is None:
        with pytest.raises(ModelError, match=r"learner\.prefix_trees"):
            layout_of(config, model)
    else:
        assert layout_of(config, model) == expected
