"""Trees of rows with a common beginning, and the lean forward pass, against a pass per row.

The oracle is transformers' own forward pass over each row alone.
"""

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

from evolver_async.model import lora, policy, row_checks
from evolver_async.model.cpu import lean
from evolver_async.model.rows import tree_spans
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.prefix_trees import LEAST_SAVED, Merged, SortedRows, merge
from evolver_async.model.tokenizer import ModelError

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


def compare(model: Any, rows: list[np.ndarray], borders: Borders, tokens_T: Any, place_A: Any):
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
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def merged_by(rows: list[np.ndarray], span: int, near: int) -> Merged:
    """Merge rows with other bounds of a span."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_spans, "SPAN", span)
        patch.setattr(tree_spans, "NEAR", near)
        return merge(rows, CPU)


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
    for block in borders.blocks:
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
    for branch in borders.far:
        found[branch.end : branch.last, branch.start : branch.end] += 1
    expected = np.zeros_like(found)
    for row_L in np.split(merged.place_A, np.cumsum([len(row) for row in rows])[:-1]):
        for end, place in enumerate(row_L.tolist()):
            expected[place, row_L[: end + 1]] = 1
    assert (found == expected).all()


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
    assert not merge(short, CPU).borders.far and len(merge(short, CPU).borders.blocks) <= 3
    alone = merge(long, CPU).borders
    assert len(alone.far) == 1 and all(block.mask is None for block in alone.blocks)
    both = merge([*short, *tree(230, 2, 20, 0)], CPU).borders
    for block in both.blocks:
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
    copied = sum(len(block.keys.source_T) for block in borders.blocks)
    assert copied <= 3 * borders.position_1T.shape[1]


@pytest.mark.parametrize("adapted", [False, True])
def test_recomputed_layers_and_adapters_change_nothing(adapted):
    rows = [np.arange(30), np.concatenate([np.arange(25), np.arange(9)])]
    found = []
    for recomputed in (False, True):
        model, merged = made(CONFIGS["qwen3"]), merge(rows, CPU)
        if recomputed:
            policy.checkpoint_layers(model)
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
        row_checks.check_prefix_trees(windowed, CPU)
    with pytest.raises(ModelError, match=r"learner\.prefix_trees"):
        row_checks.check_prefix_trees(made(CONFIGS["llama"]), torch.device("cuda"))


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
            row_checks.check_prefix_trees(model, CPU)
    else:
        row_checks.check_prefix_trees(model, CPU)
